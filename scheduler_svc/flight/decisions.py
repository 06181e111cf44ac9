"""One step as it was decided, in numbers: what two schedulers are compared by, and what a reader is shown.

Made of the message that a worker was sent, so nothing of a decision is missing but what is private: tokens, sampling
parameters, and the hashes of blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from protos import worker_pb2

Decision = dict[str, Any]


def decision_of(step: worker_pb2.Step, groups: list[int]) -> Decision:
    """`groups`: the numbers of the requests that are introduced, in their order. What is empty is left out.

    released        slots that were given up
    forks           [parent's slot, child's slot]
    introduced      [request, [[slot, index, tokens, computed tokens, blocks], ...]]; blocks of another slot: its number
    swap_out, swap_in, copies   pairs of blocks, source and destination
    appended        [slot, new blocks]
    replaced        [slot, all its blocks]
    decodes         slots that compute one token each
    chunks          [slot, tokens, samples, what it computes (0 known tokens, 1 its last draw, 2 a given token)]
    children        slots of a row's forks
    cached, forgotten   blocks that may be found by later leases, and such as may not; "all" of them
    """
    rows = step.rows
    appended: list[Any] = []
    replaced: list[Any] = []
    for update in step.block_tables:
        which = update.WhichOneof("update")
        if which is not None:
            (appended if which == "append" else replaced).extend(_tables(getattr(update, which)))
    slots, first = _numbers(rows.slots_u16, "<u2"), rows.num_decode_rows
    decision = {
        "resumes_after": step.resume_after if step.HasField("resume_after") else None,
        "released": _numbers(step.released_slots_u16, "<u2"),
        "forks": _pairs(step.forks_u16, "<u2"),
        "introduced": [[n, _sequences(each)] for n, each in zip(groups, step.groups, strict=True)],
        "swap_out": _pairs(step.swap_out.pairs_u32, "<u4"),
        "swap_in": _pairs(step.swap_in.pairs_u32, "<u4"),
        "copies": _pairs(step.copies.pairs_u32, "<u4"),
        "appended": appended,
        "replaced": replaced,
        "decodes": slots[:first],
        "chunks": _chunks(rows, slots[first:]),
        "children": _numbers(rows.child_slots_u16, "<u2"),
        "cached": _numbers(step.cached_blocks.block_ids_u32, "<u4"),
        "forgotten": "all" if step.forgets_all_blocks else _numbers(step.forgotten_blocks_u32, "<u4"),
    }
    return {name: value for name, value in decision.items() if value not in (None, [])}


def num_tokens_of(decision: Decision) -> int:
    """That the step computes."""
    of_chunks: list[int] = [chunk[1] for chunk in decision.get("chunks", ())]
    return len(decision.get("decodes", ())) + sum(of_chunks)


def num_rows_of(decision: Decision) -> int:
    """Sequences that compute something in it."""
    return len(decision.get("decodes", ())) + len(decision.get("chunks", ()))


def _numbers(data: bytes, dtype: str) -> list[int]:
    numbers: list[int] = np.frombuffer(data, dtype).tolist()
    return numbers


def _pairs(data: bytes, dtype: str) -> list[list[int]]:
    pairs: list[list[int]] = np.frombuffer(data, dtype).reshape(-1, 2).tolist()
    return pairs


def _tables(tables: worker_pb2.BlockTables) -> list[Any]:
    slots, blocks = _numbers(tables.slots_u16, "<u2"), _numbers(tables.block_ids_u32, "<u4")
    counts, entries, start = _numbers(tables.counts_u16, "<u2") or [1] * len(slots), [], 0
    for slot, count in zip(slots, counts, strict=True):
        entries.append([slot, blocks[start : start + count]])
        start += count
    return entries


def _sequences(group: worker_pb2.SequenceGroupMetadata) -> list[Any]:
    return [
        [each.slot, each.index, len(each.token_ids), each.num_computed_tokens, list(each.block_table)]
        if not each.HasField("same_as_slot")
        else [each.slot, each.index, 0, 0, each.same_as_slot]
        for each in group.sequences
    ]


def _chunks(rows: worker_pb2.Rows, slots: list[int]) -> list[list[int]]:
    lengths, samples = _numbers(rows.query_lens_u32, "<u4"), _numbers(rows.num_samples_u16, "<u2")
    inputs = list(rows.inputs_u8) or [0] * len(slots)
    return [list(chunk) for chunk in zip(slots, lengths, samples, inputs, strict=True)]
