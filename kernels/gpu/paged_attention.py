"""Paged attention on a GPU: formula and arguments as in `kernels.oracles.reference.paged_attention`.

    out[t, h] = sum_j softmax_j(bias(cap(scale * query[t, h] . key[j, h // group]))) value[j, h // group]

Source: Kwon et al. 2023 (arXiv:2309.06180) for the cache; `attention_segment` for the rest. Layout: key_cache,
value_cache [num_blocks, num_kv_heads, block_size, head_size], a block's heads, tokens and elements contiguous; blocks
may lie apart (a layer of a store). out, query [T, num_heads, head_size], a token's heads contiguous.

Three kernels, each for all sequences: `prefill_kernel` for those with several new tokens, `segment_kernel` and
`join_kernel` for those with one. Nothing here reads a tensor's values, so that a graph can capture it: a decode step
needs `max_query_len=1`, and `max_seq_len` bounds the room for segments, not the work.

A token has the same bits whatever runs beside it. Where the matrix units give a row the same sums in a tile of 64 rows
as in one of 128 (the same instructions are chosen for both), also whether it is computed alone, in a chunk or in a
whole prompt: docs/paged-attention.md says why, and what of it has been seen where.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.gpu import attention_segment
from kernels.gpu.architectures import MAX_SHARED_BYTES
from kernels.gpu.attention_decode import join_kernel, segment_kernel
from kernels.gpu.attention_prefill import prefill_kernel
from kernels.gpu.attention_tiling import ALL_REGISTERS, Tiling, tiling
from kernels.gpu.attention_work import OF_A_STEP
from kernels.gpu.variant import Variant

LOG2_E, SEGMENT = attention_segment.LOG2_E.value, attention_segment.SEGMENT.value
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_MIN_HEAD_TILE = 16  # what matrix units multiply at once
_CACHE_TYPES = (*_TYPES, torch.float8_e4m3fn)


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
) -> None:
    """See `kernels.oracles.reference.paged_attention`. `out` and `query` may be strided in their first dimension.

    Types: float32, float16 or bfloat16, and the caches in any of these or float8_e4m3fn. Raises ValueError where a
    shape, stride, type or device does not fit.
    """
    _check(out, query, key_cache, value_cache, block_tables, seq_lens, query_starts, scale)
    heads = {"alibi_slopes": (alibi_slopes, query.shape[1])}
    heads |= {"key_scale": (key_scale, key_cache.shape[1]), "value_scale": (value_scale, key_cache.shape[1])}
    for name, (x, size) in heads.items():
        if x is not None and (x.dtype != torch.float32 or x.shape != (size,) or x.device != query.device):
            raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}, not float32 ({size},)")
    num_sequences, (num_tokens, num_heads, head_size) = seq_lens.numel(), query.shape
    num_kv_heads, block_size = key_cache.shape[1:3]
    if not num_tokens or not num_sequences:
        return
    group, head_tile = num_heads // num_kv_heads, max(triton.next_power_of_2(head_size), _MIN_HEAD_TILE)
    gpu = _gpu(query.device)
    if key_cache.dtype == torch.float8_e4m3fn and gpu.capability < 89:
        raise ValueError(f"caches of {key_cache.dtype} need compute capability 8.9, this GPU has {gpu.capability / 10}")
    of_card, has_soft_cap = (gpu.capability, gpu.max_shared_bytes), logit_soft_cap > 0
    cut = tiling(head_tile, query.element_size(), group, *of_card, has_soft_cap=has_soft_cap)
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
        "HAS_SOFT_CAP": has_soft_cap,
        "DOT_TYPE": gpu.dot_type(query.dtype),
        "num_stages": cut.stages,
    }
    places = (block_tables, seq_lens, query_starts)
    strides = (query.stride(0), key_cache.stride(0), block_tables.stride(0))

    if max_query_len > 1:
        prefill_kernel[(cut.prefill_programs * gpu.num_multiprocessors,)](
            out,
            query,
            key_cache,
            value_cache,
            *places,
            alibi_slopes,
            key_scale,
            value_scale,
            num_sequences,
            num_kv_heads,
            out.stride(0),
            *strides,
            logit_scale,
            soft_cap,
            sliding_window,
            ROWS=cut.prefill_rows,
            num_warps=cut.prefill_warps,
            maxnreg=ALL_REGISTERS,
            **kept,
        )

    max_segments = max(triton.cdiv(max_seq_len, SEGMENT), 1)
    sums = query.new_empty((num_sequences, num_heads, max_segments, head_size), dtype=torch.float32)
    maxima = sums.new_empty((num_sequences, num_heads, max_segments))
    totals = torch.empty_like(maxima)  # a part of `maxima` might begin at no multiple of 16, and compile again
    segment_kernel[(cut.decode_programs * gpu.num_multiprocessors,)](
        sums,
        maxima,
        totals,
        query,
        key_cache,
        value_cache,
        *places,
        alibi_slopes,
        key_scale,
        num_sequences,
        num_kv_heads,
        max_segments,
        *strides,
        logit_scale,
        soft_cap,
        sliding_window,
        ROWS=cut.decode_rows,
        PROGRAMS=cut.decode_programs,
        num_warps=cut.decode_warps,
        maxnreg=ALL_REGISTERS,
        **kept,
    )
    join_kernel[(num_sequences, num_kv_heads)](
        out,
        sums,
        maxima,
        totals,
        seq_lens,
        query_starts,
        value_scale,
        num_kv_heads,
        max_segments,
        out.stride(0),
        sliding_window,
        GROUP=group,
        GROUP_TILE=triton.next_power_of_2(group),
        HEAD_SIZE=head_size,
        HEAD_TILE=head_tile,
        HAS_WINDOW=sliding_window > 0,
    )


def scratch_bytes(num_sequences: int, num_heads: int, head_size: int, max_seq_len: int) -> int:
    """What a call takes besides its arguments, until the device is done with it: the segments of all sequences."""
    return num_sequences * num_heads * max(triton.cdiv(max_seq_len, SEGMENT), 1) * (head_size + 2) * 4


@dataclass(frozen=True, slots=True)
class _Gpu:
    """What a launch asks of a device."""

    capability: int  # 90 is Hopper
    num_multiprocessors: int
    max_shared_bytes: int  # of one block
    is_interpreted: bool

    def dot_type(self, dtype: torch.dtype) -> Any:
        """What products are made of; the interpreter's cannot be of bfloat16."""
        return tl.float32 if self.is_interpreted and dtype == torch.bfloat16 else _TYPES[dtype]


@cache
def _gpu(device: torch.device) -> _Gpu:
    if device.type != "cuda":
        return _Gpu(90, 3, MAX_SHARED_BYTES[90], True)
    facts = torch.cuda.get_device_properties(device)
    shared: int = facts.shared_memory_per_block_optin  # type: ignore[attr-defined]  # torch's stubs do not list it
    return _Gpu(10 * facts.major + facts.minor, facts.multi_processor_count, shared, False)


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
    if out.shape != query.shape or out.dtype != query.dtype or query.dtype not in _TYPES:
        raise ValueError(f"out {tuple(out.shape)} {out.dtype} does not fit query {tuple(query.shape)} {query.dtype}")
    if num_heads % num_kv_heads or head_size != key_cache.shape[3]:
        raise ValueError(f"query {tuple(query.shape)} does not fit a cache of {tuple(key_cache.shape)}")
    if value_cache.shape != key_cache.shape or value_cache.stride() != key_cache.stride():
        raise ValueError("key_cache and value_cache differ in shape or strides")
    if value_cache.dtype != key_cache.dtype or key_cache.dtype not in _CACHE_TYPES:
        raise ValueError(f"no caches of {key_cache.dtype} and {value_cache.dtype}")
    if key_cache.stride()[1:] != (block_size * head_size, head_size, 1):
        raise ValueError(f"a block's heads, tokens and elements are not contiguous: strides {key_cache.stride()}")
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


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a model asks of the kernels."""

    head_size: int
    group: int
    dtype: str = "bf16"
    cache: str = ""  # where it differs from dtype
    block_size: int = 16
    has_window: bool = False
    has_alibi: bool = False
    has_soft_cap: bool = False

    def tiling(self, capability: int) -> Tiling:
        element_size, head_tile = 4 if self.dtype == "fp32" else 2, triton.next_power_of_2(self.head_size)
        shared = MAX_SHARED_BYTES[capability]
        return tiling(head_tile, element_size, self.group, capability, shared, has_soft_cap=self.has_soft_cap)

    def __str__(self) -> str:
        words = [self.dtype, f"head {self.head_size} group {self.group} block {self.block_size}"]
        words += [f"cache {self.cache}"] * bool(self.cache) + ["window"] * self.has_window
        return " ".join(words + ["alibi"] * self.has_alibi + ["cap"] * self.has_soft_cap)


_KINDS = (
    _Kind(128, 4),
    _Kind(128, 8, "fp16", block_size=256, has_window=True),
    _Kind(128, 1, block_size=8, has_alibi=True),
    _Kind(128, 2, has_window=True, has_soft_cap=True),
    _Kind(128, 4, cache="fp8e4nv"),
    _Kind(128, 2, "fp32"),
    _Kind(64, 3),
    _Kind(64, 8, "fp16", cache="fp8e4nv", block_size=32),
    _Kind(32, 1, "fp32"),
    _Kind(80, 1),
    _Kind(96, 1, has_window=True),
    _Kind(256, 4),
    _Kind(256, 2, has_window=True, has_soft_cap=True),
)
_POINTERS = {"seq_lens": "*i32", "query_starts": "*i32"}
_NUMBERS = {"num_sequences": "i32", "num_kv_heads": "i32", "query_stride": "i32", "block_stride": "i32"}
_NUMBERS |= {"table_stride": "i32", "scale": "fp32", "soft_cap": "fp32", "window": "i32"}


def variants() -> Iterator[Variant]:
    """Those of every kind of model, and of every cut of them."""
    for kind in _KINDS:
        capabilities: dict[Tiling, list[int]] = {}
        for capability in MAX_SHARED_BYTES:
            capabilities.setdefault(kind.tiling(capability), []).append(capability)
        for cut, of_cut in capabilities.items():
            yield from _variants(kind, cut, of_cut)
    for kind in (_KINDS[0], _KINDS[-1]):
        yield _join_variant(kind)


def _variants(kind: _Kind, cut: Tiling, capabilities: list[int]) -> Iterator[Variant]:
    cache = kind.cache or kind.dtype
    signature = {"query": f"*{kind.dtype}", "key_cache": f"*{cache}", "value_cache": f"*{cache}"}
    signature |= {"block_tables": "*i32", **_POINTERS, **_NUMBERS}
    constants = {
        "GROUP": kind.group,
        "KEY_TILE": cut.key_tile,
        "BLOCK_SIZE": kind.block_size,
        "HEAD_SIZE": kind.head_size,
        "HEAD_TILE": triton.next_power_of_2(kind.head_size),
        "HAS_WINDOW": kind.has_window,
        "HAS_SOFT_CAP": kind.has_soft_cap,
        "DOT_TYPE": {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}[kind.dtype],
    }
    common: dict[str, Any] = {
        "num_stages": cut.stages,
        "may_spill": False,
        "may_spill_on": (120,) if kind.has_alibi else (),
        "capabilities": [one for one in capabilities if one >= 89] if kind.cache else capabilities,
    }
    of_prefill = {"out": f"*{kind.dtype}", "out_stride": "i32"}
    of_decode = {"sums": "*fp32", "maxima": "*fp32", "totals": "*fp32", "max_segments": "i32"}
    of_decode_shape = {"ROWS": cut.decode_rows, "PROGRAMS": cut.decode_programs}
    scales = dict.fromkeys(("key_scale", "value_scale"), bool(kind.cache))
    for name, kernel, own, shape, num_warps in (
        ("prefill", prefill_kernel, of_prefill, {"ROWS": cut.prefill_rows}, cut.prefill_warps),
        ("decode", segment_kernel, of_decode, of_decode_shape, cut.decode_warps),
    ):
        # An argument that may be None is a constant where it is.
        optional = {"alibi_slopes": kind.has_alibi, **{key: scales[key] for key in scales if key in kernel.arg_names}}
        yield Variant(
            f"paged_attention {name} {kind} tile {shape['ROWS']}x{cut.key_tile}",
            kernel,
            signature | own | {key: "*fp32" for key, is_given in optional.items() if is_given},
            constants | shape | {key: None for key, is_given in optional.items() if not is_given},
            num_warps=num_warps,
            max_registers=ALL_REGISTERS,
            divisible_by_16=_aligned(signature | own),
            **common,
        )


def _join_variant(kind: _Kind) -> Variant:
    signature = {"out": f"*{kind.dtype}", "sums": "*fp32", "maxima": "*fp32", "totals": "*fp32", **_POINTERS}
    constants: dict[str, Any] = {"GROUP": kind.group, "GROUP_TILE": triton.next_power_of_2(kind.group)}
    constants |= {"HEAD_SIZE": kind.head_size, "HEAD_TILE": triton.next_power_of_2(kind.head_size)}
    if kind.cache:
        signature["value_scale"] = "*fp32"
    else:
        constants["value_scale"] = None
    signature |= {"num_kv_heads": "i32", "max_segments": "i32", "out_stride": "i32", "window": "i32"}
    return Variant(
        f"paged_attention join {kind}",
        join_kernel,
        signature,
        constants | {"HAS_WINDOW": kind.has_window},
        num_stages=3,
        divisible_by_16=_aligned(signature),
        may_spill=False,
    )


def _aligned(signature: dict[str, str]) -> tuple[str, ...]:
    """Addresses, and strides in elements; but of what each step brings."""
    names = [name for name, kind in signature.items() if kind[0] == "*" or name.endswith("_stride")]
    return tuple(name for name in names if name not in OF_A_STEP)
