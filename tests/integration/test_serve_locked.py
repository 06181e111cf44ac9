"""`octavo serve` with every lock at once: certificates on both sides, keys, HTTPS, and a token for its own workers."""

from __future__ import annotations

import json
import re
import signal
import ssl
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import yaml

from octavo.cli import main
from octavo.shared.access.keys import hash_of
from protos import worker_pb2, worker_pb2_grpc
from tests.integration.test_serve import Served, serving
from tests.tiny_models import make_tiny_llama

ROLES = {"web": ["inference"], "ops": ["control"], "eyes": ["metrics"], "both": ["inference", "control"]}


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    assert main(["certs", str(folder)]) == 0
    entries = [{"name": name, "sha256": hash_of(f"key of {name}"), "roles": ROLES[name]} for name in ROLES]
    (folder / "keys.yaml").write_text(yaml.safe_dump({"keys": entries}))
    assert main(["certs", str(folder / "others")]) == 0
    return folder


@pytest.fixture(scope="module")
def served(certs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")
    before = folders()
    locks = [
        f"--tls-cert-file={certs / 'scheduler.pem'}", f"--tls-key-file={certs / 'scheduler.key'}",
        f"--tls-client-ca-file={certs / 'ca.pem'}", f"--keys-file={certs / 'keys.yaml'}",
    ]  # fmt: skip
    memory = ["--max-model-len=256", "--kv-cache-memory=0.01", "--swap-space=0"]
    with serving(f"--model={model}", *memory, *locks, "--http-port=0", "--metrics-port=0", "--frontends=2") as served:
        served.wait_until_ready()
        # Of servers with TLS, as this one: others have no socket in theirs.
        own = {folder for folder in folders() - before if any(folder.glob("frontend-*"))}
        assert len(own) == 1
        yield served
        assert served.end(signal.SIGTERM)[0] == 0
    assert not own & folders(), "what the parts know of each other is gone"
    assert "Traceback" not in served.said


def folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("octavo-serve-*"))


def https_port(served: Served) -> int:
    found = re.search(r"^ *OpenAI's API: https://127\.0\.0\.1:(\d+)/v1$", served.said, re.MULTILINE)
    assert found is not None, served.said
    return int(found[1])


def asked(served: Served, certs: Path, path: str, key: str | None, body: object = None, role: str = "client") -> int:
    context = ssl.create_default_context(cafile=certs / "ca.pem")
    if role:
        context.load_cert_chain(certs / f"{role}.pem", certs / f"{role}.key")
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"https://127.0.0.1:{https_port(served)}{path}", content)
    request.add_header("Content-Type", "application/json")
    if key is not None:
        request.add_header("Authorization", f"Bearer key of {key}")
    try:
        with urllib.request.urlopen(request, timeout=20, context=context) as answer:
            assert answer.read(20)
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_it_says_how_to_call_it(served: Served) -> None:
    flags = f"--address {served.address} --tls-ca-file CA.pem --tls-client-cert-file CLIENT.pem"
    assert f'OCTAVO_API_KEY=KEY octavo chat "Why is the sky blue?" {flags}' in served.said
    assert "grpcurl -cacert CA.pem -cert CLIENT.pem -key CLIENT.key -H 'authorization: Bearer KEY'" in served.said


def test_https_wants_a_certificate_and_a_key(served: Served, certs: Path) -> None:
    completion = {"prompt": "The sea", "max_tokens": 3}
    for key, status in (("web", 200), (None, 401), ("nobody", 401), ("eyes", 403)):
        assert asked(served, certs, "/v1/completions", key, completion) == status, key
    with pytest.raises(OSError):  # in whatever words of TLS
        asked(served, certs, "/v1/models", "web", role="")
    for key, status in (("ops", 200), ("eyes", 200), ("web", 403), (None, 401)):
        assert asked(served, certs, "/live", key) == status, key


def test_workers_are_for_the_scheduler_alone(served: Served) -> None:
    found = re.search(r'"workers": \["([^"]+)"\]', served.said)
    assert found is not None, served.said
    with grpc.insecure_channel(found[1]) as channel, pytest.raises(grpc.RpcError) as raised:
        worker_pb2_grpc.WorkerStub(channel).GetInfo(worker_pb2.GetInfoRequest(), timeout=5)
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_commands_with_certificates_and_keys(
    served: Served, certs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(key: str, *command: str, ca: Path = certs, own: Path = certs) -> tuple[int, str]:
        """Exit code, and the last line of what it said."""
        monkeypatch.setenv("OCTAVO_API_KEY", f"key of {key}")
        tls = [f"--tls-ca-file={ca / 'ca.pem'}", f"--tls-client-cert-file={own / 'client.pem'}"]
        code = main([*command, *tls, f"--tls-client-key-file={own / 'client.key'}"])
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return code, (said.err.strip() or said.out.strip()).splitlines()[-1]

    here = f"--address={served.address}"
    assert run("web", "generate", "Hi", "--max-tokens=3", here)[0] == 0
    assert run("web", "chat", "Hi", "--max-tokens=3", here)[0] == 0
    assert run("web", "health", here)[0] == 0
    assert run("web", "health", f"https://127.0.0.1:{https_port(served)}")[0] == 0
    assert run("ops", "top", "--once", here)[0] == 0
    bench = ["bench", "serve", "--requests=2", "--prompt-tokens=4", "--output-tokens=2", "--rate=100"]
    assert run("both", *bench, here)[0] == 0
    code, why = run("web", *bench, here)
    assert code == 1 and "a key that has this role and inference" in why and "it takes role control" in why

    code, why = run("nobody", "generate", "Hi", here)
    assert code == 1 and "no known key" in why
    code, why = run("web", "top", "--once", here)
    assert code == 1 and "it takes role control" in why
    for command in (["generate", "Hi"], ["top", "--once"], ["health"]):
        code, why = run("web", *command, here, ca=certs / "others")
        assert code != 0 and f"the certificate of {served.address} is not accepted" in why, why
