"""What can happen to a worker or to the way there, and how it is over again."""

from __future__ import annotations

import asyncio
import signal
from abc import ABC, abstractmethod

from tests.chaos.cluster import Cluster, Place


class Fault(ABC):
    """`strike` happens within one event of the proxies' loop; `heal` follows, and takes its time."""

    @abstractmethod
    def strike(self, place: Place) -> None: ...

    @abstractmethod
    async def heal(self, cluster: Cluster, place: Place) -> None: ...


class Killed(Fault):
    """SIGKILL, and another process at the same address soon after."""

    def strike(self, place: Place) -> None:
        place.process.send_signal(signal.SIGKILL)

    async def heal(self, cluster: Cluster, place: Place) -> None:
        await asyncio.sleep(0.3)
        await cluster.replace(place)


class Stopped(Fault):
    """SIGSTOP for 5 s: longer than a scheduler waits, and than a lease lasts. Then a zombie with both."""

    def strike(self, place: Place) -> None:
        place.process.send_signal(signal.SIGSTOP)

    async def heal(self, cluster: Cluster, place: Place) -> None:
        await asyncio.sleep(5.0)
        place.process.send_signal(signal.SIGCONT)


class Cut(Fault):
    """Connections reset, and none possible for a second."""

    def strike(self, place: Place) -> None:
        place.network.cut()

    async def heal(self, cluster: Cluster, place: Place) -> None:
        await asyncio.sleep(1.0)
        place.network.heal()


class Swallowed(Fault):
    """A network that takes everything, delivers nothing and says nothing for 4 s; then it delivers after all."""

    def strike(self, place: Place) -> None:
        place.network.swallow()

    async def heal(self, cluster: Cluster, place: Place) -> None:
        await asyncio.sleep(4.0)
        place.network.heal()


class Restarted(Fault):
    """SIGTERM: it drains and goes, and another process follows at the same address."""

    def strike(self, place: Place) -> None:
        place.process.send_signal(signal.SIGTERM)

    async def heal(self, cluster: Cluster, place: Place) -> None:
        await asyncio.to_thread(place.process.wait_for_end)
        await cluster.replace(place)


FAULTS: dict[str, Fault] = {
    "killed": Killed(),
    "stopped for 5 s": Stopped(),
    "cut off": Cut(),
    "swallowed for 4 s": Swallowed(),
    "restarted": Restarted(),
}
