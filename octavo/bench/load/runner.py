"""Sends requests: in an open loop each at its time, in a closed one whenever one of N streams is free."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo.bench.load.record import Record
from octavo.bench.load.requests import PlannedRequest

Clock = Callable[[], float]  # seconds from the start of the run


class RequestError(Exception):
    """A request that did not end as it should; `kind` is the same for all alike, `reason` the server's own words."""

    def __init__(self, kind: str, reason: str = "") -> None:
        super().__init__(kind, reason)
        self.kind, self.reason = kind, reason


class Target(Protocol):
    """A server, and how to ask it."""

    async def send(self, request: PlannedRequest, record: Record, clock: Clock) -> None:
        """Fills in what comes. Raises RequestError."""


@dataclass(frozen=True)
class Run:
    """Records in the order of the requests, and the CPU seconds of this process, of all its threads."""

    records: list[Record]
    wall_s: float
    cpu_s: float


async def run(
    target: Target, requests: Sequence[PlannedRequest], streams: int | None = None, timeout_s: float = 600.0
) -> Run:
    """Open where `streams` is None: a request is sent at its time, however many are on the way."""
    started_s, cpu_s = time.monotonic(), time.process_time()

    def clock() -> float:
        return time.monotonic() - started_s

    if streams is None:
        records = await _open_loop(target, requests, clock, timeout_s)
    else:
        records = await _closed_loop(target, requests, streams, clock, timeout_s)
    return Run(records, clock(), time.process_time() - cpu_s)


async def _open_loop(
    target: Target, requests: Sequence[PlannedRequest], clock: Clock, timeout_s: float
) -> list[Record]:
    records, tasks = [], []
    async with asyncio.TaskGroup() as group:
        for request in requests:
            assert request.at_s is not None
            await asyncio.sleep(max(0.0, request.at_s - clock()))  # 0 lets those go that are due
            records.append(Record(planned_s=request.at_s))
            tasks.append(group.create_task(_one(target, request, records[-1], clock, timeout_s)))
    return records


async def _closed_loop(
    target: Target, requests: Sequence[PlannedRequest], streams: int, clock: Clock, timeout_s: float
) -> list[Record]:
    records = [Record(planned_s=0.0) for _ in requests]
    waiting = iter(zip(requests, records, strict=True))

    async def stream(waiting: Iterator[tuple[PlannedRequest, Record]]) -> None:
        for request, record in waiting:
            record.planned_s = clock()
            await _one(target, request, record, clock, timeout_s)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(streams, len(requests))):
            group.create_task(stream(waiting))
    return records


async def _one(target: Target, request: PlannedRequest, record: Record, clock: Clock, timeout_s: float) -> None:
    record.sent_s = clock()
    try:
        async with asyncio.timeout(timeout_s):
            await target.send(request, record, clock)
        if not record.times_s:
            record.error = "no tokens"
    except RequestError as error:
        record.error, record.reason = error.kind, error.reason
    except TimeoutError:
        record.error = "timeout"
    record.end_s = clock()
