"""Minutes of traffic in a second: plays arrivals against the waiting queue and a worker whose steps take modelled time.

The clock is a number: a step takes `base_ns` and `token_ns` for each token that it computes, and what arrives meanwhile
waits for the next. What comes out is when each request was admitted and done, and who was served how
many tokens when.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from protos import inference_pb2
from scheduler_svc.core.blocks.block_manager import BlockSpaceManager
from scheduler_svc.core.queues.policy import POLICIES
from scheduler_svc.core.queues.served_tokens import ServedTokens
from scheduler_svc.core.queues.waiting_queue import WaitingQueue
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.scheduler_settings import SchedulerSettings
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.sequences.sequence_columns import SequenceColumns
from scheduler_svc.core.step_plan import Answer, ScheduledRows

SECOND_NS = 1_000_000_000
MAX_MODEL_LEN, BLOCK_SIZE = 512, 16
STEPS_A_CHECK = 50  # of thousands


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    tenant: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Machine:
    """A worker: room for so many sequences, and steps that take so long."""

    num_slots: int = 16
    max_num_batched_tokens: int = 512
    base_ns: int = 40_000_000
    token_ns: int = 100_000


@dataclass(eq=False, slots=True)
class Outcome:
    """What became of one arrival. Times are None for what had not happened when the play ended."""

    arrival: Arrival
    group: SequenceGroup
    end_s: float | None = None

    @property
    def admitted_s(self) -> float | None:
        first_ns = self.group.first_scheduled_ns
        return None if first_ns is None else first_ns / SECOND_NS

    @property
    def wait_s(self) -> float:
        """From arrival to admission; for ever where it was not admitted."""
        return float("inf") if self.admitted_s is None else self.admitted_s - self.arrival.at_s


@dataclass(slots=True)
class Playback:
    outcomes: list[Outcome]
    served: list[tuple[float, str, int]] = field(default_factory=list)  # (when, tenant, prompt and generated tokens)
    num_steps: int = 0

    def of(self, tenant: str) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.arrival.tenant == tenant]

    def tokens(self, tenant: str, from_s: float, until_s: float) -> int:
        """Tokens that a tenant was served in a window of time."""
        return sum(tokens for at_s, name, tokens in self.served if name == tenant and from_s <= at_s < until_s)


def jain_index(shares: Sequence[float]) -> float:
    """1 where all are equal, 1 / len(shares) where one has everything (Jain, Chiu and Hawe, 1984)."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


class Core:
    """The waiting queue and the scheduler of one worker: built and stepped here and nowhere else."""

    def __init__(self, machine: Machine, policy: str, served: ServedTokens) -> None:
        self.waiting = WaitingQueue(POLICIES[policy], served)
        columns = SequenceColumns(machine.num_slots, MAX_MODEL_LEN, BLOCK_SIZE)
        num_blocks = machine.num_slots * MAX_MODEL_LEN // BLOCK_SIZE
        blocks = BlockSpaceManager(columns, num_blocks, enable_prefix_caching=False)  # all prompts are alike
        settings = SchedulerSettings(policy=POLICIES[policy], served=served)
        self.scheduler = Scheduler(columns, blocks, machine.max_num_batched_tokens, settings)
        self._num_steps = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.groups.has_work or len(self.waiting) > 0

    def add(self, group: SequenceGroup) -> None:
        self.waiting.push(group)

    def step(self, now_ns: int) -> ScheduledRows:
        outputs = self.scheduler.schedule(self.waiting, now_ns)
        assert outputs is not None, "work waits and nothing runs"
        return outputs.rows

    def answer(self, rows: ScheduledRows) -> list[SequenceGroup]:
        """Takes the answer of a step, one token for each row that draws; the groups that are complete."""
        token_ids = np.full(int(rows.num_answers.sum()), 5, np.int32)
        answer = Answer(token_ids, rows.num_answers, np.zeros(0, np.float32), {})
        tokens = self.scheduler.process_outputs(rows, answer)
        self._num_steps += 1
        if self._num_steps % STEPS_A_CHECK == 0:
            self.scheduler.check_integrity()
        return [tokens.sequences[entry].group for entry in np.flatnonzero(tokens.finish_reasons)]


def play(
    trace: Iterable[Arrival],
    policy: str,
    *,
    until_s: float = float("inf"),
    weights: Mapping[str, float] | None = None,
    machine: Machine | None = None,
) -> Playback:
    """Plays a trace until everything is done, or until a time."""
    machine = machine or Machine()
    core = Core(machine, policy, ServedTokens(weights))
    arrivals = sorted(trace, key=lambda arrival: arrival.at_s)
    playback = Playback([Outcome(arrival, _group(arrival)) for arrival in arrivals])
    outcomes = {outcome.group: outcome for outcome in playback.outcomes}
    to_come = playback.outcomes[::-1]
    now_ns = 0
    while (to_come or core.has_work) and now_ns < until_s * SECOND_NS:
        while to_come and to_come[-1].group.arrival_ns <= now_ns:
            core.add(to_come.pop().group)
        if not core.has_work:
            now_ns = to_come[-1].group.arrival_ns
            continue
        rows = core.step(now_ns)
        now_ns += machine.base_ns + machine.token_ns * int(rows.query_lens.sum())
        now_s = now_ns / SECOND_NS
        for group in core.answer(rows):
            outcomes[group].end_s = now_s
        num_prompt_tokens = rows.query_lens.copy()
        num_prompt_tokens[: rows.num_decode_rows] = 0
        for sequence, num_tokens in zip(rows.sequences, num_prompt_tokens + rows.num_answers, strict=True):
            playback.served.append((now_s, sequence.group.tenant, int(num_tokens)))
        playback.num_steps += 1
    return playback


def _group(arrival: Arrival) -> SequenceGroup:
    return SequenceGroup(
        "request",
        [1] * arrival.num_prompt_tokens,
        inference_pb2.SamplingParams(),
        max_num_tokens=arrival.num_prompt_tokens + arrival.num_output_tokens,
        arrival_ns=round(arrival.at_s * SECOND_NS),
        tenant=arrival.tenant,
        priority=arrival.priority,
    )
