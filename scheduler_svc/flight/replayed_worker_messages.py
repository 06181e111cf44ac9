"""What workers said, as messages again: as many tokens, in the same rows, with the same ends."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from protos import worker_pb2
from scheduler_svc.core.step_plan import ScheduledRows
from scheduler_svc.flight.hidden import digest_of
from scheduler_svc.flight.replayed_groups import EOS
from scheduler_svc.leases.worker_handle import WorkerHandle

NONSENSE = b"\xff"  # no message at all
_candidates = itertools.count(EOS + 1)  # tokens of beams, each another one, so that their blocks differ
MAX_TOKEN = 1 << 30


def lease_of(entry: Mapping[str, Any]) -> worker_pb2.LeaseGranted:
    """That a worker joined with."""
    lease = worker_pb2.LeaseGranted(epoch=entry["epoch"])
    lease.cached_blocks.block_ids_u32 = np.array(entry["cached"], "<u4").tobytes()
    lease.cached_blocks.hashes = b"".join(digest_of(number) for number in entry["hashes"])
    return lease


def response_of(entry: Mapping[str, Any], worker: WorkerHandle) -> bytes:
    """To the oldest step that the worker has now."""
    if entry.get("broken"):
        return NONSENSE
    response = worker_pb2.StepResponse(epoch=entry["epoch"])
    if entry["says"] == "heartbeat":
        response.heartbeat.SetInParent()
    elif entry["says"] == "notice":
        _notice(response.notice, entry)
    elif entry["says"] == "result":
        result = response.result
        result.step_id = entry["step"]
        result.status = getattr(worker_pb2, entry["status"])
        result.timings.total_ns = entry["took_ns"]
        if "code" in entry:
            result.error.code = getattr(worker_pb2, entry["code"])
        _outputs(result.outputs, entry, worker.in_flight[0].rows if worker.in_flight else None)
    return response.SerializeToString()


def _notice(notice: worker_pb2.Notice, entry: Mapping[str, Any]) -> None:
    kind = entry["notice"]
    if kind == "draining":
        notice.draining.finishes_within_ms = entry["finishes_within_ms"]
        notice.draining.SetInParent()
    elif kind == "budget":
        notice.budget.max_num_batched_tokens = entry["max_num_batched_tokens"]
    elif kind == "adapter_loaded":
        notice.adapter_loaded.name, notice.adapter_loaded.generation = entry["adapter"], entry["generation"]
    elif kind == "wanted":
        notice.wanted.SetInParent()


def _outputs(outputs: worker_pb2.SequenceOutputs, entry: Mapping[str, Any], rows: ScheduledRows | None) -> None:
    token_ids = np.zeros(entry["tokens"], "<i4")
    counts = entry.get("counts")
    if rows is not None:
        _end_sequences(token_ids, entry, rows, counts)
    if counts is not None:
        outputs.num_tokens_u16 = np.array(counts, "<u2").tobytes()
    for row, kind in entry.get("row_errors", ()):
        outputs.row_errors.add(row=row, kind=kind)
    if "logprobs" in entry:
        logprobs = np.zeros(entry["logprobs"], "<f4")
        if "candidates" in entry:
            logprobs[:] = entry["candidates"]["logprobs"]
        outputs.logprobs_f32 = logprobs.tobytes()
        outputs.ranks_u32 = np.ones(len(logprobs), "<u4").tobytes()
    for row, first, count in entry.get("prompt_logprobs", ()):
        of_prompt = outputs.prompt_logprobs.add(row=row, first_position=first).logprobs
        of_prompt.token_ids_i32 = np.zeros(count, "<i4").tobytes()
        of_prompt.logprobs_f32 = np.zeros(count, "<f4").tobytes()
        of_prompt.ranks_u32 = np.ones(count, "<u4").tobytes()
    outputs.token_ids_i32 = token_ids.tobytes()


def _end_sequences(token_ids: Any, entry: Mapping[str, Any], rows: ScheduledRows, counts: list[int] | None) -> None:
    """Draws the stop token for those that ended with one, and for beams tokens that are all different."""
    sequences = rows.sample_sequences
    if counts is not None and len(counts) == len(rows):
        drew = np.repeat(np.array(counts) > 0, rows.num_answers)[: len(sequences)]
        sequences = sequences[drew]
    stopped = {(number, index) for number, index in entry.get("stopped", ())}
    if stopped:
        for place, sequence in enumerate(sequences[: len(token_ids)]):
            if (sequence.group.number, sequence.index) in stopped:
                token_ids[place] = EOS
    if "candidates" in entry:
        for place in range(len(sequences), len(token_ids)):
            token_ids[place] = EOS + 1 + next(_candidates) % MAX_TOKEN
        token_ids[entry["candidates"]["stops"]] = EOS
