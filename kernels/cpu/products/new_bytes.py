"""Where packed weights are written to."""

from __future__ import annotations

import numpy as np
import torch

_ALIGNMENT = 64  # a cache line


def new_bytes(num_bytes: int) -> torch.Tensor:
    """u8[num_bytes], from the start of a cache line on. For 4 MiB and more numpy asks the system for pages of 2 MiB;
    docs/cpu-performance.md says what these bring."""
    memory = np.empty(num_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + num_bytes])
