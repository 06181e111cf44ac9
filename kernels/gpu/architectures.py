"""What a block of threads may take on each architecture that kernels are compiled for.

From the CUDA C++ Programming Guide, "Technical specifications per compute capability". A launch asks the card itself.
"""

from __future__ import annotations

KIB = 1024

# Shared memory of one block, when it asks for more than every block may have; by compute capability, 90 is Hopper.
MAX_SHARED_BYTES = {
    80: 163 * KIB,  # A100
    86: 99 * KIB,  # A10, RTX 3090
    89: 99 * KIB,  # L4, L40S, RTX 4090
    90: 227 * KIB,  # H100, H200
    100: 227 * KIB,  # B200
    120: 99 * KIB,  # RTX 5090, RTX PRO 6000
}
