"""Each field that docs/openai.md says is taken changes an answer of a real model as it should, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.chaos.worker_process import WorkerProcess
from tests.gateway.running import Gateway, gateway
from tests.gateway.test_fields_of_the_page import ROWS
from tests.integration.scheduler_process import scheduler
from tests.tiny_models import IM_END, make_tiny_llama

LETTER_H, LETTER_I = b"hi"  # their token ids
HELLO = [{"role": "user", "content": "hello"}]
ANSWERED = {"role": "assistant", "content": "a"}
COMPLETION: dict[str, Any] = {"prompt": "The sea", "max_tokens": 8, "seed": 3, "ignore_eos": True}
CHAT: dict[str, Any] = {"messages": HELLO, "max_tokens": 8, "seed": 3, "ignore_eos": True}
RESPONSE: dict[str, Any] = {"input": "hello", "max_output_tokens": 8, "seed": 3, "ignore_eos": True}
GREEDY = COMPLETION | {"temperature": 0}
H_AND_I = GREEDY | {"logit_bias": {str(LETTER_H): 60, str(LETTER_I): 55}}
ONLY_H = GREEDY | {"allowed_token_ids": [LETTER_H]}
LETTERS = GREEDY | {"allowed_token_ids": list(b"abcdefgh")}
ENDS = GREEDY | {"ignore_eos": False, "logit_bias": {str(IM_END): 80}}
BEAMS = GREEDY | {"use_beam_search": True, "best_of": 4, "max_tokens": 16, "stop_token_ids": list(range(64))}
LONG_PROMPT = COMPLETION | {"prompt": "What the sea is, and why it is so: " * 3}

Answer = dict[str, Any]
Seen = Callable[[Answer, Answer], object]  # of the answers without and with the field


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")
    sizes = ["--max-model-len=512", "--kv-cache-memory=0.05"]
    worker = WorkerProcess([f"--model={folder}", *sizes], tmp_path_factory.mktemp("log") / "worker")
    try:
        worker.wait_until_ready()
        with scheduler(f"--worker=127.0.0.1:{worker.port}", "--scheduling-policy=priority") as service:
            service.wait_until_ready()
            with gateway(service.address) as running:
                yield running
    finally:
        worker.end()


def ask(served: Gateway, body: dict[str, Any]) -> Answer:
    """A whole answer, or of a stream its events under `events`; which path it is for shows by what is asked."""
    path = next(path for name, path in PATHS.items() if name in body)
    if body.get("stream"):
        with served.streaming(path, body) as response:
            lines = [line for line in response.read().decode().split("\n") if line.startswith("data: {")]
            return {"http": response.status, "events": [json.loads(line.removeprefix("data: ")) for line in lines]}
    status, headers, text = served.ask("POST", path, body)
    return {"http": status, "headers": headers, **json.loads(text)}


PATHS = {"prompt": "/v1/completions", "messages": "/v1/chat/completions", "input": "/v1/responses"}


def text(answer: Answer) -> str:
    if "output" in answer:
        return str(answer["output"][0]["content"][0]["text"])
    (choice,) = answer["choices"]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def num_in(answer: Answer) -> int:
    usage = answer["usage"]
    return int(usage["input_tokens" if "input_tokens" in usage else "prompt_tokens"])


def num_out(answer: Answer) -> int:
    usage = answer["usage"]
    return int(usage["output_tokens" if "output_tokens" in usage else "completion_tokens"])


def num_cached(answer: Answer) -> int:
    return int((answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def logprobs(answer: Answer) -> Any:
    return answer["choices"][0].get("logprobs")


def another_text(plain: Answer, got: Answer) -> bool:
    return text(got) != text(plain)


def repeats(name: str) -> Seen:
    return lambda plain, got: got[name] == "x" and same(plain, got)


def more_in(plain: Answer, got: Answer) -> bool:
    return num_in(got) > num_in(plain)


def more_letters(plain: Answer, got: Answer) -> bool:
    return len(set(text(got))) > len(set(text(plain)))


def says(expected: str) -> Seen:
    return lambda plain, got: text(got) == expected != text(plain)


def same(plain: Answer, got: Answer) -> bool:
    return text(got) == text(plain)


# By field: what is asked without it, its value, and what has to be seen. Several where paths differ.
EFFECTS: dict[str, list[tuple[dict[str, Any], Any, Seen]]] = {
    "model": [(COMPLETION, "tiny", lambda plain, got: got["model"] == "tiny" and same(plain, got))],
    "messages": [(CHAT, [*HELLO, ANSWERED], more_in)],
    "prompt": [(COMPLETION, "The", lambda plain, got: num_in(got) == 3)],
    "input": [(RESPONSE, [*HELLO, *HELLO], more_in)],
    "instructions": [(RESPONSE, "Be brief.", more_in)],
    "max_tokens": [(COMPLETION, 5, lambda plain, got: (num_out(plain), num_out(got)) == (8, 5))],
    "max_completion_tokens": [({**CHAT, "max_tokens": None}, 5, lambda plain, got: num_out(got) == 5)],
    "max_output_tokens": [
        (RESPONSE, 5, lambda plain, got: (num_out(got), got["status"]) == (5, "incomplete")),
    ],
    "temperature": [(COMPLETION, 0, another_text), (RESPONSE, 0, another_text)],
    "top_p": [(COMPLETION, 1e-6, another_text), (RESPONSE, 1e-6, another_text)],
    "seed": [(COMPLETION, 4, another_text), (COMPLETION, 3, same)],
    "presence_penalty": [(LETTERS, 2, more_letters)],
    "frequency_penalty": [(LETTERS, 2, more_letters)],
    "repetition_penalty": [(LETTERS, 20, more_letters)],
    "logit_bias": [(GREEDY, {str(LETTER_H): 60}, says("h" * 8))],
    "stop": [(ONLY_H, ["hhh"], says(""))],
    "include_stop_str_in_output": [(ONLY_H | {"stop": ["hhh"]}, True, says("hhh"))],
    "stop_token_ids": [(ONLY_H, [LETTER_H], lambda plain, got: num_out(got) == 1)],
    "min_tokens": [
        (H_AND_I | {"stop_token_ids": [LETTER_H]}, 4, lambda plain, got: (text(got), num_out(got)) == ("iiii", 5))
    ],
    "bad_words": [(H_AND_I, ["h"], says("i" * 8))],
    "allowed_token_ids": [(H_AND_I, [LETTER_I], says("i" * 8))],
    "ignore_eos": [(ENDS, True, lambda plain, got: (num_out(plain), num_out(got)) == (1, 8))],
    "skip_special_tokens": [(ENDS | {"ignore_eos": True}, False, says("<|im_end|>" * 8))],
    "top_k": [(COMPLETION, 1, another_text)],
    "min_p": [(COMPLETION, 1.0, another_text)],
    "n": [(COMPLETION, 3, lambda plain, got: len({choice["text"] for choice in got["choices"]}) == 3)],
    "best_of": [(COMPLETION, 3, lambda plain, got: len(got["choices"]) == 1 and num_out(got) == 24)],
    "use_beam_search": [(GREEDY | {"max_tokens": 16}, {"use_beam_search": True, "best_of": 4}, another_text)],
    "length_penalty": [(BEAMS, -4.0, lambda plain, got: num_out(got) < num_out(plain))],
    "early_stopping": [(BEAMS | {"length_penalty": 3.0}, True, another_text)],
    "logprobs": [
        (COMPLETION, 2, lambda plain, got: len(logprobs(got)["token_logprobs"]) == 8 and not logprobs(plain)),
        (CHAT, True, lambda plain, got: len(logprobs(got)["content"]) == 8 and not logprobs(plain)),
    ],
    "top_logprobs": [
        (CHAT | {"logprobs": True}, 2, lambda _, got: len(logprobs(got)["content"][0]["top_logprobs"]) == 2),
        (
            RESPONSE | {"include": ["message.output_text.logprobs"]},
            2,
            lambda _, got: len(got["output"][0]["content"][0]["logprobs"][0]["top_logprobs"]) == 2,
        ),
    ],
    "include": [
        (
            RESPONSE,
            ["message.output_text.logprobs"],
            lambda plain, got: (
                len(got["output"][0]["content"][0]["logprobs"]) == 8
                and not plain["output"][0]["content"][0].get("logprobs")
            ),
        )
    ],
    "prompt_logprobs": [(COMPLETION, 1, lambda plain, got: len(got["choices"][0]["prompt_logprobs"]) == 7)],
    "echo": [(COMPLETION, True, lambda plain, got: text(got) == "The sea" + text(plain))],
    "stream": [
        (COMPLETION, True, lambda plain, got: _joined(got) == text(plain)),
        (RESPONSE, True, lambda plain, got: got["events"][-1]["response"]["output"] and len(got["events"]) > 8),
    ],
    "stream_options": [
        (
            COMPLETION | {"stream": True},
            {"include_usage": True},
            lambda plain, got: (
                got["events"][-1]["usage"]["completion_tokens"] == 8 and not plain["events"][-1].get("usage")
            ),
        )
    ],
    "return_token_ids": [(ONLY_H, True, lambda plain, got: got["choices"][0]["token_ids"] == [LETTER_H] * 8)],
    "return_tokens_as_token_ids": [
        (ONLY_H | {"logprobs": 0}, True, lambda plain, got: logprobs(got)["tokens"] == [f"token_id:{LETTER_H}"] * 8)
    ],
    "truncate_prompt_tokens": [(COMPLETION, 3, lambda plain, got: (num_in(plain), num_in(got)) == (7, 3))],
    "cache_salt": [(LONG_PROMPT, "mine", lambda plain, got: num_cached(plain) > 0 == num_cached(got))],
    "request_id": [(COMPLETION, "mine", lambda plain, got: "mine" in got["id"] or "mine" in got["headers"].values())],
    "priority": [(COMPLETION, 5, same)],
    "adapter": [(COMPLETION, "nobody", lambda plain, got: got["error"]["param"] == "adapter")],
    "add_generation_prompt": [(CHAT, False, lambda plain, got: num_in(got) < num_in(plain))],
    "continue_final_message": [
        (
            {**CHAT, "messages": [*HELLO, ANSWERED], "add_generation_prompt": False},
            True,
            lambda plain, got: num_in(got) < num_in(plain),
        )
    ],
    "metadata": [(RESPONSE, {"a": "b"}, lambda plain, got: got["metadata"] == {"a": "b"} and same(plain, got))],
    **{
        name: [(COMPLETION, "x", same), (RESPONSE, "x", repeats(name))]
        for name in ("user", "safety_identifier", "prompt_cache_key")
    },
    "store": [(CHAT, False, same)],
    "service_tier": [(CHAT, "auto", same)],
    "parallel_tool_calls": [
        (CHAT, True, same),
        (RESPONSE, False, lambda plain, got: plain["parallel_tool_calls"] and not got["parallel_tool_calls"]),
    ],
    "add_special_tokens": [(COMPLETION, False, same)],  # this tokenizer adds none
    "spaces_between_special_tokens": [(COMPLETION, False, same)],
}  # fmt: skip
# Of these no answer shows anything here: who has them is refused, or they are without effect.
REFUSED_BY_THE_SCHEDULER = {"guided_json", "guided_json_object", "guided_regex", "guided_choice", "guided_grammar"}
OTHERS = {"structured_outputs", "prompt_cache_retention", "prompt_cache_options"}


def _joined(answer: Answer) -> str:
    return "".join(choice["text"] for event in answer["events"] for choice in event["choices"])


def test_every_field_that_is_taken_has_its_effect_here() -> None:
    taken = {name for name, said, _, _ in ROWS if not said.startswith("refused")}
    assert taken - REFUSED_BY_THE_SCHEDULER - OTHERS == set(EFFECTS)


@pytest.mark.parametrize("name", EFFECTS)
def test_what_a_field_changes(served: Gateway, name: str) -> None:
    for body, value, is_seen in EFFECTS[name]:
        with_it = value if isinstance(value, dict) and name in value else {name: value}
        plain, got = ask(served, body), ask(served, body | with_it)
        if name == "cache_salt":
            plain = ask(served, body)  # once more: the blocks of the first are there
        assert is_seen(plain, got), (plain, got)


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_shows_what_is_left_of_a_prompt_that_is_cut(served: Gateway, stream: bool) -> None:
    for prompt in ("The sea", list(b"The sea")):
        for kept, shown in ((3, "sea"), (99, "The sea")):
            asked = COMPLETION | {"prompt": prompt, "echo": True, "truncate_prompt_tokens": kept, "stream": stream}
            plain, scored = ask(served, asked), ask(served, asked | {"logprobs": 0})
            choices = [each["choices"][0] for each in (scored["events"] if stream else [scored])]
            offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
            assert offsets[: len(shown) + 1] == list(range(len(shown) + 1))
            for answer in (plain, scored):
                assert (_joined(answer) if stream else text(answer)).startswith(shown)


@pytest.mark.parametrize("name", sorted(REFUSED_BY_THE_SCHEDULER))
def test_what_the_scheduler_does_not_have_is_refused_by_name(served: Gateway, name: str) -> None:
    value = {"guided_json": {"type": "object"}, "guided_json_object": True, "guided_choice": ["a"]}.get(name, "a")
    answer = ask(served, COMPLETION | {name: value})
    assert (answer["http"], answer["error"]["param"]) == (400, name)


@pytest.mark.parametrize("body", [COMPLETION, CHAT, RESPONSE], ids=["completion", "chat", "response"])
def test_parameters_that_forbid_every_token_are_refused_for_good(served: Gateway, body: dict[str, Any]) -> None:
    answer = ask(served, body | {"ignore_eos": False, "allowed_token_ids": [IM_END], "min_tokens": 1})
    assert (answer["http"], answer["error"]["type"]) == (400, "invalid_request_error"), answer
