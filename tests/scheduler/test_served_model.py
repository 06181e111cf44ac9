"""What makes workers serve one model together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.byte_tokenizer import byte_tokenizer_files, write_byte_tokenizer
from protos import worker_pb2
from scheduler_svc.models.model_description import decode_model_with, encode_model
from scheduler_svc.models.served_model import ServedModel, fingerprint_of
from scheduler_svc.text.tokenizer import Tokenizer

SIZES = worker_pb2.InitializeResponse(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=64, num_device_blocks=9)


def info(**changes: Any) -> worker_pb2.WorkerInfo:
    same: dict[str, Any] = {"model": "tiny", "dtype": "float32", "kv_cache_dtype": "float32", "block_size": 4}
    return worker_pb2.WorkerInfo(**same | changes)


def test_a_worker_that_computes_the_same_serves_the_same_whatever_its_bounds_and_its_name() -> None:
    other = info(max_num_seqs=3, max_model_len=9, device="cuda:1", model="other")
    assert fingerprint_of(info(), "abc") == fingerprint_of(other, "abc")


@pytest.mark.parametrize(
    "changes",
    [
        {"model_hash": "0123456789abcdef"},
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "bfloat16"},
        {"quantization": "int8"},
        {"instructions": "amx"},
    ],
)
def test_what_would_give_other_tokens_is_another_model(changes: dict[str, Any]) -> None:
    assert fingerprint_of(info(**changes), "abc") != fingerprint_of(info(), "abc")


def test_another_tokenizer_than_the_workers_makes_another_model_to_go_on_with(tmp_path: Path) -> None:
    """`--tokenizer`: a prompt is other tokens with it, and an output's tokens are other text."""
    for seed, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        write_byte_tokenizer(tmp_path / name, 400, seed)
    a, b = (ServedModel.from_worker(info(), SIZES, Tokenizer.from_folder(tmp_path / name), "tiny") for name in "ab")
    assert a.fingerprint != b.fingerprint
    assert decode_model_with(encode_model(b), Tokenizer(b.tokenizer.files)).fingerprint == b.fingerprint


def test_the_workers_own_tokenizer_counts_as_the_same_wherever_it_was_read(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, 400)
    (tmp_path / "README.md").write_text("not of a tokenizer")
    files, sha256 = byte_tokenizer_files(400)
    assert Tokenizer.from_folder(tmp_path).sha256 == Tokenizer(dict(reversed(files.items()))).sha256 == sha256


@pytest.mark.parametrize(
    ("named", "vocab_size", "expected"),
    [((), 400, (257,)), ((9,), 400, (9, 257)), ((257, 9), 400, (257, 9)), ((9,), 257, (9,))],
    ids=["no end", "the end of its base", "the same", "a token without a row"],
)
def test_outputs_end_at_the_tokenizers_own_end_too(
    tmp_path: Path, named: tuple[int, ...], vocab_size: int, expected: tuple[int, ...]
) -> None:
    """As vLLM has it, for fine-tunes whose configs are still those of the base."""
    write_byte_tokenizer(tmp_path, 400)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    tokenizer = Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": tokenizer.token(257)}))
    worker = info(eos_token_ids=named, vocab_size=vocab_size)
    assert ServedModel.from_worker(worker, SIZES, Tokenizer.from_folder(tmp_path), "tiny").eos_token_ids == expected
