"""Memory for what passes between the operations of all layers, kept from one decode step to the next.

The products of a step leave nothing of Python's code in the caches, so that every tensor that is asked for costs
several times what it does in a loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Activation = Literal["silu", "gelu", "gelu_tanh"]

# As many as an MLP takes at a time, so that what it holds in between stays in the caches. A pass of 2,048 rows of int8,
# SmolLM2-135M on two Zen 5 cores: 456 ms in place of 942, half of which went into pages of memory that the system made
# and took back.
_MLP_ROWS = 256
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
        normed: [rows, hidden].
        qkv: [rows, heads and twice kv heads].
        attended: [rows, heads], what attention gives.
        mlp_rows: as many as an MLP takes at a time.
        inner: [mlp_rows, twice intermediate].
        activated: [mlp_rows, intermediate].
        prepared: u8, rows as a product takes them.
    """

    def __init__(self, shape: StackShape, rows: int, dtype: torch.dtype, prepared_bytes: int) -> None:
        """`prepared_bytes`: of a row, `Product.workspace_bytes` of any of the products."""
        self.rows, self.dtype = rows, dtype
        self.mlp_rows, heads = min(rows, _MLP_ROWS), shape.num_heads * shape.head_size
        self.normed = torch.empty(rows, shape.hidden, dtype=dtype)
        self.qkv = torch.empty(rows, heads + 2 * shape.num_kv_heads * shape.head_size, dtype=dtype)
        self.attended = torch.empty(rows, heads, dtype=dtype)
        self.inner = torch.empty(self.mlp_rows, 2 * shape.intermediate, dtype=dtype)
        self.activated = torch.empty(self.mlp_rows, shape.intermediate, dtype=dtype)
        self.prepared = torch.empty(rows * prepared_bytes, dtype=torch.uint8)


class LayerWorkspaces:
    """Workspaces that no pass is in; may be used by several threads."""

    def __init__(self, shape: StackShape, prepared_bytes: int) -> None:
        """See `LayerWorkspace`."""
        self._shape, self._prepared_bytes = shape, prepared_bytes
        self._free: list[LayerWorkspace] = []

    def take(self, rows: int, dtype: torch.dtype) -> LayerWorkspace:
        """For the caller alone until it is given back."""
        try:
            workspace = self._free.pop()
        except IndexError:
            return LayerWorkspace(self._shape, rows, dtype, self._prepared_bytes)
        if workspace.rows >= rows and workspace.dtype == dtype:
            return workspace
        if rows > _KEPT_ROWS:
            self._free.append(workspace)
        return LayerWorkspace(self._shape, rows, dtype, self._prepared_bytes)

    def give_back(self, workspace: LayerWorkspace) -> None:
        """For a later pass, unless it is larger than what a decode step needs."""
        if workspace.rows <= _KEPT_ROWS:
            self._free.append(workspace)
