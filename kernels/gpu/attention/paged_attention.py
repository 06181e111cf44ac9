"""Paged attention on a GPU: formula and arguments as in `kernels.oracles.reference.paged_attention`.

    out[t, h] = sum_j softmax_j(bias(cap(scale * query[t, h] . key[j, h // group]))) value[j, h // group]

Source: Kwon et al. 2023 (arXiv:2309.06180) for the cache; `segment` for the rest. Layout: key_cache,
value_cache [num_blocks, num_kv_heads, block_size, head_size], a block's heads, tokens and elements contiguous; blocks
may lie apart (a layer of a store). out, query [T, num_heads, head_size], a token's heads contiguous.

`plan_kernel` decides, once a forward pass for each window, which sequences are split: those with one new token, and
those with few after a long context. `segment_kernel` and `join_kernel` compute these, `prefill_kernel` the others.
Nothing here reads a tensor's values, so that a graph can capture it: a decode step needs `max_query_len=1`.

A token has the same bits whatever runs beside it. Where the matrix units give a row the same sums in a tile of 64 rows
as in one of 128 (the same instructions are chosen for both), also whether it is computed alone, in a chunk or in a
whole prompt: docs/paged-attention.md says why, and what of it has been seen where. With `is_batch_invariant` both tiles
have 64 rows where nobody knows that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kernels.gpu.attention import kinds, segment
from kernels.gpu.attention.card import TYPES, card_of
from kernels.gpu.attention.decode import segment_kernel
from kernels.gpu.attention.joins import join_launch
from kernels.gpu.attention.plans import OfPlan, plan_of
from kernels.gpu.attention.prefill import prefill_kernel
from kernels.gpu.attention.scratch import AttentionPass, Scratch, new_pass_of, new_scratch, scratch_bytes
from kernels.gpu.attention.tiling import ALL_REGISTERS, MAX_HEAD_SIZE, Tiling, padded, tiling
from kernels.gpu.launch import Launch, once_a_layout
from kernels.gpu.variant import Variant

LOG2_E = segment.LOG2_E.value
_CACHE_TYPES = (*TYPES, torch.float8_e4m3fn)


def paged_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    alibi_slopes: torch.Tensor | None = None,
    sliding_window: int = 0,
    logit_soft_cap: float = 0.0,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    is_batch_invariant: bool = False,
    shared: AttentionPass | None = None,
    cut: Tiling | None = None,
) -> None:
    """See `kernels.oracles.reference.paged_attention`. `out` and `query` may be strided in their first dimension.

    `shared` is what all layers of one forward pass are given; without it this call makes a scratch and a plan of its
    own. Its scratch has to suffice for so many sequences of `max_seq_len`. Without `is_batch_invariant` a token's bits
    may depend on which of the two kernels computes it. `cut`: a tiling to be measured or tested in place of the card's
    own.

    Types: float32, float16 or bfloat16, and the caches in any of these or float8_e4m3fn. Raises ValueError where a
    shape, stride, type or device does not fit.
    """
    of_heads = alibi_slopes, sinks, key_scale, value_scale
    tensors = out, query, key_cache, value_cache, block_tables, seq_lens, query_starts, *of_heads
    bound = _bound(tensors, scale, max_query_len > 1, sliding_window, logit_soft_cap, is_batch_invariant, cut)
    if bound is None:
        return
    head_size, multiprocessors = query.shape[2], bound.num_multiprocessors
    if shared is None:
        shared = new_pass_of(query, head_size, len(seq_lens), max_seq_len, multiprocessors)
    scratch = shared.scratch
    plan = plan_of(shared, bound.of_plan, query, head_size, seq_lens, query_starts, max_seq_len, multiprocessors)
    lines = (scratch.sums, scratch.maxima, scratch.totals)
    kept_lines = (scratch.kept_sums, scratch.kept_maxima, scratch.kept_totals)
    read = (plan, query, key_cache, value_cache, block_tables, seq_lens, query_starts)
    if bound.prefill is not None:
        bound.prefill(out, *kept_lines, *read, *of_heads)
    bound.segment(*lines, *read, alibi_slopes, key_scale)
    bound.join(out, *lines, plan, seq_lens, query_starts, sinks, value_scale)


@dataclass(frozen=True, slots=True)
class _Launches:
    """Of one layout of tensors."""

    of_plan: OfPlan
    num_multiprocessors: int
    prefill: Launch | None  # where all sequences have one new token
    segment: Launch
    join: Launch


@once_a_layout
def _bound(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    scale: float,
    has_several: bool,
    sliding_window: int,
    logit_soft_cap: float,
    is_batch_invariant: bool,
    cut: Tiling | None,
) -> _Launches | None:
    """`has_several`: a sequence may have several new tokens. None: there are no tokens."""
    _check(out, query, key_cache, value_cache, block_tables, seq_lens, query_starts, scale)
    heads = {"alibi_slopes": (alibi_slopes, query.shape[1]), "sinks": (sinks, query.shape[1])}
    heads |= {"key_scale": (key_scale, key_cache.shape[1]), "value_scale": (value_scale, key_cache.shape[1])}
    for name, (x, size) in heads.items():
        if x is not None and (x.dtype != torch.float32 or x.shape != (size,) or x.device != query.device):
            raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}, not float32 ({size},)")
    num_sequences, (num_tokens, num_heads, head_size) = seq_lens.numel(), query.shape
    num_kv_heads, block_size = key_cache.shape[1:3]
    if not num_tokens or not num_sequences:
        return None
    group, head_tile = num_heads // num_kv_heads, padded(head_size)
    card = card_of(query.device)
    if key_cache.dtype == torch.float8_e4m3fn and card.capability < 89:
        raise ValueError(
            f"caches of {key_cache.dtype} need compute capability 8.9, this GPU has {card.capability / 10}"
        )
    if cut is None:
        sizes = head_size, query.element_size(), group
        cut = card_tiling(query.device, *sizes, is_batch_invariant=is_batch_invariant)
    logit_scale, soft_cap = scale * LOG2_E, 0.0
    if logit_soft_cap > 0:
        logit_scale, soft_cap = 2 * LOG2_E * scale / logit_soft_cap, logit_soft_cap * LOG2_E
    kept = {
        "GROUP": group,
        "KEY_TILE": cut.key_tile,
        "BLOCK_SIZE": block_size,
        "HEAD_SIZE": head_size,
        "HEAD_TILE": head_tile,
        "HAS_WINDOW": sliding_window > 0,
        "HAS_SOFT_CAP": logit_soft_cap > 0,
        "JOINS": cut.joins,
        "SUMS_ARE_PRODUCTS": cut.sums_are_products,
        "DOT_TYPE": card.dot_type(query.dtype),
        "num_stages": cut.stages,
    }
    of_plan = OfPlan(sliding_window, num_kv_heads, group, cut.key_tile, cut.decode_rows, cut.prefill_rows)
    strides = (query.stride(0), key_cache.stride(0) // head_size, block_tables.stride(0))
    of_keys = (logit_scale, soft_cap, sliding_window)
    prefill = Launch(
        prefill_kernel,
        (cut.prefill_programs * card.num_multiprocessors,),
        (num_sequences, num_kv_heads, out.stride(0), *strides, *of_keys),
        ROWS=cut.prefill_rows,
        num_warps=cut.prefill_warps,
        maxnreg=ALL_REGISTERS,
        **kept,
    )
    segment = Launch(
        segment_kernel,
        (cut.decode_programs * card.num_multiprocessors,),
        (num_sequences, num_kv_heads, *strides, *of_keys),
        ROWS=cut.decode_rows,
        PROGRAMS=cut.decode_programs,
        num_warps=cut.decode_warps,
        maxnreg=ALL_REGISTERS,
        **kept,
    )
    join = join_launch(
        num_sequences,
        num_tokens,
        num_heads,
        head_size,
        heads=group,
        heads_of_scale=group,
        out_stride=out.stride(0),
        window=sliding_window,
        num_multiprocessors=card.num_multiprocessors,
    )
    return _Launches(of_plan, card.num_multiprocessors, prefill if has_several else None, segment, join)


def card_tiling(
    device: torch.device, head_size: int, element_size: int, group: int, *, is_batch_invariant: bool = False
) -> Tiling:
    """How attention is cut on this card; see `tiling`."""
    card = card_of(device)
    of_card = card.capability, card.max_shared_bytes
    return tiling(head_size, element_size, group, *of_card, is_batch_invariant=is_batch_invariant)


def attention_scratch(
    device: torch.device, max_num_seqs: int, max_seq_len: int, num_heads: int, head_size: int
) -> Scratch:
    """Scratch for all steps of so many sequences of up to so many positions, of a model with these heads."""
    multiprocessors = card_of(device).num_multiprocessors
    return new_scratch(max_num_seqs, max_seq_len, num_heads, head_size, multiprocessors, device)


def attention_scratch_bytes(
    device: torch.device, max_num_seqs: int, max_seq_len: int, num_heads: int, head_size: int
) -> int:
    """What `attention_scratch` takes."""
    multiprocessors = card_of(device).num_multiprocessors
    return scratch_bytes(max_num_seqs, max_seq_len, num_heads, head_size, multiprocessors)


def _check(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    scale: float,
) -> None:
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads, block_size = key_cache.shape[1:3]
    if out.shape != query.shape or out.dtype != query.dtype or query.dtype not in TYPES:
        raise ValueError(f"out {tuple(out.shape)} {out.dtype} does not fit query {tuple(query.shape)} {query.dtype}")
    if num_heads % num_kv_heads or head_size != key_cache.shape[3]:
        raise ValueError(f"query {tuple(query.shape)} does not fit a cache of {tuple(key_cache.shape)}")
    if head_size > MAX_HEAD_SIZE:
        raise ValueError(f"heads of {head_size} elements are larger than {MAX_HEAD_SIZE}, the most there are tiles for")
    if value_cache.shape != key_cache.shape or value_cache.stride() != key_cache.stride():
        raise ValueError("key_cache and value_cache differ in shape or strides")
    if value_cache.dtype != key_cache.dtype or key_cache.dtype not in _CACHE_TYPES:
        raise ValueError(f"no caches of {key_cache.dtype} and {value_cache.dtype}")
    if key_cache.stride()[1:] != (block_size * head_size, head_size, 1):
        raise ValueError(f"a block's heads, tokens and elements are not contiguous: strides {key_cache.stride()}")
    if key_cache.stride(0) % head_size or len(key_cache) * key_cache.stride(0) > head_size << 32:
        raise ValueError(
            f"blocks do not begin at one of 2^32 lines of {head_size} elements: strides {key_cache.stride()}"
        )
    for name, x in (("out", out), ("query", query)):
        if num_tokens and x.stride()[1:] != (head_size, 1):
            raise ValueError(f"a token's heads are not contiguous in {name}: strides {x.stride()}")
    for name, x, size in (("seq_lens", seq_lens, len(block_tables)), ("query_starts", query_starts, len(seq_lens) + 1)):
        if x.dtype != torch.int32 or x.shape != (size,) or not x.is_contiguous():
            raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}, not contiguous int32 ({size},)")
    if block_tables.dtype != torch.int32 or block_tables.stride(1) != 1:
        raise ValueError("the rows of block_tables are not contiguous int32")
    if len({x.device for x in (out, query, key_cache, value_cache, block_tables, seq_lens, query_starts)}) > 1:
        raise ValueError("tensors lie on more than one device")
    if scale <= 0:
        raise ValueError(f"scale {scale} is not positive")


def variants() -> Iterator[Variant]:
    """Those of every kind of model, and of every cut of them."""
    return kinds.variants_of_all()
