"""A shard's side of the choice among shards: what its workers have to do and have cached, told to every frontend.

Load is read on the step loop's thread after all requests that had come by then were given to a worker; each frontend is
told which of its own those are. Changes of a cache are told once; who is told of a worker first gets all of its bits.
"""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass
from functools import partial

from protos import frontend_pb2, shards_pb2
from scheduler_svc.core.blocks.prefix_cache import CacheChanges, PrefixCache
from scheduler_svc.core.sequences.sequence import PROCESS
from scheduler_svc.engine.engine import Engine
from scheduler_svc.frontends.frontend_links import FrontendLink, FrontendLinks
from scheduler_svc.leases.worker_handle import WorkerHandle
from scheduler_svc.routing.routing_cost import Ahead, WorkerLoad
from scheduler_svc.shards.cached_bits import CachedBits

INTERVAL_S = 0.1  # 20 reports a second cost a shard with two busy workers 1 % of a core more than these do
MAX_WAITING_TOLD = 64  # groups of one frontend that may move while they wait


@dataclass(slots=True)
class Seen:
    """A worker at one moment, between two steps.

    Attributes:
        cache: None where prefixes are not cached.
        changes: of that cache since it was looked at last.
        load: what the routing cost reads of it.
        ahead: what waits for it.
        num_outputs: tokens that a sequence of its model is expected to have.
    """

    handle: WorkerHandle
    cache: PrefixCache | None
    changes: CacheChanges
    load: WorkerLoad
    ahead: Ahead
    num_cached_blocks: int
    num_outputs: float


@dataclass(slots=True)
class _Told:
    """What frontends have been told of a worker. `cache`: its state is forgotten with it, and begins anew."""

    number: int
    cache: PrefixCache | None
    bits: CachedBits | None
    description: shards_pb2.WorkerDescription


@dataclass(slots=True)
class _State:
    num_steps: list[int]
    are_busy: list[bool]
    are_draining: list[bool]
    num_cached: list[int]
    num_live: int
    links: dict[FrontendLink, int]
    generations: dict[str, int]


class ShardReporter:
    """Belongs to one event loop's thread."""

    def __init__(self, engine: Engine, links: FrontendLinks) -> None:
        self._engine = engine
        self._links = links
        self._workers: dict[WorkerHandle, _Told] = {}
        self._num_workers = 0  # ever
        self._told_links: dict[FrontendLink, tuple[tuple[int, bytes], set[int]]] = {}
        self._reported_state: _State | None = None
        self._last: shards_pb2.ShardReport = shards_pb2.ShardReport()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            if (state := self._state()) != self._reported_state or any(state.are_busy):
                self._reported_state = state
                await self.report()

    def _state(self) -> _State:
        """All that a report depends on, but for time, which matters to those that are busy."""
        workers = list(self._engine.workers)
        return _State(
            num_steps=[worker.statistics.num_steps for worker in workers],
            are_busy=[bool(worker.in_flight) for worker in workers],
            are_draining=[worker.is_draining for worker in workers],
            num_cached=[len(worker.scheduler.blocks.cache) for worker in workers],
            num_live=self._engine.num_live,
            links={link: link.last_settled_number for link in self._links.connected()},
            generations=self._engine.adapter_generations(),
        )

    async def report(self) -> None:
        """Tells every frontend what is news to it."""
        settled = {link: link.last_settled_number for link in self._links.connected()}
        seen = await asyncio.wrap_future(self._engine.call(partial(look, self._engine)))
        adapters = self._engine.adapter_generations()
        report = shards_pb2.ShardReport(
            workers=[self._fold(each) for each in seen],
            process=PROCESS,
            adapters=[shards_pb2.ReportedAdapter(name=name, generation=number) for name, number in adapters.items()],
        )
        gone = self._workers.keys() - {each.handle for each in seen}
        for handle in gone:
            del self._workers[handle]
        is_news, self._last = _without_changes(report) != self._last or _has_changes(report), _without_changes(report)
        self._told_links = {link: told for link, told in self._told_links.items() if link in settled}
        for link, number in settled.items():
            waiting = link.waiting_numbers(MAX_WAITING_TOLD)
            last, told = self._told_links.get(link, ((-1, b""), set()))
            if is_news or (number, waiting) != last:
                numbers = {worker.number for worker in report.workers}
                self._send(link, report, number, waiting, told)
                self._told_links[link] = (number, waiting), numbers

    def _send(
        self, link: FrontendLink, common: shards_pb2.ShardReport, last_number: int, waiting: bytes, told: set[int]
    ) -> None:
        report = shards_pb2.ShardReport()
        report.CopyFrom(common)
        report.last_number, report.waiting_u32 = last_number, waiting
        described = {each.number: each for each in self._workers.values()}
        for worker in report.workers:
            if worker.number not in told:
                known = described[worker.number]
                worker.description.CopyFrom(known.description)
                worker.description.bits = known.bits.snapshot() if known.bits is not None else b""
                worker.ClearField("set_bits_u32")
                worker.ClearField("cleared_bits_u32")
        link.outbox.put(frontend_pb2.CoreEvent(report=report))

    def _fold(self, seen: Seen) -> shards_pb2.ReportedWorker:
        told = self._workers.get(seen.handle)
        if told is None or told.cache is not seen.cache:
            self._num_workers += 1
            told = self._workers[seen.handle] = _new(seen, self._num_workers)
        worker = shards_pb2.ReportedWorker(
            number=told.number,
            load=shards_pb2.RoutingLoad(**dataclasses.asdict(seen.load)),
            num_ahead_tokens=seen.ahead.num_tokens,
            num_ahead_slots=seen.ahead.num_slots,
            num_cached_blocks=seen.num_cached_blocks,
            num_outputs=seen.num_outputs,
        )
        if told.bits is not None and (seen.changes.published or seen.changes.forgotten):
            came, went = told.bits.change(seen.changes.published, seen.changes.forgotten)
            worker.set_bits_u32, worker.cleared_bits_u32 = came.astype("<u4").tobytes(), went.astype("<u4").tobytes()
        return worker


def look(engine: Engine) -> list[Seen]:
    """All workers that take groups. On the step loop's thread; changes of caches are told once."""
    router = engine.router
    router.look()
    seen = []
    for handle in engine.workers:
        if handle.is_closing:
            continue
        cache = handle.scheduler.blocks.cache if engine.caches_prefixes else None
        changes = cache.take_changes() if cache is not None else CacheChanges()
        seen.append(Seen(handle, cache, changes, *router.load_of(handle), router.outputs.of(handle.model)))
    return seen


def _new(seen: Seen, number: int) -> _Told:
    sizes, info = seen.handle.sizes, seen.handle.info
    bits = CachedBits(sizes.num_device_blocks) if seen.cache is not None else None
    description = shards_pb2.WorkerDescription(
        model_fingerprint=seen.handle.model,
        block_size=info.block_size,
        max_model_len=sizes.max_model_len,
        max_cached_tokens=sizes.num_device_blocks * info.block_size,
        num_bits=bits.num_bits if bits is not None else 0,
        takes_adapters=info.max_loras > 0,
    )
    return _Told(number, seen.cache, bits, description)


def _has_changes(report: shards_pb2.ShardReport) -> bool:
    return any(worker.set_bits_u32 or worker.cleared_bits_u32 for worker in report.workers)


def _without_changes(report: shards_pb2.ShardReport) -> shards_pb2.ShardReport:
    bare = shards_pb2.ShardReport()
    bare.CopyFrom(report)
    for worker in bare.workers:
        worker.ClearField("set_bits_u32")
        worker.ClearField("cleared_bits_u32")
    return bare
