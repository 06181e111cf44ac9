"""A product with what adapters add to it: y = W x + b, and for a row with an adapter + B A x."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from worker_svc.adapters.adapter_folder import LowRank
from worker_svc.adapters.sites import Site
from worker_svc.models.linear import Linear
from worker_svc.models.step_adapters import StepAdapters


class AdaptedLinear(Protocol):
    """A `Linear` to which adapters can be put, by number. A row's result depends on nothing beside it, as the base's
    does."""

    @property
    def weight_bytes(self) -> int:
        """Of the base, and what is kept for adapters."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""

    def put(self, number: int, parts: Sequence[LowRank]) -> None:
        """What this adapter adds from now on; nothing where there are no parts."""


class PackedAdaptedLinear:
    """On a CPU: one compiled product after the other, for the rows of each adapter, with float32 between."""

    def __init__(self, base: Linear, step: StepAdapters) -> None:
        from kernels.cpu.products.matmul import matmul  # here: a worker with a GPU waits for no compiler of CPU code

        self._base, self._step, self._matmul = base, step, matmul
        self._parts: dict[int, list[tuple[torch.Tensor, torch.Tensor, LowRank]]] = {}

    @property
    def weight_bytes(self) -> int:
        """See `AdaptedLinear`."""
        packed = (a.nbytes + b.nbytes for parts in self._parts.values() for a, b, _ in parts)
        return self._base.weight_bytes + sum(packed)

    def put(self, number: int, parts: Sequence[LowRank]) -> None:
        """See `AdaptedLinear`."""
        from kernels.cpu.products.packed_weight import pack

        self._parts.pop(number, None)
        if parts:
            self._parts[number] = [(pack(low.a), pack(low.b), low) for low in parts]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear`; a sum is rounded to the type of x."""
        out = self._base(x)
        for number, rows in self._step.groups:
            for a, b, low in self._parts.get(number, ()):
                between = torch.empty(rows.numel(), low.a.shape[0])
                self._matmul(between, x[rows].float(), a)
                added = torch.empty(rows.numel(), low.b.shape[0])
                self._matmul(added, between, b)
                outputs = slice(low.first, low.first + low.b.shape[0])
                out[rows, outputs] = (out[rows, outputs].float() + added).to(out.dtype)
        return out


class SlottedAdaptedLinear:
    """On a GPU: numbers are those of slots, of which every part of the product has as many as a step has adapters."""

    def __init__(
        self, base: Linear, step: StepAdapters, site: Site, num_slots: int, max_rank: int, like: torch.Tensor
    ) -> None:
        """`like`: of the model's type, on its device."""
        from kernels.gpu.lora import lora_expand, lora_shrink, num_segments  # here: only a worker with a GPU has Triton

        self._base, self._step = base, step
        self._shrink, self._expand = lora_shrink, lora_expand
        is_fused = len(site.modules) < len(site.sizes)
        sizes = [site.size] if is_fused else [len(outputs) for outputs in site.outputs]
        self._firsts = [sum(sizes[:index]) for index in range(len(sizes))]
        self._a = [like.new_zeros(num_slots, max_rank, len(site.inputs)) for _ in sizes]
        self._b = [like.new_zeros(num_slots, size, max_rank) for size in sizes]
        self._scales = like.new_ones(num_slots, dtype=torch.float32)  # they are in b
        self._num_segments = num_segments(len(site.inputs))

    @property
    def weight_bytes(self) -> int:
        """See `AdaptedLinear`; slots take their room whatever is in them."""
        return self._base.weight_bytes + sum(tensor.nbytes for tensor in (*self._a, *self._b))

    def put(self, number: int, parts: Sequence[LowRank]) -> None:
        """See `AdaptedLinear`; returns when the copies are on their way."""
        by_first = {low.first: low for low in parts}
        for first, a, b in zip(self._firsts, self._a, self._b, strict=True):
            a[number].zero_()
            b[number].zero_()
            if (low := by_first.get(first)) is not None:
                rank = low.a.shape[0]
                a[number, :rank].copy_(low.a, non_blocking=True)
                b[number, :, :rank].copy_(low.b, non_blocking=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        out = self._base(x)
        if not self._step.is_used:
            return out
        adapters = self._step.of_rows[: x.shape[0]]
        for first, a, b in zip(self._firsts, self._a, self._b, strict=True):
            between = torch.empty(self._num_segments, x.shape[0], a.shape[1], dtype=torch.float32, device=x.device)
            self._shrink(between, x, a, adapters)
            self._expand(out[:, first : first + b.shape[1]], between, b, adapters, self._scales)
        return out
