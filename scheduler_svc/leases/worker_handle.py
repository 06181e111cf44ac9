"""One joined worker as the step loop sees it: its scheduler, its steps in flight, what it said last."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from protos import worker_pb2
from scheduler_svc.core.blocks.block_manager import BlockSpaceManager
from scheduler_svc.core.preemption_modes import Costs
from scheduler_svc.core.queues.waiting_queue import WaitingQueue
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.scheduler_settings import SchedulerSettings
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.sequences.sequence_columns import SequenceColumns
from scheduler_svc.core.step_plan import ScheduledRows, SchedulerOutputs, WrongAnswer
from scheduler_svc.leases.adapter_gate import AdapterGate
from scheduler_svc.leases.step_pace import StepPace
from scheduler_svc.leases.step_statistics import StepInFlight, StepStatistics

# Heartbeats come every 0.5 s, but not while a worker's interpreter is busy. That its process is stopped, cut off or
# dead is found sooner, by gRPC's pings (`octavo.shared.rpc`), which end the stream.
SILENCE_LIMIT_NS = 15_000_000_000
STEP_BASE_NS = 30_000_000_000  # what a step may take beside its tokens: compilation, a busy neighbour
BLOCKS_CHECKED_AT_ONCE = 16_384  # about 10 ms
# Large steps that have to go well before a budget that ran out of memory is doubled; four times as many after each time
# that it was doubled in vain, so that what does not fit is tried ever more rarely.
STEPS_TO_GROW, MAX_STEPS_TO_GROW = 64, 16_384
MAX_SLOWER = 4.0  # times as long as steps of that size: one that takes longer is late
LATE_BASE_NS = 100_000_000
STEP_SLOWNESS = 10  # times the measured prefill time that a step's tokens may take


AdapterRequest = worker_pb2.LoadAdapterRequest | worker_pb2.UnloadAdapterRequest


class WorkerLink(Protocol):
    """The open step stream to a worker, and its calls beside it. Nothing here blocks."""

    address: str
    last_heard_ns: int

    def send(self, data: bytes) -> None:
        """One serialised `StepRequest`, behind those that were sent before."""

    def call(self, request: AdapterRequest, done: Callable[[str], None]) -> None:
        """Loads or unloads an adapter. `done` gets what went wrong, "" for nothing, on any thread."""

    def distrust(self) -> None:
        """What came from it was wrong: once it is closed it is not asked again soon."""

    def close(self) -> None:
        """Ends the stream, and with it the lease."""


class WorkerHandle:
    """State of a worker under one lease."""

    def __init__(
        self,
        link: WorkerLink,
        info: worker_pb2.WorkerInfo,
        sizes: worker_pb2.InitializeResponse,
        lease: worker_pb2.LeaseGranted,
        settings: SchedulerSettings,
        enable_prefix_caching: bool = True,
        model: str = "",
        *,
        is_lock_step: bool = False,
    ) -> None:
        """`model`: fingerprint of what it serves; "" where nobody tells models apart. `is_lock_step`: a step is sent
        when the one before is answered, so each has all decodes, whatever stages the worker has."""
        self.link = link
        self.info = info
        self.model = model
        self.sizes = sizes
        self.epoch = lease.epoch
        costs = Costs(sizes.prefill_tokens_per_s, sizes.swap_bytes_per_s, sizes.block_bytes)
        self._num_micro_batches = 1 if is_lock_step else max(1, info.parallel.pipeline_parallel_size)
        self._settings = replace(settings, costs=costs, num_micro_batches=self._num_micro_batches)
        self._enable_prefix_caching = enable_prefix_caching
        self._most_batched_tokens = self._tokens_of_a_step
        self.scheduler = self._new_scheduler(self._most_batched_tokens)
        self.scheduler.blocks.adopt(lease.cached_blocks)
        self.num_adopted = len(self.scheduler.blocks.cache)  # blocks that hold what was computed under earlier leases
        self.adapter_gate = AdapterGate(info.max_loras)
        self.number = -1  # given by the router
        self.waiting: WaitingQueue = WaitingQueue(settings.policy)  # of the groups that are bound to it
        self.look_again_ns = 0  # for groups of others, after a look that found none
        self.pace = StepPace(sizes.prefill_tokens_per_s, sizes.max_num_batched_tokens)
        self._answered_ns = 0  # when its last answer came
        self.adapters: dict[str, int] = {}  # that it has loaded under this lease, with their generations
        self.in_flight: deque[StepInFlight] = deque()
        self.statistics = StepStatistics()
        self.is_draining = False  # it says that it ends, or has been told to
        self.is_leaving = False  # given back as soon as it has answered
        self.is_finishing = False  # told to drain with nobody to go on for it: it ends what it has, and leaves
        self.failed_step: StepInFlight | None = None
        self.unsent: ScheduledRows | None = None  # of a step that was decided and could not be said; not yet taken back
        self.num_faults = 0  # of our own over this worker's groups, since its last good answer
        self._told_slots: set[int] = set()  # that are occupied at the worker, once it has run what was sent
        self._num_steps_to_grow = STEPS_TO_GROW
        self._num_large_steps = 0  # that went well under this budget
        self._has_grown = False  # since memory ran out last
        self._next_block_checked = 0
        self.checked_ns = 0  # when the integrity of its state was looked at last
        self.last_step_id = 0  # ids rise by one, and answers come in order

    def _new_scheduler(self, max_num_batched_tokens: int) -> Scheduler:
        sizes = self.sizes
        columns = SequenceColumns(sizes.max_num_seqs, sizes.max_model_len, self.info.block_size)
        blocks = BlockSpaceManager(
            columns, sizes.num_device_blocks, sizes.num_host_blocks, enable_prefix_caching=self._enable_prefix_caching
        )
        return Scheduler(columns, blocks, max_num_batched_tokens, self._settings)

    @property
    def num_running(self) -> int:
        """Groups with slots."""
        return len(self.scheduler.groups.running)

    def can_ever_run(self, group: SequenceGroup) -> bool:
        """Whether the worker, empty, serves the group's model and could hold what it has and may become."""
        if group.model and self.model and group.model != self.model:
            return False
        return self.scheduler.can_ever_run(group) and not (group.adapter and not self.adapter_gate.max_loras)

    @property
    def is_closing(self) -> bool:
        """Takes no new requests any more, for good."""
        return self.is_draining or self.is_finishing

    @property
    def takes_new_groups(self) -> bool:
        """Whether its next step may begin groups from the queue."""
        groups = self.scheduler.groups
        comes_back = groups.num_away or groups.suspects
        return not (self.is_draining or self.failed_step or comes_back or groups.next_late())

    @property
    def num_steps_answered(self) -> int:
        """The id of the last one, whether it went well or not."""
        return self.last_step_id - len(self.in_flight)

    @property
    def is_idle(self) -> bool:
        """Nothing is in flight and nothing runs; groups may be swapped out or preempted."""
        return not self.in_flight and not self.scheduler.groups.running

    def check_integrity(self) -> None:
        """The scheduler's own check, each time with the next part of its blocks: a large cache holds nobody up."""
        num_blocks = self.sizes.num_device_blocks
        part = slice(self._next_block_checked, self._next_block_checked + BLOCKS_CHECKED_AT_ONCE)
        self._next_block_checked = 0 if part.stop >= num_blocks else part.stop
        self.scheduler.check_integrity(part)

    def flush(self) -> int:
        """Forgets what its cache holds, here and there; how many blocks could be found. What runs keeps its own."""
        self.scheduler.tells_releases = True  # also where no other step is to come
        return self.scheduler.blocks.flush()

    @property
    def most_withheld(self) -> int:
        """Blocks that may be withheld: what is left holds one sequence of any length that the model takes."""
        least = self.scheduler.blocks.num_blocks_for(self.scheduler.columns.max_model_len)
        return max(0, self.sizes.num_device_blocks - max(1, least))

    # ---- tokens in a step -------------------------------------------------------------------------------------------

    @property
    def _tokens_of_a_step(self) -> int:
        """At most. Stages have that many between them: each computes another part of a prompt, and a token that others
        wait for goes through all stages no later than through one that has all layers."""
        most = self.sizes.max_num_batched_tokens
        if self._num_micro_batches == 1 or not self._settings.enable_chunked_prefill:
            return most
        return max(-(-most // self._num_micro_batches), self.sizes.max_num_seqs)

    @property
    def most_prompt_tokens(self) -> int:
        """Of the next step, so that whoever decodes here has a token in about `step_time_goal`, whatever prompts others
        bring. Where nobody does, and without chunked prefill, as many as a step has."""
        scheduler, settings = self.scheduler, self._settings
        most, num_decoding = scheduler.max_num_batched_tokens, scheduler.num_decoding
        if not (num_decoding and settings.step_time_goal and settings.enable_chunked_prefill):
            return most
        stages = self._num_micro_batches  # a sequence has a step in so many
        return min(most, self.pace.prompt_tokens_in(settings.step_time_goal / stages, num_decoding / stages))

    def set_budget(self, max_num_batched_tokens: int) -> None:
        """The worker says how many tokens a step of it may have from now on. Raises WrongAnswer."""
        least, most = self.sizes.max_num_seqs, self.sizes.max_num_batched_tokens
        if not least <= max_num_batched_tokens <= most:
            raise WrongAnswer(f"a budget of {max_num_batched_tokens} tokens a step, not {least} to {most}")
        self._most_batched_tokens = min(max_num_batched_tokens, self._tokens_of_a_step)
        self.scheduler.max_num_batched_tokens = self._most_batched_tokens

    def shrink_budget(self) -> bool:
        """Halves the tokens of a step after the worker ran out of memory; False when decodes alone fill it already."""
        scheduler = self.scheduler
        smaller = max(scheduler.max_num_batched_tokens // 2, scheduler.columns.max_num_seqs)
        self._num_large_steps = 0
        if self._has_grown:
            self._num_steps_to_grow = min(4 * self._num_steps_to_grow, MAX_STEPS_TO_GROW)
            self._has_grown = False
        if smaller >= scheduler.max_num_batched_tokens:
            return False
        scheduler.max_num_batched_tokens = smaller
        return True

    def _grow_budget(self, num_tokens: int) -> None:
        """A step of so many tokens went well. After enough of those that were held down by the budget it is doubled.

        One of at most half the budget was not: whatever did not fit would have come in a step larger than that.
        """
        budget = self.scheduler.max_num_batched_tokens
        if budget >= self._most_batched_tokens or 2 * num_tokens <= budget:
            return
        self._num_large_steps += 1
        if self._num_large_steps >= self._num_steps_to_grow:
            self.scheduler.max_num_batched_tokens = min(2 * budget, self._most_batched_tokens)
            self._num_large_steps, self._has_grown = 0, True

    # ---- steps ------------------------------------------------------------------------------------------------------

    def went_well(self, step: StepInFlight, received_ns: int) -> None:
        """The answer to its oldest step came at that time."""
        self.num_faults = 0
        self._grow_budget(step.num_tokens)
        seconds = (received_ns - max(step.sent_ns, self._answered_ns)) / 1e9
        # A step that compiles takes as long as a thousand others, and says nothing of those.
        most_s = MAX_SLOWER * max(self.pace.mean_s, self.pace.seconds(step.num_tokens))
        self.pace.answered(step.num_tokens, step.num_prefill_tokens, min(seconds, most_s))
        self._answered_ns = received_ns

    @property
    def answer_due_ns(self) -> float:
        """When the oldest step in flight should have been answered, by all that is known of this worker."""
        if not self.in_flight:
            return math.inf
        step = self.in_flight[0]
        begun_ns = max(step.sent_ns, self._answered_ns)
        return begun_ns + LATE_BASE_NS + MAX_SLOWER * 1e9 * self.pace.seconds(step.num_tokens)

    @property
    def has_something_to_do(self) -> bool:
        """Whether a step may come of asking its scheduler for one."""
        return self.scheduler.groups.has_work or len(self.waiting) > 0 or self.scheduler.tells_releases

    def can_take_step(self, max_in_flight: int) -> bool:
        """One step at a time after a failure, and while groups are on trial; none while it drains. Otherwise
        `max_in_flight`, or one for each stage of its pipeline, unless steps are in lock-step."""
        if self.is_draining:
            return False
        waits_for_void = bool(self.in_flight) and self.in_flight[0].is_void
        is_careful = self.failed_step or self.scheduler.trials.on_trial or self.unsent is not None or waits_for_void
        if is_careful or max_in_flight == 1:
            return not self.in_flight
        return len(self.in_flight) < max(max_in_flight, self._num_micro_batches)

    # ---- faults of our own ------------------------------------------------------------------------------------------

    def start_over(self) -> None:
        """Forgets what was known of its slots and blocks, which is broken, under the same lease. Its groups are gone.

        Answers to steps in flight are void. The next step is sent after them, and releases every slot.
        """
        for step in self.in_flight:
            step.is_void = True
        before = self.scheduler
        self.scheduler, self.unsent = self._new_scheduler(before.max_num_batched_tokens), None
        self.scheduler.blocks.allocator.withhold(before.blocks.allocator.num_to_withhold)
        self.scheduler.blocks.forget_all_told()
        self._next_block_checked = 0
        self._release_told_slots()

    def take_void_answer(self, is_failure: bool) -> None:
        """The oldest step in flight was answered, which nobody waits for any more."""
        step = self.in_flight.popleft()
        if is_failure:
            self.failed_step = step
        self._release_told_slots()

    def roll_back(self, failed: StepInFlight) -> None:
        """A step failed: it is taken back with all that were sent, or were to be sent, after it."""
        self.failed_step = failed
        behind = [step.rows for step in self.in_flight]
        unsent, self.unsent = self.unsent, None
        self.scheduler.roll_back(failed.rows, behind if unsent is None else [*behind, unsent])

    def take_back_unsent(self) -> None:
        """Once nothing is in flight: a decided step that could not be said is undone, and nobody is suspected."""
        if self.unsent is not None and not self.in_flight:
            rows, self.unsent = self.unsent, None
            self.scheduler.take_back(rows)
            self.scheduler.blocks.forget_all_told()  # what that step was to take back
            self._release_told_slots()

    def _release_told_slots(self) -> None:
        """The next step releases what the worker has; all slots after a failed step, when it takes empty ones, too."""
        is_known = self.failed_step is None
        slots = self._told_slots if is_known else range(self.scheduler.columns.max_num_seqs)
        self.scheduler.groups.released_slots = set(slots)

    # ---- steps ------------------------------------------------------------------------------------------------------

    @property
    def next_step_id(self) -> int:
        """Of the step that is made next; ids of one lease rise by one."""
        return self.last_step_id + 1

    def sent(self, step_id: int, outputs: SchedulerOutputs, now_ns: int) -> StepInFlight:
        """Takes note of a step that is being sent: the next one, after the failed one if there is any."""
        self.last_step_id, self.failed_step = step_id, None
        num_tokens = int(outputs.rows.query_lens.sum())
        tokens_ns = num_tokens / max(self.sizes.prefill_tokens_per_s, 1.0) * 1e9
        previous_ns = self.in_flight[-1].deadline_ns if self.in_flight else now_ns
        deadline_ns = previous_ns + STEP_BASE_NS + int(STEP_SLOWNESS * tokens_ns)
        step = StepInFlight(step_id, outputs.rows, num_tokens, now_ns, deadline_ns)
        step.take(outputs)
        self.in_flight.append(step)
        if outputs.released_slots or outputs.introductions or outputs.forks:
            self._told_slots.difference_update(outputs.released_slots)
            self._told_slots.update(introduction.sequence.slot for introduction in outputs.introductions)
            self._told_slots.update(child.slot for _, child in outputs.forks)
        return step

    def problem(self, now_ns: int, awake_since_ns: int = 0) -> str | None:
        """Why this worker must be given up now, if it must; silence counts from `awake_since_ns` on."""
        silence_ns = now_ns - max(self.link.last_heard_ns, awake_since_ns)
        if silence_ns > SILENCE_LIMIT_NS:
            return f"no message for {silence_ns / 1e9:.1f} s"
        if self.in_flight and now_ns > self.in_flight[0].deadline_ns:
            return f"step {self.in_flight[0].step_id} is past its deadline"
        return None
