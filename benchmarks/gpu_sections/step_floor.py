"""The least that a decode step of a Llama can take: the sum over its operations of what the card needs for each.

An operation needs the longer of two times: its bytes at the speed of a copy of as many bytes, and its operations at the
rate of the product at that very shape; attention is granted the share of the bandwidth that is its own goal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kernels.bench.ceilings import Ceilings

_ATTENTION_SHARE = 0.85  # of the bandwidth of a copy, the goal of decode attention over this much cache


@dataclass(frozen=True, slots=True)
class StepOp:
    """An operation of the step, `count` times in it."""

    name: str
    count: int
    num_bytes: int  # inputs read once, outputs written once
    product: tuple[int, int, int] | None = None  # m, n, k
    share: float = 1.0  # of the bandwidth


def operations(config: dict[str, Any], batch: int, context: int, itemsize: int) -> Iterator[StepOp]:
    """Operations of a decode step of `batch` sequences with `context` tokens each, by the keys of a `config.json`."""
    hidden, inner, vocab_size = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    num_layers, num_heads = config["num_hidden_layers"], config["num_attention_heads"]
    num_kv_heads = config["num_key_value_heads"]
    head_size = config.get("head_dim") or hidden // num_heads
    heads, kv_heads = num_heads * head_size, num_kv_heads * head_size

    def product(name: str, count: int, n: int, k: int) -> StepOp:
        return StepOp(name, count, (batch * k + n * k + batch * n) * itemsize, (batch, n, k))

    def rows(name: str, count: int, width: int) -> StepOp:
        """`width` elements of each sequence's row are read or written."""
        return StepOp(name, count, batch * width * itemsize)

    yield rows("embedding", 1, 2 * hidden)
    yield rows("norm and residual", 2 * num_layers + 1, 4 * hidden)
    yield product("query, key, value", num_layers, heads + 2 * kv_heads, hidden)
    yield rows("rotation and cache write", num_layers, 2 * heads + 4 * kv_heads)  # in one launch
    cache_bytes = batch * context * 2 * kv_heads * itemsize
    yield StepOp("attention", num_layers, cache_bytes + 2 * batch * heads * itemsize, share=_ATTENTION_SHARE)
    yield product("attention's output", num_layers, hidden, heads)
    yield product("gate and up", num_layers, 2 * inner, hidden)
    yield rows("silu and product", num_layers, 3 * inner)
    yield product("down", num_layers, hidden, inner)
    yield product("head", 1, vocab_size, hidden)
    yield StepOp("sampling", 1, batch * vocab_size * 4)  # logits are float32


def floor_us(op: StepOp, ceilings: Ceilings, dtype: torch.dtype) -> float:
    """Microseconds of all `count` of them."""
    us = op.num_bytes / (op.share * ceilings.copy_gb_per_s(op.num_bytes)) / 1e3
    if op.product is not None:
        m, n, k = op.product
        us = max(us, 2 * m * n * k / ceilings.matrix_tflops(m, n, k, dtype) / 1e6)
    return op.count * us
