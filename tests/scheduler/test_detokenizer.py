"""Incremental text against the tokenizer's decode of all ids, and stop strings against a naive search of the whole."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.text.detokenizer import Detokenizer
from scheduler_svc.text.stop_automaton import StopAutomaton
from scheduler_svc.text.text_stream import ByteLevelStream, SentencePieceStream, WindowStream
from scheduler_svc.text.tokenizer import Tokenizer
from tests.many import trials, without_end
from tests.scheduler import tiny_tokenizers
from tests.scheduler.naive_stop_strings import naive_match

EXACT = {
    "byte_level": (tiny_tokenizers.byte_level(), ByteLevelStream),
    "sentencepiece": (tiny_tokenizers.sentencepiece(), SentencePieceStream),
    "sentencepiece_no_strip": (tiny_tokenizers.sentencepiece(strip=False), SentencePieceStream),
    "metaspace": (tiny_tokenizers.metaspace(), SentencePieceStream),
    "metaspace_no_prepend": (tiny_tokenizers.metaspace(prepend=False), SentencePieceStream),
}
BY_WINDOW = {"word_piece": tiny_tokenizers.word_piece(), "no_decoder": tiny_tokenizers.no_decoder()}
TOKENIZERS = {name: Tokenizer(tiny_tokenizers.files_of(tokenizer)) for name, (tokenizer, _) in EXACT.items()}
WINDOW_TOKENIZERS = {name: Tokenizer(tiny_tokenizers.files_of(tokenizer)) for name, tokenizer in BY_WINDOW.items()}
exact = pytest.mark.parametrize("name", EXACT)


def pieces_of(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    borders = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in pairwise(borders)]


def ids_for(name: str, data: Any) -> list[int]:
    """Random ids: bytes and special tokens from the front of the vocabulary, words from its end, some beyond it."""
    size = TOKENIZERS[name].vocab_size
    bytes_and_special, words = st.integers(0, min(size - 1, 260)), st.integers(max(0, size - 50), size - 1)
    return data.draw(st.lists(words | bytes_and_special | st.integers(0, size + 3), max_size=40))


@exact
def test_each_family_has_its_decoder(name: str) -> None:
    assert isinstance(TOKENIZERS[name].stream(), EXACT[name][1])
    assert all(isinstance(tokenizer.stream(), WindowStream) for tokenizer in WINDOW_TOKENIZERS.values())


@exact
@without_end
@settings(max_examples=trials(50))
@given(data=st.data())
def test_deltas_of_random_ids_add_up_to_decode_however_they_are_cut(name: str, data: Any) -> None:
    ids, skip = ids_for(name, data), data.draw(st.booleans())
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=6))
    detokenizer = Detokenizer(TOKENIZERS[name], skip_special_tokens=skip)
    text = "".join(detokenizer.update(piece).text for piece in pieces_of(ids, cuts)) + detokenizer.finish().text
    assert text == EXACT[name][0].decode(ids, skip_special_tokens=skip)


@exact
@without_end
@settings(max_examples=trials(33))
@given(data=st.data())
def test_text_that_was_released_is_never_taken_back(name: str, data: Any) -> None:
    """After k ids the text is the same for every cut, and the beginning of what decode gives with any continuation."""
    ids, more = ids_for(name, data), ids_for(name, data)
    one_by_one = Detokenizer(TOKENIZERS[name])
    text = "".join(one_by_one.update([index]).text for index in ids)
    assert text == Detokenizer(TOKENIZERS[name]).update(ids).text
    assert EXACT[name][0].decode(ids + more).startswith(text)


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece", "sentencepiece_no_strip"])
@pytest.mark.parametrize("text", tiny_tokenizers.TEXTS)
def test_real_text_comes_back_without_half_a_character(name: str, text: str) -> None:
    ids = EXACT[name][0].encode(text, add_special_tokens=False).ids
    detokenizer = Detokenizer(TOKENIZERS[name], skip_special_tokens=False)
    deltas = [detokenizer.update([index]).text for index in ids]
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta for delta in deltas)
    shown = "".join(deltas) + detokenizer.finish().text
    assert shown == EXACT[name][0].decode(ids, skip_special_tokens=False)
    assert shown.lstrip(" ") == text.lstrip(" ")  # a space in front is the tokenizer's own business


@exact
def test_an_output_that_continues_a_text_keeps_the_space_in_front_of_it(name: str) -> None:
    """Wherever a text is cut, it is what `decode` gives of the tokens before and what comes of those behind."""
    tokenizer = EXACT[name][0]
    if name.startswith("metaspace"):  # has no way to cut a text
        ids = [tokenizer.get_vocab()[token] for token in ("▁the", "▁a▁b", "t", "▁the")]
    else:
        ids = tokenizer.encode("the fox the", add_special_tokens=False).ids
    for cut in range(1, len(ids)):
        detokenizer = Detokenizer(TOKENIZERS[name], continues_text=True)
        text = detokenizer.update(ids[cut:]).text + detokenizer.finish().text
        assert tokenizer.decode(ids[:cut]) + text == tokenizer.decode(ids)


def test_a_stop_string_with_a_space_in_front_ends_a_continued_text_at_its_first_token() -> None:
    the = EXACT["sentencepiece"][0].get_vocab()["▁the"]
    for continues_text, stop in ((True, " the"), (False, None)):
        detokenizer = Detokenizer(
            TOKENIZERS["sentencepiece"], continues_text=continues_text, stop=StopAutomaton([" the"])
        )
        assert detokenizer.update([the]).matched_stop == stop


def test_bytes_that_are_no_utf8_become_what_decode_makes_of_them() -> None:
    """All kinds of broken UTF-8: lone continuations, overlong forms, surrogates, cut and interrupted characters."""
    tokenizer = EXACT["byte_level"][0]
    id_of = {byte: tokenizer.encode(bytes([byte]).decode("latin-1")).ids[-1] for byte in range(128)}
    alphabet = tokenizer.get_vocab()
    for byte in range(128, 256):  # a letter above 127 is two bytes; look the byte's own letter up
        letters = {b: chr(b) for b in [*range(0xA1, 0xAD), *range(0xAE, 0x100)]}
        rest = [b for b in range(256) if b not in letters and not 0x21 <= b <= 0x7E]
        id_of[byte] = alphabet[letters.get(byte) or chr(256 + rest.index(byte))]
    rng = random.Random(3)
    leads = [0xC2, 0xE0, 0xE2, 0xED, 0xEF, 0xF0, 0xF4, 0xF5, 0xC0, 0xFF, 0x80, 0x9F, 0xA0, 0xBF, 0x41]
    for _ in range(3000):
        ids = [id_of[rng.choice(leads)] for _ in range(rng.randrange(1, 9))]
        detokenizer = Detokenizer(TOKENIZERS["byte_level"])
        text = "".join(detokenizer.update([index]).text for index in ids) + detokenizer.finish().text
        assert text == tokenizer.decode(ids)


def test_a_run_of_byte_tokens_is_shown_when_it_is_over() -> None:
    """decode turns a whole run into U+FFFD when a byte of it is wrong, so "€" is not certain before the run's end."""
    tokenizer = EXACT["sentencepiece"][0]
    vocab = tokenizer.get_vocab()
    euro, bad, word = [vocab[f"<0x{byte:02X}>"] for byte in "€".encode()], vocab["<0xFF>"], vocab["t"]
    good = Detokenizer(TOKENIZERS["sentencepiece"])
    assert [good.update([index]).text for index in [*euro, word]] == ["", "", "", "€t"]
    broken = Detokenizer(TOKENIZERS["sentencepiece"])
    assert broken.update([*euro, bad, word]).text == "\ufffd" * 4 + "t"
    ended = Detokenizer(TOKENIZERS["sentencepiece"])
    assert (ended.update(euro).text, ended.finish().text) == ("", "€")


@pytest.mark.parametrize("name", BY_WINDOW)
@without_end
@settings(max_examples=trials(20))
@given(data=st.data())
def test_the_window_gives_decodes_text_too(name: str, data: Any) -> None:
    ids = data.draw(st.lists(st.integers(0, WINDOW_TOKENIZERS[name].vocab_size - 1), max_size=60))
    detokenizer = Detokenizer(WINDOW_TOKENIZERS[name])
    text = "".join(detokenizer.update([index]).text for index in ids) + detokenizer.finish().text
    assert text == BY_WINDOW[name].decode(ids)


# ---- Stop strings ---------------------------------------------------------------------------------------------------


@exact
@without_end
@settings(max_examples=trials(50))
@given(data=st.data())
def test_stop_strings_across_tokens_resume_and_min_tokens(name: str, data: Any) -> None:
    ids = ids_for(name, data)
    tokenizer, min_tokens = EXACT[name][0], data.draw(st.integers(0, 6))
    whole = tokenizer.decode(ids)
    candidates = st.sampled_from([*whole, "t", "th", "he q", "\ufffd"])
    strings = data.draw(st.lists(candidates, min_size=1, max_size=4))
    if len(whole) > 4:
        start = data.draw(st.integers(0, len(whole) - 2))
        strings.append(whole[start : start + data.draw(st.integers(1, 8))])
    include = data.draw(st.booleans())

    def make() -> Detokenizer:
        return Detokenizer(
            TOKENIZERS[name], stop=StopAutomaton(strings), include_stop_str_in_output=include, min_tokens=min_tokens
        )

    def run(detokenizer: Detokenizer, pieces: Sequence[Sequence[int]]) -> tuple[str, str | None, int]:
        text, used = "", 0
        for piece in pieces:
            delta = detokenizer.update(piece)
            text, used = text + delta.text, used + delta.num_tokens
            if delta.matched_stop is not None:
                return text, delta.matched_stop, used
        last = detokenizer.finish()
        return text + last.text, last.matched_stop, used

    cuts = data.draw(st.lists(st.integers(0, 40), max_size=6))
    result = run(make(), pieces_of(ids, cuts))
    assert result == run(make(), [[index] for index in ids])

    # The oracle works on the text after each id; a match must end behind what the first `min_tokens` ids made.
    texts, early, match, used = text_after_each(name, ids), 0, None, len(ids)
    for count, text in enumerate([*texts, whole], start=1):
        if min(count, len(ids)) <= min_tokens:
            continue
        early = max((len(each) for each in texts[:min_tokens] if text.startswith(each)), default=0)
        if (match := naive_match(text, strings, early + 1)) is not None:
            whole, used = text, min(count, len(ids))
            break
    assert result[1:] == (match[2] if match else None, used)
    assert result[0] == (whole if match is None else whole[: match[1] if include else match[0]])

    # Resume: the first k ids fed in silence, the rest gives the rest of the text.
    k = data.draw(st.integers(0, result[2]))
    before, after = make(), make()
    sent = before.update(ids[:k])
    if sent.matched_stop is None:
        assert after.update(ids[:k]) == sent
        assert sent.text + run(after, [ids[k:]])[0] == result[0]


def text_after_each(name: str, ids: Sequence[int]) -> list[str]:
    """What is certain of the text; with the bytes that are held back, where they are whole characters."""
    plain, certain, texts = Detokenizer(TOKENIZERS[name]), "", list[str]()
    for count, index in enumerate(ids, start=1):
        certain += plain.update([index]).text
        all_of_it = EXACT[name][0].decode(ids[:count])
        texts.append(certain if "\ufffd" in all_of_it[len(certain) :] else all_of_it)
    return texts


def test_a_stop_string_of_byte_tokens_ends_an_output_at_its_last_byte() -> None:
    """Llama 2's newline is a byte token: what follows it is neither waited for nor computed."""
    vocab = EXACT["sentencepiece"][0].get_vocab()

    def run(text: str, stops: list[str], **options: Any) -> tuple[str, str | None, int]:
        ids = [vocab[token] for token in text.split()]
        detokenizer = Detokenizer(TOKENIZERS["sentencepiece"], stop=StopAutomaton(stops), **options)
        shown = detokenizer.update(ids)
        return shown.text + detokenizer.finish().text, shown.matched_stop, shown.num_tokens

    assert run("▁the <0x0A> ▁the", ["\n"]) == ("the", "\n", 2)
    assert run("▁the <0x0A> <0x0A> <0x0A> ▁the", ["\n\n"]) == ("the", "\n\n", 3)
    assert run("▁the <0x0A> <0x0A> <0x0A> ▁the", ["\n\n"], include_stop_str_in_output=True) == ("the\n\n", "\n\n", 3)
    assert run("▁the <0xE2> <0x82> <0xAC> ▁the", ["€"]) == ("the", "€", 4)
    assert run("<0x20> <0x20> ▁the", [" "]) == ("", " ", 2)  # the first is taken off
    assert run("▁the <0x0A> <0xFF> <0x0A> ▁the", ["\n\n", "he\n"]) == ("t", "he\n", 2)
    assert run("▁the <0x0A> <0xFF> <0x0A> ▁the", ["\n\n"]) == ("the\ufffd\ufffd\ufffd the", None, 5)
    # A string that is complete within the first tokens does not count, whenever it is certain.
    assert run("▁the <0x0A> ▁the", ["\n"], min_tokens=2) == ("the\n the", None, 3)
    assert run("▁the <0x0A> <0x0A>", ["\n"], min_tokens=2) == ("the\n", "\n", 3)
    assert run("▁the <0x0A> <s> <s>", ["\n"], min_tokens=2) == ("the\n", None, 4)


def byte_ids(text: str) -> list[int]:
    return EXACT["byte_level"][0].encode(text).ids


def test_tokens_behind_the_match_are_not_counted_and_not_shown() -> None:
    ids = byte_ids("one") + byte_ids("two") + byte_ids("three")
    detokenizer = Detokenizer(TOKENIZERS["byte_level"], stop=StopAutomaton(["tw"]))
    text, matched, used = detokenizer.update(ids)
    assert (text, matched) == ("one", "tw")
    fed = EXACT["byte_level"][0].decode(ids[:used])
    assert fed.startswith("onetw") and "thr" not in fed
    assert detokenizer.update(ids) == ("", "tw", 0) and detokenizer.finish() == ("", "tw", 0)


@pytest.mark.parametrize("stop", [None, StopAutomaton(["zzz"])])
def test_the_token_that_ends_an_output_has_no_text(stop: StopAutomaton | None) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids, eos = byte_ids("hi"), tokenizer.encode("</s>")

    def text(ended: bool, **options: Any) -> str:
        detokenizer = Detokenizer(tokenizer, stop=stop, **options)
        delta = detokenizer.update(ids + eos, ended_by_stop_token=ended)
        assert delta.num_tokens == len(ids) + 1
        return delta.text + detokenizer.finish().text

    assert text(True) == text(False) == "hi"
    assert text(True, skip_special_tokens=False) == "hi"
    assert text(False, skip_special_tokens=False) == "hi</s>"
    assert text(True, skip_special_tokens=False, include_stop_str_in_output=True) == "hi</s>"
    assert text(True, include_stop_str_in_output=True) == "hi"


def test_what_was_held_back_is_shown_when_the_output_ends() -> None:
    detokenizer = Detokenizer(TOKENIZERS["byte_level"], stop=StopAutomaton(["END!"]))
    assert detokenizer.update(byte_ids("the EN")).text == "the "
    assert detokenizer.finish() == ("EN", None, 0)
    half = Detokenizer(TOKENIZERS["byte_level"], stop=StopAutomaton(["END!"]))
    (first, *_) = byte_ids("ß")
    assert half.update([first]).text == "" and half.finish().text == "\ufffd"
