"""GPUs that kernels are compiled for, and what a block may take there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

KIB = 1024
MAX_TENSOR_MEMORY_COLUMNS = 512  # of a block, where the architecture has tensor memory


@dataclass(frozen=True, slots=True)
class Target:
    """An architecture, by its compute capability."""

    name: str  # "sm_90"
    capability: int  # 90
    max_shared_bytes: int  # of one block, when it asks for more than every block may have


# CUDA C++ Programming Guide, "Technical specifications per compute capability": shared memory per thread block.
TARGETS = {
    name: Target(name, capability, kib * KIB)
    for name, capability, kib in (
        ("sm_80", 80, 163),
        ("sm_86", 86, 99),
        ("sm_89", 89, 99),
        ("sm_90", 90, 227),
        ("sm_100", 100, 227),
        ("sm_120", 120, 99),
    )
}
DEFAULT = ("sm_80", "sm_90", "sm_100")


def parse(text: str) -> Sequence[Target]:
    """Targets named in `sm_80,sm_90`, in that order and each once. Raises ValueError naming one that is unknown."""
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in TARGETS:
            raise ValueError(f"no target is called {name!r}; there are {', '.join(TARGETS)}")
    return [TARGETS[name] for name in names]
