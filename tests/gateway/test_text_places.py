"""Where tokens begin in a text, for tokens whose own text does not stand there as it is, too."""

from __future__ import annotations

import random

import pytest

from gateway_svc.answers.text_places import TextPlaces

PART = "\N{REPLACEMENT CHARACTER}"  # the text of a part of a character


@pytest.mark.parametrize(
    ("text", "tokens", "places"),
    [
        ("The sea", ["The", " sea"], [0, 3]),
        ("The sea", ["<s>", "The", " sea"], [0, 0, 3]),
        ("<s>The sea", ["<s>", "<s>", "The", " sea"], [0, 3, 3, 6]),
        ("The sea is", ["<s>", "The", "sea", "is"], [0, 0, 3, 7]),
        (" The sea", ["<s>", "The", "sea"], [0, 0, 4]),
        ("a\u00e9b\U0001f600c", ["a", PART, PART, "b", PART, PART, PART, PART, "c"], [0, 1, 1, 2, 3, 3, 3, 3, 4]),
        ("say \u201cso", ["say", f" {PART}", PART, "so"], [0, 3, 4, 5]),
        (" x  \u200b ", [" x", " ", f" {PART}", PART, " "], [0, 2, 3, 4, 5]),
        ("\u00e9 \u201c a", [PART, PART, f" {PART}", PART, " ", "a"], [0, 0, 1, 2, 3, 4]),
        (" \U0001f600  b", [f" {PART}", PART, PART, " ", " b"], [0, 1, 1, 2, 3]),
        (f"a {PART} b", ["a", f" {PART}", " b"], [0, 1, 3]),
        ("ab", ["a", "<|im_end|>", "b", "<|im_end|>", "<|im_end|>"], [0, 1, 1, 2, 2]),
        ("a", ["a", "hh", "h"], [0, 1, 1]),
        ("hand in hand", ["hand", " in", " hand"], [0, 4, 7]),
        ("ab", ["a", "", "b"], [0, 1, 1]),
    ],
)
def test_places(text: str, tokens: list[str], places: list[int]) -> None:
    whole = TextPlaces()
    whole.add(text)
    assert [whole.next(token) for token in tokens] == places


def test_tokens_whose_text_is_held_back_for_a_while_do_not_move_those_behind_them() -> None:
    places = TextPlaces()
    places.add("ab")
    assert [places.next(token) for token in ("ab", "cd", "ef")] == [0, 2, 2]
    places.add("cdefgh")
    assert [places.next(token) for token in ("gh", "i")] == [6, 8]


def test_many_parts_of_characters_do_not_move_what_comes_behind_them() -> None:
    """As of a script that a tokenizer has bytes for, and nothing else."""
    places = TextPlaces()
    places.add("é" * 1500 + "x")
    assert [places.next("\N{REPLACEMENT CHARACTER}") for _ in range(3000)] == [0] * 3000
    assert places.next("x") == 1500


@pytest.mark.parametrize("seed", range(20))
def test_tokens_that_are_the_text_stand_one_behind_the_other(seed: int) -> None:
    drawn = random.Random(seed)
    tokens = ["".join(drawn.choices("ab ", k=drawn.randint(1, 4))) for _ in range(300)]
    places, found = TextPlaces(), []
    for first in range(0, len(tokens), 7):
        places.add("".join(tokens[first : first + 7]))
        found += [places.next(token) for token in tokens[first : first + 7]]
    assert found == [len("".join(tokens[:number])) for number in range(len(tokens))]


@pytest.mark.parametrize("seed", range(20))
def test_no_token_stands_beyond_the_text_or_in_front_of_the_one_before(seed: int) -> None:
    drawn = random.Random(seed)
    places, length, found = TextPlaces(), 0, [0]
    for _ in range(300):
        text = "".join(drawn.choices("ab ", k=drawn.randint(0, 4)))
        length += len(text)
        places.add(text)
        found.append(places.next("".join(drawn.choices("ab ", k=drawn.randint(0, 4)))))
        assert found[-2] <= found[-1] <= length
