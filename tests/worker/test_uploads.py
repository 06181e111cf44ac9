"""Arrays of a step in one copy: each comes out as it went in, whatever types and sizes lie before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.worker.test_prompt_logprobs import of_all_prompts
from worker_svc.host import uploads
from worker_svc.host.uploads import pack, unpack, upload
from worker_svc.models.step_adapters import StepAdapters

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


def test_no_input_of_a_step_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters and prompt logprobs, too: a copy from memory that is not pinned waits for the step before it."""
    device, copies = torch.device("meta"), list[bool]()
    copy: Any = torch.Tensor.to

    def watched(tensor: torch.Tensor, *args: Any, non_blocking: bool = False) -> torch.Tensor:
        copies.append(non_blocking)
        moved: torch.Tensor = copy(tensor, *args, non_blocking=non_blocking)
        return moved

    monkeypatch.setattr(uploads, "pack", lambda arrays, *, pin_memory: pack(arrays, pin_memory=False))
    monkeypatch.setattr(torch.Tensor, "to", watched)
    adapters = StepAdapters(device)
    with adapters.step(np.array([1, 0, -1])):
        assert adapters.slots.shape == (3,) and adapters.slots.dtype == torch.int32
    reader = of_all_prompts([3, 4, 5, 6]).reader(device)
    assert reader is not None and reader.rows.shape == (3,) and reader.rows.dtype == torch.int64
    assert copies == [True, True]
