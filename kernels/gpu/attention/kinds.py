"""Kinds of models that paged attention is compiled for: what `octavo bench kernels --compile-only` builds of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton.language as tl

from kernels.gpu.architectures import MAX_SHARED_BYTES
from kernels.gpu.attention.decode import join_kernel, segment_kernel
from kernels.gpu.attention.joins import FEWEST_DIMS, JOIN_REGISTERS, join_constants
from kernels.gpu.attention.prefill import prefill_kernel
from kernels.gpu.attention.tiling import ALL_REGISTERS, Tiling, padded, tiling
from kernels.gpu.attention.work import OF_A_STEP, plan_kernel
from kernels.gpu.variant import Variant


@dataclass(frozen=True, slots=True)
class Kind:
    """What a model asks of the kernels."""

    head_size: int
    group: int
    dtype: str = "bf16"
    cache: str = ""  # where it differs from dtype
    block_size: int = 16
    has_window: bool = False
    has_alibi: bool = False
    has_soft_cap: bool = False
    has_sinks: bool = False
    is_batch_invariant: bool = False

    def tiling(self, capability: int) -> Tiling:
        """As a launch on such a card has it."""
        of_card = (capability, MAX_SHARED_BYTES[capability])
        element_size = 4 if self.dtype == "fp32" else 2
        sizes = self.head_size, element_size, self.group
        return tiling(*sizes, *of_card, is_batch_invariant=self.is_batch_invariant)

    def __str__(self) -> str:
        words = [self.dtype, f"head {self.head_size} group {self.group} block {self.block_size}"]
        words += [f"cache {self.cache}"] * bool(self.cache) + ["window"] * self.has_window
        words += (
            ["invariant"] * self.is_batch_invariant
            + ["alibi"] * self.has_alibi
            + ["cap"] * self.has_soft_cap
            + ["sinks"] * self.has_sinks
        )
        return " ".join(words)


_KINDS = (
    Kind(128, 4),
    Kind(128, 8, "fp16", block_size=256, has_window=True),
    Kind(128, 1, block_size=8, has_alibi=True),
    Kind(128, 2, has_window=True, has_soft_cap=True),
    Kind(128, 4, cache="fp8e4nv"),
    Kind(128, 2, "fp32"),
    Kind(64, 3),
    Kind(64, 8, "fp16", cache="fp8e4nv", block_size=32),
    Kind(64, 8, has_window=True, has_sinks=True),
    Kind(64, 8, has_sinks=True),
    Kind(32, 1, "fp32"),
    Kind(80, 1),
    Kind(96, 1, has_window=True),
    Kind(256, 4),
    Kind(256, 2, has_window=True, has_soft_cap=True),
)
_SUMS = ("sums", "maxima", "totals")
_POINTERS = {"seq_lens": "*i32", "query_starts": "*i32"}
_NUMBERS = {"num_sequences": "i32", "num_kv_heads": "i32", "query_stride": "i32", "block_lines": "i32"}
_NUMBERS |= {"table_stride": "i32", "scale": "fp32", "soft_cap": "fp32", "window": "i32"}


def variants_of_all() -> Iterator[Variant]:
    """Those of every kind of model, and of every cut of them."""
    for kind in _KINDS:
        capabilities: dict[Tiling, list[int]] = {}
        for capability in MAX_SHARED_BYTES:
            capabilities.setdefault(kind.tiling(capability), []).append(capability)
        for cut, of_cut in capabilities.items():
            yield from _variants(kind, cut, of_cut)
        yield _join_variant(kind, kind.group, padded(kind.head_size))
    # Of which only prompts are computed otherwise, and only where there is tensor memory.
    invariant = Kind(128, 4, is_batch_invariant=True)
    yield from _variants(invariant, invariant.tiling(100), [100], has_decode=False)
    for kind in _KINDS:
        if kind.has_window or kind.has_sinks or kind.cache or kind is _KINDS[0]:
            yield _join_variant(kind, 1, FEWEST_DIMS)
    for kind in (_KINDS[0], _KINDS[-1]):
        yield _plan_variant(kind)


def _variants(kind: Kind, cut: Tiling, capabilities: list[int], *, has_decode: bool = True) -> Iterator[Variant]:
    cache = kind.cache or kind.dtype
    signature = {"query": f"*{kind.dtype}", "key_cache": f"*{cache}", "value_cache": f"*{cache}"}
    signature |= {"plan": "*i32", "block_tables": "*i32", **_POINTERS, **_NUMBERS}
    constants = {
        "GROUP": kind.group,
        "KEY_TILE": cut.key_tile,
        "BLOCK_SIZE": kind.block_size,
        "HEAD_SIZE": kind.head_size,
        "HEAD_TILE": padded(kind.head_size),
        "HAS_WINDOW": kind.has_window,
        "HAS_SOFT_CAP": kind.has_soft_cap,
        "JOINS": cut.joins,
        "SUMS_ARE_PRODUCTS": cut.sums_are_products,
        "DOT_TYPE": {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}[kind.dtype],
    }
    common: dict[str, Any] = {
        "num_stages": cut.stages,
        "may_spill": False,
        "capabilities": [one for one in capabilities if one >= 89] if kind.cache else capabilities,
    }
    of_prefill = {"out": f"*{kind.dtype}", **{f"kept_{name}": "*fp32" for name in _SUMS}, "out_stride": "i32"}
    of_decode = dict.fromkeys(_SUMS, "*fp32")
    of_decode_shape = {"ROWS": cut.decode_rows, "PROGRAMS": cut.decode_programs}
    given = dict.fromkeys(("key_scale", "value_scale"), bool(kind.cache))
    given |= {"alibi_slopes": kind.has_alibi, "sinks": kind.has_sinks}
    said = " joined" * cut.joins + " sums by products" * cut.sums_are_products
    for name, kernel, own, shape, num_warps in (
        ("prefill", prefill_kernel, of_prefill, {"ROWS": cut.prefill_rows}, cut.prefill_warps),
        ("decode", segment_kernel, of_decode, of_decode_shape, cut.decode_warps),
    )[: 1 + has_decode]:
        # An argument that may be None is a constant where it is.
        optional = {key: given[key] for key in given if key in kernel.arg_names}
        yield Variant(
            f"paged_attention {name} {kind} tile {shape['ROWS']}x{cut.key_tile}" + said,
            kernel,
            signature | own | {key: "*fp32" for key, is_given in optional.items() if is_given},
            constants | shape | {key: None for key, is_given in optional.items() if not is_given},
            num_warps=num_warps,
            max_registers=ALL_REGISTERS,
            divisible_by_16=_aligned(signature | own),
            **common,
        )


def _join_variant(kind: Kind, heads: int, dims: int) -> Variant:
    signature = {"out": f"*{kind.dtype}", **dict.fromkeys(_SUMS, "*fp32"), "plan": "*i32", **_POINTERS}
    constants: dict[str, Any] = {**join_constants(kind.head_size, heads, kind.group, dims)}
    for name, is_given in (("sinks", kind.has_sinks), ("value_scale", bool(kind.cache))):
        if is_given:
            signature[name] = "*fp32"
        else:
            constants[name] = None
    signature |= {"num_sequences": "i32", "num_tiles": "i32", "out_stride": "i32", "window": "i32"}
    return Variant(
        f"paged_attention join {kind} tile {heads}x{dims}",
        join_kernel,
        signature,
        constants | {"HAS_WINDOW": kind.has_window},
        num_stages=3,
        max_registers=JOIN_REGISTERS,
        divisible_by_16=_aligned(signature),
        may_spill=False,
    )


def _plan_variant(kind: Kind) -> Variant:
    signature = {"plan": "*i32", **_POINTERS}
    names = ("num_sequences", "num_kv_heads", "num_lines", "num_multiprocessors", "window")
    signature |= dict.fromkeys(names, "i32")
    constants: dict[str, Any] = {"GROUP": kind.group, "KEY_TILE": 64, "SPLIT_ROWS": 64, "WHOLE_ROWS": 128}
    return Variant(
        f"paged_attention plan {kind}",
        plan_kernel,
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
