"""One scheduler and one mirror with a fake model between them: the core without sockets, threads or time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from protos import inference_pb2, worker_pb2
from scheduler_svc.block_manager import BlockSpaceManager
from scheduler_svc.policy import POLICIES, Policy
from scheduler_svc.scheduler import Scheduler
from scheduler_svc.sequence import SequenceGroup, SequenceStatus
from scheduler_svc.sequence_columns import SequenceColumns
from scheduler_svc.step_encoder import encode
from scheduler_svc.step_plan import NewTokens, ScheduledRows, SchedulerOutputs
from scheduler_svc.waiting_queue import WaitingQueue
from worker_svc.sequence_states import SequenceStates

VOCAB_SIZE, EOS = 97, 3
OK, FAILED, SKIPPED = worker_pb2.STEP_STATUS_OK, worker_pb2.STEP_STATUS_FAILED, worker_pb2.STEP_STATUS_SKIPPED


def next_token(history: np.ndarray) -> int:
    """What the fake model says: a function of all tokens so far, so that a lost or doubled token changes the rest."""
    state = 17
    for token in history.tolist():
        state = (state * 31 + token + 7) % 1_000_003
    return state % VOCAB_SIZE


def expected_tokens(prompt: list[int], max_num_tokens: int, eos: int | None = EOS) -> list[int]:
    """What a request must end with, whatever happens around it."""
    tokens = list(prompt)
    while len(tokens) < max_num_tokens:
        tokens.append(next_token(np.array(tokens)))
        if tokens[-1] == eos:
            break
    return tokens


class Simulation:
    """Steps go through the encoder, through bytes, and into the mirror at once; their answers wait in `in_flight`."""

    def __init__(
        self,
        *,
        num_slots: int = 4,
        max_model_len: int = 64,
        block_size: int = 4,
        num_blocks: int = 24,
        max_num_batched_tokens: int = 16,
        depth: int = 2,
        policy: Policy = POLICIES["fcfs"],
    ) -> None:
        self.policy = policy
        self.num_slots, self.max_model_len, self.block_size = num_slots, max_model_len, block_size
        self.num_blocks, self.max_num_batched_tokens, self.depth = num_blocks, max_num_batched_tokens, depth
        self.waiting = WaitingQueue(policy)
        self.groups: list[SequenceGroup] = []
        self.num_preempted = 0
        self.sent: list[tuple[SchedulerOutputs, bytes]] = []
        self.steps: list[worker_pb2.Step] = []
        self.start_worker()

    def start_worker(self) -> None:
        """An empty worker and an empty scheduler for it."""
        self.columns = SequenceColumns(self.num_slots, self.max_model_len, self.block_size)
        self.blocks = BlockSpaceManager(self.columns, self.num_blocks)
        self.scheduler = Scheduler(self.columns, self.blocks, self.max_num_batched_tokens, self.policy)
        self.mirror = SequenceStates(self.num_slots, self.max_model_len, self.block_size, self.num_blocks)
        self.in_flight: deque[tuple[int, ScheduledRows, int, np.ndarray | None]] = deque()
        self.worker_skips = False
        self.failed: tuple[int, ScheduledRows] | None = None
        self.step_id = 0

    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        eos_token_id: int | None = EOS,
        stop_token_ids: frozenset[int] = frozenset(),
        priority: int = 0,
    ) -> SequenceGroup:
        group = SequenceGroup(
            f"request-{len(self.groups)}",
            prompt,
            inference_pb2.SamplingParams(seed=1),
            max_num_tokens=min(len(prompt) + max_tokens, self.max_model_len),
            arrival_ns=0,
            eos_token_id=eos_token_id,
            stop_token_ids=stop_token_ids,
            priority=priority,
        )
        self.groups.append(group)
        self.waiting.push(group)
        return group

    def abort(self, group: SequenceGroup) -> None:
        if self.waiting.remove(group):
            for sequence in group.sequences:
                sequence.status = SequenceStatus.FINISHED
        else:
            self.scheduler.abort(group)

    def lose_worker(self) -> None:
        """The worker dies and an empty one takes its place: groups keep what was answered, nothing else."""
        for group in self.scheduler.evacuate():
            self.waiting.push(group)
        self.start_worker()

    def send(self, fails: bool = False) -> bool:
        """Schedules and sends one step, which the worker runs at once; False when there is none to send."""
        if self.failed is not None and self.in_flight:
            return False
        running, suspects = set(self.scheduler.running), list(self.scheduler.suspects)
        outputs = self.scheduler.schedule(self.waiting, now_ns=0)
        if outputs is None:
            return False
        admitted = self.scheduler.running - running
        assert not (admitted and outputs.num_preempted), "took blocks from one group and gave them to another"
        assert not suspects or self.groups_of(outputs.rows) == suspects[:1], "a suspect runs by itself"
        self.step_id += 1
        self.num_preempted += outputs.num_preempted
        data = encode(outputs, self.step_id, self.failed[0] if self.failed else None).SerializeToString()
        self.failed = None
        self.sent.append((outputs, data))
        self.steps.append(worker_pb2.Step.FromString(data))
        status, token_ids = self._run(self.steps[-1], fails)
        self.in_flight.append((self.step_id, outputs.rows, status, token_ids))
        return True

    def _run(self, step: worker_pb2.Step, fails: bool) -> tuple[int, np.ndarray | None]:
        if self.worker_skips and not step.HasField("resume_after"):
            return SKIPPED, None
        self.worker_skips = fails
        self.mirror.apply_blocks(step)
        rows = self.mirror.apply_rows(step)
        if fails:
            self.mirror.roll_back(rows)
            return FAILED, None
        tokens = [next_token(self.mirror.token_ids[slot, : self.mirror.num_tokens[slot]]) for slot in rows.sample_slots]
        self.mirror.record_samples(rows, np.array(tokens, np.int64))
        self.mirror.check_integrity()
        return OK, np.array(tokens, np.int32)

    @staticmethod
    def groups_of(rows: ScheduledRows) -> list[SequenceGroup]:
        return list(dict.fromkeys(sequence.group for sequence in rows.sequences))

    def answer(self) -> NewTokens | None:
        """Takes the answer of the oldest step in flight, and gives what it brought unless it failed."""
        step_id, rows, status, token_ids = self.in_flight.popleft()
        if status == OK and token_ids is not None:
            return self.scheduler.process_outputs(rows, token_ids, rows.num_samples, {})
        self.scheduler.roll_back(rows)
        if status == FAILED:
            self.failed = (step_id, rows)
        if self.failed and not self.in_flight:
            self.scheduler.resume(self.failed[1])
        return None

    def check(self) -> None:
        """Every invariant that can be seen from here; the mirror's equality whenever nothing is on the way."""
        self.scheduler.check_integrity()
        self.mirror.check_integrity()
        if not self.in_flight and self.failed is None:
            self._check_mirror()

    def _check_mirror(self) -> None:
        columns, mirror = self.columns, self.mirror
        not_yet_released = set(np.flatnonzero(mirror.occupied)) - set(np.flatnonzero(columns.occupied))
        assert not_yet_released <= self.scheduler._released_slots, "the worker holds a slot that nobody will release"
        for slot in np.flatnonzero(columns.occupied):
            if columns.owner[slot] in self.scheduler._unknown:
                continue
            length, num_blocks = columns.num_tokens[slot], columns.num_blocks[slot]
            assert mirror.num_tokens[slot] == length
            assert mirror.num_computed_tokens[slot] == columns.num_computed_tokens[slot]
            assert (mirror.token_ids[slot, :length] == columns.token_ids[slot, :length]).all()
            assert mirror.num_blocks[slot] == num_blocks
            assert (mirror.block_tables[slot, :num_blocks] == columns.block_tables[slot, :num_blocks]).all()

    def run_to_end(self, fails: Callable[[], bool] = lambda: False) -> None:
        """Runs until every group is finished. Fails when there is work, nothing in flight, and nothing to send."""
        while any(not group.is_finished for group in self.groups):
            sent = False
            while len(self.in_flight) < self.depth and self.send(fails()):
                sent = True
            assert sent or self.in_flight, "runnable work, nothing in flight, and nothing was scheduled"
            self.answer()
            self.check()
        while self.in_flight:
            self.answer()

    def check_nothing_left(self) -> None:
        assert self.columns.num_free_slots == self.num_slots
        assert self.blocks.num_free_blocks == self.num_blocks
        assert not self.scheduler.running and not self.scheduler.preempted and not self.scheduler.prefilling
        assert len(self.waiting) == 0 and self.waiting.num_tokens == 0
        self.scheduler.check_integrity()
