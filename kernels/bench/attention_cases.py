"""Attention over a paged cache with random block tables, beside PyTorch's on the same tokens laid out densely.

Peers read no block table: what they are given is the cheapest form of the same problem.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.bench.case import Call, Calls, Case, Goal, Setting
from kernels.bench.shapes import BLOCK_SIZE, HEAD_SIZE, NUM_HEADS, NUM_KV_HEADS
from kernels.gpu.attention.paged_attention import card_tiling
from kernels.gpu.operations import paged_attention

Heads = tuple[int, int, int]
# (sequences, context)
_DECODES = ((8, 1024), (64, 1024), (128, 1024), (256, 1024), (32, 4096), (16, 32768), (1, 32768), (1, 131072))
# (sequences, new tokens, context before them)
_PREFILLS = ((1, 4096, 0), (4, 4096, 0), (1, 8192, 0), (1, 16384, 0), (1, 2048, 6144), (8, 512, 3584))
# Few new tokens after a long context: a turn of a chat, tokens that were guessed. (sequences, new tokens, context)
_FEWS = ((1, 32, 32768), (1, 8, 131072), (1, 256, 65536), (16, 32, 8192))
# Heads, key/value heads, their size.
_LLAMA, _GEMMA, _TINY = (NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE), (16, 8, 256), (8, 2, 32)
_FLEX_SHAPES = ((64, 1, 1024), (16, 1, 32768), (1, 4096, 4096), (1, 2048, 8192))  # each is compiled for many seconds
_LARGE_BYTES = 512 << 20  # of keys and values: from here on decode attention should reach the bandwidth of a copy
_PRODUCT = (4096, 4096, 4096)  # whose rate stands for the card's matrix units


def cases(setting: Setting) -> Iterator[Case]:
    """One decode step a context and batch, prompts with and without a cached beginning, and few tokens after one."""
    for num_seqs, context in ((3, 40),) if setting.is_tiny else _DECODES:
        yield _decode(setting, num_seqs, context)
    for prefill in ((2, 20, 0), (1, 7, 13)) if setting.is_tiny else _PREFILLS:
        yield _prefill(setting, *prefill)
    yield _prefill(setting, *((1, 70, 0) if setting.is_tiny else (1, 8192, 0)), has_other_loop=True)
    for few in ((1, 3, 13),) if setting.is_tiny else _FEWS:
        yield _few(setting, *few)
    if not setting.is_tiny:
        yield _decode(setting, 64, 4096, _GEMMA)
        yield _prefill(setting, 1, 4096, 0, _GEMMA)


def _decode(setting: Setting, num_seqs: int, context: int, heads: Heads | None = None) -> Case:
    heads = heads or _usual(setting)
    num_bytes = _bytes(setting, num_seqs, 1, context, heads)
    is_large = num_seqs > 1 and num_bytes >= _LARGE_BYTES
    return Case(
        op="paged_attention",
        shape=f"decode {num_seqs} x {context:,}{_said(heads)}",
        num_bytes=num_bytes,
        flops=4 * num_seqs * heads[0] * heads[2] * context,
        build=lambda: _calls(setting, num_seqs, 1, context, heads),
        goal=Goal(0.85 if is_large else 0.7),
    )


def _few(setting: Setting, num_seqs: int, query_len: int, before: int) -> Case:
    """Bound by reading keys and values; the goal is 1.5 times as long."""
    heads = _usual(setting)
    return Case(
        op="paged_attention",
        shape=f"few {num_seqs} x {query_len:,} after {before:,}",
        num_bytes=_bytes(setting, num_seqs, query_len, query_len + before, heads),
        flops=4 * num_seqs * heads[0] * heads[2] * query_len * before,
        build=lambda: _calls(setting, num_seqs, query_len, query_len + before, heads),
        goal=Goal(1 / 1.5),
    )


def _usual(setting: Setting) -> Heads:
    return _TINY if setting.is_tiny else _LLAMA


def _said(heads: Heads) -> str:
    return "" if heads in (_LLAMA, _TINY) else f", heads of {heads[2]}"


def _prefill(
    setting: Setting,
    num_seqs: int,
    query_len: int,
    before: int,
    heads: Heads | None = None,
    has_other_loop: bool = False,
) -> Case:
    """`has_other_loop`: segments are joined where the card's own tiling has a loop each, or the other way round."""
    heads = heads or _usual(setting)
    pairs = query_len * before + query_len * (query_len + 1) // 2  # of query and key, in one sequence and head
    shape = f"prefill {num_seqs} x {query_len:,}{_said(heads)}{', other loop' * has_other_loop}"
    return Case(
        op="paged_attention",
        shape=f"{shape} after {before:,}" if before else shape,
        num_bytes=_bytes(setting, num_seqs, query_len, query_len + before, heads),
        flops=4 * num_seqs * heads[0] * heads[2] * pairs,
        product=(*_PRODUCT, setting.dtype) if not setting.is_tiny else (16, 16, 16, setting.dtype),
        build=lambda: _calls(setting, num_seqs, query_len, query_len + before, heads, has_other_loop),
        goal=Goal(0.85, of_shape="prefill 1 x 8,192") if before else Goal(0.75, peer="cuDNN"),
    )


def _bytes(setting: Setting, num_seqs: int, query_len: int, seq_len: int, heads: Heads) -> int:
    num_heads, num_kv_heads, head_size = heads
    cache = 2 * num_seqs * seq_len * num_kv_heads * head_size * setting.dtype.itemsize
    tables = 4 * num_seqs * -(-seq_len // BLOCK_SIZE)
    return cache + tables + 2 * num_seqs * query_len * num_heads * head_size * setting.dtype.itemsize


def _calls(
    setting: Setting, num_seqs: int, query_len: int, seq_len: int, heads: Heads, has_other_loop: bool = False
) -> Calls:
    num_heads, num_kv_heads, head_size = heads
    device, dtype = setting.device, setting.dtype
    blocks_of_one = -(-seq_len // BLOCK_SIZE)
    num_blocks = num_seqs * blocks_of_one
    caches = torch.randn(2, num_blocks, num_kv_heads, BLOCK_SIZE, head_size, dtype=dtype, device=device)
    tables = torch.randperm(num_blocks, device=device).int().view(num_seqs, blocks_of_one)
    query = torch.randn(num_seqs * query_len, num_heads, head_size, dtype=dtype, device=device)
    out = torch.empty_like(query)
    arguments: dict[str, Any] = {
        "block_tables": tables,
        "seq_lens": torch.full((num_seqs,), seq_len, dtype=torch.int32, device=device),
        "query_starts": query_len * torch.arange(num_seqs + 1, dtype=torch.int32, device=device),
        "scale": head_size**-0.5,
        "max_query_len": query_len,
        "max_seq_len": seq_len,
    }
    if has_other_loop:
        cut = card_tiling(device, head_size, dtype.itemsize, num_heads // num_kv_heads)
        arguments["cut"] = dataclasses.replace(cut, joins=not cut.joins)

    def ours() -> torch.Tensor:
        paged_attention(out, query, caches[0], caches[1], **arguments)
        return out.view(num_seqs, query_len, num_heads, head_size).transpose(1, 2)  # as the peers have it

    # [sequences, kv heads, tokens, head size]
    key, value = (cache[tables.long()].transpose(1, 2).flatten(2, 3)[:, :, :seq_len].contiguous() for cache in caches)
    dense_query = query.view(num_seqs, query_len, num_heads, head_size).transpose(1, 2).contiguous()
    return Calls(ours, _peers(dense_query, key, value))


def _peers(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Mapping[str, Call]:
    """By name; each gives [sequences, heads, tokens, head size]."""
    backends = {"math": SDPBackend.MATH}
    if query.is_cuda:
        backends = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    peers: dict[str, Call] = {
        name: functools.partial(_scaled_dot_product, backend, query, key, value) for name, backend in backends.items()
    }
    num_queries, seq_len = query.shape[2], key.shape[2]
    if num_queries > 1:  # a backend may not take groups of heads; with a prompt this long their bytes hardly count
        group = query.shape[1] // key.shape[1]
        heads = (key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1))
        for name, backend in backends.items():
            peers[f"{name}, heads repeated"] = functools.partial(_scaled_dot_product, backend, query, *heads)
    if not query.is_cuda or (query.shape[0], num_queries, seq_len) in _FLEX_SHAPES:
        peers["flex_attention"] = _flex(query, key, value)
    return peers


def _scaled_dot_product(
    backend: SDPBackend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    query_len, seq_len = query.shape[2], key.shape[2]
    options: dict[str, Any] = {}
    if query_len == seq_len:
        options["is_causal"] = True
    elif query_len > 1:
        from torch.nn.attention.bias import causal_lower_right

        options["attn_mask"] = causal_lower_right(query_len, seq_len)
    with sdpa_kernel(backend):
        return functional.scaled_dot_product_attention(
            query, key, value, enable_gqa=query.shape[1] > key.shape[1], **options
        )


def _flex(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Callable[[], torch.Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask

    query_len, seq_len = query.shape[2], key.shape[2]
    mask = None
    if query_len > 1:

        def is_visible(batch: object, head: object, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return q + (seq_len - query_len) >= k

        mask = create_block_mask(is_visible, None, None, query_len, seq_len, device=query.device.type)
    attend = _compiled_flex(tuple(query.shape), seq_len, query.device.type)
    return lambda: attend(query, key, value, block_mask=mask, enable_gqa=True)


@functools.lru_cache(maxsize=1)
def _compiled_flex(query_shape: tuple[int, ...], seq_len: int, device: str) -> Callable[..., torch.Tensor]:
    """For one shape: what was compiled for others is forgotten, because so many kinds of one function are not kept."""
    from torch.nn.attention.flex_attention import flex_attention

    if device == "cpu":
        return flex_attention
    torch.compiler.reset()
    return torch.compile(flex_attention, dynamic=False)
