"""Order among float32 numbers in compiled code: the k-th largest, and a sort. numba has both, but takes 10 s to compile
each of its own."""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.cpu.sampling.numbers import bits_of

_LOW = np.int64(0xFFFFFFFF)


@njit(nogil=True)
def kth_largest(values, k):  # type: ignore[no-untyped-def]
    """Of an array without NaN, whose order is lost; 1 <= k <= its size. Hoare's selection, with the middle of three as
    the pivot."""
    first, last, wanted = 0, values.size - 1, values.size - k
    while first < last:
        a, b, c = values[first], values[(first + last) // 2], values[last]
        pivot = max(min(a, b), min(max(a, b), c))
        low, high = first, last
        while low <= high:
            while values[low] < pivot:
                low += 1
            while values[high] > pivot:
                high -= 1
            if low <= high:
                values[low], values[high] = values[high], values[low]
                low += 1
                high -= 1
        if wanted <= high:
            last = high
        elif wanted >= low:
            first = low
        else:
            break  # between the two parts everything equals the pivot
    return values[wanted]


@njit(nogil=True, inline="always")
def sort_key(value, position):  # type: ignore[no-untyped-def]
    """An int64 that rises as float32 `value` rises and, among equal ones, as `position` < 2^32 falls."""
    bits = np.int64(bits_of(value + np.float32(0.0)))  # -0.0 equals 0.0
    rising = bits if bits >= 0 else -(bits & np.int64(0x7FFFFFFF))
    return (rising << np.int64(32)) | (_LOW - position)


@njit(nogil=True, inline="always")
def position_of(key):  # type: ignore[no-untyped-def]
    """The position in a `sort_key`."""
    return _LOW - (key & _LOW)


@njit(nogil=True)
def sort_falling(keys):  # type: ignore[no-untyped-def]
    """Sorts int64 numbers in place, the largest first: Williams' heap sort, with the smallest on top of the heap."""
    for start in range(keys.size // 2 - 1, -1, -1):
        _sift(keys, start, keys.size)
    for size in range(keys.size - 1, 0, -1):
        keys[0], keys[size] = keys[size], keys[0]
        _sift(keys, 0, size)


@njit(nogil=True)
def _sift(keys, place, size):  # type: ignore[no-untyped-def]
    """Lets the key at `place` sink in the heap of the first `size` keys."""
    key, child = keys[place], 2 * place + 1
    while child < size:
        if child + 1 < size and keys[child + 1] < keys[child]:
            child += 1
        if keys[child] >= key:
            break
        keys[place] = keys[child]
        place, child = child, 2 * child + 1
    keys[place] = key
