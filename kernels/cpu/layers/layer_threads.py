"""What a thread does in the layers of a Llama-like model; see `layer_stack` for the formula.

All between two attentions is one parallel loop. Its threads go through the phases together: `shared_work` says how. Its
products prefetch what the second of them reads: `cache_prefetch`.

    of layer i - 1   product with W_out, residual and norm; of 256 rows at a time product with W_inner, gate, W_down
    of layer i       residual and norm, product with W_qkv, rotary and cache
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from kernels.cpu.attention.attention import _paged_attention
from kernels.cpu.products.layer_product import PHASES as PRODUCT_PHASES
from kernels.cpu.products.layer_product import PRODUCT, multiply, num_prefetching_inputs
from kernels.cpu.rows.activation import activate_rows
from kernels.cpu.rows.cache import store_token
from kernels.cpu.rows.norm import norm_rows
from kernels.cpu.rows.rotary import rotate_rows
from kernels.cpu.shared_work import counters, shared, wait
from kernels.cpu.vectors.cache_prefetch import PREFETCH_CURSOR_SIZE, blocks_before, new_places, plan_prefetch
from kernels.cpu.vectors.numbers import address_of, lines

_ADDRESS = _COUNT = np.int64
LAYER = np.dtype(
    [
        ("input_norm", _ADDRESS),
        ("qkv", PRODUCT),
        ("cos_sin", _ADDRESS),
        ("max_positions", _COUNT),  # of cos_sin, and how many elements of a head are turned
        ("num_turned", _COUNT),
        ("key_cache", _ADDRESS),
        ("value_cache", _ADDRESS),
        ("window", _COUNT),
        ("attention_scale", np.float64),
        ("attention_out", PRODUCT),
        ("mlp_norm", _ADDRESS),
        ("mlp_in", PRODUCT),
        ("mlp_out", PRODUCT),
    ]
)
# Of a pass: sizes, the step's tensors and a workspace between operations; `LayerStack` says which is which.
STEP = np.dtype(
    [
        *[(name, _COUNT) for name in ("rows", "num_sequences", "tables_stride", "element_bytes")],
        *[(name, _COUNT) for name in ("hidden", "num_heads", "num_kv_heads", "head_size", "num_blocks", "block_size")],
        ("prefetch_bytes", _COUNT),  # of keys and values, at most, while the products before an attention compute
        *[(name, _ADDRESS) for name in ("positions", "slots", "block_tables", "seq_lens", "query_starts")],
        *[(name, _ADDRESS) for name in ("update", "residual", "normed", "qkv", "attended", "inner", "activated")],
        *[(name, _ADDRESS) for name in ("workspace", "zeros")],  # see `layer_product.multiply`
        *[(name, np.float64) for name in ("norm_eps", "norm_weight_offset", "logit_soft_cap")],
    ]
)

# So what an MLP holds in between stays in the caches. A pass of 2,048 rows of int8, SmolLM2-135M on two Zen 5 cores:
# 456 ms in place of 942, half of which went into pages of memory that the system made and took back.
MLP_ROWS = 256

_NO_SLOPES = np.int64(0)
# Of one type, as threads are: numba compiles a function again for every constant, and for a number without a sign.
_INPUT_NORM, _MLP_NORM, _ROTARY = np.arange(3)
_QKV, _OUT, _MLP = np.arange(3, 3 + 3 * PRODUCT_PHASES, PRODUCT_PHASES)
_GATE, _MLP_OUT, _MLP_PHASES = PRODUCT_PHASES, PRODUCT_PHASES + 1, 2 * PRODUCT_PHASES + 1  # of the MLP's, for some rows


@njit(nogil=True, cache=True)
def run_layers(
    element: Any, stored_element: Any, layers: Any, steps: Any, first: Any, end: Any, num_threads: Any
) -> None:
    """Stages first .. end of a step, the one record of `STEP`, through layers, records of `LAYER`: stage i is all that
    lies between attention i - 1 and i, and this; the last, behind all attentions, has the number of layers.

    element, stored_element: see `numbers`, of the model and of the caches.
    """
    step = steps[0]
    for index in range(first, end):
        _between_attentions(element, stored_element, layers, steps, index, num_threads)
        if index == layers.size:
            break
        layer = layers[index]
        _paged_attention(
            element,
            stored_element,
            step.attended,
            step.num_heads * step.head_size,
            step.qkv,
            layer.qkv.num_out,
            layer.key_cache,
            layer.value_cache,
            (step.num_blocks, step.num_kv_heads, step.block_size, step.head_size),
            step.block_tables,
            step.tables_stride,
            step.seq_lens,
            step.query_starts,
            step.num_sequences,
            step.num_heads,
            np.float32(layer.attention_scale),
            _NO_SLOPES,
            layer.window,
            np.float32(step.logit_soft_cap),
            num_threads,
        )


@njit(nogil=True, parallel=True)
def _between_attentions(
    element: Any, stored_element: Any, layers: Any, steps: Any, index: Any, num_threads: Any
) -> None:
    blocks, cursors = np.empty(0, dtype=np.int64), np.zeros((num_threads, PREFETCH_CURSOR_SIZE), dtype=np.int64)
    places = blocks
    if index < layers.size:
        blocks = _blocks_before(layers[index], steps[0])
        places = new_places(blocks, _block_bytes(stored_element, layers[index], steps[0]))
    counts = counters(num_threads, _MLP + (steps[0].rows + MLP_ROWS - 1) // MLP_ROWS * _MLP_PHASES)
    for thread in prange(num_threads):
        team = counts, np.int64(thread), num_threads
        cursor = address_of(cursors[thread])
        if index < layers.size:
            _plan_prefetch(cursor, places, blocks, thread, num_threads, stored_element, layers[index], steps[0])
        if index > 0:
            _after_attention(team, element, layers[index - 1], steps[0], cursor)
        if index < layers.size:
            _before_attention(team, element, stored_element, layers[index], steps[0], cursor)


@njit(nogil=True)
def _blocks_before(layer: Any, step: Any) -> Any:
    lens = step.seq_lens, step.query_starts, step.num_sequences
    return blocks_before(step.block_tables, step.tables_stride, *lens, step.block_size, layer.window)


@njit(nogil=True)
def _block_bytes(stored_element: Any, layer: Any, step: Any) -> Any:
    """Of a block's keys, or values."""
    bytes_of_number = lines(layer.key_cache, stored_element, 1, 1).itemsize
    return step.num_kv_heads * step.block_size * step.head_size * bytes_of_number


@njit(nogil=True)
def _plan_prefetch(
    cursor: Any, places: Any, blocks: Any, thread: Any, threads: Any, stored_element: Any, layer: Any, step: Any
) -> None:
    caches = layer.key_cache, layer.value_cache, _block_bytes(stored_element, layer, step)
    num_inputs = 0
    for product in (layer.attention_out, layer.mlp_in, layer.mlp_out, layer.qkv):
        num_inputs += num_prefetching_inputs(product, step.rows)
    plan_prefetch(
        cursor,
        places,
        blocks,
        thread,
        threads,
        *caches,
        step.prefetch_bytes,
        num_inputs // threads,
    )


@njit(nogil=True, inline="always")
def _before_attention(team: Any, element: Any, stored_element: Any, layer: Any, step: Any, cursor: Any) -> None:
    _norm(team, _INPUT_NORM, element, layer.input_norm, step)
    multiply(team, _QKV, element, layer.qkv, step.qkv, step.normed, step.rows, step, cursor)
    _rotate_and_store(team, _ROTARY, step.rows, (element, stored_element, layer, step))
    wait(team, _ROTARY, step.rows)


@njit(nogil=True, inline="always")
def _after_attention(team: Any, element: Any, layer: Any, step: Any, cursor: Any) -> None:
    multiply(team, _OUT, element, layer.attention_out, step.update, step.attended, step.rows, step, cursor)
    _norm(team, _MLP_NORM, element, layer.mlp_norm, step)
    phase, row_bytes = _MLP, step.hidden * step.element_bytes
    for first in range(0, step.rows, MLP_ROWS):
        rows, size = min(MLP_ROWS, step.rows - first), layer.mlp_out.num_in
        normed, update = step.normed + first * row_bytes, step.update + first * row_bytes
        multiply(team, phase, element, layer.mlp_in, step.inner, normed, rows, step, cursor)
        _gate(team, phase + _GATE, rows, (element, step.activated, step.inner, rows, size))
        wait(team, phase + _GATE, rows)
        multiply(team, phase + _MLP_OUT, element, layer.mlp_out, update, step.activated, rows, step, cursor)
        phase += _MLP_PHASES


@njit(nogil=True, inline="always")
def _norm(team: Any, phase: Any, element: Any, weight: Any, step: Any) -> None:
    _norm_shared(team, phase, step.rows, (element, weight, step))
    wait(team, phase, step.rows)


@njit(nogil=True)
def _norm_row(row: Any, end: Any, element: Any, weight: Any, step: Any) -> None:
    eps, offset = np.float32(step.norm_eps), np.float32(step.norm_weight_offset)
    norm_rows(
        row, step.rows, element, step.normed, step.update, weight, step.residual, step.rows, step.hidden, eps, offset
    )


@njit(nogil=True)
def _gate_row(row: Any, end: Any, element: Any, activated: Any, inner: Any, rows: Any, size: Any) -> None:
    activate_rows(row, rows, element, activated, inner, rows, size)


@njit(nogil=True)
def _rotate_and_store_row(row: Any, end: Any, element: Any, stored_element: Any, layer: Any, step: Any) -> None:
    width, query_shape = layer.qkv.num_out, (step.rows, step.num_heads, step.head_size)
    key = step.qkv + step.num_heads * step.head_size * step.element_bytes
    value = key + step.num_kv_heads * step.head_size * step.element_bytes
    angles = step.positions, layer.cos_sin, (layer.max_positions, layer.num_turned)
    rotate_rows(row, step.rows, element, step.qkv, width, query_shape, key, width, step.num_kv_heads, *angles)
    cache_shape = step.num_blocks, step.num_kv_heads, step.block_size, step.head_size
    caches = layer.key_cache, layer.value_cache, cache_shape, step.slots
    store_token(row, element, stored_element, key, width, value, width, *caches, step.rows)


_norm_shared, _gate, _rotate_and_store = shared(_norm_row), shared(_gate_row), shared(_rotate_and_store_row)
