"""How many calls clients have open, by host and in all, and which hosts keep opening calls that end without any work.

A peer is one connection, as gRPC writes it: `ipv4:10.0.0.7:41234`. Its host is all of that but the port. A host is
forgotten when it has nothing open and has behaved for a while.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import structlog

from octavo.shared.connections import cut_connection
from scheduler_svc.api import allowance
from scheduler_svc.api.allowance import Allowance
from scheduler_svc.errors import QueueFull

log = structlog.get_logger()

HOST_SHARE = 0.75  # of all open calls that one host may have: behind a proxy everybody is one host
QUICK_S = 0.25  # a call that its client ends earlier has had no use of it
RETRY_AFTER_S = 1.0
LOG_INTERVAL_S = 1.0
MAX_QUIET_HOSTS = 1024
MAX_CUT_PEERS = 64
CUT_AGAIN_S = 1.0  # the calls of a connection that has been cut end one after the other, and each looks for it


class Call:
    """One open call.

    Attributes:
        has_request: its message has come, or as many as may come are awaited.
        is_useful: it got what its client wanted or was told why not, whatever comes now.
        has_given_way: another one has its place.
    """

    __slots__ = ("has_given_way", "has_request", "is_useful", "started_s")

    def __init__(self, started_s: float) -> None:
        self.started_s = started_s
        self.has_request = False
        self.is_useful = False
        self.has_given_way = False


class _Host:
    """`yielding` are its calls that give way to others when there is no place, the latest last, and what ends each.

    Whoever begins and gives up more calls than `allowance` has loses the connection.
    """

    __slots__ = ("allowance", "num_open", "yielding")

    def __init__(self, now_s: float) -> None:
        self.num_open = 0
        self.yielding: dict[Call, Callable[[], object]] = {}
        self.allowance = Allowance(now_s)


class OpenCalls:
    """For one thread.

    Args:
        max_calls: open at once, of all hosts together.
        cut: ends a peer's connection.
        clock: seconds, rising.
    """

    def __init__(
        self,
        max_calls: int,
        cut: Callable[[str], bool] = cut_connection,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_calls = max_calls
        self._max_calls_of_host = max(1, int(max_calls * HOST_SHARE))
        self._cut = cut
        self._clock = clock
        self._hosts: dict[str, _Host] = {}
        self._num_open = 0
        self._num_open_of: Counter[str] = Counter()  # by peer, without those that give way
        self._num_yielding = 0
        self._num_cut = 0
        self._cut_s: dict[str, float] = {}  # when, by peer; the oldest first
        self._look_at = MAX_QUIET_HOSTS  # hosts, before the quiet ones of them are looked for
        self._logged_s = -LOG_INTERVAL_S

    def peers(self) -> Iterable[str]:
        """Those that have a call open which does not give way."""
        return self._num_open_of.keys()

    @contextmanager
    def open(self, peer: str, give_way: Callable[[], object] | None = None) -> Iterator[Call]:
        """For as long as a call is open. Raises QueueFull beyond the bounds.

        `give_way` ends the call soon, where another one that cannot needs its place.
        """
        now_s = self._clock()
        name = peer.rpartition(":")[0]
        host = self._hosts.get(name)
        if host is None:
            host = self._hosts[name] = _Host(now_s)
        if not self._has_place(host) and (give_way is not None or not self._make_place(host)):
            raise QueueFull(f"{host.num_open} calls of this host and {self._num_open} in all are open", RETRY_AFTER_S)
        call = Call(now_s)
        self._count(host, 1)
        if give_way is None:
            self._num_open_of[peer] += 1
        else:
            host.yielding[call] = give_way
            self._num_yielding += 1
        try:
            yield call
        finally:
            if give_way is None:
                self._close_one_of(peer)
                self._count(host, -1)
            elif not call.has_given_way:
                del host.yielding[call]
                self._num_yielding -= 1
                self._count(host, -1)
            if not call.is_useful:
                self._note_idle(call, host, peer)
            if not host.num_open and len(self._hosts) > self._look_at:
                self._forget_quiet_hosts()

    def _has_place(self, host: _Host) -> bool:
        return self._num_open < self._max_calls and host.num_open < self._max_calls_of_host

    def _count(self, host: _Host, change: int) -> None:
        host.num_open += change
        self._num_open += change

    def _make_place(self, host: _Host) -> bool:
        """Ends a call that gives way, the latest of the host that has the most, and of this one where it has too many.

        Its place is free at once.
        """
        if not self._num_yielding:
            return False
        if host.num_open < self._max_calls_of_host:
            host = max(self._hosts.values(), key=lambda each: len(each.yielding))
        if not host.yielding:
            return False
        call, give_way = host.yielding.popitem()
        call.has_given_way = call.is_useful = True
        self._num_yielding -= 1
        self._count(host, -1)
        give_way()
        return True

    def _close_one_of(self, peer: str) -> None:
        self._num_open_of[peer] -= 1
        if not self._num_open_of[peer]:
            del self._num_open_of[peer]

    def _note_idle(self, call: Call, host: _Host, peer: str) -> None:
        now_s = self._clock()
        if now_s - call.started_s > QUICK_S or host.allowance.spend(now_s):
            return
        self._cut_once(peer, now_s)
        if now_s - self._logged_s >= LOG_INTERVAL_S:
            log.warning("calls are begun and given up; connections are cut", peer=peer, connections=self._num_cut)
            self._logged_s, self._num_cut = now_s, 0

    def _cut_once(self, peer: str, now_s: float) -> None:
        cut_s = self._cut_s.get(peer)
        if cut_s is None or now_s - cut_s >= CUT_AGAIN_S:
            self._num_cut += self._cut(peer)
            self._cut_s.pop(peer, None)
            self._cut_s[peer] = now_s
            if len(self._cut_s) > MAX_CUT_PEERS:
                del self._cut_s[next(iter(self._cut_s))]

    def _forget_quiet_hosts(self) -> None:
        earliest_s = self._clock() - allowance.AT_ONCE / allowance.PER_S
        self._hosts = {
            name: host for name, host in self._hosts.items() if host.num_open or host.allowance.used_s > earliest_s
        }
        self._look_at = max(MAX_QUIET_HOSTS, 2 * len(self._hosts))
