"""Kinds of models that latent attention is compiled for: what `octavo bench kernels --compile-only` builds of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton.language as tl

from kernels.gpu.architectures import MAX_SHARED_BYTES
from kernels.gpu.attention.decode import join_kernel
from kernels.gpu.attention.joins import FEWEST_DIMS, JOIN_REGISTERS, join_constants
from kernels.gpu.attention.tiling import padded
from kernels.gpu.attention.work import OF_A_STEP
from kernels.gpu.latent.pieces import pieces_kernel
from kernels.gpu.latent.tiling import ALL_REGISTERS, LatentCut, LatentTiling, latent_tiling
from kernels.gpu.latent.whole import whole_kernel
from kernels.gpu.variant import Variant


@dataclass(frozen=True, slots=True)
class LatentKind:
    """What a model asks of the kernels; the sizes of all published ones."""

    num_heads: int
    dtype: str = "bf16"
    block_size: int = 16
    latent_size: int = 512
    rotary_size: int = 64
    is_batch_invariant: bool = False

    def tiling(self, capability: int) -> LatentTiling:
        """As a launch on such a card has it."""
        element_size = 4 if self.dtype == "fp32" else 2
        sizes = self.num_heads, self.latent_size, self.rotary_size, element_size
        of_card = capability, MAX_SHARED_BYTES[capability]
        return latent_tiling(*sizes, *of_card, is_batch_invariant=self.is_batch_invariant)

    def __str__(self) -> str:
        name = f"{self.dtype} {self.num_heads} heads block {self.block_size}"
        return name + " invariant" * self.is_batch_invariant


_KINDS = (
    LatentKind(128),  # DeepSeek-V3 where one GPU has all heads
    LatentKind(16),  # on eight GPUs, and DeepSeek-V2-Lite
    LatentKind(16, is_batch_invariant=True),
    LatentKind(32),  # on four
    LatentKind(32, is_batch_invariant=True),
    LatentKind(16, "fp32"),
)
_SUMS = ("sums", "maxima", "totals")
_DOT_TYPES = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}


def variants_of_all() -> Iterator[Variant]:
    """Those of every kind of model, and of every cut of them."""
    for kind in _KINDS:
        whole: dict[LatentCut, list[int]] = {}
        pieces: dict[tuple[LatentCut, int], list[int]] = {}
        for capability in MAX_SHARED_BYTES:
            cut = kind.tiling(capability)
            whole.setdefault(cut.whole, []).append(capability)
            pieces.setdefault((cut.pieces, cut.piece_programs), []).append(capability)
        out = {"out": f"*{kind.dtype}", **{f"kept_{name}": "*fp32" for name in _SUMS}, "out_stride": "i32"}
        for of_kernel, capabilities in whole.items():
            yield _variant(kind, "whole", whole_kernel, out, of_kernel, {}, capabilities)
        sums = dict.fromkeys(_SUMS, "*fp32")
        for (of_kernel, programs), capabilities in pieces.items():
            yield _variant(kind, "pieces", pieces_kernel, sums, of_kernel, {"PROGRAMS": programs}, capabilities)
    yield _join_variant(_KINDS[0], _KINDS[0].tiling(90).joined_heads, padded(_KINDS[0].latent_size))
    yield _join_variant(_KINDS[0], 1, FEWEST_DIMS)


def _variant(
    kind: LatentKind,
    name: str,
    kernel: Any,
    own: dict[str, str],
    cut: LatentCut,
    shape: dict[str, int],
    capabilities: list[int],
) -> Variant:
    """`own` arguments of the kernel, and constants of its `shape`."""
    signature = {**own, "plan": "*i32", "query": f"*{kind.dtype}", "cache": f"*{kind.dtype}", "block_tables": "*i32"}
    signature |= {"seq_lens": "*i32", "query_starts": "*i32", "num_sequences": "i32", "scale": "fp32"}
    signature |= dict.fromkeys(("query_stride", "block_stride", "table_stride"), "i32")
    constants = {
        "HEADS": kind.num_heads,
        "BLOCK_SIZE": kind.block_size,
        "LATENT": kind.latent_size,
        "LATENT_TILE": padded(kind.latent_size),
        "TURNED": kind.rotary_size,
        "TURNED_TILE": padded(kind.rotary_size),
        "DOT_TYPE": _DOT_TYPES[kind.dtype],
    }
    said = f"tile {cut.rows}x{cut.key_tile}{' joined' * cut.joins}"
    said += f" programs {shape['PROGRAMS']}" if shape else ""
    return Variant(
        f"latent_attention {name} {kind} {said}",
        kernel,
        signature,
        constants | shape | {"ROWS": cut.rows, "KEY_TILE": cut.key_tile, "JOINS": cut.joins},
        num_warps=cut.num_warps,
        num_stages=cut.stages,
        max_registers=ALL_REGISTERS,
        divisible_by_16=_aligned(signature),
        may_spill=kind.dtype == "fp32",  # without matrix units Ampere and Blackwell are a register or two short
        capabilities=capabilities,
    )


def _join_variant(kind: LatentKind, heads: int, dims: int) -> Variant:
    signature = {"out": f"*{kind.dtype}", **dict.fromkeys(_SUMS, "*fp32"), "plan": "*i32"}
    signature |= {"seq_lens": "*i32", "query_starts": "*i32"}
    signature |= dict.fromkeys(("num_sequences", "num_tiles", "out_stride", "window"), "i32")
    constants: dict[str, Any] = {"sinks": None, "value_scale": None, "HAS_WINDOW": False}
    constants |= join_constants(kind.latent_size, heads, kind.num_heads, dims)
    return Variant(
        f"latent_attention join {kind} tile {heads}x{dims}",
        join_kernel,
        signature,
        constants,
        num_stages=3,
        max_registers=JOIN_REGISTERS,
        divisible_by_16=_aligned(signature),
        may_spill=False,
    )


def _aligned(signature: dict[str, str]) -> tuple[str, ...]:
    """Addresses, and strides in elements; but of what each step brings."""
    names = [name for name, kind in signature.items() if kind[0] == "*" or name.endswith("_stride")]
    return tuple(name for name in names if name not in OF_A_STEP)
