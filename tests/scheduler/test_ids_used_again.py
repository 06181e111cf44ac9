"""A client may send a request of the same id as soon as it has read the former one's end, however quick it is."""

from __future__ import annotations

import numpy as np
import pytest

from protos import worker_pb2
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import SequenceGroup, SequenceStatus
from scheduler_svc.core.step_plan import NewTokens
from scheduler_svc.engine.metrics.metrics import Metrics
from scheduler_svc.errors import DuplicateRequest
from tests.scheduler.hand_turned_loop import FakeLink, Loop

END = 8  # a token


class QuickLoop(Loop):
    """Its client reads what is handed out, and sends `again` with the end, before the step loop does anything else.

    `was_taken` says of each that was sent so whether its id was free.
    """

    def __init__(self) -> None:
        super().__init__()
        self.again: list[SequenceGroup] = []
        self.was_taken: list[bool] = []

    def put_tokens(self, tokens: NewTokens, outputs: worker_pb2.SequenceOutputs) -> None:
        super().put_tokens(tokens, outputs)
        if tokens.finish_reasons.any() and self.again:
            try:
                self.engine.submit(self.again.pop())
                self.was_taken.append(True)
            except DuplicateRequest:
                self.was_taken.append(False)

    def answer_with(self, link: FakeLink, *token_ids: int) -> None:
        (worker,) = self.engine.workers
        outputs = worker_pb2.SequenceOutputs(token_ids_i32=np.array(token_ids, "<i4").tobytes())
        self.answer(link, result=worker_pb2.StepResult(step_id=worker.in_flight[0].step_id, outputs=outputs))


def two_outputs(loop: Loop) -> SequenceGroup:
    """Begun, and its first step not answered."""
    group = loop.group("one", num_outputs=2, best_of=2, stop_token_ids=frozenset({END}))
    loop.engine.submit(group)
    loop.turn()
    return group


def test_where_a_token_ends_it() -> None:
    loop = QuickLoop()
    link = loop.join()
    loop.submit("one")
    loop.again.append(loop.group("one"))
    loop.run_to_end(link)
    assert loop.was_taken == [True]
    assert loop.token_ids == {"one": [7] * 18} and not loop.ends


def test_where_the_text_of_several_outputs_ends_before_the_step_loop_hears_of_any() -> None:
    loop = QuickLoop()
    link = loop.join()
    group = two_outputs(loop)
    first, second = group.sequences
    loop.engine.finish_sequence(first)
    with pytest.raises(DuplicateRequest):
        loop.submit("one")  # the other one is not at its end
    loop.engine.finish_sequence(second)
    loop.submit("one")
    assert loop.engine.find("one") != [group] and loop.engine.num_live == 2
    loop.run_to_end(link)
    assert loop.token_ids == {"one": [7] * 9} and group.is_finished


def test_where_one_output_is_at_its_end_by_its_text_and_the_last_by_a_token() -> None:
    loop = QuickLoop()
    link = loop.join()
    group = two_outputs(loop)
    loop.again.append(loop.group("one"))
    loop.answer_with(link, 7, END)
    loop.engine.finish_sequence(group.sequences[0])  # behind the answer, which the loop takes first
    loop.turn()
    assert loop.was_taken == [True]
    assert group.is_finished and len(loop.engine.live_groups()) == 1


def test_where_a_resumed_request_has_nothing_left_to_do() -> None:
    loop = Loop()
    link = loop.join()
    group = loop.group("one")
    group.sequences[0].status = SequenceStatus.FINISHED
    loop.engine.submit(group)
    loop.submit("one")  # the step loop has seen neither
    loop.run_to_end(link)
    assert loop.token_ids == {"one": [7] * 9} and not loop.ends


def test_a_request_whose_id_is_free_is_forgotten_also_where_a_fault_comes_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = QuickLoop()
    link = loop.join()
    group = two_outputs(loop)
    loop.again.append(loop.group("one"))

    def fail(*_: object) -> None:
        monkeypatch.undo()
        raise AssertionError("broken")

    monkeypatch.setattr(Metrics, "generated", fail)
    loop.answer_with(link, END, END)
    loop.turn()
    assert loop.was_taken == [True] and group.is_finished
    assert loop.ends.pop("one") == (FinishReason.ERROR, "the scheduler failed over its last token")
    (again,) = loop.engine.live_groups()
    assert again is not group and loop.engine.find("one") == [again]
    loop.run_to_end(link)
    assert again.is_finished and not loop.ends
