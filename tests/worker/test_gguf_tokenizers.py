"""How text is cut before bytes are merged, for each word by which GGUF files name it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from octavo.models import sentencepiece_tokenizer
from octavo.models.errors import GGUFError
from octavo.models.gguf_tokenizer import tokenizer_files, typed_tokens
from tests.scheduler.tiny_tokenizers import TEXTS
from tests.worker.sentencepiece_fixtures import FOLDER

WORDS = ["▁", "t", "h", "e", "th", "the", "▁the"]
SPACE, THE, SPACE_THE = 259, 264, 265  # where `spm` has them

MORE = [
    "HTTPServer2024's",
    "Don't WE'LL",
    "naïve cafe\u0301 ÉCOLE",
    "\u0301ABC x\u0301ABC",
    "a/b//\n/c",
    "x  \n\n  y\t",
    "1234567",
    "日本語 中文。",
    "wörter|(a)",
]


def made(pre: str, **more: Any) -> Tokenizer:
    """`more`: keys, with `__` for a dot."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*alphabet, "ab"],
        "tokenizer.ggml.merges": ["a b"],
    }
    metadata |= {key.replace("__", "."): value for key, value in more.items()}
    return Tokenizer.from_str(tokenizer_files(metadata, 64)["tokenizer.json"])


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    assert tokenizer.pre_tokenizer is not None
    return [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def pattern_of(name: str) -> str:
    """As `transformers` has it, or the file that the model itself came with."""
    if name == "qwen2":
        from transformers.models.qwen2 import tokenization_qwen2

        return str(tokenization_qwen2.PRETOKENIZE_REGEX)
    if name == "llama-bpe":
        from transformers.convert_slow_tokenizer import TikTokenConverter

        return str(inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default)
    return (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


@pytest.mark.parametrize("name", ["qwen2", "llama-bpe", "tekken"])
def test_text_is_cut_as_the_model_was_trained_to(name: str) -> None:
    oracle = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern_of(name)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer = made(name)
    for text in [*TEXTS, *MORE]:
        whole = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
        assert pieces(tokenizer, text) == [piece for piece, _ in oracle.pre_tokenize_str(whole)], text


@pytest.mark.parametrize(
    ("pre", "has_bos"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("gpt-2", False)]
)
def test_texts_begin_with_bos_as_in_llama_cpp_where_no_key_says_it(pre: str, has_bos: bool) -> None:
    """Files of Llama 3 have none: its tokenizer.json does it by a template."""
    assert made(pre, tokenizer__ggml__bos_token_id=256).encode("a").tokens == ["ab"] * has_bos + ["a"]
    for says in (True, False):
        keys = {"tokenizer__ggml__bos_token_id": 256, "tokenizer__ggml__add_bos_token": says}
        assert made(pre, **keys).encode("a").tokens == ["ab"] * says + ["a"]


def spm(marks: Sequence[str], **more: Any) -> Tokenizer:
    """Of sentencepiece, `marks` being control tokens from 266 on. `more`: keys, with `__` for a dot."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS, *marks]
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 4] + [6] * 256 + [1] * len(WORDS) + [3] * len(marks),
        "tokenizer.ggml.scores": [0.0] * 259 + [-10.0, -9, -9, -9, -3, -2, -1] + [0.0] * len(marks),
    }
    metadata |= {key.replace("__", "."): value for key, value in more.items()}
    return Tokenizer.from_str(tokenizer_files(metadata, 64)["tokenizer.json"])


def test_marks_of_phi3_take_in_what_follows_and_parts_behind_them_begin_with_a_space() -> None:
    """As its tokenizer.json has them; so the newlines of its template are no tokens."""
    marks = ["<|user|>", "<|end|>", "<|endoftext|>"]
    chat = "<|user|>\nthe<|end|>\n<|user|> the</s>\nthe<|endoftext|>\nthe"
    user, end, newline = 266, 267, 3 + ord("\n")
    ids = spm(marks, general__architecture="phi3").encode(chat).ids
    assert ids == [user, SPACE_THE, end, user, SPACE_THE, 2, SPACE_THE, 268, SPACE, newline, THE]
    assert spm(marks).encode(chat).ids[:4] == [user, SPACE, newline, THE]


@pytest.mark.parametrize("adds_bos", [False, True])
def test_parts_behind_a_control_token_begin_with_a_space_as_in_llama_cpp(adds_bos: bool) -> None:
    """Templates of Llama 2 write BOS themselves."""
    tokenizer = spm([], tokenizer__ggml__bos_token_id=1, tokenizer__ggml__add_bos_token=adds_bos)
    assert tokenizer.encode("<s>the</s>the", add_special_tokens=False).ids == [1, SPACE_THE, 2, SPACE_THE]
    assert tokenizer.encode("the the").ids == [1] * adds_bos + [SPACE_THE, SPACE_THE]
    plain = spm([], tokenizer__ggml__add_space_prefix=False)
    assert plain.encode("<s>the</s>the").ids == [1, THE, 2, THE]


def test_templates_of_mistrals_third_tokenizer_write_that_space_themselves() -> None:
    tokenizer = spm(["[INST]", "[/INST]"], tokenizer__ggml__bos_token_id=1)
    chat = "<s>[INST] the[/INST] the</s>"
    assert tokenizer.encode(chat, add_special_tokens=False).ids == [1, 266, SPACE_THE, 267, SPACE_THE, 2]
    assert tokenizer.encode("the").ids == [1, SPACE_THE]


def test_a_chat_has_the_ids_of_the_sentencepiece_model_that_the_file_was_made_of() -> None:
    data = (FOLDER / "bpe.model").read_bytes()
    pieces = sentencepiece_tokenizer._parse(data).pieces
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece.piece for piece in pieces],
        "tokenizer.ggml.token_type": [piece.type for piece in pieces],
        "tokenizer.ggml.scores": [piece.score for piece in pieces],
        "tokenizer.ggml.bos_token_id": 1,
    }
    ours = Tokenizer.from_str(tokenizer_files(metadata, 64)["tokenizer.json"])
    oracle = Tokenizer.from_str(sentencepiece_tokenizer.tokenizer_json(data, {}, {}))
    chat = "<s>[INST] the quick fox [/INST] lazy dog</s><s>[INST] over\n\nthe box [/INST]"
    for text in (chat, "the fox", "the</s>fox", "</s>\n the"):
        for adds_special_tokens in (False, True):
            expected = oracle.encode(text, add_special_tokens=adds_special_tokens).ids
            assert ours.encode(text, add_special_tokens=adds_special_tokens).ids == expected, text


def test_qwen2_composes_letters_and_their_marks_first() -> None:
    assert made("qwen2").encode("cafe\u0301").ids == made("qwen2").encode("caf\u00e9").ids
    assert made("llama-bpe").encode("cafe\u0301").ids != made("llama-bpe").encode("caf\u00e9").ids


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one two, three", ["one", "Ġtwo", ",", "Ġthree"]),
        ("Hi! 12 a|b", ["Hi", "!", "Ġ12", "Ġa", "|", "b"]),
        ("x\u3002y\u0964z", ["x", "ãĢĤ", "y", "à¥¤", "z"]),
    ],
)
def test_bloom_cuts_at_spaces_and_punctuation(text: str, expected: list[str]) -> None:
    assert pieces(made("bloom"), text) == expected


def test_an_unknown_word_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(GGUFError, match="pre-tokenizer 'own' is not known; known are smollm, starcoder, llama-bpe"):
        made("own")


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("tokens", "abc", "not a list of texts"),
        ("merges", [1], "not a list of texts"),
        ("merges", ["a b", "ab a"], "makes 'aba', which is no token of the file"),
        ("token_type", 1, "not a list of whole numbers"),
        ("token_type", [1.5], "not a list of whole numbers"),
        ("pre", ["qwen2"], "not a text"),
        ("add_bos_token", "yes", "not true or false"),
        *[
            (f"{name}_token_id", value, "not the id of one of 257 tokens")
            for name in ("bos", "eos", "unknown", "padding")
            for value in (257, -2, 2**64 - 1, True, 1.0, "1", [1])
        ],
    ],
)
def test_a_value_of_another_type_is_refused_by_the_name_of_its_key(key: str, value: Any, why: str) -> None:
    with pytest.raises(GGUFError, match=f"^tokenizer.ggml.{key} .*{why}"):
        made("qwen2", **{f"tokenizer__ggml__{key}": value})


def test_scores_of_another_type_are_refused() -> None:
    with pytest.raises(GGUFError, match=r"^tokenizer.ggml.scores is \['x'\], not a list of numbers"):
        spm([], tokenizer__ggml__scores=["x"])


@pytest.mark.parametrize("none", [-1, 2**32 - 1])
def test_a_file_may_say_that_it_has_no_such_token(none: int) -> None:
    """As llama.cpp writes it, and reads it where it has a u32."""
    metadata: dict[str, Any] = {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.merges": []}
    metadata |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.eos_token_id": 1}
    metadata |= {f"tokenizer.ggml.{name}_token_id": none for name in ("bos", "padding")}
    assert json.loads(tokenizer_files(metadata, 64)["special_tokens_map.json"]) == {"eos_token": "b"}


def test_what_ends_a_turn_is_special_whatever_type_a_file_gives_it() -> None:
    """Phi-3's converter wrote user-defined, Gemma's normal."""
    metadata = {"tokenizer.ggml.tokens": ["a", "<|end|>", "<end_of_turn>"], "tokenizer.ggml.token_type": [1, 4, 1]}
    assert typed_tokens(metadata) == [("a", 1), ("<|end|>", 3), ("<end_of_turn>", 3)]
