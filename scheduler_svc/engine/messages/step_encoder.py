"""The messages of the step protocol: full metadata once, packed columns after that, and the answer.

`worker_svc.mirror.sequence_states.SequenceStates.apply` is the inverse: what it holds afterwards equals the scheduler's
columns. A step that these messages cannot hold is refused before any of it is sent, and the group it fails over is
named.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from octavo.shared.rpc import MAX_MESSAGE_BYTES
from protos import inference_pb2, worker_pb2
from scheduler_svc.core.blocks.cache_news import NO_NEWS, CacheNews
from scheduler_svc.core.sequences.group_fault import GroupFault
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.sequences.sequence_columns import Ints
from scheduler_svc.core.step_plan import (
    Answer,
    Introduction,
    ScheduledRows,
    SchedulerOutputs,
    WrongAnswer,
    introduced_groups,
)
from scheduler_svc.leases.worker_claims import check_tokens
from scheduler_svc.tracing.step_trace import StepTrace

U16, U32, I32, F32 = np.dtype("<u2"), np.dtype("<u4"), np.dtype("<i4"), np.dtype("<f4")
U64 = np.dtype(np.uint64)
LARGEST = {dtype: int(np.iinfo(dtype).max) for dtype in (U16, U32)}


class Owners(Protocol):
    """Whose the rows of a column are."""

    def __getitem__(self, entry: int, /) -> Sequence: ...


class UnsendableGroup(GroupFault):
    """Something of one group does not fit the messages of a step: no step with it can be sent, any without it can."""


def encode_request(
    outputs: SchedulerOutputs,
    epoch: int,
    step_id: int,
    resume_after: int | None = None,
    trace: StepTrace | None = None,
) -> tuple[worker_pb2.Step, bytes]:
    """The message of one step, and the bytes that are sent of it. Raises UnsendableGroup."""
    request = worker_pb2.StepRequest(epoch=epoch)
    step = request.step
    _write(step, outputs, step_id, resume_after)
    if trace is not None and trace.context is not None:
        step.trace.context, step.trace.requests = trace.context.to_bytes(), trace.requests()
    data = request.SerializeToString()
    if len(data) > MAX_MESSAGE_BYTES and outputs.introductions:
        groups = introduced_groups(outputs.introductions)
        sizes = [group.ByteSize() for group in step.groups]
        largest = int(np.argmax(sizes))
        why = f"a step of {len(data)} bytes, {sizes[largest]} of them to introduce it; {MAX_MESSAGE_BYTES} are the most"
        raise UnsendableGroup(groups[largest], why)
    return step, data


def encode(outputs: SchedulerOutputs, step_id: int, resume_after: int | None = None) -> worker_pb2.Step:
    """The message of one step. `resume_after` names the failed step after which the worker goes on with this one.

    Raises UnsendableGroup.
    """
    step = worker_pb2.Step()
    _write(step, outputs, step_id, resume_after)
    return step


def _write(step: worker_pb2.Step, outputs: SchedulerOutputs, step_id: int, resume_after: int | None) -> None:
    """Writes a step into an empty message. Raises UnsendableGroup."""
    step.step_id = step_id
    if resume_after is not None:
        step.resume_after = resume_after
    if outputs.released_slots:
        step.released_slots_u16 = np.array(outputs.released_slots, U16).tobytes()
    if outputs.forks:
        forked = [child for _, child in outputs.forks]
        step.forks_u16 = _packed(
            [(parent.slot, child.slot) for parent, child in outputs.forks], U16, "slot of a fork", forked
        )
        step.fork_indices_u16 = _packed([child.index for child in forked], U16, "index", forked)
    metadata: dict[SequenceGroup, worker_pb2.SequenceGroupMetadata] = {}
    for introduction in outputs.introductions:
        try:
            _introduce(step, introduction, metadata)
        except Exception as error:
            group = introduction.sequence.group
            raise UnsendableGroup(group, f"its metadata is none: {type(error).__name__}: {error}") from error
    for pairs, message in (
        (outputs.swap_out, step.swap_out),
        (outputs.swap_in, step.swap_in),
        (outputs.copies, step.copies),
    ):
        if pairs:
            message.pairs_u32 = np.array(pairs, U32).tobytes()
    if len(outputs.appended_slots):
        _pack_appended(step.block_tables.add().append, outputs)
    if len(outputs.replaced):
        _pack_replaced(step.block_tables.add().replace, outputs.replaced)
    _pack_rows(step.rows, outputs.rows)
    if outputs.news is not NO_NEWS:
        _pack_news(step, outputs.news)


def _pack_news(step: worker_pb2.Step, news: CacheNews) -> None:
    if news.forgets_all:
        step.forgets_all_blocks = True
    elif news.forgotten:
        step.forgotten_blocks_u32 = np.array(news.forgotten, U32).tobytes()
    if news.blocks:
        step.cached_blocks.block_ids_u32 = np.array(news.blocks, U32).tobytes()
        step.cached_blocks.hashes = news.hashes


def _begin_metadata(step: worker_pb2.Step, group: SequenceGroup) -> worker_pb2.SequenceGroupMetadata:
    """Without sequences. Written in place: to copy a message of a whole prompt into another takes as long as to make
    it."""
    message = step.groups.add(
        request_id=group.request_id,
        num_prompt_tokens=group.num_prompt_tokens,
        adapter=group.adapter,
        bad_words=[inference_pb2.TokenIds(ids=word) for word in group.bad_words],
    )
    params = message.sampling_params
    params.CopyFrom(group.sampling_params)
    for name in ("stop", "stop_token_ids", "bad_words"):  # decided here and of any size, or of token ids
        params.ClearField(name)
    if group.best_of > group.num_outputs and not params.HasField("logprobs"):
        params.logprobs = 0  # the best are chosen by the logprobs of what was drawn
    if not group.awaits_prompt_logprobs:
        params.ClearField("prompt_logprobs")  # computed again, it need not say again what it has said
    if params.min_tokens:
        message.stop_token_ids_u32 = np.array(group.all_stop_token_ids(), U32).tobytes()
    return message


def _introduce(
    step: worker_pb2.Step,
    introduction: Introduction,
    metadata: dict[SequenceGroup, worker_pb2.SequenceGroupMetadata],
) -> None:
    """`metadata`: of the groups that this step has introduced sequences of."""
    sequence, same_as = introduction.sequence, introduction.same_as
    message = metadata.get(sequence.group)
    if message is None:  # once for all: bad words take as long as hundreds of sequences
        message = metadata[sequence.group] = _begin_metadata(step, sequence.group)
    if same_as is not None:
        message.sequences.add(slot=sequence.slot, index=sequence.index, same_as_slot=same_as.slot)
        return
    message.sequences.add(
        slot=sequence.slot,
        index=sequence.index,
        token_ids=sequence.token_ids.tolist(),
        num_computed_tokens=introduction.num_computed_tokens,
        block_table=sequence.block_table.tolist(),
    )


def _packed(values: npt.ArrayLike, dtype: np.dtype, what: str, owners: Owners) -> bytes:
    """A column of `dtype`. Raises UnsendableGroup, naming the owner of the first row of values that does not fit."""
    array = np.asarray(values, np.int64)
    # Negative numbers are the largest of all without a sign: one look is for both ends.
    largest = LARGEST[dtype]
    if array.size and np.maximum.reduce(array.view(U64), axis=None) > largest:
        outside = (array < 0) | (array > largest)
        entry = int(np.argwhere(outside)[0][0])
        owner = owners[entry]
        raise UnsendableGroup(owner.group, f"its {what} is {array[outside][0]}; 0 to {largest} fit")
    return array.astype(dtype).tobytes()


class RowOwners:
    """The sequences whose slots these are, looked up among those with a row in the step only where they are wanted."""

    def __init__(self, rows: ScheduledRows, slots: Ints) -> None:
        self._rows, self._slots = rows, slots

    def __getitem__(self, entry: int) -> Sequence:
        owner: Sequence = self._rows.sequences[np.flatnonzero(self._rows.slots == self._slots[entry])[0]]
        return owner


def _pack_appended(append: worker_pb2.BlockTables, outputs: SchedulerOutputs) -> None:
    slots, blocks = outputs.appended_slots, outputs.appended_blocks
    owners = RowOwners(outputs.rows, slots)
    append.slots_u16 = _packed(slots, U16, "slot", owners)
    append.block_ids_u32 = blocks.astype(U32).tobytes()
    if len(blocks) > len(slots):
        append.counts_u16 = _packed(outputs.appended_counts, U16, "number of new blocks", owners)


def _pack_replaced(replace: worker_pb2.BlockTables, replaced: list[Sequence]) -> None:
    tables = [sequence.block_table for sequence in replaced]
    replace.slots_u16 = _packed([sequence.slot for sequence in replaced], U16, "slot", replaced)
    replace.counts_u16 = _packed([len(table) for table in tables], U16, "number of blocks", replaced)
    replace.block_ids_u32 = np.concatenate(tables).astype(U32).tobytes()


def _pack_rows(message: worker_pb2.Rows, rows: ScheduledRows) -> None:
    message.slots_u16 = _packed(rows.slots, U16, "slot", rows.sequences)
    first = message.num_decode_rows = rows.num_decode_rows
    if len(rows) == first:
        return
    others = rows.sequences[first:]
    message.query_lens_u32 = _packed(rows.query_lens[first:], U32, "row's number of tokens", others)
    message.num_samples_u16 = _packed(rows.num_answers[first:], U16, "row's number of answers", others)
    if rows.forks:
        forked = [sequence for parent, children in rows.forks for sequence in (parent, *children)]
        message.child_slots_u16 = _packed([sequence.slot for sequence in forked], U16, "slot", forked)
    if rows.num_given_rows:
        inputs = np.full(len(rows) - first, worker_pb2.ROW_INPUT_KNOWN_TOKENS, np.uint8)
        inputs[-rows.num_given_rows :] = worker_pb2.ROW_INPUT_GIVEN_TOKENS
        message.inputs_u8 = inputs.tobytes()
        given = [sequence.token_ids[-1] for sequence in rows.sequences[-rows.num_given_rows :]]
        message.given_token_ids_i32 = np.array(given, I32).tobytes()


def decode(outputs: worker_pb2.SequenceOutputs, num_answers: Ints, vocab_size: int = 0) -> Answer:
    """Reads an answer to rows that were to have `num_answers` entries each.

    Raises WrongAnswer for logprob columns that contradict one another, which others read later on, and for tokens that
    a vocabulary of `vocab_size` (0: any) does not have.
    """
    if len(outputs.token_ids_i32) % I32.itemsize or len(outputs.num_tokens_u16) % U16.itemsize:
        raise WrongAnswer("columns that end within an entry")
    token_ids = np.frombuffer(outputs.token_ids_i32, I32)
    num_tokens = num_answers
    if outputs.num_tokens_u16:
        num_tokens = np.frombuffer(outputs.num_tokens_u16, U16).astype(np.int64)
    logprobs = np.frombuffer(outputs.logprobs_f32, F32)
    if len(logprobs) or outputs.top_counts_u32:
        check_logprobs(outputs)
    check_tokens(outputs, vocab_size)
    errors = {error.row: error.message for error in outputs.row_errors}
    of_sampling = worker_pb2.ROW_ERROR_KIND_SAMPLING
    computed_well = frozenset(error.row for error in outputs.row_errors if error.kind == of_sampling)
    return Answer(token_ids, num_tokens, logprobs, errors, computed_well)


def check_logprobs(outputs: worker_pb2.SequenceOutputs) -> None:
    """Raises WrongAnswer for logprob columns that contradict one another or the number of tokens."""
    num_entries = len(outputs.token_ids_i32) // I32.itemsize
    if len(outputs.top_counts_u32) % U32.itemsize:
        raise WrongAnswer("top counts that end within an entry")
    counts = np.frombuffer(outputs.top_counts_u32, U32)
    num_top = int(counts.sum())
    sizes = {
        "logprobs": (len(outputs.logprobs_f32), num_entries),
        "ranks": (len(outputs.ranks_u32), num_entries),
        "top counts": (len(outputs.top_counts_u32), num_entries if len(counts) else 0),
        "top token ids": (len(outputs.top_token_ids_i32), num_top),
        "top logprobs": (len(outputs.top_logprobs_f32), num_top),
    }
    for name, (num_bytes, wanted) in sizes.items():
        if num_bytes != 4 * wanted:
            raise WrongAnswer(f"{num_bytes} bytes of {name} for {wanted} entries")
