"""Memory for what passes between the operations of all layers, kept from one decode step to the next.

The products of a step leave nothing of Python's code in the caches, so that every tensor that is asked for costs
several times what it does in a loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.cpu.layers.layer_lanes import MLP_ROWS
from kernels.cpu.products.int8_rows import room_bytes

_KEPT_ROWS = 256  # those of a prompt need memory that other steps can use: 26 MB for 2,048 of SmolLM2-135M


@dataclass(frozen=True, slots=True)
class StackShape:
    """What all layers have in common."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm_eps: float
    norm_weight_offset: float
    logit_soft_cap: float


class LayerRoom:
    """For a pass of up to `rows` rows of `dtype`; one pass at a time.

    Attributes:
        attended: [rows, heads], what attention gives.
        addresses: of the fields of `layer_lanes.STEP` that lie in this room.
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
            "room": torch.empty(room_bytes(rows, widest), dtype=torch.uint8),  # quantised rows of any of the products
        }
        self.addresses = {name: tensor.data_ptr() for name, tensor in self._tensors.items()}


class LayerRooms:
    """Rooms that no pass is in; may be used by several threads."""

    def __init__(self, shape: StackShape) -> None:
        self._shape = shape
        self._free: list[LayerRoom] = []

    def take(self, rows: int, dtype: torch.dtype) -> LayerRoom:
        """For the caller alone until it is given back."""
        try:
            room = self._free.pop()
        except IndexError:
            return LayerRoom(self._shape, rows, dtype)
        if room.rows >= rows and room.dtype == dtype:
            return room
        if rows > _KEPT_ROWS:
            self._free.append(room)
        return LayerRoom(self._shape, rows, dtype)

    def give_back(self, room: LayerRoom) -> None:
        """For a later pass, unless it is larger than what a decode step needs."""
        if room.rows <= _KEPT_ROWS:
            self._free.append(room)
