"""Latent attention over a paged cache, beside PyTorch's on the same latents laid out densely; and what precedes it.

Sizes are DeepSeek's: latents of 512 and 64 turned elements; 16 heads as V2-Lite and each of eight ranks have them, 128
as V3 has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

from kernels.bench.case import Call, Calls, Case, Goal, Setting
from kernels.bench.shapes import BLOCK_SIZE
from kernels.gpu.operations import latent_and_cache, latent_attention
from kernels.oracles import reference_latent

_LATENT, _TURNED = 512, 64
_SCALE = (128 + _TURNED) ** -0.5
# (sequences, new tokens, tokens in all, heads)
_SHAPES = ((64, 1, 4096, 16), (1, 1, 65536, 16), (64, 1, 4096, 128), (128, 1, 1024, 128))
_PROMPTS = ((1, 4096, 4096, 16), (1, 512, 8192, 128))
_PRODUCT = (4096, 4096, 4096)  # whose rate stands for the card's matrix units


def cases(setting: Setting) -> Iterator[Case]:
    """Decode steps, prompts, and the cache's lines of a step."""
    for num_seqs, query_len, seq_len, num_heads in ((3, 1, 40, 3), (2, 3, 20, 3)) if setting.is_tiny else _SHAPES:
        yield _attention(setting, num_seqs, query_len, seq_len, num_heads)
    for num_seqs, query_len, seq_len, num_heads in () if setting.is_tiny else _PROMPTS:
        yield _attention(setting, num_seqs, query_len, seq_len, num_heads)
    for num_tokens, num_heads in ((3, 2),) if setting.is_tiny else ((64, 16), (8192, 16), (64, 128)):
        yield _cache(setting, num_tokens, num_heads)


def _attention(setting: Setting, num_seqs: int, query_len: int, seq_len: int, num_heads: int) -> Case:
    pairs = num_seqs * (query_len * (seq_len - query_len) + query_len * (query_len + 1) // 2)  # of query and key
    cache, tables = num_seqs * seq_len * (_LATENT + _TURNED), 4 * num_seqs * -(-seq_len // BLOCK_SIZE)
    rows = num_seqs * query_len * num_heads * (2 * _LATENT + _TURNED)
    kind = "decode" if query_len == 1 else f"{query_len:,} tokens"
    # Of 128 heads a key's 1,152 bytes are multiplied 128 times: then the matrix units are the bound.
    is_product = query_len > 1 or num_heads > 64
    return Case(
        op="latent_attention",
        shape=f"{kind} {num_seqs} x {seq_len:,}, {num_heads} heads",
        num_bytes=(cache + rows) * setting.dtype.itemsize + tables,
        flops=2 * pairs * num_heads * (2 * _LATENT + _TURNED),
        product=((16, 16, 16) if setting.is_tiny else _PRODUCT) + (setting.dtype,) if is_product else None,
        build=lambda: _calls(setting, num_seqs, query_len, seq_len, num_heads),
        goal=Goal(0.5 if is_product else 0.7),
    )


def _calls(setting: Setting, num_seqs: int, query_len: int, seq_len: int, num_heads: int) -> Calls:
    device, dtype, size = setting.device, setting.dtype, _LATENT + _TURNED
    blocks_of_one = -(-seq_len // BLOCK_SIZE)
    cache = torch.randn(num_seqs * blocks_of_one, 1, BLOCK_SIZE, size, dtype=dtype, device=device)
    tables = torch.randperm(len(cache), device=device).int().view(num_seqs, blocks_of_one)
    query = torch.randn(num_seqs * query_len, num_heads, size, dtype=dtype, device=device)
    out = torch.empty(num_seqs * query_len, num_heads, _LATENT, dtype=dtype, device=device)
    seq_lens = torch.full((num_seqs,), seq_len, dtype=torch.int32, device=device)
    starts = query_len * torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
    places: tuple[torch.Tensor, ...] = (tables, seq_lens, starts)

    def ours() -> torch.Tensor:
        latent_attention(out, query, cache, *places, scale=_SCALE, max_query_len=query_len, max_seq_len=seq_len)
        return out.view(num_seqs, query_len, num_heads, _LATENT)

    keys = cache[tables.long(), 0].flatten(1, 2)[:, None, :seq_len]  # [sequences, 1, tokens, size]
    by_head = query.view(num_seqs, query_len, num_heads, size).transpose(1, 2).contiguous()
    positions = torch.arange(seq_len, device=device)
    mask = positions <= positions[seq_len - query_len :, None]

    def heads_as_rows() -> torch.Tensor:
        rows = by_head.transpose(1, 2)  # one new token: all heads see the same keys
        return functional.scaled_dot_product_attention(rows, keys, keys[..., :_LATENT], scale=_SCALE)

    def keys_for_each_head() -> torch.Tensor:
        every = keys.expand(-1, num_heads, -1, -1)
        values = every[..., :_LATENT]
        return functional.scaled_dot_product_attention(by_head, every, values, mask, scale=_SCALE).transpose(1, 2)

    if query_len == 1:
        return Calls(ours, {"torch, heads as rows": heads_as_rows})
    return Calls(ours, {"torch, keys for each head": keys_for_each_head})


def _cache(setting: Setting, num_tokens: int, num_heads: int) -> Case:
    elements = num_tokens * (2 * num_heads * _TURNED + 2 * (_LATENT + _TURNED))
    return Case(
        op="latent_and_cache",
        shape=f"{num_tokens:,} tokens, {num_heads} heads",
        num_bytes=elements * setting.dtype.itemsize + num_tokens * (16 + 4 * _TURNED),
        build=lambda: _cache_calls(setting, num_tokens, num_heads),
    )


def _cache_calls(setting: Setting, num_tokens: int, num_heads: int) -> Calls:
    device, dtype, size = setting.device, setting.dtype, _LATENT + _TURNED
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    query = torch.randn(num_tokens, num_heads, 128 + _TURNED, dtype=dtype, device=device)[..., 128:]
    new, norm = (torch.randn(*shape, dtype=dtype, device=device) for shape in ((num_tokens, size), (_LATENT,)))
    positions, slots = (torch.arange(num_tokens, device=device) for _ in range(2))
    cos_sin = torch.randn(num_tokens, _TURNED, device=device)

    def of(operation: Callable[..., None]) -> Call:
        """Each with a cache of its own, which is what is compared."""
        turned = torch.empty(num_tokens, num_heads, size, dtype=dtype, device=device)[..., _LATENT:]
        cache = torch.zeros(num_blocks, 1, BLOCK_SIZE, size, dtype=dtype, device=device)
        given = (turned, query, new, norm, positions, cos_sin, cache, slots)

        def run() -> torch.Tensor:
            operation(*given, norm_eps=1e-6, are_pairs=True)
            return cache

        return run

    return Calls(of(latent_and_cache), {"torch": of(reference_latent.latent_and_cache)})
