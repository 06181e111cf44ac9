"""Bodies to messages: every field by name, and what is refused."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from gateway_svc.answers.json_text import text_of
from gateway_svc.errors import HttpError
from gateway_svc.requests.asked import Asked
from gateway_svc.requests.chat import read_chat
from gateway_svc.requests.completions import read_completion
from gateway_svc.requests.fields import Fields
from gateway_svc.requests.responses import read_response
from gateway_svc.requests.tokens import read_detokenize, read_tokenize
from protos import inference_pb2 as pb

HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> Asked:
    return read_chat(Fields({"messages": HELLO, **fields}))


def completion(**fields: Any) -> Asked:
    return read_completion(Fields({"prompt": "hello", **fields}))


def response(**fields: Any) -> Asked:
    return read_response(Fields({"input": "hello", **fields}))


def params_of(asked: Asked) -> pb.SamplingParams:
    return asked.requests[0].sampling_params


@pytest.mark.parametrize("read", [chat, completion, response])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": None}, {}),
        ({"top_p": 0.5, "top_k": 7, "min_p": 0.25}, {"top_p": 0.5, "top_k": 7, "min_p": 0.25}),
        ({"presence_penalty": -1, "frequency_penalty": 2}, {"presence_penalty": -1.0, "frequency_penalty": 2.0}),
        ({"repetition_penalty": 1.5, "length_penalty": 0.5}, {"repetition_penalty": 1.5, "length_penalty": 0.5}),
        ({"seed": 7}, {"seed": 7}),
        ({"seed": -1}, {"seed": 2**64 - 1}),
        ({"stop": "end"}, {"stop": ["end"]}),
        ({"stop": ["a", "b"]}, {"stop": ["a", "b"]}),
        ({"stop": []}, {}),
        ({"stop_token_ids": [1, 2], "allowed_token_ids": [3]}, {"stop_token_ids": [1, 2], "allowed_token_ids": [3]}),
        ({"bad_words": ["no"]}, {"bad_words": ["no"]}),
        ({"logit_bias": {"5": -100, "6": 0.5}}, {"logit_bias": {5: -100.0, 6: 0.5}}),
        ({"ignore_eos": True, "min_tokens": 3}, {"ignore_eos": True, "min_tokens": 3}),
        ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
        ({"spaces_between_special_tokens": False}, {"spaces_between_special_tokens": False}),
        ({"include_stop_str_in_output": True}, {"include_stop_str_in_output": True}),
        ({"use_beam_search": True, "early_stopping": "never"}, {"use_beam_search": True, "early_stopping": 2}),
        ({"early_stopping": True}, {"early_stopping": 1}),
        ({"guided_regex": "a+"}, {"guided": {"regex": "a+"}}),
        ({"guided_choice": ["a", "b"]}, {"guided": {"choice": {"choices": ["a", "b"]}}}),
        ({"guided_json": {"type": "object"}}, {"guided": {"json_schema": '{"type": "object"}'}}),
        ({"guided_grammar": "root ::= x"}, {"guided": {"grammar": "root ::= x"}}),
        ({"structured_outputs": {"json_object": True}}, {"guided": {"json_object": True}}),
    ],
)
def test_sampling(read: Any, given: dict[str, Any], expected: dict[str, Any]) -> None:
    found = params_of(read(**given))
    found.ClearField("max_tokens")  # of completions, by default
    assert found == pb.SamplingParams(**expected)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"max_tokens": None}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 6, "max_completion_tokens": 6}, 6),
    ],
)
def test_a_chat_ends_where_the_model_ends_it_unless_it_says_so(given: dict[str, Any], expected: int | None) -> None:
    params = params_of(chat(**given))
    assert (params.max_tokens if params.HasField("max_tokens") else None) == expected


@pytest.mark.parametrize(("given", "expected"), [({}, 16), ({"max_tokens": None}, 16), ({"max_tokens": 9}, 9)])
def test_a_completion_has_the_default_of_openai(given: dict[str, Any], expected: int) -> None:
    assert params_of(completion(**given)).max_tokens == expected


def test_a_scored_prompt_takes_one_token_that_is_not_shown() -> None:
    asked = completion(max_tokens=0, echo=True, logprobs=2)
    assert (params_of(asked).max_tokens, params_of(asked).prompt_logprobs, asked.shows_output) == (1, 2, False)
    assert asked.requests[0].return_prompt_token_ids


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hello", [pb.GenerateRequest(prompt="hello")]),
        (["a", "b"], [pb.GenerateRequest(prompt="a"), pb.GenerateRequest(prompt="b")]),
        ([1, 2], [pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[1, 2]))]),
        ([[1], "a"], [pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[1])), pb.GenerateRequest(prompt="a")]),
    ],
)
def test_prompts(prompt: Any, expected: list[pb.GenerateRequest]) -> None:
    asked = completion(prompt=prompt)
    found = [pb.GenerateRequest() for _ in asked.requests]
    for kept, request in zip(found, asked.requests, strict=True):
        kept.MergeFrom(request)
        for name in ("request_id", "sampling_params", "stream"):
            kept.ClearField(name)
    assert found == expected


def test_each_prompt_of_several_is_a_request_with_an_id_of_its_own() -> None:
    assert [each.request_id for each in completion(prompt="a", request_id="x").requests] == ["cmpl-x"]
    assert [each.request_id for each in completion(prompt=["a", "b"], request_id="x").requests] == [
        "cmpl-x-0",
        "cmpl-x-1",
    ]
    assert chat().id != chat().id


def test_what_else_a_request_has() -> None:
    given = {"model": "owner/name", "priority": 3, "cache_salt": "s", "adapter": "a", "truncate_prompt_tokens": 9}
    request = completion(**given, add_special_tokens=False).requests[0]
    assert {name: getattr(request, name) for name in given} == given and not request.add_special_tokens
    request = chat(**given, add_generation_prompt=False, continue_final_message=True).requests[0]
    assert {name: getattr(request, name) for name in given} == given
    assert (request.messages.add_generation_prompt, request.messages.continue_final_message) == (False, True)


def test_messages() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "ok",
        "refusal": None,
        "tool_calls": None,
        "annotations": [],
        "audio": None,
    }
    messages = [{"role": "developer", "content": "be brief"}, answer, {"role": "user", "content": parts, "name": "me"}]
    found = chat(messages=messages).requests[0].messages.messages
    assert [(each.role, each.content) for each in found] == [
        ("system", "be brief"),
        ("assistant", "ok"),
        ("user", "one\ntwo"),
    ]


def test_input_of_a_response() -> None:
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"role": "assistant", "id": "msg_1", "status": "completed", "type": "message",
         "content": [{"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}]},
        {"role": "user", "content": "bye"},
    ]  # fmt: skip
    found = response(input=items, instructions="be kind").requests[0].messages.messages
    assert [each.content for each in found] == ["be kind", "hi", "hello", "bye"]
    assert [each.role for each in found] == ["system", "user", "assistant", "user"]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (chat(logprobs=True), (0, 0)),
        (chat(logprobs=True, top_logprobs=3), (3, 3)),
        (chat(logprobs=False), (None, None)),
        (chat(top_logprobs=0), (None, None)),
        (completion(logprobs=0), (0, 0)),
        (completion(logprobs=5), (5, 5)),
        (response(include=["message.output_text.logprobs"]), (0, 0)),
        (response(top_logprobs=2), (2, 2)),
    ],
)
def test_logprobs(asked: Asked, expected: tuple[int | None, int | None]) -> None:
    params = params_of(asked)
    assert (asked.num_top, params.logprobs if params.HasField("logprobs") else None) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, pb.GuidedDecoding(json_object=True)),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"type": "null"}}},
            pb.GuidedDecoding(json_schema='{"type": "null"}'),
        ),
    ],
)
def test_response_format(given: dict[str, Any], expected: pb.GuidedDecoding | None) -> None:
    flat = {**given, **given.get("json_schema", {})}
    flat.pop("json_schema", None)
    for params in (params_of(chat(response_format=given)), params_of(response(text={"format": flat}))):
        assert (params.guided if params.HasField("guided") else None) == expected


def test_fields_that_change_nothing() -> None:
    given = {
        "user": "me", "metadata": {"a": "b"}, "safety_identifier": "x", "prompt_cache_key": "k", "store": False,
        "tools": [], "tool_choice": "auto", "function_call": "none",
        "parallel_tool_calls": True, "service_tier": "auto", "modalities": ["text"],
        "functions": None, "suffix": None, "stream_options": None, "n": None, "logprobs": None,
    }  # fmt: skip
    plain = completion(request_id="x")
    assert completion(request_id="x", **given).requests == plain.requests


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (chat, {"temperature": "hot"}, "temperature"),
    (chat, {"temperature": True}, "temperature"),
    (chat, {"temperature": 10**400}, "temperature"),
    (chat, {"request_id": "one\r\nx-two: 2"}, "request_id"),
    (completion, {"request_id": "\u00fc"}, "request_id"),
    (response, {"request_id": "\ud800"}, "request_id"),
    (chat, {"max_tokens": 1.5}, "max_tokens"),
    (chat, {"max_tokens": -1}, "max_tokens"),
    (chat, {"max_tokens": 2**40}, "max_tokens"),
    (chat, {"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    (chat, {"n": "2"}, "n"),
    (chat, {"stop": [1]}, "stop"),
    (chat, {"stop": {"a": 1}}, "stop"),
    (chat, {"stop": "\ud800"}, "stop"),
    (chat, {"logit_bias": [1]}, "logit_bias"),
    (chat, {"logit_bias": {"x": 1}}, "logit_bias"),
    (chat, {"logit_bias": {"99999999999": 1}}, "logit_bias"),
    (chat, {"logit_bias": {str(n): 0 for n in range(1025)}}, "logit_bias"),
    (chat, {"logit_bias": {"1": 10**400}}, "logit_bias"),
    (chat, {"stop_token_ids": [-1]}, "stop_token_ids"),
    (chat, {"allowed_token_ids": []}, "allowed_token_ids"),
    (chat, {"early_stopping": 1}, "early_stopping"),
    (chat, {"top_logprobs": 2}, "top_logprobs"),
    (chat, {"stream_options": {"include_usage": True}}, "stream_options"),
    (chat, {"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    (chat, {"stream": True, "best_of": 2}, "best_of"),
    (completion, {"stream": True, "best_of": 3, "n": 2}, "best_of"),
    (chat, {"tools": [{"type": "function"}]}, "tools"),
    (chat, {"functions": [{}]}, "functions"),
    (chat, {"tool_choice": "required"}, "tool_choice"),
    (chat, {"function_call": {"name": "f"}}, "function_call"),
    (chat, {"messages": [{"role": "tool", "content": "42"}]}, "messages[0].role"),
    (chat, {"messages": [{"role": "function", "name": "f", "content": "42"}]}, "messages[0].role"),
    (chat, {"response_format": {"type": "xml"}}, "response_format.type"),
    (chat, {"response_format": {}}, "response_format.type"),
    (chat, {"response_format": {"type": "json_schema"}}, "response_format.schema"),
    (chat, {"guided_regex": "a", "guided_json": {}}, "guided_regex"),
    (chat, {"guided_choice": [1]}, "guided_choice"),
    (chat, {"guided_choice": "abc"}, "guided_choice"),
    (chat, {"guided_json": {"minimum": float("inf")}}, "guided_json"),
    (chat, {"guided_json": 0}, "guided_json"),
    (chat, {"messages": [{"role": "\ud800", "content": "a"}]}, "messages[0].role"),
    (chat, {"modalities": ["audio"]}, "modalities"),
    (chat, {"service_tier": "flex"}, "service_tier"),
    (chat, {"reasoning_effort": "high"}, "reasoning_effort"),
    (chat, {"chat_template": "{{ x }}"}, "chat_template"),
    (chat, {"store": True}, "store"),
    (chat, {"temprature": 1}, "temprature"),
    (chat, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (chat, {"messages": None}, "messages"),
    (chat, {"messages": []}, "messages"),
    (chat, {"messages": "hello"}, "messages"),
    (chat, {"messages": ["hello"]}, "messages[0]"),
    (chat, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (chat, {"messages": [{"content": "x"}]}, "messages[0].role"),
    (chat, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
    (chat, {"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages[0].mood"),
    (chat, {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    (chat, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    (chat, {"messages": HELLO * 8193}, "messages"),
    (chat, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 8192}]}, "messages"),
    (response, {"input": HELLO * 8193}, "input"),
    (completion, {"prompt": None}, "prompt"),
    (completion, {"prompt": []}, "prompt"),
    (completion, {"prompt": [1, "a"]}, "prompt[0]"),
    (completion, {"prompt": [[-1]]}, "prompt"),
    (completion, {"prompt": "\ud800"}, "prompt"),
    (completion, {"prompt": ["a"] * 1025}, "prompt"),
    (completion, {"prompt": ["a"] * 1024, "stop": ["b" * 20_000]}, "prompt"),
    (completion, {"max_tokens": 0}, "max_tokens"),
    (completion, {"suffix": "x"}, "suffix"),
    (completion, {"logprobs": True}, "logprobs"),
    (response, {"input": None}, "input"),
    (response, {"input": [{"type": "function_call_output"}]}, "input[0].type"),
    (response, {"previous_response_id": "resp_1"}, "previous_response_id"),
    (response, {"store": True}, "store"),
    (response, {"background": True}, "background"),
    (response, {"truncation": "auto"}, "truncation"),
    (response, {"include": ["file_search_call.results"]}, "include"),
    (response, {"max_tokens": 4}, "max_tokens"),
    (response, {"metadata": {"a": float("inf")}}, "metadata"),
    (response, {"user": ["me"]}, "user"),
    (response, {"parallel_tool_calls": "no"}, "parallel_tool_calls"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("read", "given", "param"), REFUSED, ids=lambda value: getattr(value, "__name__", str(value)[:40])
)
def test_refusals_name_the_field(read: Any, given: dict[str, Any], param: str) -> None:
    with pytest.raises(HttpError) as refused:
        read(**given)
    assert (refused.value.status, refused.value.param, refused.value.type) == (400, param, "invalid_request_error")
    assert refused.value.message.startswith(f"{param}: ") and len(refused.value.message) < 300


NASTY: list[Any] = [
    True, 0, -1, 2**31, 10**400, -(10**400), 1.5, 1e308, float("inf"), "", "a", "\ud800", "\x00", "a\r\nb: c",
    "a" * 100_000,     [], [[]], [{}], ["a"], ["\ud800"], [-1], [2**64], [1.5], [None], [True],
    {}, {"a": float("inf")}, {"1": 10**400}, {"type": []}, {"type": "json_schema", "schema": {"a": float("inf")}},
]  # fmt: skip


@pytest.mark.parametrize("read", [chat, completion, response])
def test_whatever_a_field_holds_it_is_taken_or_refused(read: Any) -> None:
    fields = Fields({"messages": HELLO, "prompt": "a", "input": "a"})
    with contextlib.suppress(HttpError):
        {chat: read_chat, completion: read_completion, response: read_response}[read](fields)
    assert len(fields.known) > 50
    for name in fields.known:
        for value in NASTY:
            try:
                asked = read(**{name: value})
            except HttpError as error:
                told = error.body()
                assert error.status == 400 and error.message.isprintable() and len(error.message) < 400
            else:
                told = asked.settings
            assert text_of(told).isascii()


def test_a_name_that_is_nearly_one_gets_it_told() -> None:
    with pytest.raises(HttpError, match="did you mean temperature"):
        chat(temprature=1)
    for name, here in (("max_tokens", "max_output_tokens"), ("messages", "input"), ("logprobs", "top_logprobs")):
        with pytest.raises(HttpError, match=rf"{name}: no field has this name; did you mean {here}\?"):
            response(**{name: 4})


def test_tokens() -> None:
    asked = read_tokenize(Fields({"prompt": "a", "add_special_tokens": False, "return_token_strs": True}))
    assert asked.request == pb.TokenizeRequest(prompt="a", add_special_tokens=False) and asked.shows_texts
    asked = read_tokenize(Fields({"messages": HELLO, "add_generation_prompt": False}))
    assert asked.request.messages.messages[0].content == "hello" and not asked.request.messages.add_generation_prompt
    assert list(read_detokenize(Fields({"tokens": [1, 2], "model": "m"})).token_ids) == [1, 2]
    with pytest.raises(HttpError, match="messages: prompt is given as well"):
        read_tokenize(Fields({"prompt": "a", "messages": HELLO}))
    for read, given in ((read_tokenize, {}), (read_detokenize, {}), (read_detokenize, {"tokens": [-1]})):
        with pytest.raises(HttpError):
            read(Fields(given))
