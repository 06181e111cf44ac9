"""Connections divided among hosts: while they are nearly used up, the hosts that have the most lose some.

gRPC closes connections beyond a number as they come, from whatever host, so that one host could keep all others out.
Its Python server accepts connections without calling us. So they are counted by host every now and then, and those
above an equal share are shut down: first those without an open call, of these the latest, and open streams last.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable

import grpc
import structlog

from octavo.shared.connections import address_of, client_connections, num_open_files, shut_down

log = structlog.get_logger()

LOOK_INTERVAL_S = 0.25
CROWDED_SHARE = 0.875  # of all connections: what is beyond is kept free for hosts with few
LOG_INTERVAL_S = 5.0
_watches: set[asyncio.Task[None]] = set()  # an event loop itself does not keep its tasks


class ConnectionShares:
    """For one thread.

    Args:
        max_connections: of all hosts together.
        peers_with_calls: names of the peers that have a call open, as gRPC gives them.
    """

    def __init__(self, max_connections: int, peers_with_calls: Callable[[], Iterable[str]]) -> None:
        self._most = max(1, int(max_connections * CROWDED_SHARE))
        self._peers_with_calls = peers_with_calls

    def look(self) -> Counter[str]:
        """Shuts down what is above a host's share, if there are many; how many of each host."""
        if num_open_files() <= self._most:
            return Counter()
        connections = client_connections()
        counts = Counter(each.peer[0] for each in connections)
        share = max(1, equal_share(counts.values(), self._most))
        crowding = {host for host, count in counts.items() if count > share}
        if not crowding:
            return Counter()
        calling = {address_of(peer) for peer in self._peers_with_calls()}
        cut: Counter[str] = Counter()
        connections.sort(key=lambda each: (each.peer not in calling, each.number), reverse=True)
        for number, peer in connections:
            host = peer[0]
            if host in crowding and cut[host] < counts[host] - share:
                cut[host] += shut_down(number, peer)
        return cut


def equal_share(counts: Iterable[int], total: int) -> int:
    """The most that each may have so that all together have at most `total`, as much of it as they want."""
    rising = sorted(counts)
    for index, count in enumerate(rising):
        share = total // (len(rising) - index)
        if count > share:
            return share
        total -= count
    return rising[-1] if rising else 0


def watch(server: grpc.aio.Server, shares: ConnectionShares) -> None:
    """Looks until the server has stopped. For its own event loop."""
    task = asyncio.get_running_loop().create_task(_watch(server, shares))
    _watches.add(task)
    task.add_done_callback(_watches.discard)


async def _watch(server: grpc.aio.Server, shares: ConnectionShares) -> None:
    """However a look ends, there is a next one."""
    loop, logged_s = asyncio.get_running_loop(), -LOG_INTERVAL_S
    cut: Counter[str] = Counter()
    while await server.wait_for_termination(LOOK_INTERVAL_S):  # True: it has not stopped yet
        try:
            cut += shares.look()
        except Exception as error:  # no file can be opened, say; the next look may be better
            log.error("connections cannot be counted", why=f"{type(error).__name__}: {error}")
        if cut and loop.time() - logged_s >= LOG_INTERVAL_S:
            log.warning("connections are nearly used up; hosts with many lose some", lost=dict(cut.most_common(4)))
            logged_s = loop.time()
            cut.clear()
