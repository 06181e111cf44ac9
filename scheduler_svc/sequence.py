"""A request as the scheduler sees it: a `SequenceGroup` of `Sequence`s that share a prompt and sampling parameters.

While a sequence has a slot its state is in the worker's `SequenceColumns`; without one it holds its own tokens, all of
which are computed again when it gets the next slot. Knows nothing of text, streams or time.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as AbstractSequence
from typing import Any

import numpy as np

from protos import inference_pb2
from scheduler_svc.sequence_columns import SequenceColumns, TokenIds


class SequenceStatus(enum.Enum):
    WAITING = "waiting"  # never ran, or was moved off a worker
    RUNNING = "running"  # has a slot
    PREEMPTED = "preempted"  # gave its slot up, belongs to a worker
    FINISHED = "finished"


class FinishReason(enum.IntEnum):
    """Numbered as in the protos, so that a column of them is a column of the answer."""

    NONE = inference_pb2.FINISH_REASON_UNSPECIFIED
    STOP = inference_pb2.FINISH_REASON_STOP
    LENGTH = inference_pb2.FINISH_REASON_LENGTH
    ABORT = inference_pb2.FINISH_REASON_ABORT
    ERROR = inference_pb2.FINISH_REASON_ERROR


class Sequence:
    """One line of tokens of a group.

    `index` is fixed for life and part of every draw. `num_pending_tokens` counts draws of steps in flight that will
    still arrive after the slot was given up; the sequence does not get a slot before they have.
    """

    __slots__ = (
        "_columns",
        "_own_token_ids",
        "group",
        "index",
        "last_generation",
        "num_pending_tokens",
        "slot",
        "status",
    )

    def __init__(self, group: SequenceGroup, index: int, token_ids: TokenIds) -> None:
        self.group = group
        self.index = index
        self.status = SequenceStatus.WAITING
        self.slot = -1
        self.last_generation = -1  # of the slot's tenancy that this sequence gave up last
        self.num_pending_tokens = 0
        self._own_token_ids = token_ids
        self._columns: SequenceColumns | None = None

    @property
    def token_ids(self) -> TokenIds:
        """Prompt and generated tokens, a view where the sequence has a slot."""
        if self._columns is None:
            return self._own_token_ids
        return self._columns.token_ids[self.slot, : self._columns.num_tokens[self.slot]]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_computed_tokens(self) -> int:
        return 0 if self._columns is None else int(self._columns.num_computed_tokens[self.slot])

    @property
    def block_table(self) -> TokenIds:
        if self._columns is None:
            return np.zeros(0, np.int32)
        return self._columns.block_tables[self.slot, : self._columns.num_blocks[self.slot]]

    def attach(self, columns: SequenceColumns) -> None:
        """Takes a slot; nothing of the sequence is computed there yet."""
        assert self._columns is None and self.num_pending_tokens == 0
        group = self.group
        self.slot = columns.take_slot(
            self,
            self._own_token_ids,
            max_num_tokens=group.max_num_tokens,
            eos_token_id=group.eos_token_id,
            has_stop_token_ids=bool(group.stop_token_ids),
        )
        self._columns = columns
        self.status = SequenceStatus.RUNNING

    def detach(self, status: SequenceStatus) -> None:
        """Gives the slot up and takes its tokens along; draws in flight stay pending unless it is finished."""
        assert self._columns is not None
        columns, slot = self._columns, self.slot
        self._own_token_ids = self.token_ids.copy()
        self.num_pending_tokens = 0 if status is SequenceStatus.FINISHED else int(columns.num_placeholders[slot])
        self.last_generation = int(columns.generation[slot])
        columns.release_slot(slot)
        self._columns, self.slot, self.status = None, -1, status

    def append_pending(self, token_id: int) -> None:
        """Takes a token that was drawn before the slot was given up and arrives after."""
        self._own_token_ids = np.append(self._own_token_ids, np.int32(token_id))
        self.num_pending_tokens -= 1

    def drop_pending(self) -> None:
        """Draws in flight will not arrive: their worker is lost."""
        self.num_pending_tokens = 0


class SequenceGroup:
    """All sequences of one request.

    Args:
        max_num_tokens: prompt and generated tokens at which a sequence ends with LENGTH.
        eos_token_id: ends a sequence with STOP when drawn; None with `ignore_eos` or where the model has none.
        stop_token_ids: further token ids that do.
        output: whatever the layer above wants back with this group's tokens; never looked into here.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: AbstractSequence[int] | TokenIds,
        sampling_params: inference_pb2.SamplingParams,
        *,
        max_num_tokens: int,
        arrival_ns: int,
        eos_token_id: int | None = None,
        stop_token_ids: frozenset[int] = frozenset(),
        priority: int = 0,
        tenant: str = "",
        adapter: str = "",
        output: Any = None,
    ) -> None:
        prompt = np.asarray(prompt_token_ids, np.int32)
        self.request_id = request_id
        self.sampling_params = sampling_params
        self.num_prompt_tokens = len(prompt)
        self.max_num_tokens = max_num_tokens
        self.eos_token_id = eos_token_id
        self.stop_token_ids = stop_token_ids
        self.priority = priority
        self.tenant = tenant
        self.adapter = adapter
        self.output = output
        self.arrival_ns = arrival_ns
        self.order = 0  # set by the waiting queue: earlier arrivals have lower numbers
        self.first_scheduled_ns: int | None = None
        self.num_preemptions = 0
        self.num_moves = 0
        self.num_worker_losses = 0  # losses of a worker that this group was in flight for
        self.sequences = [Sequence(self, 0, prompt)]

    def unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.status is not SequenceStatus.FINISHED]

    @property
    def is_finished(self) -> bool:
        return all(sequence.status is SequenceStatus.FINISHED for sequence in self.sequences)

    @property
    def num_pending_tokens(self) -> int:
        return sum(sequence.num_pending_tokens for sequence in self.sequences)
