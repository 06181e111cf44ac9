"""Requests that are malformed or extreme, as many as there is time for: the right status, no harm, nothing left behind.

`make test` sends some hundreds of them, `make chaos` ten thousand.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from protos import inference_pb2 as pb
from tests.chaos.expected_statuses import MAX_REQUEST_BYTES, expected
from tests.chaos.extreme_messages import generate_requests, messages
from tests.chaos.leftovers import wait_until_nothing_is_left
from tests.fakes import FakeWorker, spell
from tests.fuzz.wire_bytes import mangled
from tests.integration.scheduler_process import Service, scheduler

GENERATE = "octavo.v1.Inference/Generate"
TIMEOUT_S = 20.0
MOST_SLOWER_S = 1.0  # of a plain request, in the median: it takes milliseconds
MOST_GROWTH_BYTES = 128 * 2**20
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
}
ANY_ANSWER = {*REFUSALS, grpc.StatusCode.OK}

_SERVICES = pb.DESCRIPTOR.services_by_name
# Generate has tests of its own; Drain would end the server's service to all others, and WatchSteps does not end.
METHODS = [
    (f"/{service.full_name}/{method.name}", GetMessageClass(method.input_type))
    for service in (_SERVICES["Inference"], _SERVICES["Control"])
    for method in service.methods
    if method.name not in ("Generate", "Drain", "WatchSteps")
]


def times(bounded: int, full: int) -> Any:
    """How many examples `make test` and `make chaos` take."""
    return pytest.mark.parametrize("count", [bounded, pytest.param(full, marks=pytest.mark.chaos)])


class Harness:
    """One scheduler, and how it was before anything was done to it."""

    def __init__(self, service: Service) -> None:
        self.address = service.address
        self.process = psutil.Process(service.process.pid)
        self.statuses: Counter[str] = Counter()
        self._channel = grpc.insecure_channel(service.address)
        self.seconds_before = self.seconds()
        self.bytes_before = self.process.memory_info().rss

    def call(self, method: str, data: bytes) -> tuple[grpc.StatusCode, str, list[bytes]]:
        """Status, its text and the messages of a call with these very bytes."""
        answers: list[bytes] = []
        call = self._channel.unary_stream(method)(data, timeout=TIMEOUT_S)
        with contextlib.suppress(grpc.RpcError):
            answers.extend(call)
        self.statuses[call.code().name] += 1
        text = call.details() or ""
        assert "Traceback" not in text and "<class" not in text, text
        assert (call.code() is grpc.StatusCode.OK) == (not text)
        return call.code(), text, answers

    def check(self, method: str, data: bytes, accepted: set[grpc.StatusCode], request: Any = None) -> list[bytes]:
        status, text, answers = self.call(method, data)
        assert status in accepted, f"{status.name}: {text}; expected {sorted(s.name for s in accepted)} for {request}"
        return answers

    def seconds(self) -> float:
        """Median time of a plain request."""
        plain = pb.GenerateRequest(prompt="say|", sampling_params=pb.SamplingParams(max_tokens=4)).SerializeToString()
        taken = []
        for _ in range(30):
            started = time.monotonic()
            self.check(f"/{GENERATE}", plain, {grpc.StatusCode.OK})
            taken.append(time.monotonic() - started)
        return statistics.median(taken)

    def check_unharmed(self) -> None:
        """It takes as long as before, but for a busy machine, and as much memory, but for buffers of large requests."""
        seconds, grown_bytes = self.seconds(), self.process.memory_info().rss - self.bytes_before
        print(
            f"{dict(self.statuses)}; a plain request took {self.seconds_before * 1e3:.2f} ms before and "
            f"{seconds * 1e3:.2f} ms after; the scheduler grew by {grown_bytes / 2**20:.1f} MiB"
        )
        assert seconds < self.seconds_before + MOST_SLOWER_S
        assert grown_bytes < MOST_GROWTH_BYTES


@pytest.fixture(scope="module", params=["--frontends=1", "--frontends=2"])
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    with FakeWorker(spell("Grüße, 世界!"), num_blocks=48) as worker:
        with scheduler(f"--worker={worker.address}", "--log-level=warning", request.param) as it:
            it.wait_until_ready()
            harness = Harness(it)
            yield harness
            assert it.process.poll() is None, "the scheduler has ended"
            harness.check_unharmed()


@pytest.fixture(autouse=True)
def _nothing_is_left(harness: Harness, capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    wait_until_nothing_is_left(harness.address)
    said = capfd.readouterr().err
    assert '"level": "error"' not in said, f"the scheduler had a fault of its own: {said}"


def examples(count: int, strategy: st.SearchStrategy[Any], check: Callable[[Any], None]) -> None:
    """Checks `count` examples; the same ones each time where they are few. The first that fails is shown as it is."""
    profile = settings(
        max_examples=count,
        derandomize=count < 1000,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    profile(given(strategy)(check))()


@times(75, 5000)
def test_extreme_fields_get_the_status_that_they_should(harness: Harness, count: int) -> None:
    def check(request: pb.GenerateRequest) -> None:
        answers = harness.check(f"/{GENERATE}", request.SerializeToString(), expected(request), request)
        if answers:
            _check_ends(request, [pb.GenerateResponse.FromString(answer) for answer in answers])

    examples(count, generate_requests(), check)


def _check_ends(request: pb.GenerateRequest, responses: list[pb.GenerateResponse]) -> None:
    """Each output ended exactly once, and well; those that a client has brought as ended are not told again."""
    reasons = {output.index: FINISHED for output in request.resume if output.finish_reason}
    for delta in (delta for response in responses for delta in response.outputs):
        assert delta.index not in reasons or not delta.finish_reason, "it ended twice"
        if delta.finish_reason:
            reasons[delta.index] = delta.finish_reason
    wanted = request.sampling_params.n if request.sampling_params.HasField("n") else 1
    assert reasons.keys() == set(range(wanted)), f"outputs {sorted(reasons)} of {wanted} ended"
    good = {pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH, FINISHED}
    assert set(reasons.values()) <= good, f"{responses[-1]} for {request}"
    assert responses[-1].HasField("usage")


FINISHED = -1  # before it came here


@times(60, 3000)
def test_bytes_at_random_are_refused_or_answered(harness: Harness, count: int) -> None:
    def check(data: bytes) -> None:
        try:
            pb.GenerateRequest.FromString(data)
        except DecodeError:
            harness.check(f"/{GENERATE}", data, {grpc.StatusCode.INVALID_ARGUMENT}, data)
        else:
            harness.check(f"/{GENERATE}", data, ANY_ANSWER, data)

    mangled = st.builds(_mangled, generate_requests(), st.integers(0, 2**32))
    examples(count, st.one_of(mangled, mangled, st.binary(max_size=64)), check)


def _mangled(request: pb.GenerateRequest, seed: int) -> bytes:
    return mangled(request.SerializeToString()[:4096], random.Random(seed))


@times(6, 120)
@pytest.mark.parametrize(("method", "kind"), METHODS, ids=[method for method, _ in METHODS])
def test_every_other_method_answers_or_refuses(harness: Harness, method: str, kind: Any, count: int) -> None:
    def check_fields(request: Any) -> None:
        is_too_large = request.ByteSize() > MAX_REQUEST_BYTES
        accepted = {grpc.StatusCode.RESOURCE_EXHAUSTED} if is_too_large else ANY_ANSWER
        harness.check(method, request.SerializeToString(), accepted, request)

    def check_bytes(data: bytes) -> None:
        try:
            kind.FromString(data)
        except DecodeError:
            harness.check(method, data, {grpc.StatusCode.INVALID_ARGUMENT}, data)
        else:
            harness.check(method, data, ANY_ANSWER, data)

    examples(count, messages(kind), check_fields)
    examples(count, st.binary(max_size=32), check_bytes)


@pytest.mark.parametrize("name", ["Drain", "WatchSteps"])
def test_bytes_that_are_no_request_are_told_apart_before_anything_happens(harness: Harness, name: str) -> None:
    for data in (b"\xff\xff", b"\x0a\x02\xff\xfe", b"\x0a\x7f"):
        harness.check(f"/octavo.v1.Control/{name}", data, {grpc.StatusCode.INVALID_ARGUMENT}, data)


@times(8, 100)
async def test_what_grpcurl_sends_as_json_gets_the_same_statuses(harness: Harness, count: int) -> None:
    from tests.grpcurl import grpcurl

    drawn: list[pb.GenerateRequest] = []
    examples(2 * count, generate_requests(), lambda request: drawn.append(request))
    small = [request for request in drawn if request.ByteSize() < 2000][:count]
    for request in small:
        fields = json_format.MessageToJson(request, preserving_proto_field_name=True)
        answer = await grpcurl(GENERATE, address=harness.address, data=fields)
        status = next(status for status in grpc.StatusCode if status.value[0] == max(0, answer.code - 64))
        assert status in expected(request), f"{answer.stderr} for {request}"
    bad_json = ['{"prompt": 7}', '{"prompt": "x"', '{"nobody": 1}', '{"sampling_params": {"seed": -1}}', "[]", '"x"']
    for answer in await asyncio.gather(*(grpcurl(GENERATE, address=harness.address, data=bad) for bad in bad_json)):
        assert answer.code and "Traceback" not in answer.stderr
