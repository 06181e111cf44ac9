"""Leases, epochs, heartbeats, failures and draining, over a real gRPC server with a fake model behind it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from octavo.shared.connection_shares import ConnectionShares
from octavo.shared.rpc import MAX_WORKER_CONNECTIONS, WORKER_CHANNEL_OPTIONS
from protos import inference_pb2, worker_pb2, worker_pb2_grpc
from tests.fuzz import http2_frames
from tests.worker.fake_model import FakeModel, Hold, decode, fake_config, next_token, prefill, tokens_of, u32
from worker_svc.config import WorkerConfig
from worker_svc.server import WorkerServer
from worker_svc.service.lease import EXPIRY_S
from worker_svc.service.worker_service import MAX_STREAMS
from worker_svc.steps.failures import MAX_CHARS
from worker_svc.steps.model_runner import ModelRunner
from worker_svc.steps.step_pipeline import Deliver
from worker_svc.steps.worker import Worker
from worker_svc.tokenizers.tokenizer_files import TokenizerFiles

CONFIG = WorkerConfig(port=0, block_size=4, max_num_seqs=4, max_num_batched_tokens=32, kv_cache_memory=0.001)


@dataclass
class Setup:
    """A served fake model and a way to it."""

    model: FakeModel
    server: WorkerServer
    worker: Worker
    stub: Any
    settings_id: str

    async def wait_until_held(self, num_steps: int) -> None:
        """Until the model is in a step that it may not end, and so many steps have come in all."""
        assert self.model.hold is not None and await asyncio.to_thread(self.model.hold.has_begun.wait, 10)

        async def have_come() -> bool:
            return self.worker._num_submitted >= num_steps

        await eventually(have_come)

    async def open(self) -> Stream:
        stream = Stream(self.stub.Execute())
        await stream.send(open=worker_pb2.OpenLease(settings_id=self.settings_id))
        stream.epoch = (await stream.wait_for("notice")).lease.epoch
        return stream


class Stream:
    """A scheduler's end of `Execute`."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.epoch = 0
        self.heartbeats: list[tuple[float, worker_pb2.Heartbeat]] = []

    async def send(self, **kind: Any) -> None:
        await self.call.write(worker_pb2.StepRequest(epoch=self.epoch, **kind))

    async def wait_for(self, kind: str) -> Any:
        while True:
            response = await self.call.read()
            if response is grpc.aio.EOF:
                raise EOFError(await self.call.code())
            assert response.epoch == self.epoch or self.epoch == 0
            if response.WhichOneof("kind") == kind:
                return getattr(response, kind)
            self.heartbeats.append((time.monotonic(), response.heartbeat))

    async def run(self, step: worker_pb2.Step) -> worker_pb2.StepResult:
        await self.send(step=step)
        return await self.wait_for("result")


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    model = FakeModel()
    worker = Worker(ModelRunner(model, fake_config(), CONFIG.block_size), CONFIG)
    server = WorkerServer(
        worker,
        fake_config(),
        TokenizerFiles({"tokenizer.json": b"x" * 3_000_000, "config.json": b"{}"}),
    )
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=WORKER_CHANNEL_OPTIONS) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        sizes = await stub.Initialize(worker_pb2.InitializeRequest())
        yield Setup(model, server, worker, stub, sizes.settings_id)
    if model.hold is not None:
        model.hold.may_end.set()
    await server.stop()


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code()


async def eventually(holds: Callable[[], Any], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not await holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_steps_are_run_and_timed(setup: Setup) -> None:
    stream = await setup.open()
    result = await stream.run(prefill(1, [[3, 4, 5], [9]]))
    expected = [next_token(5, 2), next_token(9, 0)]
    assert tokens_of(result) == expected
    timings = result.timings
    phases = (timings.cache_ops_ns, timings.prepare_ns, timings.forward_ns, timings.sample_ns)
    assert all(phases) and sum(phases) + timings.queue_ns <= timings.total_ns
    result = await stream.run(decode(2, [1, 0]))
    assert tokens_of(result) == [next_token(expected[1], 1), next_token(expected[0], 3)]


async def test_two_steps_in_flight_are_answered_in_order(setup: Setup) -> None:
    stream = await setup.open()
    await stream.send(step=prefill(1, [[3]]))
    await stream.send(step=decode(2, [0]))
    first, second = await stream.wait_for("result"), await stream.wait_for("result")
    assert (first.step_id, second.step_id) == (1, 2)
    assert tokens_of(second) == [next_token(tokens_of(first)[0], 1)]


async def test_who_holds_all_connections_keeps_no_other_host_out_and_whoever_has_the_lease_keeps_it(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where both are of one host. No look at the connections is taken before all are."""
    look, all_are_taken = ConnectionShares.look, False
    monkeypatch.setattr(ConnectionShares, "look", lambda shares: look(shares) if all_are_taken else Counter())
    stream = await setup.open()
    address = f"127.0.0.1:{setup.server.port}"
    with ExitStack() as stack:
        monkeypatch.setattr(http2_frames, "SOURCE", "127.0.0.1")
        for _ in range(MAX_WORKER_CONNECTIONS):
            stack.enter_context(await asyncio.to_thread(http2_frames.connection, address))
        monkeypatch.setattr(http2_frames, "SOURCE", "127.0.0.9")

        async def gets_in() -> bool:
            with await asyncio.to_thread(http2_frames.connection, address) as other:
                with contextlib.suppress(OSError):
                    return bool(await asyncio.to_thread(other.recv, 1))
            return False

        assert not await gets_in(), "all are taken"
        all_are_taken = True
        await eventually(gets_in)
        assert tokens_of(await stream.run(prefill(1, [[3]]))) == [next_token(3, 0)]


async def test_second_opener_is_refused_until_the_first_leaves(setup: Setup) -> None:
    first = await setup.open()
    info = await setup.stub.GetInfo(worker_pb2.GetInfoRequest())
    assert info.lifecycle == worker_pb2.WORKER_LIFECYCLE_LEASED
    second = setup.stub.Execute()
    await second.write(worker_pb2.StepRequest(open=worker_pb2.OpenLease(settings_id=setup.settings_id)))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await second.read()
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "another scheduler" in refused.value.details()
    assert tokens_of(await first.run(prefill(1, [[3]]))) == [next_token(3, 0)]

    await first.call.done_writing()
    assert await first.call.code() == grpc.StatusCode.OK

    async def is_free() -> bool:
        info = await setup.stub.GetInfo(worker_pb2.GetInfoRequest())
        return bool(info.lifecycle == worker_pb2.WORKER_LIFECYCLE_INITIALIZED)

    await eventually(is_free)
    third = await setup.open()
    assert third.epoch == first.epoch + 1
    # A new epoch finds an empty mirror: the same metadata for the same slot is no contradiction.
    assert tokens_of(await third.run(prefill(1, [[3]]))) == [next_token(3, 0)]


async def test_the_next_lease_is_told_what_the_cache_holds_and_who_ran(setup: Setup) -> None:
    """Blocks 0 and 1 hold eight tokens of slot 0, and block 2 is written to once more after it was told of."""
    first = await setup.open()
    step = prefill(1, [range(3, 14)])
    step.cached_blocks.block_ids_u32, step.cached_blocks.hashes = u32([0, 1, 2]), bytes(range(96))
    assert (await first.run(step)).status == worker_pb2.STEP_STATUS_OK
    assert (await first.run(decode(2, [0]))).status == worker_pb2.STEP_STATUS_OK  # position 11, in block 2
    bad = decode(3, [0])
    bad.cached_blocks.block_ids_u32, bad.cached_blocks.hashes = u32([3]), b""
    assert (await first.run(bad)).error.code == worker_pb2.STEP_ERROR_CODE_PROTOCOL
    await first.call.done_writing()
    await first.call.code()
    for _ in range(2):  # once more for a lease that did nothing
        lease = await lease_of_next(setup)
        assert lease.cached_blocks.block_ids_u32 in (u32([0, 1]), u32([1, 0]))
        assert sorted((lease.cached_blocks.hashes[:32], lease.cached_blocks.hashes[32:])) == [
            bytes(range(32)),
            bytes(range(32, 64)),
        ]
        assert list(lease.request_ids) == ["request-0"]


async def lease_of_next(setup: Setup) -> worker_pb2.LeaseGranted:
    """Of a scheduler that takes it and leaves."""

    async def is_free() -> bool:
        info = await setup.stub.GetInfo(worker_pb2.GetInfoRequest())
        return bool(info.lifecycle == worker_pb2.WORKER_LIFECYCLE_INITIALIZED)

    await eventually(is_free)
    stream = Stream(setup.stub.Execute())
    await stream.send(open=worker_pb2.OpenLease(settings_id=setup.settings_id))
    lease = (await stream.wait_for("notice")).lease
    await stream.call.done_writing()
    await stream.call.code()
    return lease


async def test_the_holder_is_told_when_another_one_lacks_the_worker(setup: Setup) -> None:
    holder = await setup.open()
    for is_wanted in (False, True):
        other = setup.stub.Execute()
        opening = worker_pb2.OpenLease(settings_id=setup.settings_id, is_wanted=is_wanted)
        await other.write(worker_pb2.StepRequest(open=opening))
        assert await code_of(other.read()) == grpc.StatusCode.FAILED_PRECONDITION
    notice = await asyncio.wait_for(holder.wait_for("notice"), 5)
    assert notice.HasField("wanted")
    with pytest.raises(TimeoutError):  # once: for the second, not for the first
        await asyncio.wait_for(holder.wait_for("notice"), 0.3)


@pytest.mark.parametrize("what", ["wanted", "draining"])
async def test_a_lease_is_granted_before_anything_else_is_said(setup: Setup, what: str) -> None:
    may_go_on, stream = threading.Event(), Stream(setup.stub.Execute())
    setup.worker.thread.call(may_go_on.wait)  # the lease waits for what the model does
    await stream.send(open=worker_pb2.OpenLease(settings_id=setup.settings_id))
    await eventually(lambda: _is_leased(setup))
    finishing = None
    if what == "wanted":
        other = setup.stub.Execute()
        opening = worker_pb2.OpenLease(settings_id=setup.settings_id, is_wanted=True)
        await other.write(worker_pb2.StepRequest(open=opening))
        assert await code_of(other.read()) == grpc.StatusCode.FAILED_PRECONDITION
    else:
        finishing = asyncio.create_task(setup.server.service.finish(5.0))
        await asyncio.sleep(0)  # it begins
    may_go_on.set()
    notices = [(await stream.wait_for("notice")).WhichOneof("notice") for _ in range(2)]
    assert notices == ["lease", what]
    await stream.call.done_writing()
    if finishing is not None:
        await finishing


async def test_sizes_do_not_change_under_a_lease_that_begins_meanwhile(setup: Setup) -> None:
    """Where others were asked for before it."""
    may_go_on = threading.Event()
    setup.worker.thread.call(may_go_on.wait)
    other = asyncio.ensure_future(setup.stub.Initialize(worker_pb2.InitializeRequest(max_num_seqs=1, max_model_len=8)))
    await asyncio.sleep(0.2)  # it waits for the model
    opening = asyncio.create_task(setup.open())
    await eventually(lambda: _is_leased(setup))
    may_go_on.set()
    stream = await opening
    assert await code_of(other) == grpc.StatusCode.FAILED_PRECONDITION
    assert (await stream.run(prefill(1, [[3]]))).status == worker_pb2.STEP_STATUS_OK


async def _is_leased(setup: Setup) -> bool:
    info = await setup.stub.GetInfo(worker_pb2.GetInfoRequest())
    return bool(info.lifecycle == worker_pb2.WORKER_LIFECYCLE_LEASED)


async def test_wrong_settings_or_first_message_are_refused(setup: Setup) -> None:
    call = setup.stub.Execute()
    await call.write(worker_pb2.StepRequest(open=worker_pb2.OpenLease(settings_id="of another life")))
    assert await code_of(call.read()) == grpc.StatusCode.FAILED_PRECONDITION
    call = setup.stub.Execute()
    await call.write(worker_pb2.StepRequest(keepalive=worker_pb2.Keepalive()))
    assert await code_of(call.read()) == grpc.StatusCode.INVALID_ARGUMENT
    await setup.open()


async def test_a_silent_scheduler_whose_connection_lives_loses_its_lease_later(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert EXPIRY_S > 5, "an interpreter may be busy for seconds"
    monkeypatch.setattr("worker_svc.service.lease.EXPIRY_S", 1.2)
    stream = await setup.open()
    await asyncio.sleep(0.4)
    await stream.send(keepalive=worker_pb2.Keepalive())
    silent_since = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as expired:
        await stream.wait_for("result")
    assert expired.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert 1.1 < time.monotonic() - silent_since < 4.2
    await eventually(lambda: _opens(setup))


STOPPABLE_SCHEDULER = """
import sys, time, grpc
from octavo.shared.rpc import MAX_WORKER_CONNECTIONS, WORKER_CHANNEL_OPTIONS
from protos import worker_pb2 as pb

address, settings_id, *steps = sys.argv[1:]
first, later = (pb.Step.FromString(bytes.fromhex(step)) for step in steps)

def requests():
    yield pb.StepRequest(open=pb.OpenLease(settings_id=settings_id))
    yield pb.StepRequest(epoch=1, step=first)
    for later.step_id in range(2, 10**9):
        yield pb.StepRequest(epoch=1, step=later)
        time.sleep(0.2)

channel = grpc.insecure_channel(address, options=WORKER_CHANNEL_OPTIONS)
encode, decoded = pb.StepRequest.SerializeToString, pb.StepResponse.FromString
try:
    for answer in channel.stream_stream("/octavo.v1.Worker/Execute", encode, decoded)(requests()):
        print(answer.WhichOneof("kind"), flush=True)
except grpc.RpcError as error:
    print("lost", error.code().name, flush=True)
"""


async def test_a_stopped_scheduler_loses_its_lease_soon_and_reaches_no_later_one(setup: Setup) -> None:
    """Though it has not noticed, and goes on with its steps when it wakes."""
    steps = (step.SerializeToString().hex() for step in (prefill(1, [[3]]), decode(2, [0])))
    arguments = ["-c", STOPPABLE_SCHEDULER, f"127.0.0.1:{setup.server.port}", setup.settings_id, *steps]
    other = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    assert other.stdout is not None
    try:
        while await other.stdout.readline() != b"result\n":
            assert other.returncode is None
        other.send_signal(signal.SIGSTOP)
        stopped_s = time.monotonic()
        assert not await _opens(setup), "a pause is no end"
        await eventually(lambda: _opens(setup))  # and leaves at once
        assert 1.0 < time.monotonic() - stopped_s < 4.0
        stream = await asyncio.wait_for(_open_soon(setup), 5.0)
        expected = tokens_of(await stream.run(prefill(1, [[9]])))
        other.send_signal(signal.SIGCONT)
        for step_id in range(2, 12):
            result = await stream.run(decode(step_id, [0]))
            expected.append(next_token(expected[-1], step_id - 1))
            assert tokens_of(result) == [expected[-1]]
            await asyncio.sleep(0.05)
        said = (await asyncio.wait_for(other.communicate(), 5.0))[0]
        assert b"lost" in said or other.returncode == 0
    finally:
        if other.returncode is None:
            other.kill()
            await other.wait()


async def _open_soon(setup: Setup) -> Stream:
    while True:
        with contextlib.suppress(grpc.aio.AioRpcError):
            return await setup.open()
        await asyncio.sleep(0.02)


async def test_a_stream_that_does_not_open_is_ended_and_there_are_only_so_many(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker_svc.service.worker_service.OPEN_TIMEOUT_S", 2.0)
    silent = [setup.stub.Execute() for _ in range(MAX_STREAMS)]
    for call in silent:
        await call.wait_for_connection()
    await asyncio.sleep(0.3)
    more = setup.stub.Execute()
    with contextlib.suppress(grpc.aio.AioRpcError):  # it may be refused before it has said anything
        await more.write(worker_pb2.StepRequest(open=worker_pb2.OpenLease(settings_id=setup.settings_id)))
    assert await more.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert {await call.code() for call in silent} == {grpc.StatusCode.DEADLINE_EXCEEDED}
    await setup.open()


@pytest.mark.parametrize(("limit", "most_queued"), [(("MAX_STEPS", 8), 8), (("MAX_STEP_BYTES", 1), 1)])
async def test_steps_beyond_a_few_wait_with_their_sender(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, limit: tuple[str, int], most_queued: int
) -> None:
    """And are not taken for silent, however long that is."""
    monkeypatch.setattr(f"worker_svc.service.step_session.{limit[0]}", limit[1])
    monkeypatch.setattr("worker_svc.service.lease.EXPIRY_S", 1.0)
    submit, queued, seen = setup.worker.submit, set[int](), list[int]()

    def counted(epoch: int, step: worker_pb2.Step, arrived_ns: int, deliver: Deliver) -> None:
        def delivered(result: worker_pb2.StepResult) -> None:
            queued.discard(result.step_id)
            deliver(result)

        queued.add(step.step_id)
        seen.append(len(queued))
        submit(epoch, step, arrived_ns, delivered)

    monkeypatch.setattr(setup.worker, "submit", counted)
    stream = await setup.open()
    await stream.run(prefill(1, [[3]]))
    hold = setup.model.hold = Hold()
    steps = [decode(step_id, [0]) for step_id in range(2, 50)]

    async def send() -> None:
        for step in steps:
            await stream.send(step=step)

    sending = asyncio.create_task(send())
    await setup.wait_until_held(1 + most_queued)
    await asyncio.sleep(1.3)
    monkeypatch.setattr("worker_svc.service.lease.EXPIRY_S", EXPIRY_S)  # now it is this machine that may be slow
    hold.may_end.set()
    assert [(await stream.wait_for("result")).step_id for _ in steps] == [step.step_id for step in steps]
    await sending
    assert max(seen) == most_queued


async def _opens(setup: Setup) -> bool:
    try:
        await setup.open()
    except grpc.aio.AioRpcError:
        return False
    return True


async def test_messages_of_another_epoch_are_dropped(setup: Setup) -> None:
    stream = await setup.open()
    await stream.call.write(worker_pb2.StepRequest(epoch=stream.epoch + 1, step=prefill(1, [[5]])))
    result = await stream.run(prefill(1, [[3]]))
    assert tokens_of(result) == [next_token(3, 0)]
    assert setup.model.num_forwards == 1 + 4  # four of the profile


async def test_lease_waits_for_the_running_step_and_throws_queued_ones_away(setup: Setup) -> None:
    first = await setup.open()
    await first.run(prefill(1, [[3]]))
    hold = setup.model.hold = Hold()
    forwards = setup.model.num_forwards
    for step_id in (2, 3, 4):
        await first.send(step=decode(step_id, [0]))
    await setup.wait_until_held(4)
    first.call.cancel()

    async def is_ending() -> bool:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await setup.open()
        return "its last step is still running" in str(refused.value.details())

    await eventually(is_ending)
    hold.may_end.set()
    await eventually(lambda: _opens(setup))
    assert setup.model.num_forwards == forwards + 1, "queued steps of the old lease are thrown away"


async def test_heartbeats_come_while_the_model_is_busy(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_svc.service.step_session.HEARTBEAT_INTERVAL_S", 0.2)
    stream = await setup.open()
    setup.model.delay_s, setup.model.spins = 1.0, True
    await stream.run(prefill(1, [[3]]))
    times = [when for when, beat in stream.heartbeats if beat.running_step_id == 1]
    ages = [beat.running_ns for _, beat in stream.heartbeats if beat.running_step_id == 1]
    assert len(times) >= 3
    assert all(later - earlier < 1.6 for earlier, later in itertools.pairwise(times))
    assert ages == sorted(ages) and ages[-1] > 400_000_000


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError("no more"), worker_pb2.STEP_ERROR_CODE_OUT_OF_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
         worker_pb2.STEP_ERROR_CODE_OUT_OF_MEMORY),
        (ZeroDivisionError("a\nsecond line"), worker_pb2.STEP_ERROR_CODE_INTERNAL),
        (ZeroDivisionError("a line without end " * 1000), worker_pb2.STEP_ERROR_CODE_INTERNAL),
    ],
)  # fmt: skip
async def test_failed_step_is_followed_by_skipped_ones_until_resume(
    setup: Setup, error: Exception, code: worker_pb2.StepErrorCode
) -> None:
    stream = await setup.open()
    token = tokens_of(await stream.run(prefill(1, [[3]])))[0]
    setup.model.error = error
    for step_id in (2, 3):
        await stream.send(step=decode(step_id, [0]))
    failed, skipped = await stream.wait_for("result"), await stream.wait_for("result")
    assert failed.status == worker_pb2.STEP_STATUS_FAILED
    assert failed.error.code == code and failed.error.block_operations_applied
    assert "\n" not in failed.error.message and "Traceback" not in failed.error.message
    assert len(failed.error.message) <= MAX_CHARS
    assert skipped.status == worker_pb2.STEP_STATUS_SKIPPED
    wrong = decode(4, [0])
    wrong.resume_after = 3
    assert (await stream.run(wrong)).status == worker_pb2.STEP_STATUS_SKIPPED

    resumed = prefill(5, [[3, token]])
    resumed.resume_after = 2
    resumed.released_slots_u16 = b"\0\0\1\0"  # slot 1 was never there: a skipped step may have brought it
    result = await stream.run(resumed)
    assert result.status == worker_pb2.STEP_STATUS_OK
    assert tokens_of(result) == [next_token(token, 1)]
    assert (await stream.run(decode(6, [0]))).status == worker_pb2.STEP_STATUS_OK


async def test_step_that_contradicts_the_mirror_fails_alone(setup: Setup) -> None:
    stream = await setup.open()
    await stream.run(prefill(1, [[3]]))
    failed = await stream.run(decode(2, [2]))
    assert failed.error.code == worker_pb2.STEP_ERROR_CODE_PROTOCOL
    assert "slot 2" in failed.error.message
    again = prefill(3, [[3]])
    again.resume_after, again.released_slots_u16 = 2, b"\0\0"
    assert tokens_of(await stream.run(again)) == [next_token(3, 0)]
    out_of_order = await stream.run(decode(7, [0]))
    assert "step 7 after step 3" in out_of_order.error.message


async def test_row_without_finite_logits_ends_alone(setup: Setup) -> None:
    stream = await setup.open()
    setup.model.poison = 5
    result = await stream.run(prefill(1, [[3], [5], [6]]))
    assert tokens_of(result) == [next_token(3, 0), next_token(6, 0)]
    assert result.outputs.num_tokens_u16 == b"\1\0\0\0\1\0"
    assert [error.row for error in result.outputs.row_errors] == [1]
    assert result.outputs.row_errors[0].kind == worker_pb2.ROW_ERROR_KIND_MODEL
    # A step that was in flight already names the same rows; the others go on.
    result = await stream.run(decode(2, [0, 1, 2]))
    assert result.status == worker_pb2.STEP_STATUS_OK


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_row_that_may_draw_nothing_says_that_it_is_its_parameters(setup: Setup, temperature: float) -> None:
    """And a row whose logits are not finite says that it is the model, whatever its parameters."""
    setup.model.poison = 5
    params = inference_pb2.SamplingParams(seed=1, temperature=temperature, allowed_token_ids=[4, 9])
    step = prefill(1, [[3], [5], [6]], params=params)
    for group in step.groups[:2]:
        group.bad_words.extend([inference_pb2.TokenIds(ids=[4]), inference_pb2.TokenIds(ids=[9])])
    step.groups[1].sampling_params.ClearField("allowed_token_ids")
    step.groups[1].sampling_params.repetition_penalty = 1e-45
    step.groups[2].sampling_params.repetition_penalty = 1e-45
    stream = await setup.open()
    result = await stream.run(step)
    kinds = {error.row: error.kind for error in result.outputs.row_errors}
    assert kinds == {0: worker_pb2.ROW_ERROR_KIND_SAMPLING, 1: worker_pb2.ROW_ERROR_KIND_MODEL}
    assert "forbid" in result.outputs.row_errors[0].message
    assert len(tokens_of(result)) == 1, "a penalty without bounds is one at its bound"


@pytest.mark.parametrize("field", ["repetition_penalty", "temperature", "logit_bias"])
async def test_a_number_that_is_none_is_no_parameter(setup: Setup, field: str) -> None:
    step = prefill(1, [[3]])
    params = step.groups[0].sampling_params
    if field == "logit_bias":
        params.logit_bias[4] = float("nan")
    else:
        setattr(params, field, float("inf"))
    result = await (await setup.open()).run(step)
    assert result.error.code == worker_pb2.STEP_ERROR_CODE_PROTOCOL and "not finite" in result.error.message


async def test_drain_answers_what_was_received(setup: Setup) -> None:
    stream = await setup.open()
    await stream.run(prefill(1, [[3]]))
    hold = setup.model.hold = Hold()
    for step_id in (2, 3):
        await stream.send(step=decode(step_id, [0]))
    await setup.wait_until_held(3)
    stopping = asyncio.create_task(setup.server.stop())
    notice = await stream.wait_for("notice")
    assert notice.WhichOneof("notice") == "draining"
    await stream.send(step=decode(4, [0]))  # too late
    hold.may_end.set()
    assert [(await stream.wait_for("result")).step_id for _ in (2, 3)] == [2, 3]
    with pytest.raises(EOFError):
        await stream.wait_for("result")
    assert await stream.call.code() == grpc.StatusCode.OK
    await stopping


async def test_a_worker_that_is_to_end_takes_steps_until_its_scheduler_gives_it_back(setup: Setup) -> None:
    stream = await setup.open()
    await stream.run(prefill(1, [[3]]))
    stopping = asyncio.create_task(setup.server.stop(finish_s=30.0))
    notice = await stream.wait_for("notice")
    assert notice.draining.finishes_within_ms == 30_000
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await setup.open()
    assert refused.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION)
    for step_id in range(2, 12):
        assert (await stream.run(decode(step_id, [0]))).status == worker_pb2.STEP_STATUS_OK
    assert not stopping.done()
    stream.call.cancel()
    await asyncio.wait_for(stopping, 20)


@pytest.mark.parametrize("why", ["time is up", "no step comes", "it is urgent"])
async def test_a_worker_that_is_to_end_does_not_wait_for_ever(
    setup: Setup, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And ends as one that was told to end at once: it says so, and ends the stream."""
    monkeypatch.setattr("worker_svc.service.worker_service.UNUSED_S", 0.2 if why == "no step comes" else 30.0)
    stream, urgent = await setup.open(), asyncio.Event()
    await stream.run(prefill(1, [[3]]))
    finish_s = 0.2 if why == "time is up" else 30.0
    stopping = asyncio.create_task(setup.server.stop(finish_s=finish_s, urgent=urgent))
    assert (await stream.wait_for("notice")).draining.finishes_within_ms == 1000 * finish_s
    if why == "it is urgent":
        urgent.set()
    assert (await stream.wait_for("notice")).draining == worker_pb2.Draining()
    await asyncio.wait_for(stopping, 20)
    assert await stream.call.code() == grpc.StatusCode.OK


async def test_handshake(setup: Setup) -> None:
    stub = setup.stub
    info = await stub.GetInfo(worker_pb2.GetInfoRequest())
    assert (info.model, info.vocab_size, info.block_size, info.max_num_seqs) == ("fake", 31, 4, 4)
    assert info.max_model_len == 64 and list(info.eos_token_ids) == [2]
    assert (info.dtype, info.kv_cache_dtype) == ("float32", "float32")
    assert info.lifecycle == worker_pb2.WORKER_LIFECYCLE_INITIALIZED
    sizes = await stub.Initialize(worker_pb2.InitializeRequest(max_num_seqs=4, max_model_len=64))
    assert sizes.settings_id == setup.settings_id, "the worker's own bounds, spelled out"
    assert sizes.num_device_blocks == 4 * 64 // 4 and sizes.prefill_tokens_per_s > 0
    assert sizes.block_bytes == 2 * 4 * 4 * 4
    chunks = [chunk async for chunk in stub.GetTokenizer(worker_pb2.GetTokenizerRequest())]
    assert max(len(chunk.data) for chunk in chunks) <= 1 << 20
    assert chunks[-1].sha256 == info.tokenizer_sha256
    assert sum(len(chunk.data) for chunk in chunks if chunk.file_name == "tokenizer.json") == 3_000_000
    for request in (dict(max_num_seqs=5), dict(max_num_batched_tokens=3), dict(max_model_len=65)):
        call = stub.Initialize(worker_pb2.InitializeRequest(**request))
        assert await code_of(call) == grpc.StatusCode.INVALID_ARGUMENT
    assert await code_of(stub.LoadAdapter(worker_pb2.LoadAdapterRequest())) == grpc.StatusCode.UNIMPLEMENTED
    assert await code_of(stub.UnloadAdapter(worker_pb2.UnloadAdapterRequest())) == grpc.StatusCode.UNIMPLEMENTED


async def test_other_settings_are_refused_while_leased_and_taken_otherwise(setup: Setup) -> None:
    other = worker_pb2.InitializeRequest(max_num_seqs=2, max_model_len=40)
    sizes = await setup.stub.Initialize(other)
    assert (sizes.max_num_seqs, sizes.max_model_len, sizes.num_device_blocks) == (2, 40, 20)
    assert sizes.settings_id != setup.settings_id
    assert not await _opens(setup), "with the settings of before"
    setup.settings_id = sizes.settings_id
    stream = await setup.open()
    call = setup.stub.Initialize(worker_pb2.InitializeRequest())
    assert await code_of(call) == grpc.StatusCode.FAILED_PRECONDITION
    assert (await setup.stub.Initialize(other)).settings_id == sizes.settings_id
    assert (await stream.run(prefill(1, [[3]], max_len=40))).status == worker_pb2.STEP_STATUS_OK
