"""Arrays of a step in one copy: each comes out as it went in, whatever types and sizes lie before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from worker_svc.host.uploads import pack, unpack, upload

ARRAYS: tuple[npt.NDArray[Any], ...] = (
    np.arange(3, dtype=np.int64) - 2**40,
    np.zeros(0, np.float32),
    np.array([True, False, True]),
    np.linspace(0, 1, 7, dtype=np.float32),
    np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2],  # not contiguous
    np.array([5], np.uint8),
)


def test_what_is_packed_is_unpacked_with_its_type_and_shape() -> None:
    packed, places = pack(ARRAYS, pin_memory=False)
    assert packed.dtype == torch.uint8 and all(place % 16 == 0 for place in places)
    for array, tensor in zip(ARRAYS, unpack(packed, ARRAYS, places), strict=True):
        assert tensor.numpy().dtype == array.dtype and np.array_equal(tensor.numpy(), array)


def test_on_the_cpu_nothing_is_copied() -> None:
    for array, tensor in zip(ARRAYS, upload("cpu", *ARRAYS), strict=True):
        assert np.array_equal(tensor.numpy(), array)
        assert np.shares_memory(tensor.numpy(), array) or not array.flags.c_contiguous or not array.size
