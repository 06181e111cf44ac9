"""Faults of the scheduler's own over one request: it ends, its neighbours get every token, and no worker is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from protos import inference_pb2 as pb
from protos import worker_pb2
from scheduler_svc.core import sealed_step
from scheduler_svc.core.answers import Answers
from scheduler_svc.core.blocks.block_manager import BlockSpaceManager
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.step_plan import Introduction
from scheduler_svc.core.worker_groups import WorkerGroups
from scheduler_svc.engine.messages import step_encoder
from scheduler_svc.routing.router import Router
from scheduler_svc.routing.worker_queue import WorkerQueue
from tests.fakes import FakeWorker
from tests.scheduler.hand_turned_loop import Loop
from tests.scheduler.hashed_tokens import hashed_after
from tests.scheduler.test_engine import Client, client

BAD = "bad"


def raise_for_bad(request_id: str) -> None:
    if request_id == BAD:
        raise KeyError("a fault over this one")


def break_method(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, groups_of: Callable[..., Any]) -> None:
    """Lets a method do its work, and raise where one of the requests that `groups_of` finds in its call is bad."""
    method = getattr(owner, name)

    def broken(*arguments: Any, **options: Any) -> Any:
        found = list(groups_of(*arguments))
        result = method(*arguments, **options)
        for request_id in found:
            raise_for_bad(request_id)
        return result

    monkeypatch.setattr(owner, name, broken)


def break_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    break_method(monkeypatch, BlockSpaceManager, "num_blocks_to_take", lambda self, group: [group.request_id])


def break_looking_at_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(self: WorkerQueue) -> list[str]:
        return [] if (head := self._worker.waiting.peek()) is None else [head.request_id]

    break_method(monkeypatch, WorkerQueue, "_choose", look)


def break_scheduling(monkeypatch: pytest.MonkeyPatch) -> None:
    break_method(monkeypatch, BlockSpaceManager, "begin", lambda self, sequence: [sequence.group.request_id])


def break_scheduling_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def seated(plan: Any, groups: WorkerGroups) -> list[str]:
        return [sequence.group.request_id for sequence in groups.columns.owner[groups.columns.occupied]]

    break_method(monkeypatch, sealed_step, "_rows", seated)


def break_encoding_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_rows(message: worker_pb2.Rows, rows: Any) -> list[str]:
        return [sequence.group.request_id for sequence in rows.sequences]

    break_method(monkeypatch, step_encoder, "_pack_rows", with_rows)


def break_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    break_method(monkeypatch, WorkerGroups, "give_up_slot", lambda self, sequence, *_: [sequence.group.request_id])


def break_appending(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(self: Answers, slots: Any, generations: Any, sequences: Any, token_ids: Any) -> list[str]:
        return [sequence.group.request_id for sequence in sequences]

    break_method(monkeypatch, Answers, "_append", drawn)


FAULTS = [
    break_admission,
    break_looking_at_the_queue,
    break_scheduling,
    break_scheduling_of_all,
    break_encoding_of_all,
    break_the_end,
    break_appending,
]


def submit_neighbours(it: Client) -> dict[str, tuple[str, int]]:
    prompts = {f"good {number}": ("p" * number + "|", 24 + number) for number in range(3)}
    for request_id, (prompt, max_tokens) in prompts.items():
        it.submit(request_id, prompt, max_tokens=max_tokens)
    return prompts


@pytest.mark.parametrize("break_something", FAULTS)
def test_the_request_that_brings_a_fault_ends_and_nobody_else_does(
    monkeypatch: pytest.MonkeyPatch, break_something: Callable[[pytest.MonkeyPatch], None]
) -> None:
    with FakeWorker(delay_s=0.002) as worker, client(worker, max_worker_losses=3) as it:
        prompts = submit_neighbours(it)
        it.read(lambda: all(len(ids) > 3 for ids in it.token_ids.values()))
        break_something(monkeypatch)
        it.submit(BAD, "bad|", max_tokens=6)
        it.finish(*prompts, BAD)
        for request_id, (prompt, max_tokens) in prompts.items():
            assert it.token_ids[request_id] == hashed_after(prompt, max_tokens), "every token, and each once"
            assert it.reasons[request_id] == pb.FINISH_REASON_LENGTH
        assert it.reasons[BAD] == pb.FINISH_REASON_ERROR
        assert "failed over it, or a worker was lost, 3 times" in it.last[BAD].outputs[0].error.message
        it.submit("later", "later|", max_tokens=9)
        it.finish("later")
        assert it.token_ids["later"] == hashed_after("later|", 9)
        (handle,) = it.serving.engine.workers
        assert worker.num_leases == 1 and it.serving.engine.metrics.total().num_worker_losses == 0, "no worker was lost"
        handle.scheduler.check_integrity()
        assert not handle.scheduler.groups.has_work and not it.serving.engine.live_groups()


def test_a_request_that_cannot_be_encoded_ends_at_once_and_nobody_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    introduce = step_encoder._introduce

    def broken(step: worker_pb2.Step, introduction: Introduction, metadata: Any) -> None:
        introduce(step, introduction, metadata)
        raise_for_bad(introduction.sequence.group.request_id)

    monkeypatch.setattr(step_encoder, "_introduce", broken)
    with FakeWorker(delay_s=0.002) as worker, client(worker) as it:
        prompts = submit_neighbours(it)
        it.read(lambda: all(len(ids) > 3 for ids in it.token_ids.values()))
        it.submit(BAD, "bad|", max_tokens=6)
        it.submit("beside", "b|", max_tokens=20)
        it.finish(*prompts, BAD, "beside")
        for request_id, (prompt, max_tokens) in {**prompts, "beside": ("b|", 20)}.items():
            assert it.token_ids[request_id] == hashed_after(prompt, max_tokens)
            assert it.last[request_id].timings.times_moved == 0, "what they have computed is still there"
        assert it.reasons[BAD] == pb.FINISH_REASON_ERROR and it.token_ids[BAD] == []
        assert "no step with it can be sent: its metadata is none: KeyError" in it.last[BAD].outputs[0].error.message
        assert worker.num_leases == 1
        it.serving.engine.workers[0].scheduler.check_integrity()


def test_a_number_that_does_not_fit_its_column_is_the_fault_of_its_group() -> None:
    loop = Loop()
    link = loop.join()
    loop.submit("good")
    loop.turn()
    bad = loop.group(BAD, num_tokens=100, num_outputs=2)  # more than a step: the second output is forked in the next
    bad.sequences[1].index = 70_000
    loop.engine.submit(bad)
    loop.turn()
    loop.run_to_end(link)
    assert loop.ends[BAD] == (FinishReason.ERROR, "no step with it can be sent: its index is 70000; 0 to 65535 fit")
    assert loop.token_ids["good"] == [7] * 9 and not link.is_closed


def test_a_step_larger_than_a_message_costs_the_group_that_makes_it_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_encoder, "MAX_MESSAGE_BYTES", 2000)
    loop = Loop()
    link = loop.join()
    loop.engine.submit(loop.group("good"))
    loop.engine.submit(loop.group(BAD, bad_words=[[1, 2, 3]] * 1000))
    loop.turn()
    loop.run_to_end(link)
    reason, message = loop.ends[BAD]
    assert reason is FinishReason.ERROR and "2000 are the most" in message
    assert loop.token_ids == {"good": [7] * 9} and not link.is_closed


def test_an_answer_that_does_not_fit_is_charged_to_the_rows_of_its_step() -> None:
    """It is the worker's fault, so that one goes; whoever brings every worker to it ends before long."""
    loop = Loop(max_worker_losses=3)
    loop.submit(BAD)
    for epoch in (1, 2, 3):
        assert not loop.ends
        link = loop.join(epoch=epoch)
        loop.turn()
        outputs = worker_pb2.SequenceOutputs(token_ids_i32=np.array([7, 7], "<i4").tobytes())
        loop.answer(link, result=worker_pb2.StepResult(step_id=1, outputs=outputs))
        loop.turn()
        assert link.is_closed
    assert loop.ends == {BAD: (FinishReason.ERROR, "3 workers were lost while running it")}


def test_faults_without_end_over_one_worker_give_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be the worker's after all."""
    loop = Loop(max_worker_losses=100)
    link = loop.join()

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("broken")

    monkeypatch.setattr(Scheduler, "schedule", fail)
    loop.submit("one")
    deadline = time.monotonic() + 10
    while not link.is_closed:
        assert time.monotonic() < deadline
        loop.turn()
    monkeypatch.undo()
    loop.run_to_end(loop.join(epoch=2))
    assert loop.token_ids == {"one": [7] * 9}


def test_requests_that_cannot_be_taken_back_end_rather_than_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    link = loop.join()
    loop.submit("one", "two")
    loop.turn()

    def fail(*_: object) -> None:
        raise AssertionError("broken")

    monkeypatch.setattr(loop.engine.workers[0].scheduler, "evacuate", fail)
    loop.engine.worker_lost(link, "gone")
    loop.turn()
    assert {reason for reason, _ in loop.ends.values()} == {FinishReason.ERROR} and len(loop.ends) == 2
    assert not loop.engine.live_groups()
    loop.submit("three")
    loop.run_to_end(loop.join(epoch=2))
    assert loop.token_ids == {"three": [7] * 9}


def test_a_request_that_cannot_be_routed_ends_at_once_also_when_its_worker_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = Loop()
    links = [loop.join(name) for name in ("first", "second")]
    loop.submit("good", "bad later")
    loop.turn()
    broken = {BAD}
    choose = Router._choose

    def break_some(self: Router, group: SequenceGroup, *options: Any) -> Any:
        if group.request_id in broken:
            raise KeyError("a fault over this one")
        return choose(self, group, *options)

    monkeypatch.setattr(Router, "_choose", break_some)
    loop.submit(BAD)
    loop.turn()
    assert loop.ends == {BAD: (FinishReason.ERROR, "the scheduler failed over it: KeyError")}
    broken.add("bad later")
    (holder,) = (
        link for link in links if any(group.request_id == "bad later" for step in link.steps for group in step.groups)
    )
    loop.engine.worker_lost(holder, "gone")
    loop.turn()
    assert "bad later" in loop.ends
    loop.run_to_end(next(link for link in links if link is not holder))
    assert loop.token_ids["good"] == [7] * 9 and not loop.engine.live_groups()
