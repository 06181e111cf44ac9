"""Norms: a weight and the kernel that applies it. Calls write to `out`, after adding `x` to `residual` where given."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

import torch

from worker_svc.models.checkpoint.weights import Weights
from worker_svc.models.config import ModelConfig
from worker_svc.models.products.rows import Rows, rounding_of
from worker_svc.models.products.summed import Layer

if TYPE_CHECKING:
    from kernels.gpu.quantized.rounding import RoundedRows, Rounding


class Norm(Protocol):
    """See `kernels.oracles.reference.rms_norm` for what a call does with `residual`; out, x, residual [T, n]."""

    @property
    def weight_bytes(self) -> int:
        """Bytes that weight and bias occupy on the device."""

    def __call__(self, out: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """See the class; `out` may be `x`."""


class RmsNorm:
    """See `kernels.oracles.reference.rms_norm`.

    Attributes:
        can_round: whether the device's kernels norm and round in one pass.
    """

    def __init__(self, weight: torch.Tensor, eps: float, weight_offset: float, kernels: ModuleType) -> None:
        self.weight, self.eps, self.weight_offset = weight, eps, weight_offset
        self._kernel = kernels.rms_norm
        self.can_round = "rounded_rms_norm" in kernels.__all__
        self._rounded = kernels.rounded_rms_norm if self.can_round else None
        self.weight_bytes = weight.nbytes

    def __call__(self, out: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """See `Norm`."""
        self._kernel(out, x, self.weight, eps=self.eps, residual=residual, weight_offset=self.weight_offset)

    def rounded(self, rounding: Rounding, x: torch.Tensor, residual: torch.Tensor | None = None) -> RoundedRows:
        """What would be written to `out`, rounded, where the kernels can."""
        assert self._rounded is not None
        options = {"eps": self.eps, "residual": residual, "weight_offset": self.weight_offset}
        rows: RoundedRows = self._rounded(x, self.weight, rounding, **options)
        return rows


class LayerNorm:
    """See `kernels.oracles.reference.layer_norm`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, eps: float, kernels: ModuleType) -> None:
        self._weight, self._bias, self._eps, self._kernel = weight, bias, eps, kernels.layer_norm
        self.weight_bytes = weight.nbytes + bias.nbytes

    def __call__(self, out: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """See `Norm`."""
        self._kernel(out, x, self._weight, self._bias, eps=self._eps, residual=residual)


class NoNorm:
    """Adds, and leaves the sum as it is."""

    weight_bytes = 0

    def __call__(self, out: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """See `Norm`."""
        out.copy_(x if residual is None else residual.add_(x))


def normed_rows(
    norm: Norm, layers: Sequence[Layer], out: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None = None
) -> Rows:
    """`out` after `norm(out, x, residual)`; or, where nothing but these `layers` reads the result and all want it
    rounded alike, that, and `out` is left as it was."""
    rounding = rounding_of(layers) if isinstance(norm, RmsNorm) and norm.can_round else None
    if rounding is None or not isinstance(norm, RmsNorm):
        norm(out, x, residual)
        return out
    return norm.rounded(rounding, x, residual)


def take_norm(
    config: ModelConfig, weights: Weights, name: str, size: int, kernels: ModuleType, eps: float | None = None
) -> Norm:
    """The norm over `size` elements whose weights the checkpoint has under `name`; `eps`: where not the style's."""
    style, weight = config.style, weights.take(f"{name}.weight", size)
    eps = style.norm_eps if eps is None else eps
    if style.norm == "layer":
        return LayerNorm(weight, weights.take(f"{name}.bias", size), eps, kernels)
    return RmsNorm(weight, eps, style.norm_weight_offset, kernels)
