"""A product with what adapters add to it: y = W x + b, and for a row with an adapter + B A x."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worker_svc.adapters.adapter_folder import LowRank
from worker_svc.adapters.sites import Site
from worker_svc.models.products.linear import Linear
from worker_svc.models.step_adapters import StepAdapters

_WARM_UP_ROWS = 2  # the least of a step; no kernel is compiled for a number of them


class AdaptedLinear:
    """A `Linear` with slots for as many adapters as a step may have. A row's result depends on nothing beside it, as
    the base's does.

    Of each part of the product: a [slots, rank, inputs], b [slots, outputs, rank], with zeros where an adapter has a
    smaller rank or no such part; on a CPU of float32, on a GPU of the model's type.
    """

    def __init__(
        self,
        base: Linear,
        step: StepAdapters,
        site: Site,
        num_slots: int,
        max_rank: int,
        like: torch.Tensor,
        *,
        is_host: bool,
    ) -> None:
        """`like`: of the model's type, on its device; `is_host`: that is a CPU."""
        if is_host:  # whichever is here: the other's compiler is not
            from kernels.cpu.lora import lora_expand, lora_shrink, num_segments
        else:
            from kernels.gpu.lora import lora_expand, lora_shrink, num_segments
        self._base, self._step, self._shrink, self._expand = base, step, lora_shrink, lora_expand
        self._num_segments = num_segments(len(site.inputs))
        is_fused = len(site.modules) < len(site.sizes)
        sizes = [site.size] if is_fused else [len(outputs) for outputs in site.outputs]
        self._firsts = [sum(sizes[:index]) for index in range(len(sizes))]
        dtype = torch.float32 if is_host else like.dtype
        self._a = [like.new_zeros(num_slots, max_rank, len(site.inputs), dtype=dtype) for _ in sizes]
        if is_host:
            self._b = [like.new_zeros(num_slots, max_rank, size, dtype=dtype).mT for size in sizes]
        else:
            self._b = [like.new_zeros(num_slots, size, max_rank, dtype=dtype) for size in sizes]
        self._scales = like.new_ones(num_slots, dtype=torch.float32)  # they are in b
        self._size, self._dtype = sum(sizes), like.dtype

    @property
    def weight_bytes(self) -> int:
        """Of the base, and of the slots, which take their room whatever is in them."""
        return self._base.weight_bytes + sum(tensor.nbytes for tensor in (*self._a, *self._b))

    def put(self, slot: int, parts: Sequence[LowRank]) -> None:
        """What an adapter adds here, into a slot; returns when the copies are on their way."""
        by_first = {low.first: low for low in parts}
        for first, a, b in zip(self._firsts, self._a, self._b, strict=True):
            a[slot].zero_()
            b[slot].zero_()
            if (low := by_first.get(first)) is not None:
                rank = low.a.shape[0]
                a[slot, :rank].copy_(low.a, non_blocking=True)
                b[slot, :, :rank].copy_(low.b, non_blocking=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear`; what is added is rounded to the type of x with the sum, or before it on a GPU."""
        out = self._base(x)
        if self._step.is_used:
            self._add(out, x, self._step.slots[: x.shape[0]])
        return out

    def warm_up(self) -> None:
        """Launches on two rows what a step with adapters will, so that its kernels are compiled by then: the first such
        step would stand still for seconds, and all sequences with it."""
        a = self._a[0]
        x = a.new_zeros(_WARM_UP_ROWS, a.shape[2], dtype=self._dtype)
        out = x.new_zeros(_WARM_UP_ROWS, self._size)  # parts are views of it, with the strides that they have in a step
        self._add(out, x, torch.full((_WARM_UP_ROWS,), -1, dtype=torch.int32, device=x.device))

    def _add(self, out: torch.Tensor, x: torch.Tensor, adapters: torch.Tensor) -> None:
        for first, a, b in zip(self._firsts, self._a, self._b, strict=True):
            between = torch.empty(self._num_segments, x.shape[0], a.shape[1], dtype=torch.float32, device=x.device)
            self._shrink(between, x, a, adapters)
            self._expand(out[:, first : first + b.shape[1]], between, b, adapters, self._scales)
