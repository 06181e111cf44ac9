"""The whole scheduler core under any order of events: rules drawn by hypothesis, every invariant after each of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from scheduler_svc.core.sequences.sequence import SequenceGroup
from tests.scheduler.simulation import VOCAB_SIZE, Simulation, expected_tokens

SHARED = [(7 * position) % VOCAB_SIZE for position in range(20)]  # what prompts begin with

some = st.integers(0, 50)  # chooses a group by its remainder
seldom = st.integers(0, 9).map(lambda number: number == 9)
failures = st.sampled_from(["before", "after"])
kinds = st.sampled_from([{}, {}, {"n": 2}, {"n": 3}, {"beam_width": 2}, {"beam_width": 3}])


def row_error(history: npt.NDArray[np.int32]) -> str | None:
    return "not finite" if int(history.sum()) % 23 == 0 else None


class CoreStateMachine(RuleBasedStateMachine):
    """Whatever happens, each group that is left alone ends with the tokens that it would get alone."""

    simulation: Simulation

    @initialize(
        num_blocks=st.integers(16, 30),
        num_host_blocks=st.sampled_from([0, 8, 40]),
        max_num_batched_tokens=st.integers(4, 40),
        depth=st.integers(1, 3),
        num_micro_batches=st.sampled_from([1, 1, 2, 3]),
        policy=st.sampled_from(["fcfs", "fcfs", "priority", "fair"]),
        preemption_mode=st.sampled_from(["auto", "swap", "recompute"]),
        enable_prefix_caching=st.booleans(),
        enable_chunked_prefill=st.booleans(),
        row_error=st.sampled_from([None, None, None, row_error]),
    )
    def begin(self, **options: Any) -> None:
        self.simulation = Simulation(**options)
        self.cut_short: set[SequenceGroup] = set()  # aborted, or with a sequence that was ended from above

    @rule(
        num_shared=st.integers(0, len(SHARED)),
        own=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12),
        max_tokens=st.integers(1, 30),
        kind=kinds,
        priority=st.integers(0, 2),
        tenant=st.sampled_from("ab"),
        cache_salt=st.sampled_from(["", "", "salt"]),
        asks_prompt_logprobs=st.booleans(),
        num_resumed=st.sampled_from([0, 0, 0, 1, 5]),
    )
    def add(
        self, num_shared: int, own: list[int], max_tokens: int, kind: dict[str, Any], num_resumed: int, **others: Any
    ) -> None:
        simulation = self.simulation
        prompt = SHARED[:num_shared] + own
        if not simulation.settings.enable_chunked_prefill:
            prompt = prompt[: simulation.max_num_batched_tokens]
        resumed = []
        if num_resumed and not kind.get("beam_width"):
            for index in range(kind.get("n", 1)):
                whole = expected_tokens(prompt, index, min(len(prompt) + max_tokens, simulation.max_model_len))
                resumed.append(whole[len(prompt) :][: min(num_resumed, len(whole) - len(prompt) - 1)])
        simulation.add(prompt, max_tokens, resumed=resumed if all(resumed) else (), **kind, **others)

    @precondition(lambda self: len(self.simulation.in_flight) < self.simulation.depth)
    @rule()
    def send(self) -> None:
        self.simulation.send()

    @precondition(lambda self: len(self.simulation.in_flight) < self.simulation.depth)
    @rule(fails=failures)
    def send_a_step_that_fails(self, fails: str) -> None:
        self.simulation.send(fails)

    @precondition(lambda self: self.simulation.in_flight)
    @rule()
    def answer(self) -> None:
        self.simulation.answer()

    @rule(count=st.integers(1, 6))
    def run_a_while(self, count: int) -> None:
        for _ in range(count):
            while len(self.simulation.in_flight) < self.simulation.depth and self.simulation.send():
                pass
            if self.simulation.in_flight:
                self.simulation.answer()

    @precondition(lambda self: self.unfinished())
    @rule(number=some)
    def abort(self, number: int) -> None:
        group = chosen(self.unfinished(), number)
        self.cut_short.add(group)
        self.simulation.abort(group)

    @precondition(lambda self: self.held())
    @rule(number=some, which=some)
    def end_a_sequence_from_above(self, number: int, which: int) -> None:
        """As a stop string does."""
        group = chosen(self.held(), number)
        self.cut_short.add(group)
        self.simulation.scheduler.finish(group.unfinished()[which % len(group.unfinished())])

    @precondition(lambda self: self.can_preempt())
    @rule(number=some)
    def preempt_as_the_scheduler_would(self, number: int) -> None:
        self.simulation.scheduler._preemption.preempt(chosen(self.simulation.scheduler.groups.running, number))
        self.simulation.send()

    @precondition(lambda self: self.can_preempt())
    @rule(number=some)
    def preempt_by_recomputation(self, number: int) -> None:
        group = chosen(self.simulation.scheduler.groups.running, number)
        self.simulation.scheduler.groups.recompute_later(group)
        group.num_preemptions += 1
        self.simulation.send()

    @rule(happens=seldom)
    def lose_worker(self, happens: bool) -> None:
        """Seldom, or no worker would ever get far."""
        if happens:
            self.simulation.lose_worker()

    @rule()
    def flush_the_cache(self) -> None:
        self.simulation.blocks.allocator.flush()

    @rule(count=st.integers(0, 15))
    def withhold_blocks(self, count: int) -> None:
        self.simulation.blocks.allocator.withhold(count)

    @invariant()
    def holds_together(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.check()

    def teardown(self) -> None:
        if not hasattr(self, "simulation"):
            return
        self.simulation.blocks.allocator.withhold(0)  # now all must end
        self.simulation.run_to_end()
        self.simulation.check_outputs(besides=self.cut_short)
        self.simulation.check_nothing_left()

    # ---- what rules look at -----------------------------------------------------------------------------------------

    def unfinished(self) -> list[SequenceGroup]:
        return [group for group in self.simulation.groups if not group.is_finished]

    def held(self) -> list[SequenceGroup]:
        """Ended from above are sequences whose tokens somebody reads; nobody reads those of a beam before its end."""
        return [g for g in self.unfinished() if self.simulation.scheduler.groups.holds(g) and not g.uses_beam_search]

    def can_preempt(self) -> bool:
        """Groups are preempted while a step is made; a suspect only by the one that makes it a suspect no longer."""
        simulation = self.simulation
        makes_steps = simulation.failed is None and len(simulation.in_flight) < simulation.depth
        groups = simulation.scheduler.groups
        return makes_steps and simulation.may_send() and bool(groups.running) and not groups.suspects


def chosen(groups: Any, number: int) -> SequenceGroup:
    ordered = sorted(groups, key=lambda group: group.order)
    return ordered[number % len(ordered)]


def test_any_order_of_events_keeps_every_invariant():
    run_state_machine_as_test(CoreStateMachine, settings=settings(max_examples=60, stateful_step_count=30))


@pytest.mark.chaos
def test_any_order_of_events_keeps_every_invariant_for_long():
    run_state_machine_as_test(CoreStateMachine, settings=settings(max_examples=1_000, stateful_step_count=60))
