"""All layers of a Llama-like model, one after the other, in one call of compiled code.

    residual += update;  q, k, v = W_qkv norm(residual);  q, k turned by position;  k, v -> cache
    residual += W_out attention(q, cache);  update = W_down (silu(gate) * up),  gate, up = W_inner norm(residual)

Some families norm each head of q and k, or what attention and MLP give, or have another activation than silu.
The kernels are those of the single operations, bit for bit. What is saved is the way from Python to each of them, and
that of the threads into and out of each. The code: native/layers.cpp.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.cpu.elements import check_integers, element_of, stored_element_of
from kernels.cpu.layers.layer_workspace import LayerWorkspace, LayerWorkspaces, StackShape
from kernels.cpu.library import library, num_threads
from kernels.cpu.products.layer_product import PRODUCT, Product
from kernels.cpu.rows import check_angles, check_positions

_ROWS_WORTH_A_CUT = 16  # left out behind the last attention; a second call of compiled code costs more than fewer
_ADDRESS = _COUNT = np.int64
LAYER = np.dtype(  # `Layer` of native/layers.cpp
    [
        ("input_norm", _ADDRESS),
        ("qkv", PRODUCT),
        ("cos_sin", _ADDRESS),
        ("num_turned", _COUNT),  # elements of a head
        ("key_cache", _ADDRESS),
        ("value_cache", _ADDRESS),
        ("window", _COUNT),
        ("attention_scale", np.float64),
        ("attention_out", PRODUCT),
        ("mlp_norm", _ADDRESS),
        ("mlp_in", PRODUCT),
        ("mlp_out", PRODUCT),
        *[(name, _ADDRESS) for name in ("query_norm", "key_norm", "attention_post_norm", "mlp_post_norm")],  # 0: none
    ]
)
STEP = struct.Struct("=12q5q8q3dq")  # `Step`, of a pass: sizes, the step's tensors, a workspace, options
_ACTIVATIONS: dict[str, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2}  # `Activation` of native/rows.h


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Of one layer; norms [hidden] as `rms_norm` takes them, `cos_sin` as `rotary`, options as `paged_attention`."""

    input_norm: torch.Tensor
    qkv: Product
    cos_sin: torch.Tensor
    attention_scale: float
    sliding_window: int
    attention_out: Product
    mlp_norm: torch.Tensor
    mlp_in: Product  # gate, then up
    mlp_out: Product
    query_norm: torch.Tensor | None = None  # [head_size], of each head
    key_norm: torch.Tensor | None = None
    attention_post_norm: torch.Tensor | None = None  # [hidden], of what attention adds to the residual
    mlp_post_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class StackStep:
    """Which rows a pass computes, as `rotary`, `reshape_and_cache` and `paged_attention` take it."""

    positions: torch.Tensor  # i64[rows]
    slot_mapping: torch.Tensor  # i64[rows]
    block_tables: torch.Tensor  # i32[sequences, blocks]
    seq_lens: torch.Tensor  # i32[sequences]
    query_starts: torch.Tensor  # i32[sequences + 1]


class BoundLayers:
    """Records of `LAYER` with the addresses of caches."""

    def __init__(self, records: np.ndarray) -> None:
        self.records, self.address = records, records.ctypes.data  # looked up once: it is slow


class LayerStack:
    """Layers, their weights checked once. Raises ValueError for weights that do not fit."""

    def __init__(self, shape: StackShape, layers: Sequence[LayerWeights]) -> None:
        self._shape, self._kept = shape, list(layers)
        self._layers = np.zeros(len(layers), dtype=LAYER)
        self._num_angles = min(layer.cos_sin.shape[0] for layer in layers)
        for record, layer in zip(self._layers, layers, strict=True):
            _check(shape, layer)
            for name in ("qkv", "attention_out", "mlp_in", "mlp_out"):
                record[name] = getattr(layer, name).record
            for name in ("input_norm", "mlp_norm", "cos_sin"):
                record[name] = getattr(layer, name).data_ptr()
            for name in ("query_norm", "key_norm", "attention_post_norm", "mlp_post_norm"):
                record[name] = 0 if getattr(layer, name) is None else getattr(layer, name).data_ptr()
            record["num_turned"] = layer.cos_sin.shape[1]
            record["attention_scale"], record["window"] = layer.attention_scale, layer.sliding_window
        # Of `STEP`, the same in all passes.
        self._sizes = shape.hidden, shape.num_heads, shape.num_kv_heads, shape.head_size
        options = shape.norm_eps, shape.norm_weight_offset, shape.logit_soft_cap
        self._options = *options, _ACTIVATIONS[shape.activation]
        self._workspaces = LayerWorkspaces(shape, max(map(_prepared_bytes, layers)))
        # The caches of the call before, of which the first and the last stand for all, and records of layers with them.
        self._bound: tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor], BoundLayers] | None = None

    def __call__(
        self,
        residual: torch.Tensor,
        caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
        step: StackStep,
        wanted: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(residual, update) of the rows i64[R] `wanted` after the last layer, [R, hidden] each; None: of all rows.

        residual [rows, hidden], contiguous, is what the first layer gets, and is overwritten; the caches of keys and
        values, one of each a layer, all alike, get the new ones.
        """
        rows, num_layers = residual.shape[0], len(self._kept)
        self._check_call(residual, step)
        layers = self._with_caches(caches)
        update = torch.zeros_like(residual)
        workspace = self._workspaces.take(rows, residual.dtype)
        # Behind the last attention no row meets another: of a prompt's only those go on whose results are asked for.
        is_cut = wanted is not None and rows - wanted.shape[0] >= _ROWS_WORTH_A_CUT
        last = num_layers if is_cut else num_layers + 1
        self._run(range(last), layers, caches[0], step, workspace, (residual, update, workspace.attended))
        if wanted is not None:
            residual, update = residual.index_select(0, wanted), update.index_select(0, wanted)
            if is_cut and wanted.shape[0] > 0:
                behind = range(num_layers, num_layers + 1)
                self._run(behind, layers, caches[0], step, workspace, (residual, update, workspace.attended[wanted]))
        self._workspaces.give_back(workspace)
        return residual, update

    def _run(
        self,
        stages: range,
        layers: BoundLayers,
        cache: tuple[torch.Tensor, torch.Tensor],
        step: StackStep,
        workspace: LayerWorkspace,
        between: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        """Stages of `run_layers`; between: residual, update and attended of the rows that they compute."""
        residual, update, attended = between
        num_blocks, _, block_size, _ = cache[0].shape
        passed = STEP.pack(
            residual.shape[0],
            step.seq_lens.shape[0],
            step.block_tables.stride(0),
            element_of(residual, self._kept[0].input_norm),
            stored_element_of(*cache),
            workspace.mlp_rows,
            *self._sizes,
            num_blocks,
            block_size,
            step.positions.data_ptr(),
            step.slot_mapping.data_ptr(),
            step.block_tables.data_ptr(),
            step.seq_lens.data_ptr(),
            step.query_starts.data_ptr(),
            update.data_ptr(),
            residual.data_ptr(),
            workspace.normed.data_ptr(),
            workspace.qkv.data_ptr(),
            attended.data_ptr(),
            workspace.inner.data_ptr(),
            workspace.activated.data_ptr(),
            workspace.prepared.data_ptr(),
            *self._options,
        )
        run_layers(layers, passed, stages)

    def _with_caches(self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> BoundLayers:
        """Records of the layers with the addresses of these caches; not to be written to. Weak references tell whether
        they are those of the call before: a cache that is given up is not held."""
        if caches and self._bound is not None:
            first, last, bound = self._bound
            if first() is caches[0][0] and last() is caches[-1][1]:
                return bound
        self._check_caches(caches)
        records = self._layers.copy()  # as a pass over others may be on its way
        records["key_cache"] = [key.data_ptr() for key, _ in caches]
        records["value_cache"] = [value.data_ptr() for _, value in caches]
        bound = BoundLayers(records)
        self._bound = weakref.ref(caches[0][0]), weakref.ref(caches[-1][1]), bound
        return bound

    def _check_call(self, residual: torch.Tensor, step: StackStep) -> None:
        shape, rows, sequences = self._shape, residual.shape[0], step.seq_lens.shape[0]
        if residual.shape != (rows, shape.hidden) or not residual.is_contiguous():
            raise ValueError(f"{tuple(residual.shape)} are not contiguous rows of {shape.hidden}")
        if len(step.positions) != rows or len(step.slot_mapping) != rows:
            raise ValueError(f"{len(step.positions)} positions or {len(step.slot_mapping)} slots for {rows} rows")
        if len(step.block_tables) < sequences or len(step.query_starts) != sequences + 1:
            tables, starts = len(step.block_tables), len(step.query_starts)
            raise ValueError(f"{tables} block tables or {starts} query starts for {sequences} sequences")
        check_integers(torch.int64, positions=step.positions, slot_mapping=step.slot_mapping)
        check_integers(torch.int32, block_tables=step.block_tables)
        check_integers(torch.int32, seq_lens=step.seq_lens, query_starts=step.query_starts)
        check_positions(step.positions, self._num_angles)

    def _check_caches(self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        shape = self._shape
        if len(caches) != len(self._layers):
            raise ValueError(f"{len(caches)} caches are not those of {len(self._layers)} layers")
        first = caches[0][0]
        if first.dim() != 4 or first.shape[1::2] != (shape.num_kv_heads, shape.head_size):
            raise ValueError(f"caches {tuple(first.shape)} are not of {shape.num_kv_heads} heads of {shape.head_size}")
        for cache in (cache for pair in caches for cache in pair):
            stored_element_of(first, cache)
            if cache.shape != first.shape or not cache.is_contiguous():
                raise ValueError(f"caches {tuple(first.shape)} and {tuple(cache.shape)} are not alike and contiguous")


def run_layers(layers: BoundLayers, step: bytes, stages: range) -> None:
    """Stages of a step, of `STEP`: stage i is all that lies between attention i - 1 and i, and this; the last, behind
    all attentions, has the number of layers."""
    library().run_layers(layers.address, len(layers.records), step, stages.start, stages.stop, num_threads())


def _prepared_bytes(layer: LayerWeights) -> int:
    """What a row takes while any of its products multiplies it."""
    products = layer.qkv, layer.attention_out, layer.mlp_in, layer.mlp_out
    return max(product.workspace_bytes(element_of(layer.input_norm)) for product in products)


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
        if not product.is_for(layer.input_norm.dtype):
            raise ValueError(f"{name} is for rows of bfloat16, not {layer.input_norm.dtype}")
        if (product.out_features, product.in_features) != size:
            raise ValueError(f"{name} is {product.out_features} x {product.in_features}, not {size[0]} x {size[1]}")
    norms = {"input_norm": shape.hidden, "mlp_norm": shape.hidden}
    norms |= {"attention_post_norm": shape.hidden, "mlp_post_norm": shape.hidden}
    norms |= {"query_norm": shape.head_size, "key_norm": shape.head_size}
    for name, elements in norms.items():
        weight = getattr(layer, name)
        if weight is None:
            continue
        if weight.shape != (elements,) or not weight.is_contiguous():
            raise ValueError(f"{name} {tuple(weight.shape)} is not for {elements} elements")
        element_of(layer.input_norm, weight)
    check_angles(layer.cos_sin, shape.head_size)
