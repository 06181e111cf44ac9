"""Logprobs of prompts on their way through the step loop: in order, each once, from whatever a worker computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from protos import inference_pb2 as pb
from protos import worker_pb2
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import SequenceGroup
from tests.scheduler.hand_turned_loop import FakeLink, Loop

PROMPT = list(range(10, 18))


def asking(request_id: str, prompt: list[int] = PROMPT, max_tokens: int = 3, **options: Any) -> SequenceGroup:
    params = pb.SamplingParams(prompt_logprobs=0)
    max_num_tokens = len(prompt) + max_tokens
    return SequenceGroup(request_id, prompt, params, max_num_tokens=max_num_tokens, arrival_ns=0, **options)


def columns(row: int, first_position: int, token_ids: list[int]) -> worker_pb2.PromptLogprobs:
    """Their logprobs are minus their ids."""
    logprobs = worker_pb2.SequenceOutputs(
        token_ids_i32=np.array(token_ids, "<i4").tobytes(),
        logprobs_f32=(-np.array(token_ids, "<f4")).tobytes(),
        ranks_u32=np.ones(len(token_ids), "<u4").tobytes(),
    )
    return worker_pb2.PromptLogprobs(row=row, first_position=first_position, logprobs=logprobs)


def answer(loop: Loop, link: FakeLink, num_tokens: int, *prompts: worker_pb2.PromptLogprobs) -> None:
    """Answers the oldest step in flight with so many draws."""
    outputs = worker_pb2.SequenceOutputs(token_ids_i32=np.full(num_tokens, 7, "<i4").tobytes(), prompt_logprobs=prompts)
    step_id = loop.engine.workers[0].in_flight[0].step_id
    loop.answer(link, result=worker_pb2.StepResult(step_id=step_id, outputs=outputs))
    loop.turn()


def test_a_worker_is_asked_until_it_has_told_them_and_no_longer():
    loop = Loop(steps_in_flight=1)
    link = loop.join()
    loop.engine.submit(asking("one"))
    loop.turn()
    (metadata,) = link.steps[-1].groups
    assert metadata.sampling_params.HasField("prompt_logprobs")
    answer(loop, link, 1, columns(0, 1, PROMPT[1:]))
    assert loop.prompt_token_ids == {"one": PROMPT[1:]} and loop.token_ids == {"one": [7]}

    loop.engine.worker_lost(link, "gone")
    other = loop.join("other", epoch=2)
    loop.turn()
    loop.turn()
    (metadata,) = other.steps[-1].groups
    assert not metadata.sampling_params.HasField("prompt_logprobs"), "they have come"
    answer(loop, other, 1)
    assert loop.prompt_token_ids == {"one": PROMPT[1:]} and loop.token_ids == {"one": [7, 7]}


def test_what_is_computed_again_in_other_chunks_is_told_once():
    loop = Loop(steps_in_flight=1)
    prompt = list(range(100, 200))
    link = loop.join()
    loop.engine.submit(asking("long", prompt))
    loop.turn()
    assert np.frombuffer(link.steps[-1].rows.query_lens_u32, "<u4").tolist() == [64]
    answer(loop, link, 0, columns(0, 1, prompt[1:65]))
    assert loop.prompt_token_ids == {"long": prompt[1:65]}

    loop.engine.worker_lost(link, "gone")
    other = loop.join("other", epoch=2)
    loop.turn()
    loop.turn()
    assert other.steps[-1].groups[0].sequences[0].num_computed_tokens == 0
    answer(loop, other, 0, columns(0, 1, prompt[1:65]))
    assert loop.prompt_token_ids == {"long": prompt[1:65]}, "nothing of it is new"
    answer(loop, other, 1, columns(0, 65, prompt[65:]))
    assert loop.prompt_token_ids == {"long": prompt[1:]} and not other.is_closed


def test_a_prompt_is_not_looked_for_in_the_cache_while_its_logprobs_are_to_come():
    loop = Loop(steps_in_flight=1)
    link = loop.join()
    plain = SequenceGroup("plain", PROMPT, pb.SamplingParams(), max_num_tokens=9, arrival_ns=0)
    loop.engine.submit(plain)
    loop.turn()
    answer(loop, link, 1)
    assert loop.ends == {} and loop.token_ids == {"plain": [7]}
    again = SequenceGroup("again", PROMPT, pb.SamplingParams(), max_num_tokens=9, arrival_ns=0)
    for group, num_cached in ((asking("asks", max_tokens=1), 0), (again, 4)):
        loop.engine.submit(group)
        loop.turn()
        assert link.steps[-1].groups[0].sequences[0].num_computed_tokens == group.num_cached_tokens == num_cached
        told = [columns(0, 1, PROMPT[1:])] if group.request_id == "asks" else []
        answer(loop, link, 1, *told)
        assert group.is_finished


def test_who_resumes_has_them():
    group = asking("resumed", resumed_token_ids=[[65]])
    assert not group.awaits_prompt_logprobs
    assert asking("from the start", resumed_token_ids=[[]]).awaits_prompt_logprobs
    assert not asking("nothing to tell", [1]).awaits_prompt_logprobs


WRONG = {
    "another row": columns(1, 1, PROMPT[1:]),
    "some left out": columns(0, 2, PROMPT[2:]),
    "of the first token": columns(0, 0, PROMPT),
    "beyond the prompt": columns(0, 1, [*PROMPT[1:], 7]),
    "no columns": worker_pb2.PromptLogprobs(row=0, first_position=1),
    "too few ranks": worker_pb2.PromptLogprobs(
        row=0,
        first_position=1,
        logprobs=worker_pb2.SequenceOutputs(token_ids_i32=b"\1\0\0\0", logprobs_f32=b"\0\0\0\0"),
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_worker_whose_prompt_logprobs_do_not_fit_is_given_up(wrong):
    loop = Loop(steps_in_flight=1)
    link = loop.join()
    group = asking("one")
    loop.engine.submit(group)
    loop.turn()
    answer(loop, link, 1, WRONG[wrong])
    assert link.is_closed and not loop.prompt_token_ids
    assert loop.token_ids == {} and group.sequences[0].num_tokens == len(PROMPT), "its token is drawn again"
    assert FinishReason.ERROR not in {reason for reason, _ in loop.ends.values()}, "the request is not at fault"
