"""Minutes of traffic in a second: plays arrivals against the waiting queue and a worker whose steps take modelled time.

The clock is a number: a step takes `base_ns` and `token_ns` for each token that it computes, and what arrives meanwhile
waits for the next. What comes out is when each request was admitted, answered first and done, and who was served how
many tokens when.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from protos import inference_pb2
from scheduler_svc.policy import POLICIES
from scheduler_svc.sequence import SequenceGroup
from scheduler_svc.served_tokens import ServedTokens
from scheduler_svc.waiting_queue import WaitingQueue

SECOND_NS = 1_000_000_000


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
    first_token_s: float | None = None
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
    """The waiting queue and a worker that takes from it: built and stepped here and nowhere else."""

    def __init__(self, machine: Machine, policy: str, served: ServedTokens) -> None:
        self.machine = machine
        self.waiting = WaitingQueue(POLICIES[policy], served)
        self.served = served
        self._running: dict[SequenceGroup, list[int]] = {}  # prompt tokens and output tokens still to compute

    @property
    def has_work(self) -> bool:
        return bool(self._running or len(self.waiting))

    def add(self, group: SequenceGroup) -> None:
        self.waiting.push(group)

    def step(self, now_ns: int) -> list[tuple[SequenceGroup, int, int]]:
        """The rows of the next step: (group, prompt tokens computed, tokens drawn)."""
        budget = self.machine.max_num_batched_tokens
        rows = [(group, 0, 1) for group, (prompt, _) in self._running.items() if not prompt]
        budget -= len(rows)
        for group in [group for group, (prompt, _) in self._running.items() if prompt]:
            budget -= self._add_chunk(rows, group, budget)
        while budget and len(self._running) < self.machine.num_slots and len(self.waiting):
            group = self.waiting.pop()
            group.first_scheduled_ns = now_ns
            self.served.charge(group.tenant, group.num_prompt_tokens)
            self._running[group] = [group.num_prompt_tokens, group.max_num_tokens - group.num_prompt_tokens]
            budget -= self._add_chunk(rows, group, budget)
        return rows

    def _add_chunk(self, rows: list[tuple[SequenceGroup, int, int]], group: SequenceGroup, budget: int) -> int:
        num_tokens = min(budget, self._running[group][0])
        if num_tokens:
            rows.append((group, num_tokens, int(num_tokens == self._running[group][0])))
        return num_tokens

    def answer(self, rows: list[tuple[SequenceGroup, int, int]]) -> list[SequenceGroup]:
        """Takes the answer of a step; the groups that are complete."""
        complete = []
        for group, num_prompt_tokens, num_drawn in rows:
            self.served.charge(group.tenant, num_drawn)
            left = self._running[group]
            left[0] -= num_prompt_tokens
            left[1] -= num_drawn
            if not left[1]:
                complete.append(group)
                del self._running[group]
        return complete


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
        assert rows, "work waits and nothing runs"
        now_ns += machine.base_ns + machine.token_ns * sum(prompt or drawn for _, prompt, drawn in rows)
        now_s = now_ns / SECOND_NS
        for group in core.answer(rows):
            outcomes[group].end_s = now_s
        for group, prompt, drawn in rows:
            playback.served.append((now_s, group.tenant, prompt + drawn))
            if drawn and outcomes[group].first_token_s is None:
                outcomes[group].first_token_s = now_s
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
