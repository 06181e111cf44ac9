"""What follows attention in a layer: an MLP.

mlp(x) = W_out act(W_in x),  or gated (Shazeer 2020, arXiv:2002.05202)  W_out (act(W_gate x) * W_up x)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from worker_svc.models.errors import ModelError
from worker_svc.models.products.linear import Linear
from worker_svc.models.products.rows import Rows, TakesRounded, applied, rounding_of
from worker_svc.models.style import DecoderStyle

if TYPE_CHECKING:
    from kernels.gpu.quantized.rounding import RoundedRows, Rounding


class Mlp(TakesRounded):
    """Calls map x [T, hidden] to [T, hidden]."""

    def __init__(self, inner: Linear, outer: Linear, style: DecoderStyle, kernels: ModuleType) -> None:
        """`inner` gives [T, n], or, gated, [T, 2 n]: gate, then up; `outer` takes [T, n]."""
        self.inner, self.outer = inner, outer
        self._activate = activation(style, kernels)
        self._is_gated = style.is_gated
        has_rounded = style.is_gated and style.activation == "silu" and "rounded_silu_and_mul" in kernels.__all__
        self._rounded_gate: Callable[[torch.Tensor, Rounding], RoundedRows] | None = None
        if has_rounded:
            self._rounded_gate = kernels.rounded_silu_and_mul

    @property
    def rounding(self) -> Rounding | None:
        """See `TakesRounded`."""
        return rounding_of([self.inner])

    @property
    def weight_bytes(self) -> int:
        """Bytes that its weights occupy on the device."""
        return self.inner.weight_bytes + self.outer.weight_bytes

    def __call__(self, x: Rows) -> torch.Tensor:
        """See the formula above."""
        inner = applied(self.inner, x)
        rounding = None if self._rounded_gate is None else rounding_of([self.outer])
        if self._rounded_gate is not None and rounding is not None:
            return applied(self.outer, self._rounded_gate(inner, rounding))
        activated = inner.new_empty(inner.shape[0], inner.shape[1] // 2) if self._is_gated else inner
        self._activate(activated, inner)
        return self.outer(activated)


def activation(style: DecoderStyle, kernels: ModuleType) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """(out, x) of the style's kind; without a gate `out` may be `x`. Raises ModelError for a kind without a kernel."""

    def relu(out: torch.Tensor, x: torch.Tensor) -> None:
        torch.clamp_min(x, 0.0, out=out)

    def gelu(out: torch.Tensor, x: torch.Tensor) -> None:
        kernel = kernels.gelu_and_mul if style.is_gated else kernels.gelu
        kernel(out, x, is_approximate=style.activation == "gelu_tanh")

    if style.activation in ("gelu", "gelu_tanh"):
        return gelu
    if style.activation == "silu" and style.is_gated:
        silu_and_mul: Callable[[torch.Tensor, torch.Tensor], None] = kernels.silu_and_mul
        return silu_and_mul
    if style.activation == "clamped_swiglu" and style.is_gated:
        return partial(kernels.clamped_swiglu, alpha=style.swiglu_alpha, limit=style.swiglu_limit)
    if style.activation == "relu" and not style.is_gated:
        return relu
    raise ModelError(f"activation {style.activation} is not supported {'with' if style.is_gated else 'without'} a gate")
