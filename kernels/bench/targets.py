"""GPUs that kernels are compiled for, and what a block may take there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernels.gpu.architectures import MAX_SHARED_BYTES

MAX_TENSOR_MEMORY_COLUMNS = 512  # of a block, where the architecture has tensor memory


@dataclass(frozen=True, slots=True)
class Target:
    """An architecture, by its compute capability."""

    name: str  # "sm_90"
    capability: int  # 90
    max_shared_bytes: int  # of one block, when it asks for more than every block may have


TARGETS = {
    f"sm_{capability}": Target(f"sm_{capability}", capability, num_bytes)
    for capability, num_bytes in MAX_SHARED_BYTES.items()
}


def parse(text: str) -> Sequence[Target]:
    """Targets named in `sm_80,sm_90`, in that order and each once. Raises ValueError naming one that is unknown."""
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in TARGETS:
            raise ValueError(f"no target is called {name!r}; there are {', '.join(TARGETS)}")
    return [TARGETS[name] for name in names]
