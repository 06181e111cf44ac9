"""Memory for what passes between the operations of all layers, kept from one decode step to the next.

The products of a step leave nothing of Python's code in the caches, so that every tensor that is asked for costs
several times what it does in a loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Activation = Literal["silu", "gelu", "gelu_tanh"]

MLP_ROWS = 256  # as many as an MLP takes at a time (native/layers.cpp)
_BYTES_OF_GROUP = 40
_KEPT_ROWS = 256  # those of a prompt need memory that other steps can use: 26 MB for 2,048 of SmolLM2-135M


@dataclass(frozen=True, slots=True)
class StackShape:
    """What all layers have in common: sizes in elements, options as `rms_norm` and `paged_attention` take them."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm_eps: float
    norm_weight_offset: float
    logit_soft_cap: float
    activation: Activation = "silu"


class LayerWorkspace:
    """For a pass of up to `rows` rows of `dtype`; one pass at a time.

    Attributes:
        attended: [rows, heads], what attention gives.
        addresses: of the fields of `layer_stack.STEP` that lie in this workspace.
    """

    def __init__(self, shape: StackShape, rows: int, dtype: torch.dtype) -> None:
        self.rows, self.dtype = rows, dtype
        heads, mlp_rows = shape.num_heads * shape.head_size, min(rows, MLP_ROWS)
        widest = max(shape.hidden, shape.intermediate, heads)
        self.attended = torch.empty(rows, heads, dtype=dtype)
        self._tensors = {
            "normed": torch.empty(rows, shape.hidden, dtype=dtype),
            "qkv": torch.empty(rows, heads + 2 * shape.num_kv_heads * shape.head_size, dtype=dtype),
            "inner": torch.empty(mlp_rows, 2 * shape.intermediate, dtype=dtype),
            "activated": torch.empty(mlp_rows, shape.intermediate, dtype=dtype),
            # Rows of any of the products as float32, or quantised, which takes less but for a group's last inputs.
            "workspace": torch.empty(rows * (4 * widest + _BYTES_OF_GROUP), dtype=torch.uint8),
        }
        self.addresses = {name: tensor.data_ptr() for name, tensor in self._tensors.items()}


class LayerWorkspaces:
    """Workspaces that no pass is in; may be used by several threads."""

    def __init__(self, shape: StackShape) -> None:
        self._shape = shape
        self._free: list[LayerWorkspace] = []

    def take(self, rows: int, dtype: torch.dtype) -> LayerWorkspace:
        """For the caller alone until it is given back."""
        try:
            workspace = self._free.pop()
        except IndexError:
            return LayerWorkspace(self._shape, rows, dtype)
        if workspace.rows >= rows and workspace.dtype == dtype:
            return workspace
        if rows > _KEPT_ROWS:
            self._free.append(workspace)
        return LayerWorkspace(self._shape, rows, dtype)

    def give_back(self, workspace: LayerWorkspace) -> None:
        """For a later pass, unless it is larger than what a decode step needs."""
        if workspace.rows <= _KEPT_ROWS:
            self._free.append(workspace)
