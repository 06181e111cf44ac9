"""How text is cut before bytes are merged, for each word by which GGUF files name it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from octavo.models.errors import GGUFError
from octavo.models.gguf_tokenizer import tokenizer_files
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


def made(pre: str) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*alphabet, "ab"],
        "tokenizer.ggml.merges": ["a b"],
    }
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
