"""Every shape in which a prompt may be given, and what is said of anything else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo import TextPrompt, TokensPrompt
from octavo.arguments.prompts import ACCEPTED, Prompt, read_prompts
from octavo.errors import InvalidPrompt

IDS, FOUR = Prompt(None, [1, 2, 3]), Prompt(None, [4])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("hi", [Prompt("hi")]),
        (["hi", "ho"], [Prompt("hi"), Prompt("ho")]),
        (("hi",), [Prompt("hi")]),
        ((text for text in ("hi", "ho")), [Prompt("hi"), Prompt("ho")]),
        ([], []),
        ([1, 2, 3], [IDS]),
        ((1, 2, 3), [IDS]),
        ([[1, 2, 3], [4]], [IDS, FOUR]),
        ([[]], [Prompt(None, [])]),
        (np.array([1, 2, 3]), [IDS]),
        (np.array([[1, 2, 3], [1, 2, 3]]), [IDS, IDS]),
        ([np.array([1, 2, 3]), [np.int64(1), 2, 3]], [IDS, IDS]),
        ({"prompt": "hi"}, [Prompt("hi")]),
        ({"prompt_token_ids": [1, 2, 3]}, [IDS]),
        ([{"prompt": "hi"}, {"prompt_token_ids": (1, 2, 3)}, "ho", [4]], [Prompt("hi"), IDS, Prompt("ho"), FOUR]),
        ({"prompt": "hi", "prompt_token_ids": [1, 2, 3], "cache_salt": "mine"}, [Prompt("hi", [1, 2, 3], "mine")]),
        ([TextPrompt(prompt="hi"), TokensPrompt(prompt_token_ids=[4])], [Prompt("hi"), FOUR]),
        ({"prompt": "hi", "multi_modal_data": None, "mm_processor_kwargs": {}}, [Prompt("hi")]),
    ],
)
def test_accepted(given: Any, expected: list[Prompt]) -> None:
    assert read_prompts(given) == expected


def test_ids_as_an_argument_of_their_own() -> None:
    assert read_prompts(None, [1, 2, 3]) == read_prompts(None, [[1, 2, 3]]) == [IDS]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (5, "prompts is 5 (int)"),
        (b"hi", "prompts is b'hi' (bytes)"),
        ({"hi", "ho"}, "(set)"),
        ([None], "prompts[0] is None (NoneType)"),
        (["hi", 5], "prompts[1] is 5 (int)"),
        ([1, "hi"], "prompts[0] is 1 (int)"),
        ([[1, "hi"]], "prompts[0][1] is 'hi' (str); accepted: a token id"),
        (["hi", ["hi"]], "prompts[1][0] is 'hi' (str)"),
        ([1, -1], "prompts[1] is -1 (int)"),
        ([[True]], "prompts[0][0] is True (bool)"),
        ([[2**32]], "prompts[0][0] is 4294967296 (int)"),
        ({}, "prompts is a dict with nothing"),
        ([{"prompt": "hi", "multi_modal_data": {"image": 1}}], 'prompts[0]["multi_modal_data"]: models here read text'),
        ({"prompt_embeds": [[0.5]]}, 'prompts["prompt_embeds"]: models here begin with token ids'),
        ({"encoder_prompt": "hi"}, 'prompts["encoder_prompt"]: no model here has an encoder'),
        ([{"promt": "hi"}], "prompts[0] is a dict with 'promt'"),
        ({"prompt": ["hi"]}, """prompts["prompt"] is ['hi'] (list)"""),
        (["hi", {"prompt_token_ids": 5}], 'prompts[1]["prompt_token_ids"] is 5 (int)'),
        ({"prompt_token_ids": [7, "hi"]}, """prompts["prompt_token_ids"][1] is 'hi' (str)"""),
    ],
)
def test_anything_else_is_named_in_one_line_with_what_is_accepted(given: Any, words: str) -> None:
    with pytest.raises(InvalidPrompt) as raised:
        read_prompts(given)
    message = str(raised.value)
    assert words in message and "accepted: " in message and "\n" not in message
    assert isinstance(raised.value, ValueError)
    assert message.partition("accepted: ")[2].startswith((ACCEPTED, "text", "a token id", "a list of token ids"))


def test_text_that_no_utf8_holds_is_named() -> None:
    with pytest.raises(InvalidPrompt, match=r"prompts\[1\] has '.ud83d' as character 2"):
        read_prompts(["fine", "hm\ud83d"])


@pytest.mark.parametrize("arguments", [(None, None), ("hi", [1])])
def test_one_of_both_arguments_is_wanted(arguments: tuple[Any, Any]) -> None:
    with pytest.raises(InvalidPrompt, match="either prompts or prompt_token_ids"):
        read_prompts(*arguments)
