"""What a client sends after a loss: the model that began, and the very prompt, are named."""

from __future__ import annotations

import grpc
import pytest

from octavo.calls.generation import Generation, build_request
from octavo.errors import RequestFailed
from octavo.retrying import RetryPolicy
from octavo.sampling_params import SamplingParams
from protos import inference_pb2 as pb

LOST = RequestFailed(grpc.StatusCode.UNAVAILABLE, "gone")
CHAT = [{"role": "user", "content": "What day is it?"}]


def begun(request: pb.GenerateRequest, *token_ids: int, prompt: tuple[int, ...] = ()) -> Generation:
    generation = Generation(request, RetryPolicy(), 0)
    admission = pb.GenerateResponse(
        admission=pb.Admission(num_prompt_tokens=3), model="m", model_fingerprint="f1", prompt_token_ids=prompt
    )
    generation.receive(admission, 1)
    if token_ids:
        generation.receive(pb.GenerateResponse(outputs=[pb.OutputDelta(index=0, token_ids=token_ids)]), 2)
    return generation


def test_a_conversation_goes_on_after_the_tokens_that_it_was_rendered_to() -> None:
    """A template with the date in it would render others after midnight."""
    generation = begun(build_request(None, None, messages=CHAT, truncate_prompt_tokens=3), 7, 8, prompt=(4, 5, 6))
    assert generation.request.return_prompt_token_ids
    generation.retry_delay_s(LOST, 4)
    again = generation.request
    assert again.WhichOneof("prompt_kind") == "prompt_token_ids" and list(again.prompt_token_ids.ids) == [4, 5, 6]
    assert not again.HasField("truncate_prompt_tokens") and not again.return_prompt_token_ids
    assert [output.is_answer for output in again.resume] == [True], "their text begins as that of an answer to messages"
    assert max(field.number for field, _ in again.ListFields()) <= 17, (
        "schedulers of 0.1.0 refuse fields that are newer"
    )
    assert (again.model, again.model_fingerprint) == ("m", "f1")
    assert [list(output.token_ids) for output in again.resume] == [[7, 8]]
    generation.receive(pb.GenerateResponse(admission=pb.Admission(), model="m", model_fingerprint="f1"), 3)
    generation.retry_delay_s(LOST, 4)
    assert list(generation.request.prompt_token_ids.ids) == [4, 5, 6], "and once more"


def test_a_message_that_was_to_be_continued_still_is() -> None:
    generation = begun(build_request(None, None, messages=CHAT, continue_final_message=True), 7, prompt=(4, 5, 6))
    generation.retry_delay_s(LOST, 4)
    assert generation.request.WhichOneof("prompt_kind") == "prompt_token_ids"
    assert [output.is_answer for output in generation.request.resume] == [False]


def test_a_text_is_sent_again_as_it_is_with_the_model_that_began() -> None:
    """The model's fingerprint covers its tokenizer: the ids would be the same, and a long prompt's are many."""
    request = build_request("Once upon", None)
    assert not Generation(request, RetryPolicy(), 0).request.return_prompt_token_ids
    generation = begun(request, 7)
    generation.retry_delay_s(LOST, 4)
    assert generation.request.prompt == "Once upon" and generation.request.model_fingerprint == "f1"


def test_what_has_nothing_yet_may_begin_anew_with_any_model() -> None:
    generation = begun(build_request(None, None, messages=CHAT), prompt=(4, 5, 6))
    generation.retry_delay_s(LOST, 4)
    again = generation.request
    assert again.WhichOneof("prompt_kind") == "messages" and not again.model and not again.model_fingerprint


def test_what_comes_at_the_end_begins_anew_and_asks_for_no_ids() -> None:
    for request in (
        build_request(None, None, messages=CHAT, stream=False),
        build_request(None, SamplingParams(n=1, best_of=2), messages=CHAT),
    ):
        assert not Generation(request, RetryPolicy(), 0).request.return_prompt_token_ids


@pytest.mark.parametrize("asks", [False, True])
def test_ids_of_the_prompt_are_shown_to_who_asked(asks: bool) -> None:
    generation = begun(build_request(None, None, messages=CHAT, return_prompt_token_ids=asks or None), prompt=(4, 5))
    output = generation.receive(pb.GenerateResponse(outputs=[pb.OutputDelta(index=0, token_ids=[7])]), 2)
    assert output is not None and tuple(output.prompt_token_ids) == ((4, 5) if asks else ())


def test_another_model_is_told_of_and_not_tried_again() -> None:
    generation = begun(build_request("Once upon", None), 7)
    generation.retry_delay_s(LOST, 4)
    with pytest.raises(RequestFailed, match="NOT_FOUND"):
        generation.retry_delay_s(RequestFailed(grpc.StatusCode.NOT_FOUND, "model 'm' is f2 here"), 4)
