"""The waiting queue against a plain list that is sorted anew for every question."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos import inference_pb2
from scheduler_svc.core.queues.policy import POLICIES
from scheduler_svc.core.queues.served_tokens import ServedTokens
from scheduler_svc.core.queues.waiting_queue import WaitingQueue
from scheduler_svc.core.sequences.sequence import SequenceGroup, SequenceStatus

TENANTS = ("", "a", "b", "c")
PARAMS = inference_pb2.SamplingParams()


def group(num_tokens: int = 10, tenant: str = "", priority: int = 0, arrival_ns: int = 0) -> SequenceGroup:
    return SequenceGroup(
        "request",
        [1] * num_tokens,
        PARAMS,
        max_num_tokens=num_tokens + 1,
        arrival_ns=arrival_ns,
        tenant=tenant,
        priority=priority,
    )


def drain(queue: WaitingQueue, limit: int = 1_000_000) -> list[SequenceGroup]:
    """Pops as a scheduler would that is charged for every prompt at once."""
    popped: list[SequenceGroup] = []
    while len(queue) and len(popped) < limit:
        each = queue.pop()
        queue.served.charge(each.tenant, each.num_prompt_tokens)
        popped.append(each)
    return popped


# ---- one lane -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_group_that_comes_back_has_the_place_that_it_had(policy):
    queue = WaitingQueue(POLICIES[policy])
    first, second, third = group(), group(), group()
    queue.push(first)
    queue.push(second)
    assert queue.pop() is first
    queue.push(third)
    queue.push(first)
    assert [queue.pop() for _ in range(3)] == [first, second, third]


def test_tokens_and_members_are_counted_whatever_leaves():
    queue = WaitingQueue(POLICIES["fcfs"])
    groups = [group(number) for number in range(1, 5)]
    for each in groups:
        queue.push(each)
    assert (len(queue), queue.num_tokens) == (4, 10)
    assert queue.remove(groups[0]) and not queue.remove(groups[0])
    assert queue.pop() is groups[1]
    assert (len(queue), queue.num_tokens) == (2, 7)
    assert queue.remove(groups[2]) and queue.remove(groups[3])
    assert (len(queue), queue.num_tokens) == (0, 0) and queue.peek() is None
    assert queue.candidates(3) == [] and queue.earliest_arrival_ns() is None


def test_a_prompt_of_several_outputs_counts_once_and_what_they_have_of_their_own_for_each():
    def several(**resumed: Any) -> SequenceGroup:
        return SequenceGroup("request", [1] * 10, PARAMS, max_num_tokens=20, arrival_ns=0, num_outputs=3, **resumed)

    queue = WaitingQueue(POLICIES["fcfs"])
    queue.push(several())
    assert queue.num_tokens == 10
    ended = several(resumed_token_ids=[[1], [2, 3], [4, 5, 6]])
    ended.sequences[0].status = SequenceStatus.FINISHED
    queue.push(ended)
    assert queue.num_tokens == 10 + 12 + 13


def test_the_earliest_arrival_is_of_what_waits_not_of_what_is_next():
    queue = WaitingQueue(POLICIES["priority"])
    early, urgent = group(priority=5, arrival_ns=1), group(priority=1, arrival_ns=9)
    queue.push(early)
    queue.push(urgent)
    assert queue.peek() is urgent and queue.earliest_arrival_ns() == 1
    queue.remove(early)
    assert queue.earliest_arrival_ns() == 9


# ---- lanes ----------------------------------------------------------------------------------------------------------


def test_those_that_arrived_by_a_time_are_told_in_order_and_no_others_looked_at():
    queue = WaitingQueue(POLICIES["fair"])
    groups = [group(tenant=str(at % 3), arrival_ns=at) for at in (5, 1, 9, 3, 7)]
    for each in groups:
        queue.push(each)
    assert [each.arrival_ns for each in queue.arrived_until(5)] == [1, 3, 5]
    queue.remove(groups[1])
    assert [each.arrival_ns for each in queue.arrived_until(4)] == [3]
    assert queue.arrived_until(2) == [] and len(queue.arrived_until(9)) == 4


def test_tenants_take_turns_by_the_tokens_that_they_were_served():
    queue = WaitingQueue(POLICIES["fair"])
    for size, tenant in [(10, "a")] * 4 + [(20, "b")] * 2 + [(5, "c")] * 2:
        queue.push(group(size, tenant))
    expected = list("abccaaba")  # levels 0 0 0, 10 20 5, 10 20 10, ...; the earliest of equals
    assert [each.tenant for each in queue.candidates(8)] == expected
    assert [each.tenant for each in drain(queue)] == expected


def test_weights_divide_what_was_served():
    queue = WaitingQueue(POLICIES["fair"], ServedTokens({"b": 3.0}))
    for tenant in ["a"] * 40 + ["b"] * 40:
        queue.push(group(10, tenant))
    served = [each.tenant for each in drain(queue, 40)]
    assert (served.count("a"), served.count("b")) == (10, 30)


def test_idling_saves_a_tenant_nothing():
    queue = WaitingQueue(POLICIES["fair"])
    for _ in range(100):
        queue.push(group(10, "a"))
    drain(queue, 50)
    for _ in range(10):
        queue.push(group(10, "b"))
    assert queue.served.level("b") == queue.served.level("a") == 500
    assert {each.tenant for each in drain(queue, 2)} == {"a", "b"}
    drain(queue)
    level = queue.served.level("a")
    queue.push(group(10, "c"))  # nobody waits, but somebody was served just now
    assert queue.served.level("c") == level


def test_a_tenant_that_had_more_than_others_still_has_when_it_comes_back():
    queue = WaitingQueue(POLICIES["fair"])
    for _ in range(3):
        queue.push(group(10, "b"))
    queue.push(group(1000, "a"))
    drain(queue, 2)
    queue.push(group(10, "a"))
    assert queue.served.level("a") == 1000
    assert [each.tenant for each in drain(queue)] == ["b", "b", "a"]


def test_a_charge_moves_a_tenant_back_while_it_waits():
    queue = WaitingQueue(POLICIES["fair"])
    queue.push(group(10, "a"))
    queue.push(group(10, "b"))
    assert queue.candidates(1)[0].tenant == "a"
    queue.served.charge("a", 1)
    assert queue.candidates(1)[0].tenant == "b"
    queue.served.charge("b", 2)
    assert queue.candidates(1)[0].tenant == "a"


def test_a_group_that_had_begun_waits_for_no_turn():
    """Its worker was lost: the tenant has paid for it, and a client is in the middle of the answer."""
    queue = WaitingQueue(POLICIES["fair"])
    moved = group(1000, "a")
    queue.push(moved)
    drain(queue)
    for tenant in "ab":
        queue.push(group(10, tenant))
    moved.first_scheduled_ns = 1
    queue.push(moved)
    assert queue.candidates(1) == [moved] and queue.pop() is moved


def test_the_earliest_of_a_lane_is_next_also_when_it_came_back_late():
    queue = WaitingQueue(POLICIES["fair"])
    first, second = group(10, "a"), group(10, "b")
    queue.push(first)
    queue.push(second)
    queue.remove(first)
    third = group(10, "a")
    queue.push(third)
    assert queue.peek() is second
    queue.push(first)
    assert [queue.pop() for _ in range(3)] == [first, second, third]


# ---- against the plain list -----------------------------------------------------------------------------------------


class PlainQueue:
    """What the queue must say, from definitions: sorts everything for every question."""

    def __init__(self, policy: str, served: ServedTokens) -> None:
        self.policy, self.served = POLICIES[policy], served
        self.groups: list[SequenceGroup] = []

    def in_service_order(self) -> list[SequenceGroup]:
        """Each tenant's first group competes; the one that wins costs its tenant its tokens."""
        rest = sorted(self.groups, key=self.policy.key)
        ordered = [each for each in rest if self.policy.lane(each) is None]
        rest = [each for each in rest if self.policy.lane(each) is not None]
        levels = {tenant: self.served.level(tenant) for tenant in TENANTS}
        while rest:
            best = min(rest, key=lambda each: (levels[each.tenant], self.policy.key(each)))
            levels[best.tenant] += self.served.cost(best.tenant, best.sequences[0].num_tokens)
            rest.remove(best)
            ordered.append(best)
        return ordered


events = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.sampled_from(TENANTS), st.integers(1, 30), st.integers(-2, 2)),
        st.tuples(st.just("push back"), st.integers(0, 50)),
        st.tuples(st.just("pop"), st.booleans()),
        st.tuples(st.just("remove"), st.integers(0, 50)),
        st.tuples(st.just("charge"), st.sampled_from(TENANTS), st.integers(0, 100)),
    ),
    max_size=80,
)


@given(st.sampled_from(sorted(POLICIES)), events)
@settings(max_examples=300)
def test_any_order_of_events_gives_the_order_of_the_plain_list(policy, script):
    queue = WaitingQueue(POLICIES[policy], ServedTokens({"b": 3.0, "c": 0.5}))
    plain = PlainQueue(policy, queue.served)
    gone: list[SequenceGroup] = []
    for number, (event, *arguments) in enumerate(script):
        if event == "push":
            tenant, size, priority = arguments
            plain.groups.append(group(size, tenant, priority, arrival_ns=number // 2))
            queue.push(plain.groups[-1])
        elif event == "push back" and gone:
            plain.groups.append(gone.pop(arguments[0] % len(gone)))
            queue.push(plain.groups[-1])
        elif event == "pop" and plain.groups:
            gone.append(queue.pop())
            gone[-1].first_scheduled_ns = 1 if arguments[0] else None
            plain.groups.remove(gone[-1])
        elif event == "remove" and plain.groups:
            gone.append(plain.groups.pop(arguments[0] % len(plain.groups)))
            assert queue.remove(gone[-1]) and gone[-1] not in queue
        elif event == "charge":
            queue.served.charge(*arguments)
        expected = plain.in_service_order()
        limit = number % 7 + 1
        assert queue.candidates(limit) == expected[:limit]
        assert queue.peek() is (expected[0] if expected else None)
        assert len(queue) == len(expected)
        assert queue.earliest_arrival_ns() == min((each.arrival_ns for each in expected), default=None)
        queue.check_integrity()


def test_long_lanes_are_cut_and_mended_without_losing_anything():
    rng, queue = random.Random(5), WaitingQueue(POLICIES["priority"])
    waiting: list[SequenceGroup] = []
    for step in range(12_000):
        if rng.random() < (0.9 if step < 6000 else 0.2) or not waiting:
            waiting.append(group(1, priority=rng.randrange(100)))
            queue.push(waiting[-1])
        else:
            queue.remove(waiting.pop(rng.randrange(len(waiting))))
        if step % 2000 == 1999:
            waiting.sort(key=POLICIES["priority"].key)
            queue.check_integrity()
            assert queue.candidates(len(waiting)) == waiting
    assert waiting and [queue.pop() for _ in waiting] == waiting and not queue


# ---- size -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_what_was_removed_is_not_kept_behind_a_head_that_stays(policy):
    queue = WaitingQueue(POLICIES[policy])
    head, tail = group(), group(tenant="other")
    queue.push(head)
    for number in range(1000):
        each = group(tenant=f"tenant-{number % 5}")
        queue.push(each)
        queue.remove(each)
    queue.push(tail)
    assert len(queue._turns) < 100
    assert queue.pop() is head and queue.pop() is tail
