"""docs/openai.md, field by field: what it says is taken is taken, what it says is refused is refused by name."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway_svc.errors import HttpError, UnsupportedField
from gateway_svc.requests.asked import Asked
from gateway_svc.requests.chat import read_chat
from gateway_svc.requests.completions import read_completion
from gateway_svc.requests.fields import Fields
from gateway_svc.requests.responses import read_response

PAGE = (Path(__file__).parents[2] / "docs" / "openai.md").read_text()
HELLO = [{"role": "user", "content": "hello"}]
Reader = Callable[[Fields], Asked]
# Each with the least that it takes.
OF_BOTH: dict[Reader, dict[str, Any]] = {read_chat: {"messages": HELLO}, read_completion: {"prompt": "a"}}
OF_RESPONSES: dict[Reader, dict[str, Any]] = {read_response: {"input": "a"}}
SECTIONS = {
    "Fields of completions and chats": OF_BOTH,
    "Fields of responses": OF_RESPONSES,
    "Extra fields": OF_BOTH | OF_RESPONSES,
}
TAKEN: dict[str, Any] = {
    "messages": HELLO, "prompt": ["a", [1]], "input": HELLO, "logit_bias": {"1": 1}, "metadata": {"a": "b"},
    "stream_options": {"include_usage": True, "include_obfuscation": False}, "service_tier": "auto", "store": False,
    "include": ["message.output_text.logprobs"], "stop_token_ids": [1], "allowed_token_ids": [1], "prompt_logprobs": 1,
    "guided_json": {"type": "object"}, "guided_choice": ["a"], "structured_outputs": {"regex": "a"}, "logprobs": 1,
    "early_stopping": "never", "add_special_tokens": False, "max_tokens": 0, "n": 2, "best_of": 2, "top_logprobs": 2,
    **dict.fromkeys(("temperature", "top_p", "presence_penalty", "frequency_penalty", "min_p", "length_penalty"), 0.5),
    **dict.fromkeys(("seed", "top_k", "min_tokens", "priority", "truncate_prompt_tokens", "repetition_penalty"), 3),
    **dict.fromkeys(("max_output_tokens", "max_completion_tokens"), 3),
    **dict.fromkeys(("stream", "echo", "parallel_tool_calls", "ignore_eos", "include_stop_str_in_output"), True),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "use_beam_search"), True),
    **dict.fromkeys(("add_generation_prompt", "continue_final_message", "guided_json_object"), True),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids"), True),
}  # fmt: skip
OF_CHATS: dict[str, Any] = {"logprobs": True, "max_tokens": 3}  # where a completion's is another one
NEEDED: dict[str, dict[str, Any]] = {"stream_options": {"stream": True}, "max_tokens": {"echo": True}}
REFUSED: dict[str, Any] = {
    "modalities": ["audio"], "tool_choice": "required", "text": {"format": {"type": "json_object"}},
    "response_format": {"type": "json_object"}, "truncation": "auto",
}  # fmt: skip
ARE_GUIDES = ("response_format", "text")  # which the gateway hands on, and the scheduler refuses


def rows() -> Iterator[tuple[str, str, str, dict[Reader, dict[str, Any]]]]:
    """A field, what the page says of it, and who reads it."""
    for title, readers in SECTIONS.items():
        for line in PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0].splitlines():
            if line.startswith("| `"):
                cells = [cell.strip() for cell in line.strip("|").split("|")]
                for name in re.findall(r"`([a-z_]+)", cells[0]):
                    yield name, cells[1], title, readers


def known_to(read: Reader, least: dict[str, Any]) -> frozenset[str]:
    streamed = Fields({**least, "stream": True})
    read(streamed)
    return streamed.known


ROWS = list(rows())
KNOWN = {read: known_to(read, least) for read, least in (OF_BOTH | OF_RESPONSES).items()}


@pytest.mark.parametrize(("name", "said", "readers"), [pytest.param(*r[:2], r[3], id=f"{r[2]}-{r[0]}") for r in ROWS])
def test_the_page_is_right(name: str, said: str, readers: dict[Reader, dict[str, Any]]) -> None:
    their_own = {read: least for read, least in readers.items() if name in KNOWN[read]}
    assert their_own, f"{name}: nobody reads it"
    for read, least in their_own.items():
        if said.startswith("refused"):
            with pytest.raises(UnsupportedField) if name not in ARE_GUIDES else contextlib.nullcontext() as refused:
                asked = read(Fields({**least, name: REFUSED.get(name, "x")}))
            if refused is None:
                assert asked.requests[0].sampling_params.HasField("guided")
            else:
                assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")
        else:
            value = {**TAKEN, **(OF_CHATS if read is read_chat else {})}.get(name, "x")
            needed = {"logprobs": True} if name == "top_logprobs" and read is read_chat else NEEDED.get(name, {})
            kept = {each: given for each, given in needed.items() if each in KNOWN[read]}
            read(Fields({**least, **kept, name: value}))


@pytest.mark.parametrize("read", KNOWN, ids=lambda read: read.__name__)
def test_the_page_has_every_field(read: Reader) -> None:
    titles = [title for title in SECTIONS if read is read_response or title != "Fields of responses"]
    assert KNOWN[read] <= {name for name, _, title, _ in ROWS if title in titles}


@pytest.mark.parametrize("read", KNOWN, ids=lambda read: read.__name__)
def test_a_field_of_no_table_is_refused_by_name(read: Reader) -> None:
    with pytest.raises(HttpError) as refused:
        read(Fields({**(OF_BOTH | OF_RESPONSES)[read], "frobnicate": 1}))
    assert (refused.value.param, refused.value.code) == ("frobnicate", "unknown_parameter")
