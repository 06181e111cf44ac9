"""Latent attention on a GPU: formula and arguments as in `kernels.oracles.reference_latent.latent_attention`.

    out[t, h] = sum_j softmax_j(scale * query[t, h] . key[j]) key[j, :latent]

Source: DeepSeek-V2, 2024 (arXiv:2405.04434); Kwon et al. 2023 (arXiv:2309.06180) for the paged cache. Layout: cache
[num_blocks, 1, block_size, latent + turned], a block's tokens and elements contiguous; blocks may lie apart. query
[T, num_heads, latent + turned], out [T, num_heads, latent], a token's heads contiguous.

`plan_kernel` decides, once a forward pass, which sequences are split: `pieces_kernel` and `join_kernel` compute these,
`whole_kernel` the others. With `is_batch_invariant` both have tiles of one shape and add up in one order, so that a
token has the same bits alone, in a chunk and in a prompt. Nothing here reads a tensor's values, so that a graph can
capture it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kernels.gpu.attention import segment
from kernels.gpu.attention.card import TYPES, card_of
from kernels.gpu.attention.joins import join_launch
from kernels.gpu.attention.plans import OfPlan, plan_of
from kernels.gpu.attention.scratch import AttentionPass, new_pass_of
from kernels.gpu.attention.tiling import padded
from kernels.gpu.latent import kinds
from kernels.gpu.latent.pieces import pieces_kernel
from kernels.gpu.latent.tiling import ALL_REGISTERS, LatentCut, latent_tiling
from kernels.gpu.latent.whole import whole_kernel
from kernels.gpu.launch import Launch, once_a_layout
from kernels.gpu.variant import Variant

_LOG2_E = segment.LOG2_E.value


def latent_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    is_batch_invariant: bool = False,
    shared: AttentionPass | None = None,
) -> None:
    """See `kernels.oracles.reference_latent.latent_attention`; `shared` as for `paged_attention`.

    Without `is_batch_invariant` a token's bits may depend on which of the two kernels computes it.

    Types: float32, float16 or bfloat16, and of the cache one with no more bits. Raises ValueError where a shape,
    stride, type or device does not fit.
    """
    tensors = out, query, cache, block_tables, seq_lens, query_starts
    bound = _bound(tensors, scale, max_query_len > 1, is_batch_invariant)
    if bound is None:
        return
    latent_size, multiprocessors = out.shape[2], bound.num_multiprocessors
    if shared is None:
        shared = new_pass_of(query, latent_size, len(seq_lens), max_seq_len, multiprocessors)
    scratch = shared.scratch
    plan = plan_of(shared, bound.of_plan, query, latent_size, seq_lens, query_starts, max_seq_len, multiprocessors)
    lines = (scratch.sums, scratch.maxima, scratch.totals)
    read = (plan, query, cache, block_tables, seq_lens, query_starts)
    if bound.whole is not None:
        bound.whole(out, scratch.kept_sums, scratch.kept_maxima, scratch.kept_totals, *read)
    bound.pieces(*lines, *read)
    bound.join(out, *lines, plan, seq_lens, query_starts, None, None)


@dataclass(frozen=True, slots=True)
class _Launches:
    """Of one layout of tensors."""

    of_plan: OfPlan
    num_multiprocessors: int
    whole: Launch | None  # where all sequences have one new token
    pieces: Launch
    join: Launch


@once_a_layout
def _bound(
    out: torch.Tensor,
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    scale: float,
    has_several: bool,
    is_batch_invariant: bool,
) -> _Launches | None:
    """`has_several`: a sequence may have several new tokens. None: there are no tokens."""
    _check(out, query, cache, block_tables, seq_lens, query_starts, scale)
    num_sequences, (num_tokens, num_heads, cached_size) = seq_lens.numel(), query.shape
    if not num_tokens or not num_sequences:
        return None
    latent_size, card = out.shape[2], card_of(query.device)
    rotary_size, programs = cached_size - latent_size, card.num_multiprocessors
    of_card = card.capability, card.max_shared_bytes
    cut = latent_tiling(
        num_heads, latent_size, rotary_size, query.element_size(), *of_card, is_batch_invariant=is_batch_invariant
    )
    kept: dict[str, Any] = {
        "HEADS": num_heads,
        "BLOCK_SIZE": cache.shape[2],
        "LATENT": latent_size,
        "LATENT_TILE": padded(latent_size),
        "TURNED": rotary_size,
        "TURNED_TILE": padded(rotary_size),
        "DOT_TYPE": card.dot_type(query.dtype),
        "maxnreg": ALL_REGISTERS,
    }
    numbers = (query.stride(0), cache.stride(0), block_tables.stride(0), scale * _LOG2_E)
    of_whole, of_pieces = _options(cut.whole), _options(cut.pieces)
    whole = Launch(whole_kernel, (programs,), (num_sequences, out.stride(0), *numbers), **of_whole, **kept)
    pieces = Launch(
        pieces_kernel,
        (cut.piece_programs * programs,),
        (num_sequences, *numbers),
        PROGRAMS=cut.piece_programs,
        **of_pieces,
        **kept,
    )
    join = join_launch(
        num_sequences,
        num_tokens,
        num_heads,
        latent_size,
        heads=cut.joined_heads,
        heads_of_scale=num_heads,
        out_stride=out.stride(0),
        window=0,
        num_multiprocessors=programs,
    )
    of_plan = OfPlan(0, 1, num_heads, cut.pieces.key_tile, cut.pieces.rows, cut.whole.rows)
    return _Launches(of_plan, programs, whole if has_several else None, pieces, join)


def _options(cut: LatentCut) -> dict[str, int]:
    of_tile = {"ROWS": cut.rows, "KEY_TILE": cut.key_tile, "JOINS": cut.joins}
    return {**of_tile, "num_warps": cut.num_warps, "num_stages": cut.stages}


def _check(
    out: torch.Tensor,
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    scale: float,
) -> None:
    if query.dim() != 3 or out.shape[:2] != query.shape[:2] or out.dtype != query.dtype or query.dtype not in TYPES:
        raise ValueError(f"out {tuple(out.shape)} {out.dtype} does not fit query {tuple(query.shape)} {query.dtype}")
    if cache.dim() != 4 or cache.shape[1] != 1 or cache.shape[3] != query.shape[2] or cache.dtype not in TYPES:
        raise ValueError(f"query {tuple(query.shape)} does not fit a cache of {tuple(cache.shape)} {cache.dtype}")
    if cache.element_size() > query.element_size():
        raise ValueError(f"tiles of a cache of {cache.dtype} have no place beside queries of {query.dtype}")
    if not 0 < out.shape[2] < query.shape[2]:
        raise ValueError(f"latents of {out.shape[2]} are not a part of keys of {query.shape[2]}")
    if cache.stride()[2:] != (cache.shape[3], 1):
        raise ValueError(f"a block's tokens and elements are not contiguous: strides {cache.stride()}")
    for name, x in (("out", out), ("query", query)):
        if len(x) and x.stride()[1:] != (x.shape[2], 1):
            raise ValueError(f"a token's heads are not contiguous in {name}: strides {x.stride()}")
    for name, x, size in (("seq_lens", seq_lens, len(block_tables)), ("query_starts", query_starts, len(seq_lens) + 1)):
        if x.dtype != torch.int32 or x.shape != (size,) or not x.is_contiguous():
            raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}, not contiguous int32 ({size},)")
    if block_tables.dtype != torch.int32 or block_tables.stride(1) != 1:
        raise ValueError("the rows of block_tables are not contiguous int32")
    if len({x.device for x in (out, query, cache, block_tables, seq_lens, query_starts)}) > 1:
        raise ValueError("tensors lie on more than one device")
    if scale <= 0:
        raise ValueError(f"scale {scale} is not positive")


def variants() -> Iterator[Variant]:
    """Those of every kind of model, and of every cut of them."""
    return kinds.variants_of_all()
