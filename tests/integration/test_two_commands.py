"""`octavo scheduler` and `octavo worker` started by hand, in either order, and restarted under one another."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from octavo import Client, SamplingParams
from octavo.errors import RequestFailed
from octavo.shared.ports import free_ports
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.forkserver import ForkedCommand
from tests.oracle import GreedyOracle
from tests.tiny_models import make_tiny_llama

PROMPT = list(b"Two commands, two ports: ")
MAX_TOKENS = 450
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
READY_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


@contextmanager
def command(*arguments: str) -> Iterator[ForkedCommand]:
    process = ForkedCommand(arguments)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(timeout=60)


def worker(folder: Path, port: int) -> list[str]:
    return [
        "worker",
        f"--model={folder}",
        f"--port={port}",
        "--num-threads=1",
        "--max-model-len=512",
        "--kv-cache-memory=0.05",
    ]


def generate(address: str) -> list[int]:
    with Client(address) as client:
        outputs = client.generate(prompt_token_ids=PROMPT, sampling_params=GREEDY, timeout=READY_S)
        return [token_id for output in outputs for part in output.outputs for token_id in part.token_ids]


def wait_until_ready(address: str) -> None:
    deadline = time.monotonic() + READY_S
    with Client(address) as client:
        while True:
            try:
                client.model_info()
                return
            except RequestFailed:
                assert time.monotonic() < deadline, "nothing got ready"
                time.sleep(0.1)


def wait_until_running(address: str, count: int) -> None:
    deadline = time.monotonic() + READY_S
    with grpc.insecure_channel(address) as channel:
        control = inference_pb2_grpc.ControlStub(channel)
        while control.GetLoad(pb.GetLoadRequest()).num_requests_running < count:
            assert time.monotonic() < deadline, "the requests did not start"


def test_a_worker_may_be_started_first(folder):
    scheduler_port, worker_port = free_ports(2)
    with command(*worker(folder, worker_port)):
        time.sleep(1.0)
        with command("scheduler", f"--port={scheduler_port}", f"--worker=127.0.0.1:{worker_port}"):
            wait_until_ready(f"127.0.0.1:{scheduler_port}")
            assert generate(f"127.0.0.1:{scheduler_port}") == expected(folder)


def test_a_worker_killed_under_a_request_and_started_again_goes_on_where_it_stopped(folder):
    """The scheduler is there before both."""
    scheduler_port, worker_port = free_ports(2)
    address = f"127.0.0.1:{scheduler_port}"
    with command("scheduler", f"--port={scheduler_port}", f"--worker=127.0.0.1:{worker_port}"):
        with command(*worker(folder, worker_port)) as doomed:
            wait_until_ready(address)
            results: list[list[int]] = []
            requests = [threading.Thread(target=lambda: results.append(generate(address))) for _ in range(3)]
            for request in requests:
                request.start()
            wait_until_running(address, 3)
            doomed.send_signal(signal.SIGKILL)
        assert results == [], "the requests were meant to be interrupted"
        late = threading.Thread(target=lambda: results.append(generate(address)))
        late.start()
        with command(*worker(folder, worker_port)):
            for request in [*requests, late]:
                request.join(READY_S)
            assert results == [expected(folder)] * 4


def expected(folder: Path) -> list[int]:
    """What transformers says, end tokens ignored as in the requests; computed once."""
    if folder not in _EXPECTED:
        oracle = GreedyOracle(folder)
        oracle._model.generation_config.eos_token_id = None
        _EXPECTED[folder] = oracle.generate(PROMPT, MAX_TOKENS)
    return _EXPECTED[folder]


_EXPECTED: dict[Path, list[int]] = {}
