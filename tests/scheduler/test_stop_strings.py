"""Stop strings against naive searches, and what they cost: steps of the automaton are counted, not seconds."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.text.stop_automaton import StopAutomaton
from scheduler_svc.text.stop_strings import HeldText, StopStrings
from tests.scheduler.naive_stop_strings import NaiveStopStrings, naive_match, naive_undecided


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(borders)]


letters = st.text("ab<", max_size=24)
stop_lists = st.lists(st.text("ab<", min_size=1, max_size=6), min_size=1, max_size=5)


@settings(max_examples=400)
@given(text=letters, strings=stop_lists, cuts=st.lists(st.integers(0, 24), max_size=8), include=st.booleans())
def test_stop_strings_match_as_a_naive_search_does(
    text: str, strings: list[str], cuts: list[int], include: bool
) -> None:
    stops, shown, so_far, matched = StopStrings(StopAutomaton(strings), include), "", "", None
    for piece in pieces_of(text, cuts):
        so_far += piece
        checked = stops.push(piece)
        shown += checked.text
        if checked.matched is not None:
            matched = checked.matched
            break
        # Exactly as much is held back as is undecided: no more, or streams would lag; no less, or a half would show.
        assert shown == so_far[: len(so_far) - (0 if include else naive_undecided(so_far, strings))]
    else:
        shown += stops.finish()
    expected = naive_match(text, strings)
    if expected is None:
        assert (shown, matched) == (text, None)
    else:
        start, end, string = expected
        assert (shown, matched) == (text[: end if include else start], string)


def test_a_match_that_does_not_count_yet_is_shown_at_once() -> None:
    stops = StopStrings(StopAutomaton(["ab", "bc"]))
    assert stops.push("ab", may_match=False) == ("a", None)  # "b" may still become "bc"
    assert stops.push("x") == ("bx", None)
    assert stops.push("xab", may_match=False).text + stops.push("c").text == "xa"
    alone = StopStrings(StopAutomaton(["ab", "zzz"]))
    assert alone.push("xab", may_match=False) == ("xab", None)


@pytest.mark.parametrize(
    ("strings", "expected"),
    [
        (["abcd", "bc"], ("a", "bc")),  # "bc" is complete first
        (["bc", "abc"], ("a", "bc")),  # both end at the same letter: the first listed
        (["abc", "bc"], ("", "abc")),
        (["cd", "d"], ("ab", "cd")),
        (["x", "abcde"], ("abcd", None)),
    ],
)
def test_which_of_two_matches_counts(strings: list[str], expected: tuple[str, str | None]) -> None:
    for whole in (True, False):
        stops = StopStrings(StopAutomaton(strings))
        text, matched = "", None
        for part in ["abcd"] if whole else "abcd":
            if matched is None:
                checked = stops.push(part)
                text, matched = text + checked.text, checked.matched
        assert (text + (stops.finish() if matched is None else ""), matched) == expected


parts = st.lists(st.tuples(st.text("ab<", max_size=8), st.booleans()), max_size=8)


@settings(max_examples=500)
@given(parts=parts, strings=stop_lists, include=st.booleans())
def test_each_part_releases_what_a_search_of_the_whole_would(
    parts: list[tuple[str, bool]], strings: list[str], include: bool
) -> None:
    """Whatever parts may not match: what is shown, and when, is a function of the text alone."""
    stops, naive = StopStrings(StopAutomaton(strings), include), NaiveStopStrings(strings, include)
    for text, may_match in parts:
        checked = stops.push(text, may_match)
        assert checked == naive.push(text, may_match)
        if checked.matched is not None:
            return
    assert stops.finish() == naive.finish()


class CountedAutomaton(StopAutomaton):
    """Counts how often a character is looked for among a node's children."""

    def __init__(self, strings: Sequence[str]) -> None:
        self.num_looks = 0
        super().__init__(strings)

    def _child(self, node: int, letter: str) -> int:
        self.num_looks += 1
        return super()._child(node, letter)


A = "a" * 1023
HOSTILE = {  # strings, and a text that was slow for some algorithm
    "a long one and a short one": ([A + "b", "c"], "a" * 5000),
    "almost, again and again": ([A + "b"], ("a" * 1022 + "c") * 5),
    "sixteen that begin alike": ([A[:-1] + letter for letter in "bcdefghijklmnopq"], "a" * 5000),
    "each the end of the one before": ([A[i:] + "b" for i in range(0, 64, 4)], ("a" * 1022 + "x") * 5),
    "two periods": (["ab" * 512, "aab" * 341], "aab" * 340 + "ab" * 2000),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("num_characters", [1, 7, 5000])
def test_a_character_costs_the_same_however_much_is_held_back(name: str, num_characters: int) -> None:
    strings, text = HOSTILE[name]
    automaton = CountedAutomaton(strings)
    total = sum(map(len, strings))
    assert automaton.num_looks <= 3 * total
    automaton.num_looks = 0
    outputs = [StopStrings(automaton) for _ in range(2)]
    naive = NaiveStopStrings(strings, include_in_output=False) if num_characters == 5000 else None
    for stops in outputs:
        for start in range(0, len(text), num_characters):
            part = text[start : start + num_characters]
            checked = stops.push(part)
            assert naive is None or stops is not outputs[0] or checked == naive.push(part, may_match=True)
            if checked.matched is not None:
                break
    assert automaton.num_looks <= 2 * 2 * len(text)  # each look that fails is paid for by one that did not


def test_a_peek_looks_at_each_character_once_and_a_push_forgets_it() -> None:
    automaton = CountedAutomaton(["aab", "x"])
    automaton.num_looks = 0
    stops = StopStrings(automaton)
    assert stops.push("a").text == "" and not any([stops.peek("a") for _ in range(1000)])
    assert automaton.num_looks <= 2 * 1001
    assert stops.peek("b")
    assert stops.push("?").text == "a?", "it was something else"
    assert not stops.peek("aa") and not stops.peek("ax", may_match=False) and stops.peek("x")
    assert stops.push("aaaxx") == ("aaa", "x")


def test_an_automaton_is_about_as_large_as_its_strings() -> None:
    """Bytes a character, for the largest lists that a server takes by default: alike, and not."""
    for strings in ([A[:-1] + letter for letter in "bcdefghijklmnopq"], [chr(97 + i) * 1024 for i in range(16)]):
        automaton = StopAutomaton(strings)
        held = [getattr(automaton, name) for name in vars(automaton)]
        num_bytes = sum(sys.getsizeof(each) for each in held)
        assert num_bytes <= 24 * sum(map(len, strings)) + 10_000


@given(st.lists(st.tuples(st.text("abc", max_size=5), st.integers(0, 12)), max_size=12))
def test_held_text_comes_out_as_it_went_in(turns: list[tuple[str, int]]) -> None:
    held, waiting = HeldText(), ""
    for text, num_kept in turns:
        held.append(text)
        waiting += text
        num_taken = max(0, len(waiting) - num_kept)
        assert held.take_all_but(num_kept) == waiting[:num_taken]
        waiting = waiting[num_taken:]
