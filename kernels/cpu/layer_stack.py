"""All layers of a Llama-like model, one after the other, in one call of compiled code.

    residual += update;  q, k, v = W_qkv norm(residual);  q, k turned by position;  k, v -> cache
    residual += W_out attention(q, cache);  update = W_down (silu(gate) * up),  gate, up = W_inner norm(residual)

The kernels are those of the single operations, bit for bit. What is saved is the way from Python to each of them, and
that of the threads into and out of a parallel loop for each: `layer_lanes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.cpu import cache_prefetch
from kernels.cpu.int8_linear import OUTPUTS_OF_ITEM
from kernels.cpu.int8_rows import room_bytes
from kernels.cpu.layer_lanes import LAYER, MLP_ROWS, STEP, run_layers
from kernels.cpu.layer_product import Product
from kernels.cpu.numbers import element_of, stored_element_of
from kernels.cpu.rotary import check_positions
from kernels.cpu.runtime import num_threads

_ROWS_WORTH_A_CUT = 16  # left out behind the last attention; a second call of compiled code costs more than fewer


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


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Of one layer; norms as `rms_norm` takes them, `cos_sin` as `rotary`, the options as `paged_attention`."""

    input_norm: torch.Tensor
    qkv: Product
    cos_sin: torch.Tensor
    attention_scale: float
    sliding_window: int
    attention_out: Product
    mlp_norm: torch.Tensor
    mlp_in: Product  # gate, then up
    mlp_out: Product


@dataclass(frozen=True, slots=True)
class StackStep:
    """Which rows a pass computes, as `rotary`, `reshape_and_cache` and `paged_attention` take it."""

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_starts: torch.Tensor


class LayerStack:
    """Layers, their weights checked once. Raises ValueError for weights that do not fit."""

    def __init__(self, shape: StackShape, layers: Sequence[LayerWeights]) -> None:
        self._shape, self._kept = shape, list(layers)
        self._zeros = torch.zeros(OUTPUTS_OF_ITEM)  # what int8 products take for a bias where there is none
        self._layers = np.zeros(len(layers), dtype=LAYER)
        self._num_angles = min(layer.cos_sin.shape[0] for layer in layers)
        for record, layer in zip(self._layers, layers, strict=True):
            _check(shape, layer)
            for name in ("qkv", "attention_out", "mlp_in", "mlp_out"):
                record[name] = getattr(layer, name).record
            for name in ("input_norm", "mlp_norm", "cos_sin"):
                record[name] = getattr(layer, name).data_ptr()
            record["max_positions"], record["num_turned"] = layer.cos_sin.shape
            record["attention_scale"], record["window"] = layer.attention_scale, layer.sliding_window

    def __call__(
        self,
        residual: torch.Tensor,
        caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
        step: StackStep,
        wanted: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(residual, update) of the rows i64[R] `wanted` after the last layer, [R, hidden] each.

        residual [rows, hidden], contiguous, is what the first layer gets, and is overwritten; the caches of keys and
        values, one of each a layer, all alike, get the new ones.
        """
        shape, num_layers = self._shape, len(self._kept)
        self._check_call(residual, caches, step)
        layers = self._layers.copy()  # as others may be at it too
        layers["key_cache"] = [key.data_ptr() for key, _ in caches]
        layers["value_cache"] = [value.data_ptr() for _, value in caches]
        update = torch.zeros_like(residual)
        attended = residual.new_empty(residual.shape[0], shape.num_heads * shape.head_size)
        # Behind the last attention no row meets another: of a prompt's only those go on whose results are asked for.
        is_cut = residual.shape[0] - wanted.shape[0] >= _ROWS_WORTH_A_CUT
        last = num_layers if is_cut else num_layers + 1
        self._run(range(last), layers, caches[0], step, (residual, update, attended))
        residual, update = residual[wanted], update[wanted]
        if is_cut and len(wanted) > 0:
            behind = range(num_layers, num_layers + 1)
            self._run(behind, layers, caches[0], step, (residual, update, attended[wanted]))
        return residual, update

    def _run(
        self,
        stages: range,
        layers: np.ndarray,
        cache: tuple[torch.Tensor, torch.Tensor],
        step: StackStep,
        between: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        """Stages of `run_layers`; between: residual, update and attended of the rows that they compute."""
        shape, (residual, update, attended) = self._shape, between
        rows, record = residual.shape[0], np.zeros(1, dtype=STEP)
        sizes = {"normed": shape.hidden, "qkv": (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size}
        room = {name: update.new_empty(rows, size) for name, size in sizes.items()}
        for name, size in (("inner", 2 * shape.intermediate), ("activated", shape.intermediate)):
            room[name] = update.new_empty(min(rows, MLP_ROWS), size)
        room |= {"room": self._room(rows), "zeros": self._zeros}
        given = {"update": update, "residual": residual, "attended": attended}
        given |= {"positions": step.positions, "slots": step.slot_mapping}
        given |= {"block_tables": step.block_tables, "seq_lens": step.seq_lens, "query_starts": step.query_starts}
        for name, tensor in (given | room).items():
            record[name] = tensor.data_ptr()
        record["rows"], record["num_sequences"] = rows, step.seq_lens.shape[0]
        record["tables_stride"] = step.block_tables.stride(0)
        record["num_blocks"], record["block_size"] = cache[0].shape[0], cache[0].shape[2]
        record["element_bytes"], record["prefetch_bytes"] = update.element_size(), cache_prefetch.ROOM_BYTES
        for name in ("hidden", "num_heads", "num_kv_heads", "head_size"):
            record[name] = getattr(shape, name)
        for name in ("norm_eps", "norm_weight_offset", "logit_soft_cap"):
            record[name] = getattr(shape, name)
        run_layers(
            element_of(update, residual, self._kept[0].input_norm),
            stored_element_of(*cache),
            layers,
            record,
            stages.start,
            stages.stop,
            num_threads(),
        )

    def _room(self, rows: int) -> torch.Tensor:
        """For the quantised rows of any of the products."""
        shape = self._shape
        widest = max(shape.hidden, shape.intermediate, shape.num_heads * shape.head_size)
        return torch.empty(room_bytes(rows, widest), dtype=torch.uint8)

    def _check_call(
        self, residual: torch.Tensor, caches: Sequence[tuple[torch.Tensor, torch.Tensor]], step: StackStep
    ) -> None:
        shape, rows = self._shape, residual.shape[0]
        if residual.shape != (rows, shape.hidden):
            raise ValueError(f"{tuple(residual.shape)} are not rows of {shape.hidden}")
        if len(step.positions) != rows or len(step.slot_mapping) != rows:
            raise ValueError(f"{len(step.positions)} positions or {len(step.slot_mapping)} slots for {rows} rows")
        check_positions(step.positions.data_ptr(), rows, self._num_angles)
        if len(caches) != len(self._layers):
            raise ValueError(f"{len(caches)} caches are not those of {len(self._layers)} layers")
        cache_shape = caches[0][0].shape
        if cache_shape[1::2] != (shape.num_kv_heads, shape.head_size):
            raise ValueError(f"caches {tuple(cache_shape)} are not of {shape.num_kv_heads} heads of {shape.head_size}")


def _check(shape: StackShape, layer: LayerWeights) -> None:
    heads = shape.num_heads * shape.head_size
    expected = {
        "qkv": (heads + 2 * shape.num_kv_heads * shape.head_size, shape.hidden),
        "attention_out": (shape.hidden, heads),
        "mlp_in": (2 * shape.intermediate, shape.hidden),
        "mlp_out": (shape.hidden, shape.intermediate),
    }
    for name, size in expected.items():
        product = getattr(layer, name)
        if layer.input_norm.dtype != torch.float32 and not product.is_int8:
            raise ValueError(f"{name} is for rows of float32, not {layer.input_norm.dtype}")
        if (product.out_features, product.in_features) != size:
            raise ValueError(f"{name} is {product.out_features} x {product.in_features}, not {size[0]} x {size[1]}")
    for name in ("input_norm", "mlp_norm"):
        if getattr(layer, name).shape != (shape.hidden,):
            raise ValueError(f"{name} {tuple(getattr(layer, name).shape)} is not for {shape.hidden} elements")
