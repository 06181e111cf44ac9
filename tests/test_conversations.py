"""Every shape in which conversations may be given to `LLM.chat`, and what is said of anything else."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.arguments.conversations import read_conversations
from octavo.errors import InvalidPrompt

ASKED = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([ASKED], [[ASKED]]),
        ((ASKED, ASKED), [[ASKED, ASKED]]),
        ([[ASKED], [ASKED, ASKED]], [[ASKED], [ASKED, ASKED]]),
        ([], []),
        ([{"role": "user", "content": ""}], [[{"role": "user", "content": ""}]]),
        ([{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}], [[ASKED | {"content": "a\nb"}]]),
    ],
)
def test_accepted(given: Any, expected: list[list[dict[str, str]]]) -> None:
    assert read_conversations(given) == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("hi", "messages is 'hi' (str)"),
        (ASKED, "(dict)"),
        (["hi"], "messages[0] is 'hi' (str)"),
        ([[ASKED], []], "messages[1] is [] (list)"),
        ([ASKED, "hi"], "messages[1] is 'hi' (str)"),
        ([[ASKED], [ASKED, 5]], "messages[1][1] is 5 (int)"),
        ([[ASKED, {"content": "hi"}]], 'messages[0][1]["role"] is missing'),
        ([{"role": "", "content": "hi"}], """messages[0]["role"] is '' (str)"""),
        ([{"role": "user", "content": 5}], 'messages[0]["content"] is 5 (int)'),
        ([ASKED, {"role": "assistant", "content": "", "tool_calls": []}], 'messages[1]["tool_calls"] is no field'),
        ([{"role": "user", "content": [{"type": "image_url"}]}], 'messages[0]["content"][0] is '),
        ([{"role": "user", "content": "hm\ud83d"}], 'messages[0]["content"] has '),
    ],
)
def test_anything_else_is_named_in_one_line(given: Any, words: str) -> None:
    with pytest.raises(InvalidPrompt) as raised:
        read_conversations(given)
    assert words in str(raised.value) and "\n" not in str(raised.value)
