"""A Triton kernel with everything fixed that it is compiled for: what `octavo bench kernels --compile-only` builds.

Each module of a Triton operation has `variants()`, which yields those that a worker may launch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

CAPABILITIES = range(80, 130)  # of the cards that a worker takes


@dataclass(frozen=True, slots=True)
class Variant:
    """One specialisation of a kernel."""

    name: str  # "paged_attention decode bf16 head 128 block 16": unique, as it is printed
    kernel: Any  # a function under `triton.jit`
    signature: Mapping[str, str]  # type of each argument that is no constant, in Triton's words: "*bf16", "i32"
    constants: Mapping[str, Any]  # value of each `tl.constexpr` argument
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = None  # of a thread; without one, the assembler weighs spills against more threads
    divisible_by_16: tuple[str, ...] = field(default=())  # arguments that the launcher knows to be: addresses, strides
    may_spill: bool = True  # False: a register spill is a defect, but for one outside of the loops over products
    # Where a few bytes may all the same: the assembler spills them outside of loops, for twice the threads at once.
    may_spill_on: Collection[int] = ()  # compute capabilities
    # Compute capabilities that a worker launches it on: types and tiles are not the same on all.
    capabilities: Collection[int] = CAPABILITIES

    def spills_are_allowed(self, capability: int) -> bool:
        """Whether a spill is no defect on such a card."""
        return self.may_spill or capability in self.may_spill_on
