"""Live requests by id, by tenant and in pages, against a plain list; what a look-up costs is counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos import inference_pb2 as pb
from scheduler_svc.core.queues.ordered_groups import Entry, OrderedGroups
from scheduler_svc.core.queues.policy import POLICIES
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.engine.requests.admitted_before import AdmittedBefore
from scheduler_svc.engine.requests.live_requests import LiveRequests
from scheduler_svc.engine.requests.tenant_turns import TenantTurns
from scheduler_svc.errors import DuplicateRequest
from scheduler_svc.routing.bound_queues import BoundQueues
from tests.many import trials, without_end


def group(request_id: str, tenant: str = "") -> SequenceGroup:
    return SequenceGroup(request_id, [1], pb.SamplingParams(), max_num_tokens=2, arrival_ns=0, tenant=tenant)


def new_live() -> LiveRequests:
    turns = TenantTurns(None, lambda weights: None, lambda group: None, lambda: 0, weights={})
    return LiveRequests(BoundQueues(POLICIES["fcfs"]), AdmittedBefore(), 1_000_000, 1_000_000, turns)


NAMES = st.sampled_from("abcd")


@without_end
@settings(max_examples=trials(70))
@given(data=st.data())
def test_ids_tenants_and_pages_as_in_a_plain_list(data: Any):
    live, plain = new_live(), list[SequenceGroup]()
    for _ in range(data.draw(st.integers(1, 30))):
        fresh = group(data.draw(NAMES), data.draw(NAMES))
        is_there = any((g.request_id, g.tenant) == (fresh.request_id, fresh.tenant) for g in plain)
        if is_there:
            with pytest.raises(DuplicateRequest):
                live.add(fresh)
            live.free(fresh)  # was never added: the one of that name stays
        else:
            live.add(fresh)
            plain.append(fresh)
        if plain and data.draw(st.booleans()):
            leaves = data.draw(st.sampled_from(plain))
            live.free(leaves)
            live.free(leaves)
            plain.remove(leaves)
        request_id, tenant = data.draw(NAMES), data.draw(NAMES)
        of_id = [g for g in plain if g.request_id == request_id]
        assert live.find(request_id) == of_id
        assert live.find(request_id, tenant) == [g for g in of_id if g.tenant == tenant]
        assert live.all() == plain and len(live) == len(plain)
        limit, paged, after = data.draw(st.integers(1, 5)), list[SequenceGroup](), 0
        while page := live.page(after, limit):
            assert len(page) <= limit
            paged += [g for _, g in page]
            after = page[-1][0]
        assert paged == plain


def test_who_leaves_between_two_pages_takes_nobody_along():
    live = new_live()
    groups = [group(str(number)) for number in range(3000)]  # several runs of the ordered groups
    for each in groups:
        live.add(each)
    first = live.page(0, 1000)
    for each in groups[990:1500]:
        live.free(each)
    second = live.page(first[-1][0], 1000)
    assert [g for _, g in second] == groups[1500:2500]
    assert [g for _, g in live.page(second[-1][0], 1000)] == groups[2500:]


def test_a_request_is_found_without_a_look_at_the_others(monkeypatch: pytest.MonkeyPatch):
    """What each of many that reconnect asks for; before, all that live were gone through."""
    live = new_live()
    groups = [group(str(number), tenant=str(number % 7)) for number in range(5000)]
    for each in groups:
        live.add(each)

    def unwanted(groups: OrderedGroups) -> Iterator[Entry]:
        raise AssertionError("all live requests are gone through")

    monkeypatch.setattr(OrderedGroups, "__iter__", unwanted)
    compared = 0

    class Counted(str):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    for each in groups[::10]:
        assert live.find(Counted(each.request_id), each.tenant) == [each]
        live.free(each)
        live.add(each)
    assert compared <= 2 * len(groups[::10])


def test_a_request_whose_id_is_free_lives_until_it_is_freed():
    live, first, second = new_live(), group("a"), group("a")
    live.add(first)
    live.free_ended_id(first)
    assert live.find("a") == [first], "it has not ended"
    live.end_above(first.sequences[0])
    assert live.find("a") == [] and live.has(first) and live.all() == [first]
    live.add(second)
    live.end_above(first.sequences[0])
    assert live.find("a") == [second] and len(live) == 2 and live.num_by_model() == {"": 2}
    live.free(first)
    live.end_above(first.sequences[0])  # late: nothing is kept of it
    assert live.find("a") == [second] and live.all() == [second] and not live.has(first) and not live._ended_above
