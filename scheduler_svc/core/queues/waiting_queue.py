"""A queue of groups that no worker holds, in service order. Knows neither clock nor threads.

Only the step loop's thread changes it; `len` and `num_tokens` may be read from any other. No operation grows with the
number of groups that wait, nor with the number of tenants, by more than a logarithm; only `candidates` reads past all
groups that do not fit, and `all` reads all.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_svc.core.queues.ordered_groups import Entry, OrderedGroups
from scheduler_svc.core.queues.policy import Key, Policy
from scheduler_svc.core.queues.served_tokens import ServedTokens
from scheduler_svc.core.queues.waiting_tenants import WaitingTenants
from scheduler_svc.core.sequences.sequence import SequenceGroup

BEFORE_ALL = 1 << 62  # for who had a turn and lost it: in order of arrival among themselves
REPLACED = -1  # no position has this ticket


@dataclass(slots=True, eq=False)
class _Lane:
    """The waiting groups of one tenant."""

    tenant: str
    groups: OrderedGroups = field(default_factory=OrderedGroups)
    ticket: int = REPLACED  # of its one valid entry in the turns


class _Turn(NamedTuple):
    """Where a lane stands among the lanes: never after where it really stands, for levels and heads only rise."""

    level: float
    head: Key
    ticket: int
    lane: _Lane


class _Member(NamedTuple):
    """What has to be taken away again when a group leaves."""

    lane: _Lane | None
    entry: Entry
    arrival: Entry
    num_tokens: int
    is_on_trial: bool


class WaitingQueue:
    """Lanes of groups; next is the first of the lane that was served the fewest tokens, and the earliest of equals.

    Groups on trial stand beside the lanes, in order: only who asks for them is shown them.

    Args:
        policy: how groups are laid out in lanes and ordered within one.
        served: what each tenant has had. Whoever admits groups and takes answers charges it where the policy counts
            tokens; the queue only reads it, and lifts tenants that come back.
        beside: another queue of the same pool: both count arrivals, tenants and what these were served as one.
    """

    def __init__(
        self, policy: Policy, served: ServedTokens | None = None, *, beside: WaitingQueue | None = None
    ) -> None:
        self.policy = policy
        self.tenants: WaitingTenants = (
            WaitingTenants(ServedTokens() if served is None else served) if beside is None else beside.tenants
        )
        self.served = self.tenants.served
        self.num_tokens = 0  # that the waiting groups still have to compute
        self._members: dict[SequenceGroup, _Member] = {}
        self._first = OrderedGroups()  # the lane None
        self._trials = OrderedGroups()
        self._lanes: dict[str, _Lane] = {}  # none of them empty
        self._turns: list[_Turn] = []  # a heap; replaced entries stay until they reach the top or pile up
        self._arrivals = OrderedGroups()  # by time of arrival
        self._num_of_adapter: dict[str, int] = {}  # groups, those on trial apart; none of them 0
        self._orders: Iterator[int] = itertools.count(1) if beside is None else beside._orders
        self._tickets = itertools.count()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, group: SequenceGroup) -> bool:
        return group in self._members

    # ---- in and out -------------------------------------------------------------------------------------------------

    def push(self, group: SequenceGroup) -> None:
        """Adds a new group at its place, or one that a worker gave back at the place that it had."""
        assert group not in self._members, "a group waits twice"
        self.number(group)
        entry, arrival = (self.policy.key(group), group), ((group.arrival_ns, group.order), group)
        tenant = None if group.is_on_trial else self.policy.lane(group)
        lane = None if tenant is None else self._open_lane(tenant)
        num_tokens = group.num_tokens_to_compute
        self._members[group] = _Member(lane, entry, arrival, num_tokens, group.is_on_trial)
        self.num_tokens += num_tokens
        self._arrivals.add(arrival)
        if not group.is_on_trial:
            self._num_of_adapter[group.adapter] = self._num_of_adapter.get(group.adapter, 0) + 1
        if lane is None:
            (self._trials if group.is_on_trial else self._first).add(entry)
        else:
            lane.groups.add(entry)
            if lane.groups.first() is entry:
                self._queue_up(lane)

    def number(self, group: SequenceGroup) -> None:
        """Gives a new group its place, which is behind all that have one; `push` does so where nobody has."""
        if not group.order:
            group.order = next(self._orders) - (BEFORE_ALL if group.is_resumed else 0)

    def peek(self) -> SequenceGroup | None:
        """The next in service order."""
        if self._first:
            return self._first.first()[1]
        lane = self._next_lane()
        return None if lane is None else lane.groups.first()[1]

    def peek_trial(self) -> SequenceGroup | None:
        """The next of those on trial."""
        return self._trials.first()[1] if self._trials else None

    def pop(self) -> SequenceGroup:
        """Takes out the group that `peek` shows; there must be one."""
        group = self.peek()
        assert group is not None, "the queue is empty"
        self._forget(group)
        return group

    def remove(self, group: SequenceGroup) -> bool:
        """Takes a group out, wherever it stands; False when it was not waiting here."""
        if group not in self._members:
            return False
        self._forget(group)
        return True

    # ---- looking ----------------------------------------------------------------------------------------------------

    def candidates(self, limit: int, fits: Callable[[SequenceGroup], bool] | None = None) -> list[SequenceGroup]:
        """The first `limit` groups in the order in which they would be served, all left where they are.

        Lanes are interleaved as if each group cost its tenant the tokens that it still has to compute. What is
        generated meanwhile, and by then charged, may shift the turns. Groups that `fits` leaves out do not count: they
        hide nobody behind them, however many they are.
        """
        first = (group for _, group in self._first if fits is None or fits(group))
        found = list(itertools.islice(first, limit))
        if len(found) == limit or not self._lanes:
            return found
        # Turns to come of the lanes that had one already, best first; the head of `_turns` is the best of all others.
        again: list[tuple[float, Key, SequenceGroup, _Lane, Iterator[Entry]]] = []
        moved: list[_Lane] = []
        while len(found) < limit:
            fresh = self._next_lane()
            if fresh is None and not again:
                break
            if fresh is not None and (not again or self._turns[0][:2] < again[0][:2]):
                level, lane, entries = heapq.heappop(self._turns).level, fresh, iter(fresh.groups)
                moved.append(lane)
                group = next(entries)[1]
            else:
                level, _, group, lane, entries = heapq.heappop(again)
            if fits is None or fits(group):
                found.append(group)
            if (following := next(entries, None)) is not None:
                level += self.served.cost(lane.tenant, self._members[group].num_tokens)
                heapq.heappush(again, (level, *following, lane, entries))
        for lane in moved:
            self._queue_up(lane)
        return found

    def adapters(self) -> Collection[str]:
        """Of all groups but those on trial, each once; "" is that of groups without one."""
        return self._num_of_adapter.keys()

    def trials(self) -> list[SequenceGroup]:
        """Those on trial, in order."""
        return [group for _, group in self._trials]

    def in_order(self) -> list[SequenceGroup]:
        """Every group, those on trial first and the others as they would be served."""
        return [*self.trials(), *self.candidates(len(self))]

    def all(self) -> list[SequenceGroup]:
        """Every group, in no order."""
        return list(self._members)

    def earliest_arrival_ns(self) -> int | None:
        """When the group that has waited longest arrived; None when nothing waits."""
        return self._arrivals.first()[1].arrival_ns if self._arrivals else None

    def arrived_until(self, latest_ns: int) -> list[SequenceGroup]:
        """Those that wait since then or longer, the earliest first; no look at any other but one."""
        arrivals = (group for _, group in self._arrivals)
        return list(itertools.takewhile(lambda group: group.arrival_ns <= latest_ns, arrivals))

    def check_integrity(self) -> None:
        """Raises AssertionError when lanes, turns and counts contradict one another. Reads every group."""
        waiting = [group for _, group in (*self._first, *self._trials)]
        for tenant, lane in self._lanes.items():
            entries = list(lane.groups)
            assert entries and entries == sorted(entries), "a lane is empty or out of order"
            turns = [turn for turn in self._turns if turn.ticket == lane.ticket]
            assert [turn.lane for turn in turns] == [lane], "a lane has no turn, or several"
            position = (self.served.level(tenant), entries[0][0])
            assert turns[0][:2] <= position, "a lane stands behind its place"
            waiting += [group for _, group in entries]
        assert len(waiting) == len(self._members) and set(waiting) == self._members.keys(), "lanes and members disagree"
        assert {group for _, group in self._arrivals} == self._members.keys(), "arrivals and members disagree"
        num_of_adapter = Counter(group.adapter for group, member in self._members.items() if not member.is_on_trial)
        assert num_of_adapter == self._num_of_adapter, "adapters are miscounted"
        assert self.num_tokens == sum(member.num_tokens for member in self._members.values()), "tokens are miscounted"

    # ---- lanes ------------------------------------------------------------------------------------------------------

    def _open_lane(self, tenant: str) -> _Lane:
        lane = self._lanes.get(tenant)
        if lane is None:
            self.tenants.came(tenant)
            lane = self._lanes[tenant] = _Lane(tenant)
        return lane

    def _next_lane(self) -> _Lane | None:
        """The lane whose turn it is. Afterwards its true place is at the top of the heap."""
        while self._turns:
            turn = self._turns[0]
            if turn.ticket != turn.lane.ticket:
                heapq.heappop(self._turns)
                continue
            level, head = self.served.level(turn.lane.tenant), turn.lane.groups.first()[0]
            if level == turn.level and head == turn.head:
                return turn.lane
            heapq.heapreplace(self._turns, _Turn(level, head, turn.ticket, turn.lane))
        return None

    def _queue_up(self, lane: _Lane) -> None:
        """Gives a lane the turn that it has now in place of the one that it had."""
        lane.ticket = next(self._tickets)
        turn = _Turn(self.served.level(lane.tenant), lane.groups.first()[0], lane.ticket, lane)
        heapq.heappush(self._turns, turn)
        if len(self._turns) > 2 * len(self._lanes) + 64:  # behind a head that stays, replaced turns would pile up
            self._turns = [turn for turn in self._turns if turn.ticket == turn.lane.ticket]
            heapq.heapify(self._turns)

    def _forget(self, group: SequenceGroup) -> None:
        lane, entry, arrival, num_tokens, is_on_trial = self._members.pop(group)
        self.num_tokens -= num_tokens
        self._arrivals.remove(arrival)
        if not is_on_trial:
            self._num_of_adapter[group.adapter] -= 1
            if not self._num_of_adapter[group.adapter]:
                del self._num_of_adapter[group.adapter]
        if lane is None:
            (self._trials if is_on_trial else self._first).remove(entry)
            return
        lane.groups.remove(entry)
        if not lane.groups:
            del self._lanes[lane.tenant]
            lane.ticket = REPLACED
            self.tenants.left(lane.tenant)
