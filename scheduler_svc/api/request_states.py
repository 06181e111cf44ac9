"""Live requests as `Control` shows them: copied between two steps, page by page, and made into messages elsewhere.

The time that this takes from the step loop is bounded: a page ends early where its requests have many sequences or long
block tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass

from protos import inference_pb2 as pb
from scheduler_svc.api.pages import bad_token, page_size
from scheduler_svc.core.sequences.sequence import SequenceGroup, SequenceStatus
from scheduler_svc.core.sequences.sequence_columns import TokenIds
from scheduler_svc.leases.worker_handle import WorkerHandle

DEFAULT_PAGE, LARGEST_PAGE = 100, 1000
MAX_SEQUENCES_A_PAGE = 1024  # about 2 ms of the step loop's time; one request more than that may be there
MAX_TABLE_ENTRIES_A_PAGE = 65_536

PHASES = {
    SequenceStatus.WAITING: pb.REQUEST_PHASE_WAITING,
    SequenceStatus.RUNNING: pb.REQUEST_PHASE_RUNNING,
    SequenceStatus.PREEMPTED: pb.REQUEST_PHASE_PREEMPTED,
    SequenceStatus.SWAPPED: pb.REQUEST_PHASE_SWAPPED,
    SequenceStatus.FINISHED: pb.REQUEST_PHASE_FINISHED,
}
AT_A_WORKER = (SequenceStatus.RUNNING, SequenceStatus.PREEMPTED, SequenceStatus.SWAPPED)


@dataclass(frozen=True, slots=True)
class RequestCopy:
    """A request's state at one moment, its block tables not yet in it."""

    state: pb.RequestState
    block_tables: list[TokenIds]
    host_tables: list[TokenIds]

    @classmethod
    def of(cls, group: SequenceGroup, workers: AbstractSequence[WorkerHandle]) -> RequestCopy:
        """Of one group; `workers`: those that may hold it."""
        status = next((s.status for s in group.sequences if s.status in AT_A_WORKER), group.sequences[0].status)
        holders = workers if status in AT_A_WORKER else ()
        worker = next((worker for worker in holders if worker.scheduler.groups.holds(group)), None)
        state = pb.RequestState(
            request_id=group.request_id,
            phase=PHASES[status],
            worker=worker.link.address if worker else "",
            num_prompt_tokens=group.num_prompt_tokens,
            times_preempted=group.num_preemptions,
            times_moved=group.num_moves,
            age_ns=time.monotonic_ns() - group.arrival_ns,
            tenant=group.tenant,
            priority=group.priority,
            model_fingerprint=group.model,
        )
        for sequence in group.sequences:
            state.sequences.add(
                index=sequence.index,
                num_tokens=sequence.num_tokens,
                num_computed_tokens=sequence.num_computed_tokens,
                num_cached_tokens=group.num_cached_tokens,
            )
        tables = [sequence.block_table.copy() for sequence in group.sequences]
        return cls(state, tables, [sequence.host_table for sequence in group.sequences])

    def message(self, name_of: Callable[[str], str]) -> pb.RequestState:
        """The whole of it; called once. `name_of`: a model's, by its fingerprint."""
        self.state.model = name_of(self.state.model_fingerprint)
        for sequence, table, on_host in zip(self.state.sequences, self.block_tables, self.host_tables, strict=True):
            sequence.block_table.extend(table.tolist())
            sequence.host_block_table.extend(on_host.tolist())
        return self.state


@dataclass(frozen=True, slots=True)
class RequestPage:
    """Where a page of live requests begins, and how long it may be."""

    after: int
    limit: int

    @classmethod
    def asked(cls, request: pb.ListRequestsRequest) -> RequestPage:
        """Raises InvalidRequest."""
        token = request.page_token or "0"
        if not (token.isascii() and token.isdecimal() and len(token) < 20):
            raise bad_token()
        return cls(int(token), page_size(request, DEFAULT_PAGE, LARGEST_PAGE))

    def copy(
        self, numbered: AbstractSequence[tuple[int, SequenceGroup]], workers: AbstractSequence[WorkerHandle]
    ) -> tuple[list[RequestCopy], str]:
        """Copies of at most `limit` of the requests, which have numbers; the next page's token, if there is one.

        On the step loop's thread. `numbered`: one more than `limit`, where there are so many.
        """
        copies: list[RequestCopy] = []
        last = num_sequences = num_entries = 0
        for number, group in numbered:
            if len(copies) == self.limit or num_sequences >= MAX_SEQUENCES_A_PAGE:
                return copies, str(last)
            if num_entries >= MAX_TABLE_ENTRIES_A_PAGE:
                return copies, str(last)
            copies.append(RequestCopy.of(group, workers))
            last = number
            num_sequences += len(group.sequences)
            num_entries += sum(map(len, (*copies[-1].block_tables, *copies[-1].host_tables)))
        return copies, ""
