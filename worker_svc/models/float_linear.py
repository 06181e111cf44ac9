"""y = x W^T + b with a weight in the model's own type, laid out once for the device that multiplies by it."""

from __future__ import annotations

import torch
from torch.nn import functional


class FloatLinear:
    """See `Linear`.

    On a CPU the weight is packed for oneDNN at load. Measured on two Zen 5 cores in float32, weight 3072 x 576, in us
    (where the processor allows it, `PackedLinear` is faster still):

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
