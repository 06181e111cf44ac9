"""Counter-based random numbers: Philox4x32-10, a pure function of (key, counter).

J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. No state is
kept, so a draw can be repeated anywhere: batch mates, slot, worker and restart do not matter.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]  # 32-bit words in 64-bit integers, so that products are exact

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))  # golden ratio and sqrt(3) - 1, added to the key each round
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Four random 32-bit words for each entry of the equally long arrays."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (product1 >> _32) ^ c1 ^ k0, product1 & _LOW, (product0 >> _32) ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(
    seed: npt.NDArray[np.uint64], sequence_index: npt.NDArray[np.int64], position: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (seed, index of the sequence in its group, token position)."""
    index, place = sequence_index.astype(np.uint64), position.astype(np.uint64)
    counter = (place & _LOW, place >> _32, index & _LOW, index >> _32)
    high, low, _, _ = philox4x32(counter, (seed & _LOW, seed >> _32))
    return ((high >> np.uint64(5)) * np.uint64(1 << 26) + (low >> np.uint64(6))) * 2.0**-53
