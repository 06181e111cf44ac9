"""Streams that a thread of their own reads: nothing of gRPC runs where Ctrl-C arrives, and calls end as they would."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import grpc
import pytest

from octavo.calls.interruptible_stream import InterruptibleStream
from octavo.client import Client
from octavo.errors import RequestFailed
from octavo.retrying import RetryPolicy
from octavo.sampling_params import SamplingParams
from tests.integration.fake_inference import FakeServer, expected_tokens

DEADLINE_S = 30.0
QUICK = RetryPolicy(first_delay_s=0.001, max_delay_s=0.001)


class FakeCall:
    """Gives numbers until it is cancelled; waits before the one that `waits_at` says."""

    def __init__(self, waits_at: int | None = None) -> None:
        self.num_read, self.waiting, self.cancelled = 0, threading.Event(), threading.Event()
        self._waits_at = waits_at

    def __next__(self) -> int:
        if self.num_read == self._waits_at:
            self.waiting.set()
            assert self.cancelled.wait(DEADLINE_S)
        if self.cancelled.is_set():
            raise StopIteration
        self.num_read += 1
        return self.num_read

    def cancel(self) -> None:
        self.cancelled.set()


def ended(name: str) -> bool:
    """Whether threads of this name end."""
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(DEADLINE_S)
    return all(thread.name != name for thread in threading.enumerate())


def test_a_response_is_read_when_it_is_asked_for() -> None:
    call = FakeCall()
    stream: InterruptibleStream[int] = InterruptibleStream(lambda: call)
    assert [next(stream), next(stream)] == [1, 2]
    assert call.num_read == 2
    stream.cancel()
    assert call.cancelled.wait(DEADLINE_S) and ended("responses")


def test_a_call_that_waits_is_cancelled() -> None:
    call = FakeCall(waits_at=1)
    stream: InterruptibleStream[int] = InterruptibleStream(lambda: call)
    assert next(stream) == 1
    waits = threading.Thread(target=lambda: list(stream))
    waits.start()
    assert call.waiting.wait(DEADLINE_S)
    stream.cancel()
    waits.join(DEADLINE_S)
    assert not waits.is_alive() and ended("responses")


def test_a_call_that_begins_while_it_is_cancelled_is_cancelled() -> None:
    call, begins, may_begin = FakeCall(waits_at=0), threading.Event(), threading.Event()

    def start() -> FakeCall:
        begins.set()
        assert may_begin.wait(DEADLINE_S)
        return call

    stream: InterruptibleStream[int] = InterruptibleStream(start)
    waits = threading.Thread(target=lambda: list(stream))
    waits.start()
    assert begins.wait(DEADLINE_S)
    stream.cancel()
    may_begin.set()
    waits.join(DEADLINE_S)
    assert not waits.is_alive() and call.cancelled.is_set()


def test_a_call_that_nobody_asked_anything_of_never_begins() -> None:
    begun = []
    stream: InterruptibleStream[int] = InterruptibleStream(lambda: begun.append(1))
    stream.cancel()
    assert ended("responses") and ended("cancel") and begun == []


def test_an_ended_stream_stays_ended_and_is_not_cancelled() -> None:
    call = FakeCall()
    call.cancelled.set()
    stream: InterruptibleStream[int] = InterruptibleStream(lambda: call)
    cancelled = []
    call.cancel = lambda: cancelled.append(1)  # type: ignore[method-assign]  # watched
    assert list(stream) == [] and list(stream) == []
    stream.cancel()
    assert ended("responses") and ended("cancel") and cancelled == []


def test_what_prevents_the_start_is_raised_where_the_response_was_asked_for() -> None:
    def start() -> Any:
        raise ValueError("the channel is closed")

    with pytest.raises(ValueError, match="the channel is closed"):
        next(InterruptibleStream(start))


def test_an_error_that_cannot_be_read_is_raised_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(FakeCall):
        def __next__(self) -> int:
            raise grpc.RpcError

    def cannot_read(error: grpc.RpcError) -> RequestFailed:
        raise ValueError("details of another server")

    monkeypatch.setattr(RequestFailed, "from_rpc_error", cannot_read)
    stream: InterruptibleStream[int] = InterruptibleStream(Broken)
    with pytest.raises(ValueError, match="details of another server"):
        next(stream)


@pytest.mark.parametrize(("ending", "code"), [("", 0), ("exit(3)", 3), ("raise KeyboardInterrupt", -signal.SIGINT)])
def test_a_program_that_leaves_an_answer_half_read_ends(server: FakeServer, ending: str, code: int) -> None:
    server.inference.token_delay_s = 0.01
    program = f"""
from octavo.client import Client
from octavo.sampling_params import SamplingParams

stream = Client({server.address!r}).generate("x", SamplingParams(max_tokens=100_000))
next(stream)
{ending}
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True)
    assert done.returncode == code, done.stderr


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


def files_of(function: Callable[[], object]) -> set[str]:
    """Names of the files of which a line ran in this thread."""
    files: set[str] = set()

    def trace(frame: FrameType, event: str, argument: object) -> None:
        files.add(frame.f_code.co_filename)

    before = sys.gettrace()
    gc.collect()  # calls of other tests end their lives here, and not in the middle
    gc.disable()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
        gc.enable()
    return files


def runs_grpc(function: Callable[[], object]) -> bool:
    files = files_of(function)
    assert any(name.endswith("client.py") for name in files)
    return any("/grpc/" in name for name in files)


def test_who_waits_for_an_answer_runs_no_line_of_grpc(server: FakeServer) -> None:
    params = SamplingParams(max_tokens=5, seed=1)
    with Client(server.address, retry=QUICK) as client:

        def reads_all() -> None:
            parts = [part for output in client.generate("x", params) for part in output.outputs]
            assert [token for part in parts for token in part.token_ids] == expected_tokens(1, 0, 5)

        def leaves_early() -> None:
            stream = client.generate("x", SamplingParams(max_tokens=1000, seed=1))
            next(stream)
            stream.close()

        def is_refused() -> None:
            with pytest.raises(RequestFailed, match="too long"):
                next(client.generate("x", params))

        assert not runs_grpc(reads_all)
        server.inference.losses = [(2, grpc.StatusCode.UNAVAILABLE)]
        assert not runs_grpc(reads_all)
        server.inference.token_delay_s = 0.01
        assert not runs_grpc(leaves_early)
        assert server.inference.cancelled.wait(DEADLINE_S)
        server.inference.refusal = grpc.StatusCode.INVALID_ARGUMENT, "too long", ()
        assert not runs_grpc(is_refused)
        assert runs_grpc(client.model_info), "it would be seen"
