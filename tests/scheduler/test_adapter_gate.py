"""The adapter gate: its rules one by one, and a worker under a flood of adapters that must starve nobody."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.leases.adapter_gate import MAX_PASSED_OVER, AdapterGate

ANY = set("abcde")
LONGEST = 15  # steps of a random request


def verdicts(gate: AdapterGate, adapters: Iterable[str]) -> list[bool]:
    """Asks in order, and lets in whoever may."""
    answers = []
    for adapter in adapters:
        answers.append(gate.admits(adapter))
        if answers[-1]:
            gate.admitted(adapter)
    return answers


def test_no_more_adapters_than_the_worker_computes_with():
    gate = AdapterGate(max_loras=2)
    gate.open({"a"}, ANY)
    assert verdicts(gate, ["", "a", "b", "c", "b", "", "a"]) == [True, True, True, False, True, True, True]


def test_an_adapter_that_the_worker_does_not_have_is_not_admitted_and_closes_nothing():
    gate = AdapterGate(max_loras=2, max_passed_over=0)
    gate.open({"a", "b"}, {"a", "b"})
    assert verdicts(gate, ["c", "a", "b"]) == [False, True, True]


def test_without_adapters_a_group_that_wants_one_waits():
    gate = AdapterGate(max_loras=0)
    gate.open((), ANY)
    assert verdicts(gate, ["a", "", "a"]) == [False, True, False]


def test_an_adapter_passed_over_often_enough_closes_the_one_in_use_longest_behind_it():
    gate = AdapterGate(max_loras=2, max_passed_over=3)
    gate.open({"b"}, ANY)
    gate.open({"a", "b"}, ANY)
    assert verdicts(gate, "ca") == [False, True]
    gate.open({"a", "b"}, ANY)
    assert verdicts(gate, "cab") == [False, True, True]
    gate.open({"a", "b"}, ANY)
    assert verdicts(gate, ["b", "c", "b", "a", "", "d"]) == [True, False, False, True, True, False]
    gate.open({"a"}, ANY)
    assert verdicts(gate, "cab") == [True, True, False]
    gate.open({"a", "c"}, ANY)
    assert verdicts(gate, "bac") == [False, True, True]
    gate.open({"a", "b"}, ANY)
    assert verdicts(gate, "cab") == [False, True, True], "that was its turn: the next one counts from zero"


def test_each_adapter_that_is_due_closes_one():
    gate = AdapterGate(max_loras=2, max_passed_over=0)
    gate.open({"a", "b"}, ANY)
    assert verdicts(gate, "cab") == [False, False, True]
    gate.open({"a", "b"}, ANY)
    assert verdicts(gate, ["c", "d", "a", "b", ""]) == [False, False, False, False, True]


# ---- a worker over time ---------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Request:
    adapter: str
    arrival: int
    num_steps: int
    started: int | None = None


class Worker:
    """Room for so many requests at once; each leaves after its steps. First come, first served but for the gate."""

    def __init__(self, gate: AdapterGate, max_requests: int) -> None:
        self.gate, self.max_requests = gate, max_requests
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.now = 0

    def step(self) -> None:
        self.gate.open({request.adapter for request in self.running}, ANY)
        for request in list(self.waiting):
            if len(self.running) == self.max_requests:
                break
            if self.gate.admits(request.adapter):
                self.gate.admitted(request.adapter)
                self.waiting.remove(request)
                self.running.append(request)
                request.started = self.now
        assert len({request.adapter for request in self.running} - {""}) <= self.gate.max_loras
        self.now += 1
        assert self.running or not self.waiting, "work waits and nothing runs"
        self.running = [each for each in self.running if self.now < (each.started or 0) + each.num_steps]


def flood_with_one_of_another(max_passed_over: int) -> tuple[Worker, Request, list[Request]]:
    """Groups of adapters a and b for ever, so that there are always some of both, and one of adapter c at step 10."""
    worker = Worker(AdapterGate(2, max_passed_over), max_requests=8)
    flood, rare = [], Request("c", 10, 20)
    for step in range(600):
        if step == rare.arrival:
            worker.waiting.append(rare)
        if step % 3 == 0:
            flood.append(Request("ab"[step % 2], step, 12))
            worker.waiting.append(flood[-1])
        worker.step()
    return worker, rare, flood


def test_a_rare_adapter_starves_where_nothing_bounds_the_overtaking():
    _, rare, _ = flood_with_one_of_another(max_passed_over=1_000_000)
    assert rare.started is None


@pytest.mark.parametrize("max_passed_over", [0, 4, 16])
def test_a_rare_adapter_waits_for_its_share_of_overtaking_and_one_adapter_to_run_dry(max_passed_over):
    _, rare, flood = flood_with_one_of_another(max_passed_over)
    assert rare.started is not None
    assert rare.started - rare.arrival <= 3 * max_passed_over + 12 + 3
    while_waiting = Counter(
        request.adapter for request in flood if rare.arrival < (request.started or 0) <= rare.started
    )
    assert sum(while_waiting.values()) >= max_passed_over, "it held up the others before it was due"
    last = [request for request in flood if request.arrival < 500]
    assert all(request.started is not None for request in last), "somebody of the flood was lost behind it"


def test_groups_without_adapter_and_of_other_adapters_go_on_while_one_runs_dry():
    worker = Worker(AdapterGate(2, max_passed_over=0), max_requests=64)
    worker.waiting = [Request("a", 0, 50), Request("b", 0, 50)]
    worker.step()
    rare, others = Request("c", 1, 5), [Request(adapter, 1, 5) for adapter in ("", "b", "", "b", "a")]
    worker.waiting = [rare, *others]
    worker.step()
    assert [request.started for request in others] == [1, 1, 1, 1, None]
    while rare.started is None:
        worker.step()
    assert rare.started == 50, "the step after the last group of the closed adapter"


def longest_waits(max_passed_over: int, seed: int) -> dict[str, int]:
    """Steps that the unluckiest group of each adapter waited: two popular adapters, three rare ones, room for two."""
    rng, worker = random.Random(seed), Worker(AdapterGate(2, max_passed_over), max_requests=1000)
    requests = []
    for step in range(3000):
        if step < 2500:
            adapter = rng.choices("abcde", weights=(40, 40, 2, 2, 2))[0]
            requests.append(Request(adapter, step, rng.randint(1, LONGEST)))
            worker.waiting.append(requests[-1])
        worker.step()
    waits: dict[str, int] = dict.fromkeys("abcde", 0)
    for request in requests:
        started = 3000 if request.started is None else request.started
        waits[request.adapter] = max(waits[request.adapter], started - request.arrival)
    return waits


@pytest.mark.parametrize("seed", range(3))
def test_the_longest_wait_is_bounded_however_popular_the_others_are(seed):
    """One group comes a step: a wait is the overtaking allowed, then at worst each other adapter runs dry first."""
    bound = MAX_PASSED_OVER + 4 * LONGEST
    assert max(longest_waits(MAX_PASSED_OVER, seed).values()) <= bound
    unbounded = longest_waits(1_000_000, seed)
    assert min(unbounded[adapter] for adapter in "cde") > bound, "this traffic starves nobody and shows nothing"


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["", *sorted(ANY)]), st.integers(1, LONGEST)), max_size=100),
    st.integers(1, 3),
    st.integers(0, 6),
)
@settings(max_examples=150)
def test_whatever_comes_the_worker_never_idles_beside_work_and_everybody_is_served(script, max_loras, max_passed_over):
    worker = Worker(AdapterGate(max_loras, max_passed_over), max_requests=8)
    for gap, adapter, num_steps in script:
        for _ in range(gap):
            worker.step()
        worker.waiting.append(Request(adapter, worker.now, num_steps))
    last_arrival = worker.now
    while worker.waiting:
        worker.step()
        assert worker.now - last_arrival <= LONGEST * len(script), "slower than one after another"
