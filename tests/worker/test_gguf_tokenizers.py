"""How text is cut before bytes are merged, for each word by which GGUF files name it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from octavo.models.errors import GGUFError
from octavo.models.gguf_tokenizer import tokenizer_files, typed_tokens
from tests.scheduler.tiny_tokenizers import TEXTS

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


def test_marks_of_phi3_take_in_what_follows_and_parts_behind_them_begin_with_a_space() -> None:
    """As its tokenizer.json has them; so the newlines of its template are no tokens."""
    words = ["▁", "t", "h", "e", "th", "the", "▁the"]
    marks = ["<|user|>", "<|end|>", "<|endoftext|>"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *marks]
    metadata: dict[str, Any] = {
        "general.architecture": "phi3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 4] + [6] * 256 + [1] * len(words) + [3] * len(marks),
        "tokenizer.ggml.scores": [0.0] * 259 + [-10.0, -9, -9, -9, -3, -2, -1] + [0.0] * len(marks),
    }
    chat = "<|user|>\nthe<|end|>\n<|user|> the</s>\nthe<|endoftext|>\nthe"

    def ids(**keys: str) -> list[int]:
        tokenizer = Tokenizer.from_str(tokenizer_files(metadata | keys, 64)["tokenizer.json"])
        return list(tokenizer.encode(chat).ids)

    user, end, the, newline = 266, 267, 265, 3 + ord("\n")
    assert ids() == [user, the, end, user, the, 2, the, 268, 259, newline, 264]
    assert tokens[264:266] == ["the", "▁the"]
    assert ids(**{"general.architecture": "llama"})[:3] == [user, newline, 264]


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


def test_what_ends_a_turn_is_special_whatever_type_a_file_gives_it() -> None:
    """Phi-3's converter wrote user-defined, Gemma's normal."""
    metadata = {"tokenizer.ggml.tokens": ["a", "<|end|>", "<end_of_turn>"], "tokenizer.ggml.token_type": [1, 4, 1]}
    assert typed_tokens(metadata) == [("a", 1), ("<|end|>", 3), ("<end_of_turn>", 3)]
