"""Policies over minutes of simulated traffic: who is served in which order, who waits how long, who gets how much."""

from __future__ import annotations

import random
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos import inference_pb2
from scheduler_svc.core.queues.policy import POLICIES
from scheduler_svc.core.queues.served_tokens import MIN_REMEMBERED, ServedTokens
from scheduler_svc.core.sequences.sequence import SequenceGroup
from tests.many import trials, without_end
from tests.scheduler.simulation import Simulation
from tests.scheduler.virtual_time import Arrival, Machine, Playback, jain_index, play

NEVER = float("inf")


def flow(
    tenant: str, per_s: float, until_s: float, *, from_s: float = 0, seed: int = 0, priority: int = 0
) -> list[Arrival]:
    """Requests of one tenant at random times and of mixed sizes: 150 prompt and 60 output tokens on average."""
    rng = random.Random(f"{tenant} {seed}")
    arrivals, at_s = [], from_s
    while (at_s := at_s + rng.expovariate(per_s)) < until_s:
        arrivals.append(Arrival(at_s, rng.randint(20, 280), rng.randint(20, 100), tenant, priority))
    return arrivals


def check_nobody_was_overtaken(playback: Playback, policy: str) -> None:
    """Whoever waited while another was admitted comes after that one in the policy's order."""
    key = POLICIES[policy].key
    admitted = sorted((o for o in playback.outcomes if o.admitted_s is not None), key=lambda o: o.admitted_s or 0)
    for one in admitted:
        for other in playback.outcomes:
            waits = (
                other.arrival.at_s <= (one.admitted_s or 0) < (NEVER if other.admitted_s is None else other.admitted_s)
            )
            assert not waits or key(one.group) < key(other.group), "somebody was overtaken"


@given(st.sampled_from(sorted(POLICIES)), st.lists(st.integers(-3, 3), min_size=2, max_size=5))
def test_a_policy_says_whether_it_ever_preempts(name: str, priorities: list[int]) -> None:
    params = inference_pb2.SamplingParams()
    groups = [SequenceGroup("", [1], params, max_num_tokens=9, arrival_ns=0, priority=each) for each in priorities]
    overrules = any(POLICIES[name].overrules(one, other) for one in groups for other in groups)
    assert overrules == (POLICIES[name].preempts and len(set(priorities)) > 1)


# ---- order ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "counts_tokens"), [("fcfs", False), ("priority", False), ("fair", True)])
def test_only_fair_turns_have_somebody_charged(name: str, counts_tokens: bool) -> None:
    served = ServedTokens()
    simulation = Simulation(policy=name, served=served)
    simulation.add([1] * 5, 3, eos_token_id=None, tenant="tenant")
    simulation.run_to_end()
    assert served.level("tenant") == (8 if counts_tokens else 0)


def test_first_come_first_served_whatever_the_size_tenant_or_priority():
    trace = flow("a", 5, 60) + flow("b", 3, 60, priority=-5)
    playback = play(trace, "fcfs")
    assert max(outcome.wait_s for outcome in playback.outcomes) > 5, "nobody waited: this shows nothing"
    check_nobody_was_overtaken(playback, "fcfs")


def test_priorities_are_served_strictly_by_class_and_within_one_by_arrival():
    trace = [arrival for number in (2, 0, 1) for arrival in flow(f"class {number}", 2.8, 60, priority=number)]
    playback = play(trace, "priority")
    check_nobody_was_overtaken(playback, "priority")
    waits = [mean(outcome.wait_s for outcome in playback.of(f"class {number}")) for number in range(3)]
    assert waits[0] < 1 and waits[0] < waits[1] / 5 < waits[2] / 10, waits


def test_an_urgent_request_takes_the_place_of_a_patient_one_which_loses_nothing():
    """All places are taken when each urgent one comes, and it starts with the next step."""
    machine = Machine()
    patient = flow("patient", 8, 60, priority=1)
    urgent = [Arrival(20 + 5 * number, 100, 20, "urgent") for number in range(5)]
    playback = play(patient + urgent, "priority", machine=machine)
    longest_step_s = (machine.base_ns + machine.token_ns * machine.max_num_batched_tokens) / 1e9
    assert max(outcome.wait_s for outcome in playback.of("urgent")) <= longest_step_s
    assert sum(outcome.group.num_preemptions for outcome in playback.of("patient")) >= 3
    for outcome in playback.outcomes:
        assert outcome.group.sequences[0].num_tokens == outcome.group.max_num_tokens
    without = play(patient + urgent, "fcfs", machine=machine)
    assert max(outcome.wait_s for outcome in without.of("urgent")) > 1, "there were places: this shows nothing"


# ---- starvation -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def overload() -> list[Arrival]:
    """Twice what the worker can do for two minutes, all of it urgent, and ten patient requests from 10 s on."""
    urgent = flow("urgent", 12, 120, priority=0)
    return urgent + [Arrival(10 + number, 100, 50, "patient", priority=1) for number in range(10)]


@pytest.mark.parametrize("policy", POLICIES)
def test_only_priorities_can_starve(overload, policy):
    """First come, first served: whoever came before is ahead and nobody else. Fair: the flood is its tenant's alone."""
    playback = play(overload, policy, until_s=120)
    patient = playback.of("patient")
    if policy == "priority":
        assert all(outcome.admitted_s is None for outcome in patient), "that is what it is for"
    elif policy == "fcfs":
        backlog_s = max(outcome.wait_s for outcome in playback.of("urgent") if outcome.arrival.at_s < 20)
        assert max(outcome.wait_s for outcome in patient) <= backlog_s + 5
    else:
        assert max(outcome.wait_s for outcome in patient) < 2


# ---- fairness -------------------------------------------------------------------------------------------------------

TENANTS = ("flood", "b", "c", "d")


@pytest.fixture(scope="module")
def contention() -> list[Arrival]:
    """Two minutes in which each of four tenants wants more than a quarter of the worker, one ten times as much."""
    return [arrival for tenant in TENANTS for arrival in flow(tenant, 20 if tenant == "flood" else 2, 120)]


def shares(playback: Playback, tenants: tuple[str, ...] = TENANTS) -> list[float]:
    """Tokens served from 20 s on, when everybody has a backlog, to the end of the arrivals."""
    return [playback.tokens(tenant, 20, 120) for tenant in tenants]


def test_one_tenant_s_flood_takes_nothing_from_the_others(contention):
    fair, fcfs = play(contention, "fair", until_s=120), play(contention, "fcfs", until_s=120)
    assert jain_index(shares(fair)) >= 0.99, shares(fair)
    assert jain_index(shares(fcfs)) <= 0.6, shares(fcfs)
    assert sum(shares(fair)) >= 0.97 * sum(shares(fcfs)), "fairness is bought with throughput"


def test_a_tenant_s_share_follows_its_weight(contention):
    playback = play(contention, "fair", until_s=120, weights={"flood": 3.0})
    flood, *others = shares(playback)
    assert all(2.7 <= flood / other <= 3.3 for other in others), shares(playback)


def test_what_one_tenant_does_not_want_goes_to_the_others():
    """A tenant that asks for a tenth gets that at once, and those with a backlog share the rest."""
    trace = flow("modest", 0.4, 120) + flow("flood", 20, 120) + flow("b", 4, 120)
    playback = play(trace, "fair", until_s=120)
    asked = [outcome for outcome in playback.of("modest") if outcome.arrival.at_s < 110]
    assert max(outcome.wait_s for outcome in asked) < 2 and all(outcome.end_s for outcome in asked)
    assert jain_index(shares(playback, ("flood", "b"))) >= 0.99
    modest, flood = shares(playback, ("modest", "flood"))
    assert modest < flood / 2


def test_a_tenant_that_comes_late_waits_for_a_place_not_for_the_backlog():
    trace = flow("flood", 20, 60) + flow("late", 2, 60, from_s=30)
    waits = {}
    for policy in ("fair", "fcfs"):
        playback = play(trace, policy, until_s=200)
        waits[policy] = playback.of("late")[0].wait_s
    assert waits["fair"] < 2 and waits["fcfs"] > 15, waits


def test_idling_and_coming_back_wins_nothing():
    """A tenant that pauses for most of the time has, once back, no more than its share."""
    trace = flow("steady", 12, 120) + flow("comes back", 12, 10) + flow("comes back", 12, 120, from_s=90)
    playback = play(trace, "fair", until_s=120)
    back = [playback.tokens(tenant, 92, 120) for tenant in ("steady", "comes back")]
    assert jain_index(back) >= 0.99, back


@without_end
@given(st.lists(st.sampled_from([0.5, 1, 2, 5, 20]), max_size=4), st.integers(0, 1000))
@settings(max_examples=trials(4))
def test_between_tenants_that_keep_waiting_service_never_drifts_apart(rates, seed):
    """The bound of the virtual token counter: what one admission and the running groups of a tenant amount to."""
    machine = Machine(num_slots=8)
    flows = {f"{number}": rate for number, rate in enumerate([5, 20, *rates])}
    trace = [arrival for tenant, rate in flows.items() for arrival in flow(tenant, rate, 40, seed=seed)]
    playback = play(trace, "fair", until_s=40, machine=machine)
    bound = 2 * (280 + machine.num_slots * 100)
    for from_s in (10, 20):
        backlogged = [tenant for tenant in flows if is_backlogged(playback, tenant, from_s, 40)]
        served = [playback.tokens(tenant, from_s, 40) for tenant in backlogged]
        assert len(served) >= 2 and max(served) - min(served) <= bound, served


def is_backlogged(playback: Playback, tenant: str, from_s: float, until_s: float) -> bool:
    """Whether the tenant had somebody waiting all the time."""
    reached = from_s
    for outcome in playback.of(tenant):
        if outcome.arrival.at_s <= reached:
            reached = max(reached, NEVER if outcome.admitted_s is None else outcome.admitted_s)
    return reached >= until_s


# ---- served tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0, -1, NEVER, float("nan")])
def test_a_weight_is_a_positive_number(weight):
    with pytest.raises(ValueError, match="weight of tenant 'a'"):
        ServedTokens({"a": weight})


def test_tenants_that_stand_where_a_newcomer_starts_are_forgotten():
    """However many names are made up, only those above the least served are remembered."""
    served = ServedTokens()
    served.charge("ahead", 10**9)
    for number in range(20 * MIN_REMEMBERED):
        served.lift(f"tenant {number}", number)
        served.charge(f"tenant {number}", 1)
    assert len(served) <= 2 * MIN_REMEMBERED
    assert served.level("ahead") == 10**9 and served.level("tenant 0") == 20 * MIN_REMEMBERED - 1


def test_whoever_stands_at_the_least_served_level_is_not_remembered():
    served = ServedTokens()
    for number in range(2 * MIN_REMEMBERED):
        served.charge(f"tenant {number}", 5)
    served.lift("newcomer", 5)
    assert len(served) == 0 and served.level("tenant 7") == 5
    served.lift("another", 3)
    assert served.level("newcomer") == 5, "a level never falls"


@pytest.mark.parametrize("preemption_mode", ["swap", "recompute"])
def test_tenants_are_charged_for_what_they_get_and_for_nothing_twice(preemption_mode):
    """A prompt once, and each token that was drawn, also where it came for a group that had been preempted."""
    served = ServedTokens()
    simulation = Simulation(
        num_slots=8,
        num_blocks=18,
        num_host_blocks=40,
        policy="fair",
        preemption_mode=preemption_mode,
        enable_prefix_caching=False,
        served=served,
    )
    for number in range(6):
        simulation.add([number] * 9, 20 + number, eos_token_id=None, tenant="ab"[number % 2])
    simulation.add([6] * 9, 14, eos_token_id=None, n=2, tenant="a")
    simulation.add([7] * 9, 14, eos_token_id=None, beam_width=2, tenant="b")
    came_late = 0
    while not all(group.is_finished for group in simulation.groups):
        while len(simulation.in_flight) < simulation.depth and simulation.send():
            pass
        came_late += sum(group.num_pending_tokens for group in simulation.groups)
        simulation.answer()
    assert simulation.num_preempted and came_late, "nobody was preempted with a draw in flight: this shows nothing"
    assert served.level("a") == 3 * 9 + (20 + 22 + 24) + 9 + 2 * 14
    assert served.level("b") == 3 * 9 + (21 + 23 + 25) + 9 + 2 * (14 - 1), "beams of the last step are not ranked"
