"""TLS on every link: client, gateway, scheduler, worker and metrics; certificates on both sides; a worker's token."""

from __future__ import annotations

import json
import shutil
import ssl
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo import Client, SamplingParams
from octavo.cli import main
from octavo.client import channel_credentials
from octavo.errors import RequestFailed
from octavo.retrying import RetryPolicy
from octavo.shared.ports import free_ports
from protos import worker_pb2, worker_pb2_grpc
from tests.forkserver import ForkedCommand
from tests.integration.scheduler_process import QUICK, scheduler
from tests.tiny_models import make_tiny_llama

CODE = grpc.StatusCode
TOKEN = "a token of thirty-two characters"
AT_ONCE = RetryPolicy(window_s=0.0)


class Ports(NamedTuple):
    scheduler: str
    worker: str
    gateway: int
    metrics: int


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    assert main(["certs", str(folder)]) == 0
    (folder / "token").write_text(f"{TOKEN}\n")
    return folder


def shows(certs: Path, role: str, client_ca: str = "ca") -> list[str]:
    files = {"cert": f"{role}.pem", "key": f"{role}.key", "client-ca": f"{client_ca}.pem"}
    return [f"--tls-{name}-file={certs / file}" for name, file in files.items()]


@pytest.fixture(scope="module")
def served(certs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    folder = tmp_path_factory.mktemp("served")
    model = make_tiny_llama(folder / "tiny")
    worker_port, gateway_port, metrics_port = free_ports(3)
    with ExitStack() as stack, (folder / "log").open("w") as log:
        worker = [
            "worker", str(model), f"--port={worker_port}", "--max-model-len=256", "--kv-cache-memory=0.01",
            "--swap-space=0", "--num-threads=1", *shows(certs, "worker"), f"--token-file={certs / 'token'}",
            "--tls-client-name=spiffe://octavo/scheduler",
        ]  # fmt: skip
        process = ForkedCommand(worker, log.fileno())
        stack.callback(process.wait, 20)
        stack.callback(process.terminate)
        service = stack.enter_context(
            scheduler(
                f"--worker=localhost:{worker_port}", f"--metrics-port={metrics_port}", *shows(certs, "scheduler"),
                f"--worker-tls-ca-file={certs / 'ca.pem'}", f"--worker-token-file={certs / 'token'}",
            )
        )  # fmt: skip
        address = service.address.replace("127.0.0.1", "localhost")
        gateway = ForkedCommand(
            ["gateway", f"--port={gateway_port}", f"--scheduler={address}", *shows(certs, "gateway"),
             f"--scheduler-tls-ca-file={certs / 'ca.pem'}"],
            log.fileno(),
        )  # fmt: skip
        stack.callback(gateway.wait, 20)
        stack.callback(gateway.terminate)
        asked = health_pb2.HealthCheckRequest(service="octavo.v1.Inference")
        with grpc.secure_channel(address, credentials(certs, "client"), options=QUICK) as channel:
            for answer in health_pb2_grpc.HealthStub(channel).Watch(asked, timeout=60, wait_for_ready=True):
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    break
        yield Ports(address, f"localhost:{worker_port}", gateway_port, metrics_port)


def credentials(certs: Path, role: str | None) -> grpc.ChannelCredentials:
    own = (certs / f"{role}.pem", certs / f"{role}.key") if role else (None, None)
    return channel_credentials(certs / "ca.pem", *own)


def client(address: str, certs: Path, role: str | None = "client") -> Client:
    return Client(address, credentials=credentials(certs, role), retry=AT_ONCE)


def test_a_request_goes_over_all_links(served: Ports, certs: Path) -> None:
    with client(served.scheduler, certs) as one:
        output = one.complete("The sea is", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 4


def test_the_command_speaks_tls(served: Ports, certs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = [f"--tls-client-cert-file={certs / 'client.pem'}", f"--tls-client-key-file={certs / 'client.key'}"]
    asked = ["generate", "The sea is", "--max-tokens=3", f"--address={served.scheduler}"]
    assert main([*asked, f"--tls-ca-file={certs / 'ca.pem'}", *own]) == 0
    assert main([*asked, "--tls", *own]) == 1, "the system's authorities know nothing of it"
    assert "Traceback" not in capsys.readouterr().err


def test_a_client_without_a_certificate_or_without_tls_is_told_nothing(served: Ports, certs: Path) -> None:
    for one in (client(served.scheduler, certs, None), Client(served.scheduler, retry=AT_ONCE)):
        with one, pytest.raises(RequestFailed) as raised:
            one.model_info()
        assert raised.value.code is CODE.UNAVAILABLE


def opened(certs: Path, role: str = "client") -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=certs / "ca.pem")
    context.load_cert_chain(certs / f"{role}.pem", certs / f"{role}.key")
    return context


def test_load_over_https_trusts_and_shows_what_it_is_told(
    served: Ports, certs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ["--prompt-tokens=4", "--output-tokens=2", "--requests=2", "--streams=1"]
    asked = ["bench", "serve", f"--url=https://localhost:{served.gateway}/v1", *load]
    own = [f"--tls-client-cert-file={certs / 'client.pem'}", f"--tls-client-key-file={certs / 'client.key'}"]
    assert main([*asked, f"--tls-ca-file={certs / 'ca.pem'}", *own]) == 0
    capsys.readouterr()
    assert main([*asked, *own]) == 1
    assert "CERTIFICATE_VERIFY_FAILED" in capsys.readouterr().err.splitlines()[-1]
    assert main([*asked, f"--tls-ca-file={certs / 'nowhere.pem'}", *own]) == 1
    assert f"{certs / 'nowhere.pem'}: No such file or directory" in capsys.readouterr().err.splitlines()[-1]


def test_https_before_it_and_for_metrics(served: Ports, certs: Path) -> None:
    body = json.dumps({"prompt": "The sea is", "max_tokens": 3, "ignore_eos": True, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"https://localhost:{served.gateway}/v1/completions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=20, context=opened(certs)) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 3
    with urllib.request.urlopen(f"https://localhost:{served.metrics}/metrics", context=opened(certs)) as answer:
        assert b"octavo:num_requests_running" in answer.read()
    own = [f"--tls-client-cert-file={certs / 'client.pem'}", f"--tls-client-key-file={certs / 'client.key'}"]
    asked = ["health", f"https://localhost:{served.gateway}", f"--tls-ca-file={certs / 'ca.pem'}"]
    assert [main([*asked, *own]), main(asked), main([*asked, *own, "--tls-ca-file=/nowhere"])] == [0, 3, 2]
    nobody = ssl.create_default_context(cafile=certs / "ca.pem")
    for port in (served.gateway, served.metrics):
        with pytest.raises(OSError):
            urllib.request.urlopen(f"https://localhost:{port}/metrics", timeout=5, context=nobody).read()
        with pytest.raises(OSError):
            urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=5).read()


@pytest.mark.parametrize(
    ("role", "token", "code", "why"),
    [
        ("client", TOKEN, CODE.UNAUTHENTICATED, "no name that this worker knows"),
        ("scheduler", "", CODE.UNAUTHENTICATED, "token is wanted"),
        ("scheduler", TOKEN[:-1], CODE.UNAUTHENTICATED, "token is wanted"),
        (None, TOKEN, CODE.UNAVAILABLE, ""),
        ("scheduler", TOKEN, None, ""),
    ],
)
def test_a_worker_obeys_its_scheduler_alone(
    role: str | None, token: str, code: grpc.StatusCode | None, why: str, served: Ports, certs: Path
) -> None:
    """Also what needs no lease."""
    with grpc.secure_channel(served.worker, credentials(certs, role)) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).GetInfo
        metadata = [("authorization", f"Bearer {token}")] if token else []
        if code is None:
            assert call(worker_pb2.GetInfoRequest(), metadata=metadata, timeout=5).vocab_size
            return
        with pytest.raises(grpc.RpcError) as raised:
            call(worker_pb2.GetInfoRequest(), metadata=metadata, timeout=5)
        assert raised.value.code() is code and why in raised.value.details()


def test_a_new_certificate_is_shown_to_the_next_connection(served: Ports, certs: Path, tmp_path: Path) -> None:
    """The last test of this server. Streams that are open go on with what they were opened with."""
    port = int(served.scheduler.rpartition(":")[2])
    before = ssl.get_server_certificate(("localhost", port))
    assert main(["certs", str(tmp_path)]) == 0  # of an authority of its own
    shutil.copy(tmp_path / "scheduler.pem", certs / "scheduler.pem")
    time.sleep(1.2)
    assert ssl.get_server_certificate(("localhost", port)) == before, "without its key it does not count"
    shutil.copy(tmp_path / "scheduler.key", certs / "scheduler.key")
    deadline = time.monotonic() + 10
    while ssl.get_server_certificate(("localhost", port)) == before:
        assert time.monotonic() < deadline
        time.sleep(0.3)
    with Client(served.scheduler, credentials=channel_credentials(
        tmp_path / "ca.pem", certs / "client.pem", certs / "client.key"), retry=AT_ONCE,
    ) as one:  # fmt: skip
        assert one.model_info().model
