"""Frames for those who look: the scheduler is watched once, only while somebody does, and nobody holds anybody up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from gateway_svc.live import live_feed
from gateway_svc.live.frames import frame
from gateway_svc.live.live_feed import LiveFeed
from gateway_svc.live.step_tally import MAX_COPIES, StepTally
from octavo.errors import RequestFailed
from protos import inference_pb2 as pb

LOST = RequestFailed(grpc.StatusCode.UNAVAILABLE, "it is away")


class Scheduler:
    """Answers looks with a number that a test sets, and tells of steps when it is told to."""

    def __init__(self) -> None:
        self.num_running, self.num_looks, self.num_watching, self.times_watched = 1, 0, 0, 0
        self.steps: asyncio.Queue[pb.StepSummary | RequestFailed] = asyncio.Queue()
        self.failure: Exception | None = None

    async def watch_steps(self) -> AsyncGenerator[pb.StepSummary, None]:
        self.num_watching += 1
        self.times_watched += 1
        try:
            while not isinstance(step := await self.steps.get(), RequestFailed):
                yield step
            raise step
        finally:
            self.num_watching -= 1

    async def view(self, request: pb.GetViewRequest) -> pb.View:
        self.num_looks += 1
        if self.failure is not None:
            raise self.failure
        return pb.View(load=pb.Load(num_requests_running=self.num_running))

    async def happens(self, num_running: int, step: pb.StepSummary | None = None) -> None:
        """Something else is to be seen, and a step tells of it."""
        self.num_running = num_running
        await self.steps.put(step or pb.StepSummary())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_feed, "FRAME_S", 0.0)
    monkeypatch.setattr(live_feed, "QUIET_S", 60.0)
    monkeypatch.setattr(live_feed, "RETRY_S", 0.0)


@asynccontextmanager
async def looking(feed: LiveFeed) -> AsyncIterator[AsyncGenerator[bytes, None]]:
    frames = feed.frames()
    try:
        yield frames
    finally:
        await frames.aclose()


async def next_of(frames: AsyncGenerator[bytes, None]) -> Any:
    async with asyncio.timeout(10):
        return json.loads(await anext(frames))


async def test_one_watch_for_all_and_none_for_nobody() -> None:
    scheduler = Scheduler()
    feed = LiveFeed(scheduler)
    await asyncio.sleep(0)
    assert feed._task is None and not scheduler.num_looks
    async with looking(feed) as one, looking(feed) as other:
        assert (await next_of(one))["running"] == (await next_of(other))["running"] == 1
        await scheduler.happens(2)
        assert (await next_of(one))["running"] == (await next_of(other))["running"] == 2
        assert scheduler.num_watching == scheduler.times_watched == 1
    assert feed._task is None and not scheduler.num_watching
    looks = scheduler.num_looks
    async with looking(feed) as again:
        await next_of(again)
    assert scheduler.times_watched == 2 and scheduler.num_looks == looks + 1


async def test_who_reads_slowly_gets_the_newest_and_holds_nobody_up() -> None:
    scheduler = Scheduler()
    feed = LiveFeed(scheduler)
    async with looking(feed) as slow, looking(feed) as quick:
        await next_of(slow)
        await next_of(quick)
        for running in (2, 3, 4):
            await scheduler.happens(running)
            assert (await next_of(quick))["running"] == running
        assert (await next_of(slow))["running"] == 4


async def test_nothing_new_is_no_frame() -> None:
    feed = LiveFeed(scheduler := Scheduler())
    async with looking(feed) as frames:
        await next_of(frames)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await anext(frames)
        assert scheduler.num_looks == 1, "nobody has said that there is something to see"


async def test_what_no_step_tells_of_is_seen_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_feed, "QUIET_S", 0.01)
    feed = LiveFeed(scheduler := Scheduler())
    async with looking(feed) as frames:
        await next_of(frames)
        scheduler.num_running = 5  # an abort, say
        assert (await next_of(frames))["running"] == 5


@pytest.mark.parametrize("from_steps", [False, True])
async def test_a_scheduler_that_goes_away_is_said_and_asked_again(from_steps: bool) -> None:
    feed = LiveFeed(scheduler := Scheduler())
    async with looking(feed) as frames:
        await next_of(frames)
        scheduler.failure = LOST
        await scheduler.steps.put(LOST if from_steps else pb.StepSummary())
        assert "it is away" in (await next_of(frames))["problem"]
        scheduler.failure = None
        assert (await next_of(frames))["running"] == 1
        assert scheduler.num_watching == 1


async def test_a_fault_of_our_own_is_said_too() -> None:
    feed = LiveFeed(scheduler := Scheduler())
    scheduler.failure = KeyError("what")
    async with looking(feed) as frames:
        assert "its log says why" in (await next_of(frames))["problem"]


async def test_the_end_of_the_service_ends_all() -> None:
    feed = LiveFeed(Scheduler())
    async with looking(feed) as frames:
        await next_of(frames)
        coming = asyncio.ensure_future(anext(frames))
        await asyncio.sleep(0)
        feed.close()
        with pytest.raises(StopAsyncIteration):
            await coming
    assert feed._task is None


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED])
async def test_a_key_that_counts_no_more_ends_the_feed(code: grpc.StatusCode) -> None:
    feed = LiveFeed(scheduler := Scheduler())
    async with looking(feed) as frames:
        await next_of(frames)
        scheduler.failure = RequestFailed(code, "not with this key")
        await scheduler.steps.put(pb.StepSummary())
        with pytest.raises(StopAsyncIteration):
            await next_of(frames)
    looks = scheduler.num_looks
    await asyncio.sleep(0.01)
    assert feed.is_closed and scheduler.num_looks == looks, "nothing changes by asking again"


def test_steps_are_summed_and_the_newest_copies_kept() -> None:
    tally = StepTally()
    copies = [pb.BlockCopy(source=1, destination=block) for block in range(MAX_COPIES)]
    tally.take(pb.StepSummary(worker="a:1", num_prefill_tokens=3, blocks_copied=1, copies=copies[:1]))
    tally.take(pb.StepSummary(worker="b:1", num_decode_tokens=4, num_preempted=2, num_swapped_out=1, copies=copies))
    shown = tally.shown()
    assert (shown["num_steps"], shown["num_prefill_tokens"], shown["num_decode_tokens"]) == (2, 3, 4)
    assert (shown["num_preempted"], shown["num_swapped_out"], shown["blocks_copied"]) == (2, 1, 1)
    assert len(shown["copies"]) == MAX_COPIES and shown["copies"][-1] == (MAX_COPIES + 1, "b:1", 1, MAX_COPIES - 1)


def test_a_frame_has_blocks_tables_and_states_and_nobody_s_text() -> None:
    sequence = pb.SequenceState(index=1, num_tokens=9, block_table=[0, 2], host_block_table=[])
    request = pb.RequestState(
        request_id="r", phase=pb.REQUEST_PHASE_SWAPPED, worker="a:1", tenant="secret", sequences=[sequence]
    )
    device = pb.BlockPool(worker="a:1", num_blocks=9, ref_counts=[1, 0, 3, 12, 0, 1, 0], cached_blocks=[0, 4])
    device.withheld_blocks.append(6)
    host = pb.BlockPool(worker="a:1", on_host=True, num_blocks=100, ref_counts=[1, 0, 1, 0, 0])
    worker = pb.WorkerState(address="a:1", health=pb.WORKER_HEALTH_SERVING, num_preempted=1, block_size_tokens=16)
    gone = pb.WorkerState(address="b:1", health=pb.WORKER_HEALTH_LOST, problem="gone")
    view = pb.View(load=pb.Load(workers=[worker, gone]), requests=[request], pools=[device, host])
    shown = frame(view, {})
    assert [pool["blocks"] for pool in shown["workers"][0]["pools"]] == ["1.3+c1w", "1.1"]
    assert (shown["workers"][1]["state"], shown["workers"][1]["pools"]) == ("lost", [])
    assert shown["requests"][0]["state"] == "swapped" and shown["requests"][0]["sequences"][0]["table"] == [0, 2]
    assert "secret" not in json.dumps(shown)


def test_each_request_has_a_key_of_its_own_that_tells_of_no_tenant() -> None:
    owned = [("acme", "dup"), ("other", "dup"), ("acme", "x"), ("acme", "dup")]  # the last: one whose id was free again
    requests = [pb.RequestState(tenant=tenant, request_id=name) for tenant, name in owned]
    keys, later = (
        [each["key"] for each in frame(pb.View(requests=some), {})["requests"]] for some in (requests, requests[1:3])
    )
    assert len(set(keys)) == 4
    assert later == keys[1:3], "it is the same in the next frame, whoever has ended"
    assert not any("acme" in key for key in keys)


@pytest.mark.parametrize("num_turns", range(5))
async def test_who_is_to_stop_as_a_step_comes_stops(num_turns: int) -> None:
    """Or two would look on for one feed, and every second frame were of another count of copies."""
    stepped = asyncio.Event()
    waiting = asyncio.create_task(live_feed._is_set(stepped, 60.0))
    for _ in range(5):
        await asyncio.sleep(0)
    stepped.set()
    for _ in range(num_turns):
        await asyncio.sleep(0)
    if waiting.cancel():  # it has not ended yet
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert waiting.done()
