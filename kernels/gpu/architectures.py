"""What kernels have to know of each architecture that they are compiled for.

Sizes are from the CUDA C++ Programming Guide, "Technical specifications per compute capability". A launch asks the card
itself.
"""

from __future__ import annotations

from functools import cache

import torch

KIB = 1024
INTERPRETED = 90  # what Triton's interpreter stands for
# Of large Blackwells: products go through tensor memory, where 64 and 128 rows are instructions of their own. Whether
# they give a row the same bits nobody has seen; elsewhere a tile's rows are multiplied 16 or 64 at a time.
TENSOR_MEMORY = range(100, 120)

# Shared memory of one block, when it asks for more than every block may have; by compute capability, 90 is Hopper.
MAX_SHARED_BYTES = {
    80: 163 * KIB,  # A100
    86: 99 * KIB,  # A10, RTX 3090
    89: 99 * KIB,  # L4, L40S, RTX 4090
    90: 227 * KIB,  # H100, H200
    100: 227 * KIB,  # B200
    120: 99 * KIB,  # RTX 5090, RTX PRO 6000
}


@cache
def capability_of(device: torch.device) -> int:
    """Compute capability; 90 is Hopper."""
    if device.type != "cuda":
        return INTERPRETED
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
