"""Which workers may serve one model together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.byte_tokenizer import byte_tokenizer_files, write_byte_tokenizer
from protos import worker_pb2
from scheduler_svc.model_description import decode_model_with, encode_model
from scheduler_svc.served_model import ServedModel
from scheduler_svc.tokenizer import Tokenizer
from tests.scheduler.tiny_served_model import tiny_served_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return tiny_served_model(tmp_path_factory.mktemp("tokenizer"))


def info(**changes: Any) -> worker_pb2.WorkerInfo:
    same: dict[str, Any] = {"model": "tiny", "dtype": "float32", "kv_cache_dtype": "float32", "block_size": 4}
    return worker_pb2.WorkerInfo(**same | changes)


def test_a_worker_that_computes_the_same_fits_whatever_its_bounds(model: ServedModel) -> None:
    assert model.difference(info()) is None
    assert model.difference(info(max_num_seqs=3, max_model_len=9, device="cuda:1")) is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model_hash": "0123456789abcdef"}, "it serves tiny (0123456789ab), this pool tiny ()"),
        ({"dtype": "bfloat16"}, "its dtype is bfloat16, the pool's float32"),
        ({"kv_cache_dtype": "bfloat16"}, "its kv_cache_dtype is bfloat16, the pool's float32"),
        ({"quantization": "int8"}, "its quantization is int8, the pool's none"),
        ({"tokenizer_sha256": "abc"}, "its tokenizer (abc) is not the pool's ()"),
        ({"block_size": 8}, "its cache blocks hold 8 tokens, the pool's 4"),
    ],
)
def test_what_would_give_other_tokens_is_said(model: ServedModel, changes: dict[str, Any], why: str) -> None:
    assert model.difference(info(**changes)) == why


def test_another_tokenizer_than_the_workers_makes_another_model_to_go_on_with(
    model: ServedModel, tmp_path: Path
) -> None:
    """`--tokenizer`: a prompt is other tokens with it, and an output's tokens are other text."""
    write_byte_tokenizer(tmp_path, 400, seed=1)
    other = replace(model, tokenizer=Tokenizer.from_folder(tmp_path))
    assert other.fingerprint != model.fingerprint
    assert decode_model_with(encode_model(other), Tokenizer(other.tokenizer.files)).fingerprint == other.fingerprint


def test_the_workers_own_tokenizer_counts_as_the_same_wherever_it_was_read(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, 400)
    (tmp_path / "README.md").write_text("not of a tokenizer")
    files, sha256 = byte_tokenizer_files(400)
    assert Tokenizer.from_folder(tmp_path).sha256 == Tokenizer(dict(reversed(files.items()))).sha256 == sha256
