"""Watchers of steps: which they see, what a slow one misses, and that one who leaves leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from protos import inference_pb2 as pb
from scheduler_svc.api import step_watch
from scheduler_svc.api.step_watch import MAX_WATCHERS, StepWatchers
from scheduler_svc.errors import TooMany
from scheduler_svc.leases.step_statistics import AnsweredStep
from scheduler_svc.leases.worker_handle import WorkerHandle
from tests.scheduler.hand_turned_loop import FakeLink, Loop


class Watched:
    """A loop with one request that runs on its only worker."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.link: FakeLink = self.loop.join("here:1")
        self.loop.submit("one")
        self.loop.turn()
        self.watchers = StepWatchers(self.loop.engine)

    async def watch(self, address: str = "") -> tuple[AsyncIterator[pb.StepSummary], asyncio.Task[pb.StepSummary]]:
        """A watcher that waits for its first step."""
        steps = self._read(address)
        first = asyncio.ensure_future(anext(steps))
        await asyncio.sleep(0)
        return steps, first

    async def _read(self, address: str) -> AsyncIterator[pb.StepSummary]:
        async with contextlib.aclosing(self.watchers.watch(address)) as steps:  # type: ignore[type-var]  # a generator
            async for data in steps:
                yield pb.StepSummary.FromString(data)

    async def step(self) -> None:
        self.loop.answer(self.link)
        self.loop.turn()
        await asyncio.sleep(0)


async def test_a_watcher_sees_every_step_from_now_on_and_leaves_nothing_behind() -> None:
    watched = Watched()
    await watched.step()
    steps, first = await watched.watch()
    for _ in range(3):
        await watched.step()
    seen = [await first, await anext(steps), await anext(steps)]
    assert [(step.worker, step.step_id, step.num_rows) for step in seen] == [("here:1", n, 1) for n in (2, 3, 4)]
    await steps.aclose()  # type: ignore[attr-defined]  # an iterator, and a generator in truth
    assert not watched.loop.engine.num_step_observers


async def test_a_step_tells_what_was_copied_on_write_and_who_gave_way() -> None:
    watched = Watched()
    _, first = await watched.watch()
    (worker,) = watched.loop.engine.workers
    sent = next(iter(worker.in_flight))
    sent.copies, sent.num_preempted, sent.num_swapped_out_groups = [(3, 9)], 2, 1
    await watched.step()
    step = await first
    assert [(copy.source, copy.destination) for copy in step.copies] == [(3, 9)] and step.blocks_copied == 1
    assert (step.num_preempted, step.num_swapped_out) == (2, 1)


async def test_a_watcher_that_is_cancelled_while_it_waits_leaves_nothing_behind() -> None:
    watched = Watched()
    _, first = await watched.watch()
    assert watched.loop.engine.num_step_observers
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert not watched.loop.engine.num_step_observers


async def test_a_watcher_of_one_worker_sees_no_other() -> None:
    watched = Watched()
    (_, of_this), (_, of_another) = await watched.watch("here:1"), await watched.watch("there:1")
    await watched.step()
    assert (await of_this).worker == "here:1" and not of_another.done()
    of_another.cancel()


async def test_a_slow_watcher_misses_steps_and_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_watch, "MAX_WAITING", 2)
    watched = Watched()
    steps, first = await watched.watch()
    failed: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    for _ in range(5):
        await watched.step()
    seen = [await first, await anext(steps)]
    await watched.step()
    seen.append(await anext(steps))
    assert [step.step_id for step in seen] == sorted({step.step_id for step in seen}) and seen[0].step_id == 1
    assert not failed
    assert watched.loop.token_ids["one"] == [7] * 6


async def test_watchers_are_few_and_a_step_is_made_into_bytes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0
    summary = step_watch._summary

    def counted(worker: WorkerHandle, answered: AnsweredStep) -> pb.StepSummary:
        nonlocal made
        made += 1
        return summary(worker, answered)

    monkeypatch.setattr(step_watch, "_summary", counted)
    watched = Watched()
    watching = [await watched.watch() for _ in range(MAX_WATCHERS)]
    _, refused = await watched.watch()
    with pytest.raises(TooMany, match=f"at most {MAX_WATCHERS} may"):
        await refused
    await watched.step()
    assert [(await first).step_id for _, first in watching] == [1] * MAX_WATCHERS and made == 1
    await watching[0][0].aclose()  # type: ignore[attr-defined]  # an iterator, and a generator in truth
    _, late = await watched.watch()
    await watched.step()
    assert (await late).step_id == 2 and made == 2 and watched.loop.engine.num_step_observers == 1
