"""The pods of a Deployment of workers: they take their time to start, and are drained when they are taken away."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.bench.fleet.simulation import Simulation
    from octavo.bench.fleet.worker import VirtualWorker, WorkerKind

FINISH_TIMEOUT_S = 20.0  # --finish-timeout of a worker, for the last one of a model


@dataclass(eq=False, slots=True)
class Pod:
    """One worker from its creation on. Times in ns; 0 where it has not come to that.

    Attributes:
        link: the worker, once it has joined.
    """

    name: str
    created_ns: int
    link: VirtualWorker | None = None
    ready_ns: int = 0
    told_to_end_ns: int = 0

    def ended_ns(self, now_ns: int) -> int:
        """When its node was free again; `now_ns` for one that still is there."""
        if not self.told_to_end_ns:
            return now_ns
        if self.link is None:
            return self.told_to_end_ns
        return self.link.closed_ns if self.link.is_closed else now_ns


class Deployment:
    """Workers of one kind. The simulation's own first workers are the pods of its beginning, ready at once.

    Args:
        start_s: from a pod's creation until it has joined the scheduler: a node, the image, the weights, warming up.

    Attributes:
        replicas: how many there shall be.
        pods: all that ever were, in order of creation.
        replicas_over_time: (ns, how many there shall be from then on).
    """

    def __init__(self, simulation: Simulation, kind: WorkerKind, start_s: float) -> None:
        self._simulation, self._kind, self._start_s = simulation, kind, start_s
        self.pods = [Pod(link.address, 0, link) for link in simulation.run_seen.workers]
        self.replicas = len(self.pods)
        self.replicas_over_time = [(0, self.replicas)]

    @property
    def present(self) -> list[Pod]:
        """Those that have not been told to end."""
        return [pod for pod in self.pods if not pod.told_to_end_ns]

    def scale(self, replicas: int) -> None:
        """Pods are created, or told to end: those that are not ready first, then the youngest."""
        now_ns = self._simulation.now_ns
        if replicas != self.replicas:
            self.replicas_over_time.append((now_ns, replicas))
        self.replicas = replicas
        present = self.present
        for _ in range(replicas - len(present)):
            self._create()
        doomed = sorted(present, key=lambda pod: (pod.link is None, pod.created_ns), reverse=True)
        for pod in doomed[: max(0, len(present) - replicas)]:
            pod.told_to_end_ns = now_ns
            if pod.link is not None:
                self._simulation.drain(pod.link, FINISH_TIMEOUT_S)

    def worker_s(self, until_ns: int) -> float:
        """Seconds that all pods together were there: from creation to end, while they start as well."""
        lives_ns = (max(0, min(pod.ended_ns(until_ns), until_ns) - min(pod.created_ns, until_ns)) for pod in self.pods)
        return sum(lives_ns) / 1e9

    def _create(self) -> None:
        now_ns = self._simulation.now_ns
        pod = Pod(f"pod-{len(self.pods)}", now_ns)
        self.pods.append(pod)
        self._simulation.at(now_ns / 1e9 + self._start_s, partial(self._ready, pod))

    def _ready(self, pod: Pod) -> None:
        if not pod.told_to_end_ns:
            pod.link, pod.ready_ns = self._simulation.add_worker(self._kind), self._simulation.now_ns
