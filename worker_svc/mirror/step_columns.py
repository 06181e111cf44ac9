"""Reads the packed columns of a `Step` into numpy arrays and checks what can be checked without the mirror.

Columns are little-endian fixed-width integers (`protos/worker.proto`). Knows nothing of slots' contents. Every function
raises ProtocolError for a column of the wrong length or a value out of range, and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protos import worker_pb2
from worker_svc.errors import ProtocolError

Ints = npt.NDArray[np.int64]

_NOTHING: Ints = np.zeros(0, np.int64)
_NO_PAIRS = _NOTHING.reshape(0, 2)
_NO_TOKENS = np.frombuffer(b"", "<i4")


@dataclass(frozen=True, slots=True)
class BlockOperations:
    """What the cache engine has to do for a step, in this order; each is [n, 2] pairs of (source, destination)."""

    swap_out: Ints  # (device, host)
    swap_in: Ints  # (host, device)
    copies: Ints  # (device, device)


@dataclass(frozen=True, slots=True)
class TableChange:
    """One `BlockTables` message: slot i gets the next counts[i] of block_ids."""

    slots: Ints  # [n]
    counts: Ints  # [n]
    block_ids: Ints  # [counts.sum()]
    replaces: bool


@dataclass(frozen=True, slots=True)
class RowColumns:
    """The `Rows` message with its decode rows, which come first, spelled out: every array has one entry a row."""

    num_decode_rows: int
    slots: Ints  # [R]
    query_lens: Ints  # [R]
    num_samples: Ints  # [R]
    inputs: npt.NDArray[np.uint8]  # [R], RowInput
    given_token_ids: npt.NDArray[np.int32]  # ragged
    child_slots: Ints  # ragged


def read_column(data: bytes, dtype: str, name: str) -> Ints:
    """`data` as int64; `dtype` is the little-endian wire type, for example "<u2"."""
    if not data:
        return _NOTHING
    item_bytes = np.dtype(dtype).itemsize
    if len(data) % item_bytes:
        raise ProtocolError(f"{name} holds {len(data)} bytes, which is no multiple of {item_bytes}")
    return np.frombuffer(data, dtype).astype(np.int64)


def read_slots(data: bytes, max_num_seqs: int, name: str, *, unique: bool = True) -> Ints:
    """Slots of a u16 column, all below `max_num_seqs`, and different from each other where `unique`."""
    slots = read_column(data, "<u2", name)
    check_below(slots, max_num_seqs, name)
    if unique and slots.size > 1 and np.bincount(slots).max() > 1:
        raise ProtocolError(f"{name} names slot {int(np.bincount(slots).argmax())} twice")
    return slots


def check_below(values: Ints, bound: int, name: str) -> None:
    """Raises unless every value is in [0, bound)."""
    if values.size and int(values.max()) >= bound:
        raise ProtocolError(f"{name} holds {int(values.max())}, out of range [0, {bound})")


def read_operations(step: worker_pb2.Step, num_device_blocks: int, num_host_blocks: int) -> BlockOperations:
    """Swaps and copies of a step, with every block in range and no block on both sides where the order forbids it."""
    swap_out = _read_pairs(step.swap_out, num_device_blocks, num_host_blocks, "swap_out")
    swap_in = _read_pairs(step.swap_in, num_host_blocks, num_device_blocks, "swap_in")
    copies = _read_pairs(step.copies, num_device_blocks, num_device_blocks, "copies")
    if copies.size and (both := np.intersect1d(copies[:, 0], copies[:, 1])).size:
        raise ProtocolError(f"block {both[0]} is both source and destination of copies")
    if swap_in.size and swap_out.size and (both := np.intersect1d(swap_in[:, 0], swap_out[:, 1])).size:
        raise ProtocolError(f"host block {both[0]} is swapped in and a swap-out target in one step")
    return BlockOperations(swap_out, swap_in, copies)


def _read_pairs(pairs: worker_pb2.BlockPairs, num_sources: int, num_destinations: int, name: str) -> Ints:
    if not pairs.pairs_u32:
        return _NO_PAIRS
    blocks = read_column(pairs.pairs_u32, "<u4", name)
    if blocks.size % 2:
        raise ProtocolError(f"{name} holds {blocks.size} block ids, which are no pairs")
    table = blocks.reshape(-1, 2)
    check_below(table[:, 0], num_sources, f"sources of {name}")
    check_below(table[:, 1], num_destinations, f"destinations of {name}")
    if np.unique(table[:, 1]).size != len(table):
        raise ProtocolError(f"{name} has a destination twice")
    return table


def read_table_change(update: worker_pb2.BlockTableUpdate, max_num_seqs: int, num_device_blocks: int) -> TableChange:
    """One update of block tables, its counts spelled out."""
    replaces = update.WhichOneof("update") == "replace"
    tables = update.replace if replaces else update.append
    slots = read_slots(tables.slots_u16, max_num_seqs, "slots of block_tables")
    counts = np.ones_like(slots)
    if tables.counts_u16:
        counts = read_column(tables.counts_u16, "<u2", "counts of block_tables")
    block_ids = read_column(tables.block_ids_u32, "<u4", "block_ids of block_tables")
    check_below(block_ids, num_device_blocks, "block_ids of block_tables")
    if counts.size != slots.size or int(counts.sum()) != block_ids.size:
        raise ProtocolError(
            f"block_tables name {slots.size} slots, {counts.size} counts and {block_ids.size} block ids, which disagree"
        )
    return TableChange(slots, counts, block_ids, replaces)


def read_rows(rows: worker_pb2.Rows, max_num_seqs: int) -> RowColumns:
    """The rows of a step: decode rows first, then those that the ragged columns describe."""
    slots = read_slots(rows.slots_u16, max_num_seqs, "slots of rows")
    num_rows, num_decode_rows = slots.size, rows.num_decode_rows
    if num_decode_rows > num_rows:
        raise ProtocolError(f"{num_decode_rows} decode rows among {num_rows} rows")
    query_lens = num_samples = np.ones(num_rows, np.int64)
    inputs = np.full(num_rows, worker_pb2.ROW_INPUT_LAST_SAMPLED, np.uint8)
    given, child_slots = _NO_TOKENS, _NOTHING
    if num_decode_rows < num_rows:
        query_lens, num_samples = query_lens.copy(), num_samples.copy()
        others = slice(num_decode_rows, None)
        query_lens[others] = _read_one_a_row(rows.query_lens_u32, "<u4", "query_lens", num_rows - num_decode_rows)
        num_samples[others] = _read_one_a_row(rows.num_samples_u16, "<u2", "num_samples", num_rows - num_decode_rows)
        inputs[others] = worker_pb2.ROW_INPUT_KNOWN_TOKENS
        if rows.inputs_u8:
            inputs[others] = _read_one_a_row(rows.inputs_u8, "u1", "inputs", num_rows - num_decode_rows)
        if len(rows.given_token_ids_i32) % 4:
            raise ProtocolError(f"given_token_ids holds {len(rows.given_token_ids_i32)} bytes, no multiple of 4")
        given = np.frombuffer(rows.given_token_ids_i32, "<i4")
        child_slots = read_slots(rows.child_slots_u16, max_num_seqs, "child_slots")
        if int(query_lens.min()) == 0:
            raise ProtocolError("a row with query length 0")
    return RowColumns(num_decode_rows, slots, query_lens, num_samples, inputs, given, child_slots)


def _read_one_a_row(data: bytes, dtype: str, name: str, num_rows: int) -> Ints:
    values = read_column(data, dtype, name)
    if values.size != num_rows:
        raise ProtocolError(f"{name} has {values.size} entries for {num_rows} rows")
    return values


def ragged_offsets(counts: Ints) -> Ints:
    """[0..counts[0]), [0..counts[1]), ... one after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if ends.size else 0
    return np.arange(total) - np.repeat(ends - counts, counts)
