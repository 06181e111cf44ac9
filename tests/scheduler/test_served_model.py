"""Which workers may serve one model together."""

from __future__ import annotations

from typing import Any

import pytest

from protos import worker_pb2
from scheduler_svc.served_model import ServedModel
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
