"""y = x W^T + b with a weight laid out once for the device that multiplies by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from worker_svc.models.weights import Weights


class Linear:
    """A dense layer; calls map x [T, in_features] to [T, out_features].

    On a CPU the weight is packed for oneDNN at load. Measured on two Zen 5 cores in float32, weight 3072 x 576, in us:

        rows                 1     2     4     8    16    32    64   512
        F.linear           404   611   542   497   673   849  1329  8356
        weight @ x.T       410   153   163   332   537   781  1243  8216
        packed             168   160   153   158   202   322   528  3648

    Packed, rows of 2 and more came out bit-equal for every number of rows and threads tried (1 to 2,048 rows; a single
    row differed for 1,536 inputs), so callers pad one row to two.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._bias = bias
        self._packed = weight.device.type == "cpu" and _can_pack(weight.dtype)
        if self._packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        else:
            self._weight = weight.contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return functional.linear(x, self._weight, self._bias)


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def take_linear(
    weights: Weights,
    names: Sequence[str],
    sizes: Sequence[int],
    in_features: int,
    *,
    is_biased: bool = False,
    is_transposed: bool = False,
    num_turns: int = 1,
) -> Linear:
    """One product whose outputs are parts of these sizes: the checkpoint has each under its name, or all under one.

    `is_transposed`: stored [in, out]. `num_turns`: stored as so many equal shares of the first part, the second, ...,
    and again, as one head's query, key and value may lie before the next one's.
    """
    whole = [sum(sizes)] if len(names) == 1 else sizes

    def in_order(x: torch.Tensor) -> torch.Tensor:
        if num_turns == 1:
            return x
        turns = x.unflatten(0, (num_turns, -1)).split([size // num_turns for size in sizes], dim=1)
        return torch.cat([part.flatten(0, 1) for part in turns])

    def weight(name: str, size: int) -> torch.Tensor:
        if is_transposed:
            return in_order(weights.take(f"{name}.weight", in_features, size).t())
        return in_order(weights.take(f"{name}.weight", size, in_features))

    parts = [weight(name, size) for name, size in zip(names, whole, strict=True)]
    biases = [
        in_order(weights.take(f"{name}.bias", size)) for name, size in zip(names, whole, strict=True) if is_biased
    ]
    return Linear(torch.cat(parts) if len(parts) > 1 else parts[0], torch.cat(biases) if biases else None)
