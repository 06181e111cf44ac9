"""tokenizer.json made of tekken.json, against the rule by which its ids are defined and against `transformers`."""

from __future__ import annotations

import base64
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from octavo.models.errors import TekkenError
from octavo.models.tekken_tokenizer import tokenizer_json
from scheduler_svc.text.tokenizer import Tokenizer
from tests.scheduler.tiny_tokenizers import TEXTS
from worker_svc.models.errors import ModelError
from worker_svc.tokenizers.tokenizer_files import TokenizerFiles

PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]"]
NUM_SPECIAL = 10
_WORDS = ["th", "he", "the", " the", "in", "qu", "aa", "aaa", "aaaa", "ab", "ba", "aba", "bab", "é", " ab", "日"]
TOKENS = [bytes([byte]) for byte in range(256)] + [word.encode() for word in _WORDS]


def written(**changes: Any) -> bytes:
    vocab = [{"rank": i, "token_bytes": base64.b64encode(token).decode()} for i, token in enumerate(TOKENS)]
    content: dict[str, Any] = {
        "config": {
            "pattern": PATTERN,
            "default_vocab_size": NUM_SPECIAL + len(TOKENS),
            "default_num_special_tokens": NUM_SPECIAL,
        },
        # One more than the model has.
        "vocab": [*vocab, {"rank": len(vocab), "token_bytes": base64.b64encode(b"quin").decode()}],
        "special_tokens": [{"rank": i, "token_str": text} for i, text in enumerate(SPECIAL)],
    }
    return json.dumps({key: value for key, value in (content | changes).items() if value is not None}).encode()


def sent(folder: Path) -> Tokenizer:
    contents: dict[str, bytes] = {}
    for chunk in TokenizerFiles.from_folder(folder).chunks():
        contents[chunk.file_name] = contents.get(chunk.file_name, b"") + chunk.data
    return Tokenizer(contents)


def by_definition(text: str) -> list[int]:
    """In each piece, of all neighbours those that form the earliest token are joined, the leftmost first."""
    ranks = {token: rank for rank, token in enumerate(TOKENS)}
    ids: list[int] = []
    for piece, _ in pre_tokenizers.Split(Regex(PATTERN), behavior="isolated").pre_tokenize_str(text):
        parts = [bytes([byte]) for byte in piece.encode()]
        if piece.encode() in ranks:
            parts = [piece.encode()]
        while True:
            joined = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
            if not joined:
                break
            _, i = min(joined)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [NUM_SPECIAL + ranks[part] for part in parts]
    return ids


def test_ids_are_those_of_the_definition(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_bytes(written())
    tokenizer, numbers = sent(tmp_path), random.Random(5)
    random_texts = ["".join(numbers.choices("aabbe th", k=30)) for _ in range(200)]
    for text in [*TEXTS, *random_texts, "aaaaaaa ababab", "日本 éa"]:
        if "<" in text or "[" in text:
            continue
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == by_definition(text), text
        assert tokenizer.decode(ids) == text


def test_special_tokens_have_the_first_ids_and_a_prompt_begins(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_bytes(written())
    tokenizer = sent(tmp_path)
    assert tokenizer.encode("[INST]the") == [1, 3, NUM_SPECIAL + TOKENS.index(b"the")]
    assert tokenizer.special_token_ids == set(range(NUM_SPECIAL)) and tokenizer.token(7) == "<SPECIAL_7>"
    assert tokenizer.vocab_size == NUM_SPECIAL + len(TOKENS)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False, "add_eos_token": True}))
    assert sent(tmp_path).encode("the") == [NUM_SPECIAL + TOKENS.index(b"the"), 2]


def test_ids_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers.integrations.mistral.tokenizer import MistralConverter

    (tmp_path / "tekken.json").write_bytes(written())
    oracle, tokenizer = MistralConverter(str(tmp_path / "tekken.json")).converted(), sent(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text, add_special_tokens=False) == oracle.encode(text).ids, text


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"special_tokens": None}, "it does not name its special tokens"),
        ({"special_tokens": [{"rank": 10, "token_str": "x"}]}, "a special token has id 10, though there are 10"),
        ({"vocab": None}, "this is no tekken file: KeyError 'vocab'"),
        ({"config": {"pattern": "("}}, "it cannot be converted: "),
    ],
)
def test_what_cannot_be_converted_is_one_line(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(TekkenError, match=why):
        tokenizer_json(written(**changes), {})
    (tmp_path / "tekken.json").write_bytes(b"{")
    with pytest.raises(ModelError, match=r"tekken\.json: this is no tekken file"):
        sent(tmp_path)
