"""What `Control` says of workers and their blocks, read from a loop that a test turns by hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from protos import inference_pb2 as pb
from protos import worker_pb2
from scheduler_svc.api.control_service import ControlService
from scheduler_svc.api.request_states import RequestCopy
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.engine.engine_settings import EngineSettings
from scheduler_svc.errors import InvalidRequest, UnknownName, Unsupported
from scheduler_svc.flight.record_file import header_of, packed, read
from scheduler_svc.flight.recorder import FlightRecorder
from scheduler_svc.leases.worker_handle import WorkerHandle
from scheduler_svc.models.served_models import ServedModels
from scheduler_svc.workers.worker_client import ConnectionState
from tests.scheduler.hand_turned_loop import Loop

Read = Callable[[], list[pb.WorkerState]]
T = TypeVar("T")
CONTEXT: Any = None  # of a call; nothing is looked up there


class Seen:
    """A loop with one worker, and an address that has none."""

    def __init__(self) -> None:
        now_ns = time.monotonic_ns()
        self.loop = Loop(clock=lambda: now_ns)  # stands still: no idle worker is checked for blocks that a test takes
        self.link = self.loop.join("here:1")
        self.loop.turn()
        states = {
            "here:1": ConnectionState(pb.WORKER_HEALTH_SERVING, ""),
            "there:1": ConnectionState(pb.WORKER_HEALTH_LOST, "gone"),
        }
        clients = {address: SimpleNamespace(address=address, state=state) for address, state in states.items()}
        serving: Any = SimpleNamespace(
            engine=self.loop.engine, pool=SimpleNamespace(clients=clients, models=ServedModels())
        )
        self.service = ControlService(serving, SchedulerConfig(), lambda: None)


@pytest.fixture
def seen() -> Seen:
    return Seen()


def test_workers_with_and_without_a_lease(seen: Seen) -> None:
    seen.loop.submit("one")
    seen.loop.turn()
    here, there = seen.service._workers()
    assert (here.address, here.health, here.epoch, here.num_running) == ("here:1", pb.WORKER_HEALTH_SERVING, 1, 1)
    assert (here.num_device_blocks, here.num_free_device_blocks) == (32, 31)
    assert (there.address, there.health, there.problem) == ("there:1", pb.WORKER_HEALTH_LOST, "gone")
    assert not there.num_device_blocks


def test_a_worker_that_drains_is_said_to(seen: Seen) -> None:
    notice = worker_pb2.StepResponse(epoch=1, notice=worker_pb2.Notice(draining=worker_pb2.Draining()))
    seen.loop.engine.worker_said(seen.link, notice.SerializeToString())
    seen.loop.turn()
    assert seen.service._workers()[0].health == pb.WORKER_HEALTH_DRAINING


async def ask(seen: Seen, call: Awaitable[T]) -> T:
    """What a method answers while the loop is turned."""
    task = asyncio.ensure_future(call)
    while not task.done():
        seen.loop.turn()
        await asyncio.sleep(0.001)
    return await task


async def blocks(seen: Seen, worker: str = "", page_size: int | None = None) -> list[pb.BlockState]:
    """All pages."""
    found: list[pb.BlockState] = []
    token = ""
    while True:
        request = pb.GetBlocksRequest(worker=worker, page_size=page_size, page_token=token)
        response = await ask(seen, seen.service.GetBlocks(request, CONTEXT))
        found += response.blocks
        assert page_size is None or len(response.blocks) <= page_size
        if not (token := response.next_page_token):
            return found


async def test_blocks_in_use_and_those_that_are_cached(seen: Seen) -> None:
    seen.loop.engine.submit(seen.loop.group("one", num_tokens=6))
    seen.loop.turn()
    running = await blocks(seen, "here:1")
    assert sorted((block.ref_count, block.cached) for block in running) == [(1, False), (1, True)]
    seen.loop.run_to_end(seen.link)
    assert {(block.worker, block.ref_count, block.cached, block.on_host) for block in await blocks(seen)} == {
        ("here:1", 0, True, False)
    }


async def test_blocks_of_all_workers_in_pages(seen: Seen) -> None:
    seen.loop.join("second:1")
    seen.loop.turn()
    for worker in seen.loop.engine.workers:
        worker.scheduler.blocks.allocator.allocate(5)
    expected = [(worker, block) for worker in ("here:1", "second:1") for block in range(5)]
    for page_size in (1, 3, 5, 10, None):
        found = await blocks(seen, page_size=page_size)
        assert sorted((block.worker, block.block_id) for block in found) == sorted(expected)
    first = await ask(seen, seen.service.GetBlocks(pb.GetBlocksRequest(page_size=1), CONTEXT))
    seen.loop.engine.worker_lost(seen.link, "gone")
    seen.loop.turn()
    follows = pb.GetBlocksRequest(page_token=first.next_page_token)
    with pytest.raises(InvalidRequest, match="page_token: its worker is gone"):
        await ask(seen, seen.service.GetBlocks(follows, CONTEXT))


async def test_requests_in_pages_and_no_turn_of_the_loop_for_more_than_one(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"r{number}" for number in range(250)]
    for name in names:
        seen.loop.engine.submit(seen.loop.group(name, tenant=f"t{name}"))
    seen.loop.turn()
    copies = 0
    copy = RequestCopy.of

    def counted(group: Any, workers: Any) -> RequestCopy:
        nonlocal copies
        copies += 1
        return copy(group, workers)

    monkeypatch.setattr(RequestCopy, "of", counted)
    found: list[pb.RequestState] = []
    request = pb.ListRequestsRequest()
    while True:
        copies = 0
        page = await ask(seen, seen.service.ListRequests(request, CONTEXT))
        assert len(page.requests) == copies <= 100
        found += page.requests
        if not page.next_page_token:
            break
        request.page_token = page.next_page_token
    assert [state.request_id for state in found] == names and len(found) == 250
    assert found[0].worker == "here:1" and found[0].sequences[0].block_table
    assert found[-1].phase == pb.REQUEST_PHASE_WAITING and not found[-1].worker
    copies = 0
    one = await ask(seen, seen.service.GetRequest(pb.GetRequestRequest(request_id="r7"), CONTEXT))
    assert (one.request_id, one.tenant, copies) == ("r7", "tr7", 1)
    with pytest.raises(UnknownName):
        await ask(seen, seen.service.GetRequest(pb.GetRequestRequest(request_id="r"), CONTEXT))


async def test_a_page_of_large_requests_ends_early(seen: Seen) -> None:
    seen.loop.engine.worker_lost(seen.link, "gone")  # nobody is left who could not hold them
    seen.loop.turn()
    for number in range(20):
        seen.loop.engine.submit(seen.loop.group(f"r{number}", num_outputs=128))
    page = await ask(seen, seen.service.ListRequests(pb.ListRequestsRequest(), CONTEXT))
    assert len(page.requests) == 8 and page.next_page_token
    follows = pb.ListRequestsRequest(page_size=2, page_token=page.next_page_token)
    page = await ask(seen, seen.service.ListRequests(follows, CONTEXT))
    assert [state.request_id for state in page.requests] == ["r8", "r9"]


async def view(seen: Seen, **asked: int) -> pb.View:
    return await ask(seen, seen.service.GetView(pb.GetViewRequest(**asked), CONTEXT))


async def test_a_view_has_tables_and_reference_counts_of_one_moment(seen: Seen) -> None:
    for name in ("one", "two"):
        seen.loop.engine.submit(seen.loop.group(name, num_tokens=9))
        seen.loop.turn()
        seen.loop.answer(seen.link)
    found = await view(seen)
    device, host = found.pools
    assert (device.worker, device.on_host, device.num_blocks, host.on_host) == ("here:1", False, 32, True)
    tables = [list(request.sequences[0].block_table) for request in found.requests]
    counts = [sum(block in table for table in tables) for block in range(32)]
    assert counts == list(device.ref_counts) and 2 in counts, "the second shares what the first has computed"
    assert set(device.cached_blocks) >= {block for block, count in enumerate(counts) if count == 2}
    assert found.load.workers[0].block_size_tokens == 4 and found.load.num_requests_running == 2


async def test_a_view_is_as_large_as_it_was_asked_for(seen: Seen) -> None:
    for name in ("one", "two", "three"):
        seen.loop.submit(name)
    seen.loop.turn()
    found = await view(seen, max_requests=2, max_blocks=5)
    assert [request.request_id for request in found.requests] == ["one", "two"] and found.has_more_requests
    assert len(found.pools[0].ref_counts) == 5 and found.pools[0].num_blocks == 32
    none = await view(seen, max_requests=0, max_blocks=0)
    assert not none.requests and none.has_more_requests and not none.pools[0].ref_counts
    with pytest.raises(InvalidRequest, match="max_blocks: got 65537; accepted: 0 to 65536"):
        await view(seen, max_blocks=65_537)


async def test_blocks_are_withheld_at_a_worker_that_is_named(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerHandle, "most_withheld", 20)
    asked = pb.WithholdBlocksRequest(worker="here:1", num_blocks=12)
    assert (await ask(seen, seen.service.WithholdBlocks(asked, CONTEXT))).num_withheld == 12
    device = (await view(seen)).pools[0]
    assert len(device.withheld_blocks) == device.num_to_withhold == 12 and device.max_withheld == 20
    assert seen.service._workers()[0].num_free_device_blocks == 20
    for wrong in (pb.WithholdBlocksRequest(num_blocks=1), pb.WithholdBlocksRequest(worker="here:1", num_blocks=21)):
        with pytest.raises(InvalidRequest):
            await ask(seen, seen.service.WithholdBlocks(wrong, CONTEXT))


async def test_what_the_recorder_has_comes_in_pieces_of_a_file(seen: Seen, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="--flight-recorder-steps"):
        seen.loop.engine.recording()
    recorder = FlightRecorder(64, 1 << 20)
    pieces = packed(recorder.recording(), header_of(EngineSettings()))

    async def flight_record() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    serving: Any = seen.service._serving
    serving.flight_record = flight_record
    asked = seen.service.DumpFlightRecord(pb.DumpFlightRecordRequest(), CONTEXT)
    (tmp_path / "record").write_bytes(b"".join([piece.data async for piece in asked]))
    assert read(tmp_path / "record").num_steps == 0


async def test_a_view_shows_where_on_the_host_a_swapped_request_lies(seen: Seen) -> None:
    seen.loop.submit("one")
    seen.loop.turn()
    seen.loop.answer(seen.link)
    (worker,) = seen.loop.engine.workers
    (group,) = worker.scheduler.groups.running
    worker.scheduler.groups.swap_out_group(group)
    copied = RequestCopy.of(group, [worker]).message(lambda model: model)
    assert copied.phase == pb.REQUEST_PHASE_SWAPPED
    assert not copied.sequences[0].block_table and len(copied.sequences[0].host_block_table) > 0


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.ListRequestsRequest(page_size=0), "page_size: got 0; accepted: 1 to 1000"),
        (pb.ListRequestsRequest(page_size=1001), "page_size: got 1001"),
        (pb.ListRequestsRequest(page_token="x"), "page_token"),
        (pb.ListRequestsRequest(page_token="1" * 30), "page_token"),
        (pb.GetBlocksRequest(page_size=10_001), "page_size: got 10001; accepted: 1 to 10000"),
        (pb.GetBlocksRequest(page_token="here:1/nowhere/3"), "page_token"),
        (pb.GetBlocksRequest(page_token="3"), "page_token"),
        (pb.GetBlocksRequest(page_token="here:1/device/-3"), "page_token"),
    ],
)
async def test_pages_that_there_are_not(seen: Seen, request_: Any, field: str) -> None:
    is_list = isinstance(request_, pb.ListRequestsRequest)
    method = seen.service.ListRequests if is_list else seen.service.GetBlocks
    with pytest.raises(InvalidRequest, match=field):
        await ask(seen, method(request_, CONTEXT))
