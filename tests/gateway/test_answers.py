"""A scheduler's messages as answers: shapes by OpenAI's own types, and text, indexes and numbers as they came."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from gateway_svc.answers.answer import Answer
from gateway_svc.answers.chat import ChatAnswer
from gateway_svc.answers.completions import CompletionAnswer
from gateway_svc.answers.gathered import Gathered
from gateway_svc.answers.json_text import text_of
from gateway_svc.answers.responses import ResponseAnswer
from gateway_svc.errors import HttpError
from gateway_svc.requests.asked import Asked
from gateway_svc.requests.fields import Fields
from gateway_svc.requests.responses import read_response
from protos import inference_pb2 as pb
from tests.gateway.shapes import events, strictly

ADMISSION = pb.GenerateResponse(
    admission=pb.Admission(num_prompt_tokens=3), model="owner/name", model_fingerprint="f1", prompt_token_ids=[7, 8, 9]
)
USAGE = pb.GenerateResponse(usage=pb.Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1))
NASTY = 'quote " back \\ line\n tab\t null\0 sep\u2028 next\u0085 \U0001f600 \u00e9'


def asked(**fields: Any) -> Asked:
    return Asked(id="x-1", requests=[pb.GenerateRequest()], created=5, **fields)


def delta(text: str, index: int = 0, finish: Any = 0, **fields: Any) -> pb.OutputDelta:
    return pb.OutputDelta(index=index, text=text, finish_reason=finish, **fields)


def logprob(text: str, value: float = -0.5, token_id: int = 4) -> pb.Logprob:
    return pb.Logprob(token_id=token_id, logprob=value, rank=1, text=text)


def of(*tokens: pb.Logprob) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(token=tokens[0], top=tokens)


def messages(*deltas: pb.OutputDelta) -> list[pb.GenerateResponse]:
    return [pb.GenerateResponse(outputs=[each]) for each in deltas] + [USAGE]


def streamed(answer: Any, responses: list[pb.GenerateResponse]) -> list[Any]:
    parts = [answer.begin([ADMISSION]), *(answer.events(0, each) for each in responses), answer.end()]
    return events(b"".join(parts).decode("ascii"))


def whole(answer: Any, responses: list[pb.GenerateResponse]) -> Any:
    gathered = Gathered()
    for each in (ADMISSION, *responses):
        gathered.take(each)
    return json.loads("".join(answer.whole([gathered])))


ENDED = messages(delta(NASTY), delta("b", finish=pb.FINISH_REASON_STOP))


def test_a_chat_s_chunks() -> None:
    *chunks, done = streamed(ChatAnswer(asked(includes_usage=True)), ENDED)
    found = [strictly(ChatCompletionChunk, chunk) for chunk in chunks]
    assert done == "[DONE]" and {(each.id, each.model, each.created) for each in found} == {("x-1", "owner/name", 5)}
    assert found[0].choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for each in found for choice in each.choices) == NASTY + "b"
    assert [each.choices[0].finish_reason for each in found[:-1]] == [None, None, "stop"]
    assert all("usage" in chunk for chunk in chunks)
    usage = found[-1].usage
    assert usage and found[-1].choices == [] and (usage.prompt_tokens, usage.total_tokens) == (3, 5)
    assert usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens == 1


def test_usage_is_not_in_a_stream_that_did_not_ask_for_it() -> None:
    *chunks, done = streamed(ChatAnswer(asked()), ENDED)
    assert done == "[DONE]" and not any("usage" in chunk for chunk in chunks)


def test_a_whole_chat_says_what_its_chunks_say() -> None:
    found = strictly(ChatCompletion, whole(ChatAnswer(asked()), ENDED))
    assert (found.choices[0].message.content, found.choices[0].finish_reason) == (NASTY + "b", "stop")
    assert found.system_fingerprint == "f1" and found.usage and found.usage.completion_tokens == 2


def test_outputs_of_one_prompt_keep_their_indexes() -> None:
    mixed = messages(
        delta("a", 1), delta("b", 0), delta("c", 1, pb.FINISH_REASON_LENGTH), delta("d", 0, pb.FINISH_REASON_STOP)
    )
    for answer in (ChatAnswer(asked(num_outputs=2)), CompletionAnswer(asked(num_outputs=2))):
        texts = {0: "", 1: ""}
        for chunk in streamed(answer, mixed)[:-1]:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
        assert texts == {0: "bd", 1: "ac"}
    found = strictly(ChatCompletion, whole(ChatAnswer(asked(num_outputs=2)), mixed))
    assert [(each.index, each.message.content, each.finish_reason) for each in found.choices] == [
        (0, "bd", "stop"),
        (1, "ac", "length"),
    ]


def test_choices_of_several_prompts_are_numbered_through() -> None:
    answer = CompletionAnswer(asked(num_outputs=2))
    answer.begin([ADMISSION, ADMISSION])
    (chunk,) = events(answer.events(1, pb.GenerateResponse(outputs=[delta("a", 1)])).decode())
    assert chunk["choices"][0]["index"] == 3


def test_text_that_is_held_back_makes_no_chunk() -> None:
    assert ChatAnswer(asked()).events(0, pb.GenerateResponse(outputs=[delta("", token_ids=[1])])) == b""
    assert CompletionAnswer(asked()).events(0, pb.GenerateResponse(outputs=[delta("", token_ids=[1])])) == b""


def test_logprobs_of_a_chat() -> None:
    part = "\N{REPLACEMENT CHARACTER}"
    entries = [of(logprob("\u00e9"), logprob("b", float("-inf"))), of(logprob(part))]
    responses = messages(delta("\u00e9?", finish=pb.FINISH_REASON_STOP, logprobs=entries))
    found = strictly(ChatCompletion, whole(ChatAnswer(asked(num_top=2)), responses)).choices[0].logprobs
    assert found and found.content and (found.content[0].token, found.content[0].bytes) == ("\u00e9", [195, 169])
    assert [each.logprob for each in found.content[0].top_logprobs] == [-0.5, -9999.0], "JSON has no infinity"
    assert found.content[1].bytes is None, "nobody knows the bytes of a part of a character"
    chunks = streamed(ChatAnswer(asked(num_top=2)), responses)[:-1]
    logprobs = strictly(ChatCompletionChunk, chunks[1]).choices[0].logprobs
    assert logprobs and logprobs.model_dump() == found.model_dump()
    ids = whole(ChatAnswer(asked(num_top=2, tokens_as_ids=True)), responses)
    assert ids["choices"][0]["logprobs"]["content"][0]["token"] == "token_id:4"


def test_logprobs_of_a_completion_with_its_prompt() -> None:
    first, second = pb.TokenLogprobs(), of(logprob("bc", -2.0))
    drawn = delta("de", logprobs=[of(logprob("de"), logprob("x", -1.0))])
    responses = [
        pb.GenerateResponse(prompt_logprobs=[first, second], outputs=[drawn]),
        *messages(delta("f", finish=pb.FINISH_REASON_LENGTH, logprobs=[of(logprob("f"))])),
    ]  # fmt: skip
    expected = {
        "tokens": ["a", "bc", "de", "f"],
        "token_logprobs": [None, -2.0, -0.5, -0.5],
        "top_logprobs": [None, {"bc": -2.0}, {"de": -0.5, "x": -1.0}, {"f": -0.5}],
        "text_offset": [0, 1, 3, 5],
    }
    answer = CompletionAnswer(asked(num_top=1, echoes=True))
    answer.learn_prompts(["abc"], [logprob("a", token_id=7)])
    choice = whole(answer, responses)["choices"][0]
    assert choice["text"] == "abcdef" and choice["logprobs"] == expected
    answer = CompletionAnswer(asked(num_top=1, echoes=True))
    answer.learn_prompts(["abc"], [logprob("a", token_id=7)])
    chunks = [chunk["choices"][0] for chunk in streamed(answer, responses)[:-1]]
    assert [chunk["text"] for chunk in chunks] == ["abcde", "f"]
    joined = {name: [x for chunk in chunks for x in chunk["logprobs"][name]] for name in expected}
    assert joined == expected
    answer = CompletionAnswer(asked(num_top=1, echoes=True, tokens_as_ids=True))
    answer.learn_prompts(["abc"], [logprob("a", token_id=7)])
    found = whole(answer, responses)["choices"][0]["logprobs"]
    assert found["tokens"] == ["token_id:7", "token_id:4", "token_id:4", "token_id:4"]
    assert found["text_offset"] == expected["text_offset"]


def test_offsets_are_places_in_the_text_that_is_shown() -> None:
    """A BOS that the tokenizer adds does not stand there, nor the space that some decoders take off a single token."""
    entries = [pb.TokenLogprobs(), of(logprob("The")), of(logprob("sea"))]
    drawn = delta(" is", finish=pb.FINISH_REASON_LENGTH, logprobs=[of(logprob("is"))])
    responses = [pb.GenerateResponse(prompt_logprobs=entries, outputs=[drawn]), USAGE]
    for show in (whole, lambda answer, responses: streamed(answer, responses)[0]):
        answer = CompletionAnswer(asked(num_top=0, echoes=True))
        answer.learn_prompts(["The sea"], [logprob("<s>", token_id=7)])
        choice = show(answer, responses)["choices"][0]
        assert (choice["text"], choice["logprobs"]["text_offset"]) == ("The sea is", [0, 0, 3, 7])
        assert choice["logprobs"]["tokens"] == ["<s>", "The", "sea", "is"]


def test_the_drawn_token_has_its_own_logprob_though_a_likelier_one_has_its_text() -> None:
    entry = pb.TokenLogprobs(token=logprob("a", -3.0, 7), top=[logprob("a", -0.5, 4), logprob("b", -2.0, 5)])
    responses = messages(delta("a", finish=pb.FINISH_REASON_LENGTH, logprobs=[entry]))
    found = whole(CompletionAnswer(asked(num_top=2)), responses)["choices"][0]["logprobs"]
    assert (found["token_logprobs"], found["top_logprobs"]) == ([-3.0], [{"a": -3.0, "b": -2.0}])


def test_a_scored_prompt_shows_no_output() -> None:
    answer = CompletionAnswer(asked(num_top=0, echoes=True, shows_output=False, returns_token_ids=True))
    answer.learn_prompts(["ab"], [logprob("a", token_id=7)])
    entries = [pb.TokenLogprobs(), of(logprob("b"))]
    at_its_end = pb.MatchedStop(token_id=4)
    drawn = delta(
        "z", logprobs=[of(logprob("z"))], finish=pb.FINISH_REASON_STOP, token_ids=[4], matched_stop=at_its_end
    )
    found = whole(answer, [pb.GenerateResponse(prompt_logprobs=entries, outputs=[drawn]), USAGE])
    assert found["choices"][0]["text"] == "ab" and found["choices"][0]["logprobs"]["tokens"] == ["a", "b"]
    assert found["choices"][0]["token_ids"] == [] and "stop_reason" not in found["choices"][0]
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["choices"][0]["prompt_token_ids"] == [7, 8, 9]
    assert found["usage"]["completion_tokens"] == 0


LONG_ANSWERS: dict[str, Answer] = {
    "chat": ChatAnswer(asked(num_top=2, returns_prompt_logprobs=True)),
    "echo": CompletionAnswer(asked(num_top=2, echoes=True)),
    "completion": CompletionAnswer(asked(num_top=2, returns_prompt_logprobs=True)),
    "response": ResponseAnswer(asked(num_top=2, settings={"text": {"format": {"type": "text"}}})),
}


@pytest.mark.parametrize("kind", LONG_ANSWERS)
def test_a_long_answer_is_made_in_short_parts(kind: str) -> None:
    """Others have their turn between two of them."""
    answer, count = LONG_ANSWERS[kind], 20_000
    if isinstance(answer, CompletionAnswer):
        answer.learn_prompts(["ab"], [logprob("a", token_id=7)])
    entries = [of(logprob("b"), logprob("c", -3.0, 9))] * count
    output, gathered = delta("x", finish=pb.FINISH_REASON_LENGTH, logprobs=entries), Gathered()
    response = pb.GenerateResponse(prompt_logprobs=[pb.TokenLogprobs(), *entries], outputs=[output])
    for each in (ADMISSION, response, USAGE):
        gathered.take(each)
    parts = list(answer.whole([gathered]))
    assert max(map(len, parts)) < 2_000 and text_of(json.loads("".join(parts))).count('"b"') >= count


def test_a_whole_completion() -> None:
    found = whole(CompletionAnswer(asked()), ENDED)
    completion = strictly(Completion, found)
    assert (completion.choices[0].text, completion.choices[0].finish_reason) == (NASTY + "b", "stop")


def test_what_vllm_shows_beside_the_text() -> None:
    responses = messages(
        delta("a", token_ids=[1]),
        delta("b", token_ids=[2], finish=pb.FINISH_REASON_STOP, matched_stop=pb.MatchedStop(text="end")),
    )
    for answer in (ChatAnswer(asked(returns_token_ids=True)), CompletionAnswer(asked(returns_token_ids=True))):
        chunks = streamed(answer, responses)[:-1]
        assert [ids for chunk in chunks for ids in chunk["choices"][0].get("token_ids", [])] == [1, 2]
        assert chunks[-1]["choices"][0]["stop_reason"] == "end"
        assert [7, 8, 9] in (chunks[0].get("prompt_token_ids"), chunks[0]["choices"][0].get("prompt_token_ids"))
    found = whole(ChatAnswer(asked(returns_prompt_logprobs=True)), [
        pb.GenerateResponse(prompt_logprobs=[pb.TokenLogprobs(), of(logprob("b"), logprob("c", -3.0, 9))]), *responses
    ])  # fmt: skip
    assert found["prompt_logprobs"] == [
        None,
        {
            "4": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
            "9": {"logprob": -3.0, "rank": 1, "decoded_token": "c"},
        },
    ]


SETTINGS = {"text": {"format": {"type": "text"}}, "instructions": "be kind", "temperature": 0.5}


def test_a_response() -> None:
    found = strictly(Response, whole(ResponseAnswer(asked(settings=SETTINGS)), ENDED))
    assert found.output_text == NASTY + "b" and found.status == "completed" and found.instructions == "be kind"
    assert found.usage and (found.usage.input_tokens, found.usage.output_tokens) == (3, 2)
    cut = messages(delta("a", finish=pb.FINISH_REASON_LENGTH))
    found = strictly(Response, whole(ResponseAnswer(asked(settings=SETTINGS)), cut))
    assert found.status == "incomplete" and found.incomplete_details
    assert found.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, ("auto", True)), ({"tool_choice": "none", "parallel_tool_calls": False}, ("none", False))],
)
def test_a_response_repeats_what_was_asked_of_tools(given: dict[str, Any], expected: tuple[str, bool]) -> None:
    repeating = read_response(Fields({"input": "a", **given}))
    for found in (whole(ResponseAnswer(repeating), ENDED), streamed(ResponseAnswer(repeating), ENDED)[-1]["response"]):
        assert (found["tool_choice"], found["parallel_tool_calls"]) == expected
        strictly(Response, found)


def test_a_response_s_events() -> None:
    found = streamed(ResponseAnswer(asked(settings=SETTINGS)), ENDED)
    assert [each["type"].removeprefix("response.") for each in found] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [each["sequence_number"] for each in found] == list(range(10))
    assert "".join(each.get("delta", "") for each in found) == NASTY + "b" == found[6]["text"]
    assert strictly(Response, found[-1]["response"]).output_text == NASTY + "b"
    assert strictly(Response, found[0]["response"]).output == []


@pytest.mark.parametrize(
    ("code", "retryable", "expected", "of_response"),
    [
        ("WORKER_LOST", True, (503, "service_unavailable_error", "worker_lost"), "server_error"),
        ("WORKER_LOST", False, (500, "server_error", "worker_lost"), "server_error"),
        ("INVALID_ARGUMENT", False, (400, "invalid_request_error", None), "invalid_prompt"),
    ],
)
def test_an_output_that_fails_is_an_error(
    code: str, retryable: bool, expected: tuple[int, str, str | None], of_response: str
) -> None:
    error = pb.OutputError(code=code, message="it is lost", retryable=retryable)
    response = pb.GenerateResponse(outputs=[delta("", finish=pb.FINISH_REASON_ERROR, error=error)])
    for answer in (ChatAnswer(asked()), CompletionAnswer(asked()), ResponseAnswer(asked(settings=SETTINGS))):
        answer.begin([ADMISSION])
        with pytest.raises(HttpError, match="it is lost") as failed:
            answer.events(0, response)
        assert (failed.value.status, failed.value.type, failed.value.code) == expected
        assert b"it is lost" in answer.failed(failed.value)
    assert f'"code":"{of_response}"'.encode() in answer.failed(failed.value)
