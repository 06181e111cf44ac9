"""A scheduler that takes tokens of an issuer: over gRPC, over HTTP, and until they expire."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from octavo.shared.access.jwt_callers import LEEWAY_S
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.fakes import FakeWorker
from tests.gateway.running import gateway
from tests.integration.scheduler_process import Service, scheduler

CODE = grpc.StatusCode
KEY = ec.generate_private_key(ec.SECP256R1())


def token(seconds: float = 60, **claims: object) -> str:
    said = {"iss": "https://issuer", "aud": "octavo", "sub": "shop", "exp": int(time.time() + seconds), **claims}
    return jwt.encode(said, KEY, "ES256", headers={"kid": "k"})


def bearing(it: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {it}")]


def options_in(folder: Path) -> list[str]:
    """Of a scheduler that takes the issuer's tokens."""
    path = folder / "jwks.json"
    maker = jwt.algorithms.ECAlgorithm(jwt.algorithms.ECAlgorithm.SHA256)
    path.write_text(json.dumps({"keys": [{**maker.to_jwk(KEY.public_key(), as_dict=True), "kid": "k"}]}))
    return [f"--jwt-jwks-file={path}", "--jwt-issuer=https://issuer", "--jwt-audience=octavo", "--metrics-port=0"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    options = [*options_in(tmp_path_factory.mktemp("jwks")), "--frontends=2"]
    with FakeWorker() as worker, scheduler(f"--worker={worker.address}", *options) as service:
        service.wait_until_ready()
        yield service


def test_a_token_brings_tenant_and_roles_and_a_wrong_one_is_refused_with_the_reason(served: Service) -> None:
    request = pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[1, 2]), request_id="a")
    request.sampling_params.max_tokens = 2
    with grpc.insecure_channel(served.address) as channel:
        inference, control = inference_pb2_grpc.InferenceStub(channel), inference_pb2_grpc.ControlStub(channel)
        assert list(inference.Generate(request, metadata=bearing(token())))[-1].usage.completion_tokens == 2
        for wrong, code, why in (
            (token(-LEEWAY_S - 1), CODE.UNAUTHENTICATED, "its token has expired"),
            (token(aud="other"), CODE.UNAUTHENTICATED, "its token is for another audience"),
            (token(fill="x" * 4700), CODE.UNAUTHENTICATED, "more than 6144 characters"),
            (token(roles=["metrics"]), CODE.PERMISSION_DENIED, "key 'jwt:shop' is not for this call"),
        ):
            with pytest.raises(grpc.RpcError) as raised:
                list(inference.Generate(request, metadata=bearing(wrong)))
            assert raised.value.code() is code and why in raised.value.details()
        ops = bearing(token(-LEEWAY_S + 2, roles=["control"]))
        watching = control.WatchSteps(pb.WatchStepsRequest(), metadata=ops)
        with pytest.raises(grpc.RpcError) as raised:
            list(watching)
        assert raised.value.code() is CODE.UNAUTHENTICATED and "has expired" in raised.value.details()


def test_over_http_too(served: Service) -> None:
    body = {"model": "fake-model", "prompt": [1, 2], "max_tokens": 1}
    with gateway(served.address) as running:
        status, _ = running.post("/v1/completions", body, authorization=f"Bearer {token()}")
        assert status == 200
        status, said = running.post("/v1/completions", body, authorization=f"Bearer {token(iss='other')}")
        assert status == 401 and said["error"]["code"] == "invalid_api_key"
        assert "its token is of another issuer" in said["error"]["message"]


def test_those_who_bring_tokens_have_the_limits_of_a_file_without_keys(tmp_path: Path) -> None:
    limits = tmp_path / "limits.yaml"
    limits.write_text("tenants:\n  - name: shop\n    requests_per_minute: 1\n")
    options = [*options_in(tmp_path), f"--keys-file={limits}"]
    request = pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[1, 2]))
    request.sampling_params.max_tokens = 1
    with FakeWorker() as worker, scheduler(f"--worker={worker.address}", *options) as service:
        service.wait_until_ready()
        with grpc.insecure_channel(service.address) as channel:
            generate = inference_pb2_grpc.InferenceStub(channel).Generate
            list(generate(request, metadata=bearing(token())))
            with pytest.raises(grpc.RpcError) as raised:
                list(generate(request, metadata=bearing(token())))
            assert raised.value.code() is CODE.RESOURCE_EXHAUSTED
            assert list(generate(request, metadata=bearing(token(sub="another"))))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--jwt-jwks-file=nowhere"], "jwt_issuer is empty, which tokens need"),
        (["--jwt-issuer=a"], "jwt_issuer is for tokens, whose keys jwt_jwks_file or jwt_jwks_url has"),
        (["--jwt-jwks-url=http://issuer/k", "--jwt-issuer=a", "--jwt-audience=b"], "https:// is accepted"),
        (["--jwt-jwks-file=nowhere", "--jwt-issuer=a", "--jwt-audience=b"], "--jwt-jwks-file: nowhere: No such file"),
        (
            ["--jwt-jwks-file=nowhere", "--jwt-issuer=a", "--jwt-audience=b", "--tenant-metadata=x-tenant"],
            "with jwt_issuer each token has its tenant",
        ),
    ],
)
def test_options_that_leave_anything_open_are_refused(
    options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from octavo.cli import main

    assert main(["scheduler", "--worker=127.0.0.1:1", *options]) == 2
    assert complaint in capsys.readouterr().err


def test_without_the_library_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from octavo.shared.options import OptionError
    from scheduler_svc.api.authority import Authority
    from scheduler_svc.config import SchedulerConfig

    monkeypatch.setitem(sys.modules, "jwt", None)
    config = SchedulerConfig(jwt_jwks_url="https://a", jwt_issuer="a", jwt_audience="b")
    with pytest.raises(OptionError, match=r"pip install '\.\[jwt\]' in a clone"):
        Authority.of(config)
