"""What is made of a worker's answer: which answers fit, whom their tokens end, and how a fault is undone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from scheduler_svc.core.before_answer import BeforeAnswer
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import SequenceStatus
from scheduler_svc.core.step_plan import Answer, ScheduledRows, WrongAnswer
from tests.scheduler.simulation import Simulation


def sent(simulation: Simulation) -> ScheduledRows:
    assert simulation.send()
    return simulation.in_flight[-1][0]


def answer(token_ids: list[int], num_tokens: list[int], logprobs: Sequence[float] = (), **options: Any) -> Answer:
    return Answer(
        np.array(token_ids, np.int32),
        np.array(num_tokens, np.int64),
        np.array(logprobs, np.float32),
        options.pop("errors", {}),
        **options,
    )


FITS = {
    "fits": answer([5, 6], [1, 1]),
    "one failed": answer([5], [1, 0], errors={1: "not finite"}),
    "both failed": answer([], [0, 0], errors={0: "not finite", 1: "nothing to draw"}),
}
WRONG = {
    "a row too few": answer([5], [1]),
    "a row too many": answer([5, 6, 7], [1, 1, 1]),
    "a token too few": answer([5], [1, 1]),
    "a token too many": answer([5, 6, 7], [1, 1]),
    "of another row": answer([5, 6], [2, 0]),
    "a row without an answer": answer([5], [1, 0]),
    "a row that failed and was answered": answer([5, 6], [1, 1], errors={1: "not finite"}),
    "another failed": answer([5], [1, 0], errors={0: "not finite"}),
    "a row beyond the last failed": answer([5, 6], [1, 1], errors={2: "not finite"}),
    "too few and one failed": answer([], [0], errors={0: "not finite"}),
}


def of_two() -> Simulation:
    simulation = Simulation(depth=1)
    for number in range(2):
        simulation.add([1 + number] * 5, 8, eos_token_id=None)
    return simulation


@pytest.mark.parametrize("what", FITS)
def test_an_answer_to_each_row_is_taken_and_who_failed_ends(what: str) -> None:
    simulation = of_two()
    rows, given = sent(simulation), FITS[what]
    tokens = simulation.scheduler.process_outputs(rows, given)
    assert tokens.token_ids.tolist() == given.token_ids.tolist()
    assert [failure.group for failure in tokens.errors] == [simulation.groups[row] for row in given.errors]
    assert [group.is_finished for group in simulation.groups] == [row in given.errors for row in range(2)]
    simulation.scheduler.check_integrity()


@pytest.mark.parametrize("what", WRONG)
def test_an_answer_to_other_rows_is_refused_and_nothing_of_it_is_taken(what: str) -> None:
    simulation = of_two()
    rows = sent(simulation)
    with pytest.raises(WrongAnswer):
        simulation.scheduler.process_outputs(rows, WRONG[what])
    assert [group.sequences[0].num_tokens for group in simulation.groups] == [5, 5]
    simulation.answer()
    simulation.run_to_end()
    simulation.check_outputs()


@pytest.mark.parametrize(("num_logprobs", "fits"), [(0, False), (1, False), (2, True), (3, False)])
@pytest.mark.parametrize("is_wanted", [False, True])
def test_where_logprobs_are_wanted_there_is_one_for_each_token(num_logprobs: int, fits: bool, is_wanted: bool) -> None:
    simulation = of_two()
    if is_wanted:
        simulation.groups[0].sampling_params.logprobs = 0
    rows = sent(simulation)
    given = answer([5, 6], [1, 1], [-0.5] * num_logprobs)
    if is_wanted and not fits:
        with pytest.raises(WrongAnswer, match=f"2 tokens with {num_logprobs} logprobs"):
            simulation.scheduler.process_outputs(rows, given)
    else:
        assert len(simulation.scheduler.process_outputs(rows, given).sequences) == 2


@pytest.mark.parametrize("has_left", [False, True])
def test_a_token_ends_its_sequence_by_its_id_or_as_the_last_one_also_where_it_comes_late(has_left: bool) -> None:
    """`has_left`: it was preempted while the step was in flight, and its tokens still count."""
    simulation = Simulation(num_slots=5, depth=1, max_num_batched_tokens=64)
    simulation.add([1] * 3, 9, eos_token_id=7)
    simulation.add([2] * 3, 9, eos_token_id=None, stop_token_ids=frozenset({7}))
    simulation.add([3] * 3, 1, eos_token_id=7)
    simulation.add([4] * 3, 1, eos_token_id=None)
    simulation.add([5] * 3, 2, eos_token_id=8)
    rows = sent(simulation)
    if has_left:
        for group in simulation.groups:
            simulation.scheduler._preemption.preempt(group)
    tokens = simulation.scheduler.process_outputs(rows, answer([7] * 5, [1] * 5))
    stop, length, none = FinishReason.STOP, FinishReason.LENGTH, FinishReason.NONE
    assert tokens.finish_reasons.tolist() == [stop, stop, stop, length, none]
    assert tokens.entries.tolist() == [0, 1, 2, 3, 4]
    assert [group.is_finished for group in simulation.groups] == [True] * 4 + [False]
    assert simulation.groups[4].num_pending_tokens == 0
    simulation.scheduler.check_integrity()


def test_only_tokens_that_somebody_still_wants_are_handed_on() -> None:
    simulation = of_two()
    rows = sent(simulation)
    simulation.scheduler.abort(simulation.groups[0])
    tokens = simulation.scheduler.process_outputs(rows, answer([5, 6], [1, 1]))
    assert (tokens.sequences.tolist(), tokens.token_ids.tolist()) == (simulation.groups[1].sequences, [6])
    assert (tokens.entries.tolist(), tokens.finish_reasons.tolist()) == ([1], [FinishReason.NONE])


# ---- back to before an answer ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("was_told", [False, True])
@pytest.mark.parametrize("has_left", [False, True])
def test_tokens_that_were_not_handed_out_are_taken_back(was_told: bool, has_left: bool) -> None:
    simulation = of_two()
    ends = simulation.add([3] * 5, 1, eos_token_id=None)
    rows, given = sent(simulation), answer([5, 6, 7], [1, 1, 1])
    if has_left:
        simulation.scheduler._preemption.preempt(simulation.groups[0])
    before = BeforeAnswer(rows, given, simulation.columns)
    simulation.scheduler.process_outputs(rows, given)
    if was_told:
        before.was_told()
    simulation.scheduler.evacuate()
    assert before.restore() == set()
    assert [group.sequences[0].num_tokens for group in simulation.groups] == [6 if was_told else 5] * 3
    assert ends.sequences[0].status is (SequenceStatus.FINISHED if was_told else SequenceStatus.WAITING)


def test_siblings_that_ended_with_a_row_that_failed_go_on_where_that_is_undone() -> None:
    simulation = Simulation(depth=1)
    group = simulation.add([1] * 4, 8, eos_token_id=None, n=2)
    rows, given = sent(simulation), answer([], [0], errors={0: "not finite"})
    before = BeforeAnswer(rows, given, simulation.columns)
    simulation.scheduler.process_outputs(rows, given)
    assert group.is_finished
    before.restore()
    assert [sequence.status for sequence in group.sequences] == [SequenceStatus.WAITING] * 2


@pytest.mark.parametrize("fault", [None, "a beam too few", "a token too few", "another token", "the search is over"])
def test_a_search_that_a_fault_left_half_advanced_cannot_go_on(fault: str | None) -> None:
    simulation = Simulation(depth=1)
    beams = simulation.add([1] * 4, 8, eos_token_id=None, beam_width=2)
    simulation.send()
    simulation.answer()
    rows = sent(simulation)
    before = BeforeAnswer(rows, answer([], []), simulation.columns)
    simulation.answer()
    simulation.scheduler.evacuate()
    search = beams.beam_search
    assert search is not None
    match fault:
        case "a beam too few":
            beams.sequences[1].status = SequenceStatus.FINISHED
        case "a token too few":
            beams.sequences[1].truncate(5)
        case "another token":
            beams.sequences[1].truncate(5)
            beams.sequences[1].append(1 + search.live_token_ids(1)[1])
        case "the search is over":
            search.is_done = True
    assert before.restore() == (set() if fault is None else {beams})
