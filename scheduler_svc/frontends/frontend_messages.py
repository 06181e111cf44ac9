"""Tokens, ends and refusals between the core and its frontends: each message is made here, and read here again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as AbstractSequence

import numpy as np

from protos import frontend_pb2, shards_pb2, worker_pb2
from scheduler_svc.api.status import STATUS_CODES
from scheduler_svc.core.sequences.beam_search import BeamHypothesis
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.sequences.sequence_columns import Ints
from scheduler_svc.core.step_plan import NewTokens
from scheduler_svc.errors import FieldViolation, InvalidRequest, QueueFull, RequestRefused
from scheduler_svc.limits.over_limit import OverLimit

_REFUSALS = {kind.__name__: kind for kind in STATUS_CODES}


# ---- tokens ---------------------------------------------------------------------------------------------------------


def encode_tokens(
    numbers: Iterable[int], tokens: NewTokens, entries: Ints, logprobs: worker_pb2.SequenceOutputs | None
) -> frontend_pb2.TokenColumns:
    """Those of `entries` (positions in `tokens`), whose groups have these numbers, one an entry."""
    return frontend_pb2.TokenColumns(
        numbers_u32=np.fromiter(numbers, "<u4", len(entries)).tobytes(),
        indices_u16=np.array([sequence.index for sequence in tokens.sequences[entries]], "<u2").tobytes(),
        token_ids_i32=tokens.token_ids[entries].astype("<i4").tobytes(),
        finish_reasons_u8=tokens.finish_reasons[entries].tobytes(),
        logprobs=logprobs,
    )


def decode_tokens(columns: frontend_pb2.TokenColumns, groups: Mapping[int, SequenceGroup]) -> NewTokens:
    """Those of groups that are still known here; logprobs are at their entries of `columns.logprobs`."""
    numbers = np.frombuffer(columns.numbers_u32, "<u4").tolist()
    indices = np.frombuffer(columns.indices_u16, "<u2").tolist()
    entries = np.array([entry for entry, number in enumerate(numbers) if number in groups], np.int64)
    sequences: np.ndarray = np.empty(len(entries), np.object_)
    for place, entry in enumerate(entries.tolist()):
        sequences[place] = groups[numbers[entry]].sequences[indices[entry]]
    token_ids = np.frombuffer(columns.token_ids_i32, "<i4")
    return NewTokens(sequences, token_ids[entries], entries, np.frombuffer(columns.finish_reasons_u8, "u1")[entries])


def encode_counters(number: int, group: SequenceGroup) -> frontend_pb2.GroupCounters:
    """What a client is told of a group beside its tokens; `number`: the frontend's own for it."""
    return frontend_pb2.GroupCounters(
        number=number,
        first_scheduled_ns=group.first_scheduled_ns or 0,
        num_cached_tokens=group.num_cached_tokens,
        num_preemptions=group.num_preemptions,
        num_moves=group.num_moves,
    )


def apply_counters(counters: frontend_pb2.GroupCounters, group: SequenceGroup) -> None:
    """Onto the frontend's copy of the group; inverse of `encode_counters`."""
    group.first_scheduled_ns = counters.first_scheduled_ns or None
    group.num_cached_tokens = counters.num_cached_tokens
    group.num_preemptions, group.num_moves = counters.num_preemptions, counters.num_moves


# ---- ends -----------------------------------------------------------------------------------------------------------


def encode_beams(number: int, group: SequenceGroup, hypotheses: AbstractSequence[BeamHypothesis]) -> frontend_pb2.Beams:
    """All hypotheses of a group, best first, with their logprobs as float64."""
    return frontend_pb2.Beams(
        hypotheses=[
            frontend_pb2.Hypothesis(
                token_ids_i32=np.array(hypothesis.token_ids, "<i4").tobytes(),
                score=hypothesis.score,
                cumulative_logprob=hypothesis.cumulative_logprob,
                finish_reason=hypothesis.finish_reason.value,
                logprobs_f64=np.array(hypothesis.logprobs, "<f8").tobytes(),
                ranks_u32=np.array(hypothesis.ranks, "<u4").tobytes(),
            )
            for hypothesis in hypotheses
        ],
        counters=encode_counters(number, group),
    )


def decode_beams(beams: frontend_pb2.Beams) -> list[BeamHypothesis]:
    """Inverse of `encode_beams`."""
    return [
        BeamHypothesis(
            token_ids=np.frombuffer(hypothesis.token_ids_i32, "<i4").tolist(),
            score=hypothesis.score,
            cumulative_logprob=hypothesis.cumulative_logprob,
            finish_reason=FinishReason(hypothesis.finish_reason),
            logprobs=np.frombuffer(hypothesis.logprobs_f64, "<f8").tolist(),
            ranks=np.frombuffer(hypothesis.ranks_u32, "<u4").tolist(),
        )
        for hypothesis in beams.hypotheses
    ]


def encode_end(
    number: int, group: SequenceGroup, reason: FinishReason, message: str, is_invalid: bool
) -> frontend_pb2.GroupEnd:
    """`message` says what went wrong where `reason` is ERROR."""
    counters = encode_counters(number, group)
    return frontend_pb2.GroupEnd(finish_reason=reason.value, message=message, counters=counters, is_invalid=is_invalid)


# ---- refusals -------------------------------------------------------------------------------------------------------


def encode_refusal(number: int, error: Exception) -> frontend_pb2.Refused:
    """`error`: a RequestRefused, or a fault of our own, of which nobody but the log is told more."""
    if not isinstance(error, RequestRefused):
        return frontend_pb2.Refused(number=number)
    refused = frontend_pb2.Refused(number=number, kind=type(error).__name__, message=str(error))
    if isinstance(error, OverLimit):
        refused.over_limit.CopyFrom(encode_over_limit(error))
    elif isinstance(error, QueueFull):
        refused.retry_after_s = error.retry_after_s
    elif isinstance(error, InvalidRequest):
        refused.is_too_long = error.is_too_long
        for violation in error.violations:
            refused.violations.add(field=violation.field, description=violation.description)
    return refused


def decode_refusal(refused: frontend_pb2.Refused) -> Exception:
    """What to raise."""
    kind = _REFUSALS.get(refused.kind)
    if kind is None:
        return RuntimeError("the core failed over this request; its log says why")
    if kind is OverLimit:
        return decode_over_limit(refused.over_limit)
    if kind is QueueFull:
        return QueueFull(refused.message, refused.retry_after_s)
    if kind is InvalidRequest:
        violations = (FieldViolation(each.field, each.description) for each in refused.violations)
        return InvalidRequest(*violations, is_too_long=refused.is_too_long)
    return kind(refused.message)


def encode_over_limit(error: OverLimit) -> shards_pb2.OverLimit:
    """All that it says."""
    return shards_pb2.OverLimit(
        message=str(error),
        retry_after_s=error.retry_after_s,
        tenant=error.tenant,
        limit=error.limit,
        most=error.most,
        left=error.left,
        label=error.label,
    )


def decode_over_limit(over: shards_pb2.OverLimit) -> OverLimit:
    """Inverse of `encode_over_limit`."""
    return OverLimit(
        over.message,
        over.retry_after_s,
        tenant=over.tenant,
        limit=over.limit,
        most=over.most,
        left=over.left,
        label=over.label,
    )
