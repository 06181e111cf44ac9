"""The step loop by itself, turned by hand: no sockets, no threads, no waiting."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

from protos import worker_pb2
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.engine.failures import LOSSES_IN_ALL
from scheduler_svc.errors import DuplicateRequest, NotReady, QueueFull
from scheduler_svc.leases.step_statistics import AnsweredStep
from tests.scheduler.hand_turned_loop import FakeLink, Loop


def test_a_request_that_loses_too_many_workers_ends_with_an_error():
    loop = Loop(max_worker_losses=2)
    loop.submit("unlucky", "waits")
    for epoch in (1, 2):
        assert not loop.ends
        link = loop.join(epoch=epoch, max_num_seqs=1)
        loop.turn()
        loop.turn()
        loop.engine.worker_lost(link, "gone")
        loop.turn()
    assert loop.ends == {"unlucky": (FinishReason.ERROR, "2 workers were lost while running it")}
    assert [group.request_id for group in loop.engine.live_groups()] == ["waits"]
    loop.run_to_end(loop.join())
    assert loop.token_ids == {"waits": [7] * 9}


def test_who_passes_its_trial_after_each_loss_and_is_there_at_the_next_ends_before_long():
    """It is charged with the first alone; what bounds it is how many losses there were."""
    loop = Loop(max_worker_losses=2)
    groups = [loop.group(request_id) for request_id in ("one", "other")]
    for group in groups:
        group.max_num_tokens = 100
        loop.engine.submit(group)
    most = 2 * LOSSES_IN_ALL
    for epoch in range(1, most + 1):
        assert not loop.ends and [group.num_losses_in_all for group in groups] == [epoch - 1] * 2
        link = loop.join(epoch=epoch)
        loop.turn()
        while any(group.is_on_trial for group in groups) or not loop.token_ids:
            loop.answer(link)
            loop.turn()
        loop.engine.worker_lost(link, "gone")
        loop.turn()
        assert [group.num_worker_losses for group in groups] == [1, 1]
    ended = (FinishReason.ERROR, f"{most} workers were lost while running it")
    assert loop.ends == {"one": ended, "other": ended} and not loop.engine.live_groups()


def test_what_a_lost_worker_gives_back_comes_before_later_arrivals():
    loop = Loop()
    link = loop.join()
    loop.submit("first", "second")
    loop.turn()
    loop.submit("third")
    loop.engine.worker_lost(link, "gone")
    loop.turn()
    again = loop.join(epoch=2)
    loop.run_to_end(again)
    assert [group.request_id for step in again.steps for group in step.groups] == ["first", "second", "third"]


def test_an_answer_of_an_old_epoch_is_dropped():
    loop = Loop()
    link = loop.join(epoch=5)
    loop.submit("one")
    loop.turn()
    loop.answer(link, epoch=4)
    loop.turn()
    assert not loop.token_ids and not link.is_closed
    loop.answer(link)
    loop.turn()
    assert loop.token_ids == {"one": [7]}


def test_a_draining_worker_gets_no_more_steps():
    loop = Loop()
    link = loop.join()
    loop.submit("one")
    loop.turn()
    num_steps = len(link.steps)
    notice = worker_pb2.StepResponse(epoch=1, notice=worker_pb2.Notice(draining=worker_pb2.Draining()))
    loop.engine.worker_said(link, notice.SerializeToString())
    loop.answer(link)
    loop.submit("two")
    loop.turn()
    assert loop.token_ids == {"one": [7]}
    assert len(link.steps) == num_steps and not link.is_closed


def test_a_drained_worker_is_given_back_when_it_has_answered_and_nothing_is_lost():
    loop = Loop()
    first = loop.join("first")
    loop.submit("one")
    loop.turn()
    assert len(first.steps) == 2
    left = loop.drain("first")
    loop.turn()
    assert left.result(0) == 1
    for num_tokens in (1, 2):
        assert not first.is_closed
        loop.answer(first)
        loop.turn()
        assert loop.token_ids == {"one": [7] * num_tokens}
    assert first.is_closed and len(first.steps) == 2 and not loop.engine.workers
    (group,) = loop.engine.live_groups()
    assert (group.num_moves, group.num_worker_losses, loop.engine.metrics.total().num_worker_losses) == (1, 0, 0)
    loop.run_to_end(loop.join("second"))
    assert loop.token_ids == {"one": [7] * 9}


def test_prompt_tokens_that_wait_are_bounded():
    loop = Loop(max_waiting_tokens=20)
    loop.engine.submit(loop.group("one", num_tokens=12))
    for _ in range(2):  # on the way to the queue, then in it
        with pytest.raises(QueueFull, match="22 prompt tokens would wait, at most 20 may"):
            loop.engine.submit(loop.group("two", num_tokens=10))
        loop.turn()
    loop.engine.submit(loop.group("two", num_tokens=8))
    loop.run_to_end(loop.join())
    assert loop.engine.num_waiting_tokens == 0


def test_a_look_that_was_cancelled_does_not_end_the_loop():
    loop = Loop()
    looked: list[int] = []
    cancelled, kept = (loop.engine.call(partial(looked.append, number)) for number in (1, 2))
    assert cancelled.cancel()
    loop.turn()
    assert kept.done() and looked == [2]


def test_bytes_that_are_no_message_cost_the_worker_that_sent_them():
    loop = Loop()
    bad = loop.join("bad")
    loop.submit("one")
    loop.turn()
    good = loop.join("good")
    loop.engine.worker_said(bad, b"\xff\xff\xff")
    loop.turn()
    assert bad.is_closed and not good.is_closed
    loop.turn()
    assert [group.request_id for group in good.steps[0].groups] == ["one"]


def test_a_refused_duplicate_leaves_the_live_request_as_it_was():
    loop = Loop()
    loop.submit("one")
    loop.turn()
    again = loop.group("one")
    for _ in range(2):
        with pytest.raises(DuplicateRequest):
            loop.engine.submit(again)
    loop.engine.abort_group(again)  # as its servicer does in the end
    loop.turn()
    loop.ends.clear()
    with pytest.raises(DuplicateRequest):
        loop.submit("one")
    assert loop.engine.abort("one")
    loop.turn()
    assert loop.ends == {"one": (FinishReason.ABORT, "")} and not loop.engine.live_groups()


def test_an_id_is_one_tenants_own():
    loop = Loop()
    first, second = loop.group("one", tenant="a"), loop.group("one", tenant="b")
    loop.engine.submit(first)
    loop.engine.submit(second)
    assert not loop.engine.abort("one", tenant="c")
    assert loop.engine.abort("one", tenant="b")
    loop.turn()
    assert second.is_finished and loop.engine.live_groups() == [first]


def test_a_group_that_is_aborted_on_its_way_to_the_queue_never_gets_there():
    loop = Loop()
    group = loop.group("one")
    loop.engine.abort_group(group)
    loop.engine.submit(group)
    loop.turn()
    assert loop.engine.num_waiting == 0
    link = loop.join()
    loop.turn()
    assert loop.ends == {"one": (FinishReason.ABORT, "")}
    assert loop.engine.num_waiting == 0 and not link.steps
    loop.submit("one")  # its id is free


def test_stopping_ends_what_lives_and_refuses_what_comes():
    loop = Loop()
    link = loop.join()
    loop.submit("runs", "waits")
    loop.turn()
    loop.engine.stop()
    assert {request_id: reason for request_id, (reason, _) in loop.ends.items()} == {
        "runs": FinishReason.ABORT,
        "waits": FinishReason.ABORT,
    }
    assert link.is_closed
    with pytest.raises(NotReady):
        loop.submit("late")


def test_out_of_memory_makes_steps_smaller_before_it_ends_a_request():
    loop = Loop(steps_in_flight=1)
    link = loop.join()
    loop.submit("one")
    loop.turn()
    (worker,) = loop.engine.workers
    budgets: list[int] = []
    while not loop.ends:
        assert len(budgets) < 10
        error = worker_pb2.StepError(code=worker_pb2.STEP_ERROR_CODE_OUT_OF_MEMORY, message="too large")
        failed = worker_pb2.StepResult(
            step_id=worker.in_flight[0].step_id, status=worker_pb2.STEP_STATUS_FAILED, error=error
        )
        loop.answer(link, result=failed)
        loop.turn()
        budgets.append(worker.scheduler.max_num_batched_tokens)
    assert budgets == [32, 16, 8, 4, 4]
    assert loop.ends["one"][0] is FinishReason.ERROR and "too large" in loop.ends["one"][1]


def fail_for_want_of_memory(loop: Loop, link: FakeLink) -> None:
    (worker,) = loop.engine.workers
    error = worker_pb2.StepError(code=worker_pb2.STEP_ERROR_CODE_OUT_OF_MEMORY, message="too large")
    step_id = worker.in_flight[0].step_id
    loop.answer(link, result=worker_pb2.StepResult(step_id=step_id, status=worker_pb2.STEP_STATUS_FAILED, error=error))
    loop.turn()


def test_a_budget_that_was_too_large_grows_back_when_it_holds_steps_down_and_ever_more_rarely() -> None:
    loop = Loop(steps_in_flight=1, enable_prefix_caching=False)
    link = loop.join(max_num_seqs=1)
    loop.engine.submit(loop.group("one", num_tokens=60))
    loop.turn()
    (worker,) = loop.engine.workers
    budgets = []
    for _ in range(2):
        fail_for_want_of_memory(loop, link)
        budgets.append(worker.scheduler.max_num_batched_tokens)
    assert budgets == [32, 16]
    loop.run_to_end(link)  # four large steps, and decodes, which prove nothing

    def num_large_steps_until_it_grows() -> int:
        before, count = worker.scheduler.max_num_batched_tokens, 0
        while worker.scheduler.max_num_batched_tokens == before:
            count += 1
            assert count < 2000
            loop.engine.submit(loop.group(f"next {count} of {before}", num_tokens=before - 1))
            loop.run_to_end(link)
        return count

    assert num_large_steps_until_it_grows() == 64 - 4
    assert worker.scheduler.max_num_batched_tokens == 32
    loop.submit("two")
    loop.turn()
    fail_for_want_of_memory(loop, link)
    assert worker.scheduler.max_num_batched_tokens == 16
    loop.run_to_end(link)
    assert num_large_steps_until_it_grows() == 4 * 64, "doubled in vain"
    assert num_large_steps_until_it_grows() == 4 * 64 and worker.scheduler.max_num_batched_tokens == 64
    loop.engine.submit(loop.group("last", num_tokens=60))
    loop.run_to_end(link)
    assert worker.scheduler.max_num_batched_tokens == 64, "the worker's own bound"


def test_stop_strings_of_any_size_stay_with_the_scheduler():
    loop = Loop()
    link = loop.join()
    group = loop.group("one")
    group.sampling_params.stop.append("x" * 1_000_000)
    group.sampling_params.stop_token_ids.extend([1] * 100_000)
    loop.engine.submit(group)
    loop.turn()
    assert sum(step.ByteSize() for step in link.steps) < 1000
    assert len(group.sampling_params.stop) == 1, "the group's own are as they were"


def test_a_step_that_is_past_its_deadline_costs_the_worker(monkeypatch):
    monkeypatch.setattr("scheduler_svc.leases.worker_handle.STEP_BASE_NS", 0)
    monkeypatch.setattr("scheduler_svc.leases.worker_handle.STEP_SLOWNESS", 0)
    loop = Loop()
    link = loop.join()
    loop.turn()
    assert len(loop.engine.workers) == 1, "there is no step yet"
    loop.submit("one")
    loop.turn()
    loop.turn()
    assert link.is_closed and loop.engine.num_waiting == 1


def floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


@pytest.mark.parametrize(
    ("columns", "is_right"),
    [
        ({}, False),
        ({"logprobs_f32": floats(-1.0), "ranks_u32": b"\1\0\0\0"}, True),
        ({"logprobs_f32": floats(-1.0)}, False),
        ({"logprobs_f32": floats(-1.0, -2.0), "ranks_u32": b"\1\0\0\0"}, False),
        ({"logprobs_f32": floats(-1.0), "ranks_u32": b"\1\0\0\0", "top_counts_u32": b"\1\0\0\0"}, False),
    ],
)
def test_a_worker_that_leaves_out_logprobs_that_were_wanted_is_given_up(columns, is_right):
    loop = Loop()
    link = loop.join("bad")
    for request_id in ("asks", "does not"):
        group = loop.group(request_id)
        if request_id == "asks":
            group.sampling_params.logprobs = 1
        loop.engine.submit(group)
        loop.turn()
    outputs = worker_pb2.SequenceOutputs(token_ids_i32=np.array([7], "<i4").tobytes(), **columns)
    loop.answer(link, result=worker_pb2.StepResult(step_id=1, outputs=outputs))
    loop.turn()
    assert link.is_closed is not is_right
    assert not loop.ends, "the requests are not at fault"
    assert loop.token_ids == ({"asks": [7]} if is_right else {})


def test_a_slot_that_now_belongs_to_one_who_wants_logprobs_owes_none_for_the_one_before():
    loop = Loop()
    link = loop.join(max_num_seqs=1)
    loop.submit("does not")
    loop.turn()
    loop.engine.abort("does not")
    group = loop.group("asks")
    group.sampling_params.logprobs = 1
    loop.engine.submit(group)
    loop.turn()
    loop.answer(link)
    loop.turn()
    assert len(link.steps) == 3 and link.steps[2].groups[0].request_id == "asks"
    loop.answer(link)
    loop.turn()
    assert not link.is_closed


def test_a_loop_that_slept_itself_does_not_blame_its_workers(monkeypatch: pytest.MonkeyPatch):
    """After a pause of its own silence counts anew; a worker that stays silent after that is given up."""
    slept_ns = 0
    now_ns = time.monotonic_ns
    monkeypatch.setattr("scheduler_svc.leases.worker_handle.SILENCE_LIMIT_NS", 2_000_000_000)
    loop = Loop(clock=lambda: now_ns() + slept_ns)
    link = loop.join()
    loop.submit("one")
    loop.turn()
    slept_ns += 5_000_000_000
    loop.turn()
    assert not link.is_closed
    for _ in range(3):  # awake, but nothing comes
        slept_ns += 900_000_000
        loop.turn()
    assert link.is_closed


def test_an_engine_with_a_clock_of_its_own_runs_in_virtual_time():
    """Minutes for it, none for the caller: it waits for nothing, and knows no time but that of its clock."""
    now_ns = 0
    loop = Loop(clock=lambda: now_ns, worker_wait_timeout_s=600.0)
    link = loop.join()
    link.last_heard_ns = 0
    answered = list[AnsweredStep]()
    loop.engine.observe_steps(lambda _, step: answered.append(step))

    def is_lost_after(seconds: int) -> bool:
        nonlocal now_ns
        for _ in range(2 * seconds):
            now_ns += 500_000_000
            loop.engine.take_events(wait_s=0)
        return link.is_closed

    loop.submit("one")
    loop.turn()
    assert not is_lost_after(10)
    loop.answer(link)
    loop.turn()
    assert answered[0].wire_ns == 10_000_000_000
    assert not is_lost_after(5)
    assert is_lost_after(1), "silent for 16 s of its time"
    assert is_lost_after(590) and "one" not in loop.ends
    assert is_lost_after(11)
    assert loop.ends["one"][0] is FinishReason.ERROR


def test_a_worker_that_said_it_would_go_is_no_loss_to_be_counted():
    loop = Loop(max_worker_losses=1)
    first = loop.join("first")
    loop.submit("one")
    loop.turn()
    notice = worker_pb2.Notice(draining=worker_pb2.Draining())
    loop.engine.worker_said(first, worker_pb2.StepResponse(epoch=1, notice=notice).SerializeToString())
    loop.engine.worker_lost(first, "it ended the stream")
    second = loop.join("second")
    loop.run_to_end(second)
    assert loop.ends == {} and loop.token_ids == {"one": [7] * 9}


def test_the_last_worker_of_a_model_that_says_it_will_go_ends_its_requests_first():
    loop = Loop()
    first, other = loop.join("first"), loop.join("other")
    loop.submit("one", "two")
    loop.turn()
    notice = worker_pb2.Notice(draining=worker_pb2.Draining(finishes_within_ms=20_000))
    for link in (first, other):
        loop.engine.worker_said(link, worker_pb2.StepResponse(epoch=1, notice=notice).SerializeToString())
    loop.submit("waits")
    loop.turn()

    def answer_until_closed(link: FakeLink) -> None:
        while not link.is_closed:
            loop.answer(link)
            loop.turn()

    answer_until_closed(first)
    assert len(loop.engine.live_groups()) == 3 and len(loop.engine.workers) == 1, "its request has moved"
    answer_until_closed(other)
    assert loop.token_ids == {"one": [7] * 9, "two": [7] * 9} and not loop.engine.workers
    assert loop.engine.metrics.total().num_worker_losses == 0
    loop.run_to_end(loop.join("next"))
    assert loop.token_ids["waits"] == [7] * 9


def test_a_worker_whose_time_to_finish_is_up_loses_nothing():
    loop = Loop(max_worker_losses=1)
    only = loop.join("only")
    loop.submit("one")
    loop.turn()
    for draining in (worker_pb2.Draining(finishes_within_ms=100), worker_pb2.Draining()):
        loop.answer(only)
        notice = worker_pb2.StepResponse(epoch=1, notice=worker_pb2.Notice(draining=draining))
        loop.engine.worker_said(only, notice.SerializeToString())
        loop.turn()
    num_steps = len(only.steps)
    loop.turn()
    assert len(only.steps) == num_steps and not only.is_closed
    loop.engine.worker_lost(only, "it ended the stream")
    loop.turn()
    loop.run_to_end(loop.join("next"))
    assert loop.ends == {} and loop.token_ids == {"one": [7] * 9}


def test_groups_that_lost_a_worker_are_tried_when_nothing_else_is_in_flight():
    loop = Loop()
    first = loop.join("first")
    loop.submit("one", "two")
    loop.turn()
    second = loop.join("second")
    loop.submit("busy")
    loop.turn()
    assert len(second.steps) == 2, "two in flight"
    loop.engine.worker_lost(first, "gone")
    loop.turn()
    loop.answer(second)
    loop.turn()
    assert len(second.steps) == 2, "one is in flight still"
    loop.answer(second)
    loop.turn()
    *_, trial = second.steps
    assert [group.request_id for group in trial.groups] == ["one", "two"]
    assert len(second.steps) == 3 and trial.rows.num_decode_rows == 0, "nobody beside them"
    loop.run_to_end(second)
    assert loop.ends == {} and {name: len(ids) for name, ids in loop.token_ids.items()} == dict.fromkeys(
        ("one", "two", "busy"), 9
    )


def answer_of(**columns: Any) -> worker_pb2.StepResult:
    values = {"token_ids_i32": np.full(1, 7, "<i4").tobytes(), **columns}
    return worker_pb2.StepResult(step_id=1, outputs=worker_pb2.SequenceOutputs(**values))


def of_logprob(logprob: float, rank: int = 1) -> dict[str, bytes]:
    return {"logprobs_f32": np.full(1, logprob, "<f4").tobytes(), "ranks_u32": np.full(1, rank, "<u4").tobytes()}


def of_top(token_id: int, logprob: float = -1.0) -> dict[str, bytes]:
    return {
        **of_logprob(-1.0),
        "top_counts_u32": np.ones(1, "<u4").tobytes(),
        "top_token_ids_i32": np.full(1, token_id, "<i4").tobytes(),
        "top_logprobs_f32": np.full(1, logprob, "<f4").tobytes(),
    }


WRONG: dict[str, dict[str, Any]] = {
    "a token beyond the vocabulary": {"result": answer_of(token_ids_i32=np.full(1, 1000, "<i4").tobytes())},
    "a negative token": {"result": answer_of(token_ids_i32=np.full(1, -3, "<i4").tobytes())},
    "half a token": {"result": answer_of(token_ids_i32=b"\7\0")},
    "a logprob that is no number": {"result": answer_of(**of_logprob(math.nan))},
    "a logprob above 0": {"result": answer_of(**of_logprob(0.5))},
    "a rank beyond the vocabulary": {"result": answer_of(**of_logprob(-0.5, rank=1001))},
    "another token beyond the vocabulary": {"result": answer_of(**of_top(1000))},
    "another logprob that is infinite": {"result": answer_of(**of_top(5, math.inf))},
    "a phase of years": {
        "result": worker_pb2.StepResult(step_id=1, timings=worker_pb2.StepTimings(forward_ns=1 << 60))
    },
    "an error of megabytes": {
        "result": worker_pb2.StepResult(
            step_id=1, status=worker_pb2.STEP_STATUS_FAILED, error=worker_pb2.StepError(message="x" * (1 << 20))
        )
    },
    "a budget beyond its own": {
        "result": None,
        "notice": worker_pb2.Notice(budget=worker_pb2.BudgetChanged(max_num_batched_tokens=1 << 30)),
    },
    "a budget of nothing": {"result": None, "notice": worker_pb2.Notice(budget=worker_pb2.BudgetChanged())},
}


@pytest.mark.parametrize("what", WRONG)
def test_what_no_worker_can_say_costs_that_worker_alone(what: str):
    loop = Loop()
    wrong = loop.join("wrong")
    loop.submit("one")
    loop.turn()
    loop.answer(wrong, **WRONG[what])
    loop.turn()
    assert wrong.is_closed and wrong.is_distrusted and not loop.engine.workers
    assert "one" not in loop.token_ids, "nothing of it reached anybody"
    right = loop.join("right")
    loop.run_to_end(right)
    assert loop.token_ids == {"one": [7] * 9} and not right.is_distrusted


def test_who_answers_at_once_gets_no_more_of_what_comes_now_and_then_than_others():
    """Wrong answers that look right cannot be told from right ones, but being fast must not attract requests."""
    now_ns = 0
    loop = Loop(clock=lambda: now_ns)
    links = [loop.join(name) for name in ("fast", "slow")]
    takes_ns = {"fast": 1_000_000, "slow": 20_000_000}
    taken = {"fast": 0, "slow": 0}
    for number in range(100):
        loop.submit(f"request {number}")
        loop.turn()
        loop.turn()
        for worker, link in zip(loop.engine.workers, links, strict=True):
            taken[link.address] += worker.num_running
        for link in links:
            while any(worker.in_flight for worker in loop.engine.workers if worker.link is link):
                now_ns += takes_ns[link.address]
                link.last_heard_ns = now_ns
                loop.answer(link)
                loop.turn()
    assert min(taken.values()) > 30 and sum(taken.values()) == 100


def test_who_answers_at_once_never_holds_more_than_its_room():
    loop = Loop()
    links = [loop.join(name, max_num_seqs=2) for name in ("fast", "slow")]
    loop.submit(*(f"request {number}" for number in range(12)))
    most = 0
    for turn in range(200):
        loop.turn()
        most = max(most, *(worker.num_running for worker in loop.engine.workers))
        for worker, link in zip(loop.engine.workers, links, strict=True):
            if worker.in_flight and (link.address == "fast" or turn % 5 == 0):
                loop.answer(link)
    assert most == 2 and len(loop.token_ids) == 12 and not loop.engine.live_groups()
