"""A model of transformers in float64, including what its code always computes in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class InFloat64(TorchFunctionMode):
    """Within it code that wants float32, as norms, softmax and angles do, gets float64; while loading, too."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        named = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return function(*map(_widened, args), **named)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
