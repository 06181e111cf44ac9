"""What a compiled variant takes of a GPU, what is wrong with that, and a table of many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kernels.bench.targets import MAX_TENSOR_MEMORY_COLUMNS, TARGETS
from kernels.gpu.architectures import KIB


@dataclass(frozen=True, slots=True)
class Compiled:
    """One variant for one target. Without machine code `error` says why, and the numbers are 0."""

    op: str
    variant: str
    target: str
    may_spill: bool
    registers: int = 0  # of a thread
    spill_bytes: int = 0  # that a thread stores because registers do not suffice
    # Instructions of the innermost loops over products of matrix units that store or load such bytes; None: no such
    # loop, or it was not looked because nothing is spilled.
    spills_in_products: int | None = None
    shared_bytes: int = 0  # of a block
    tensor_memory_columns: int = 0  # of a block
    loop: str = ""  # what the machine code's loop over products consists of, in words
    remark: str = ""  # what the assembler says of speed
    has_tf32: bool = False  # matrix units multiply float32 numbers by 11 of their 24 bits
    error: str = ""
    seconds: float = 0.0  # that compiling took; of a result that was kept: when it was made

    @property
    def fault(self) -> str:
        """Why this must not be shipped; empty where it may."""
        if self.error:
            return self.error
        if self.has_tf32:
            return "multiplies in TF32, which is less than float32"
        if self.spill_bytes and not self.may_spill and self.spills_in_products != 0:
            place = "" if self.spills_in_products is None else " in its loop over products"
            return f"spills {self.spill_bytes} bytes{place}, and may spill none"
        if self.shared_bytes > (limit := TARGETS[self.target].max_shared_bytes):
            return f"takes {self.shared_bytes} bytes of shared memory, {limit} is what a block can have"
        if self.tensor_memory_columns > MAX_TENSOR_MEMORY_COLUMNS:
            return f"takes {self.tensor_memory_columns} columns of tensor memory of {MAX_TENSOR_MEMORY_COLUMNS}"
        return ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "fault": self.fault}


def table(results: Iterable[Compiled], targets: Sequence[str]) -> str:
    """A line a variant; for each target registers a thread, bytes spilled, KiB of shared memory a block."""
    by_variant: dict[tuple[str, str], dict[str, Compiled]] = {}
    for one in results:
        by_variant.setdefault((one.op, one.variant), {})[one.target] = one
    width = max((len(variant) for _, variant in by_variant), default=0)
    lines = [
        " " * width + "".join(f"  {target:>22}" for target in targets),
        " " * width + "  regs  spilled   shared" * len(targets),
    ]
    for (_, variant), of_targets in by_variant.items():
        lines.append(f"{variant:<{width}}" + "".join(_cell(of_targets.get(target)) for target in targets))
    return "\n".join(lines)


def loops(results: Iterable[Compiled]) -> str:
    """A line a variant and target: what its loop over products consists of; of those that have one."""
    found = [one for one in results if one.loop and not one.loop.startswith("no ")]
    return "\n".join(f"{one.target}, {one.variant}: {one.loop}" for one in found)


def _cell(one: Compiled | None) -> str:
    if one is None:
        return " " * 24
    if one.error:
        return f"{'does not compile':>24}"
    mark = "!" if one.fault else " "
    return f"  {one.registers:>4} {one.spill_bytes:>6} B {one.shared_bytes / KIB:>5.1f} K{mark}"
