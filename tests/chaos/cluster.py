"""A scheduler and its workers as processes, with a network between them that a test can break.

    octavo scheduler --> TcpProxy --> StepProxy --> octavo worker       (once for each worker)

A StepProxy is an end of HTTP/2: the scheduler's pings end there, and its own find a worker that is stopped. They are as
frequent. Without it (`reads_steps`) pings travel from scheduler to worker.

Proxies and clients share one event loop in a thread of its own, so a fault happens between two messages and at the
very one that a test waits for. A worker that is lost is replaced by a spare that is up already: a new process behind
the same address, as after a restart.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from tests.chaos.scheduler_process import SchedulerProcess
from tests.chaos.step_proxy import StepProxy, Watcher
from tests.chaos.tcp_proxy import TcpProxy
from tests.chaos.worker_process import WorkerProcess

T = TypeVar("T")


class Place:
    """A worker's address as the scheduler knows it: the way there, and whoever is there now."""

    def __init__(self, process: WorkerProcess, reads_steps: bool) -> None:
        self.process = process
        self.reads_steps = reads_steps
        self.steps = StepProxy(process.port)
        self.network = TcpProxy(0)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.network.port}"

    async def open(self) -> None:
        if self.reads_steps:
            await self.steps.start()
        self.network.target_port = self.steps.port if self.reads_steps else self.process.port
        await self.network.start()

    async def close(self) -> None:
        await self.network.close()
        await self.steps.close()

    async def move_in(self, process: WorkerProcess) -> None:
        """`process` takes the place; the one before it is somebody else's to end."""
        self.process = process
        await self.steps.point_to(process.port)
        if not self.reads_steps:
            self.network.target_port = process.port


class Cluster:
    """From `with` to the end of its block.

    Args:
        folder: of the model.
        worker_options, scheduler_options: as on their command lines.
        delay_s: of the network, each way.
        reads_steps: whether a StepProxy stands in the way, which `watch` needs.
    """

    def __init__(
        self,
        folder: Path,
        logs: Path,
        *,
        num_workers: int = 2,
        num_spares: int = 0,
        worker_options: Sequence[str] = (),
        scheduler_options: Sequence[str] = (),
        delay_s: float = 0.0,
        reads_steps: bool = True,
    ) -> None:
        self.places: list[Place] = []
        self.scheduler: SchedulerProcess
        self._folder, self._logs = folder, logs
        self._num_workers, self._num_spares, self._delay_s = num_workers, num_spares, delay_s
        self._reads_steps = reads_steps
        self._worker_options, self._scheduler_options = worker_options, scheduler_options
        self._processes: list[WorkerProcess] = []
        self._spares: list[WorkerProcess] = []
        self._schedulers: list[SchedulerProcess] = []
        self._numbers = itertools.count()  # of processes, for their logs
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)

    @property
    def address(self) -> str:
        return self.scheduler.address

    # ---- from the test's thread -------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = 120.0) -> T:
        """Runs something on the event loop of proxies and clients."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def wait_until_whole(self) -> None:
        """Every place is served, and nothing is left of earlier requests."""
        self.scheduler.wait_for_workers(self._num_workers)

    def start_scheduler(self, *options: str, places: Sequence[Place] | None = None) -> SchedulerProcess:
        """Another one; `scheduler` is the cluster's own."""
        addresses = [place.address for place in (self.places if places is None else places)]
        process = SchedulerProcess(addresses, options, self._logs / f"scheduler-{next(self._numbers)}.log")
        self._schedulers.append(process)
        return process

    def restart_scheduler(self, *options: str) -> None:
        """Further options than the cluster's own, which win."""
        self._schedulers.remove(self.scheduler)
        self.scheduler.stop()
        self.scheduler = self.start_scheduler(*self._scheduler_options, *options)
        self.wait_until_whole()

    def start_worker(self, folder: Path | None = None, name: str = "worker") -> WorkerProcess:
        arguments = [f"--model={folder or self._folder}", "--num-threads=1", *self._worker_options]
        process = WorkerProcess(arguments, self._logs / f"{name}-{next(self._numbers)}.log")
        self._processes.append(process)
        return process

    # ---- from the event loop ----------------------------------------------------------------------------------------

    def watch(self, watcher: Watcher | None) -> None:
        for place in self.places:
            place.steps.watcher = watcher

    async def replace(self, place: Place) -> None:
        """A spare takes the place. The next spare is being started."""
        spare = self._spares.pop(0) if self._spares else self.start_worker()
        await asyncio.to_thread(spare.wait_until_ready)
        await place.move_in(spare)
        if len(self._spares) < self._num_spares:
            self._spares.append(self.start_worker())

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        processes = [self.start_worker() for _ in range(self._num_workers + self._num_spares)]
        self._spares = processes[self._num_workers :]
        for process in processes[: self._num_workers]:
            process.wait_until_ready()
            place = self.run(_made_on_loop(process, self._reads_steps))
            place.network.delay_s = self._delay_s
            self.places.append(place)
            self.run(place.open())
        self.scheduler = self.start_scheduler(*self._scheduler_options)
        self.wait_until_whole()

    def _stop(self) -> None:
        for scheduler in self._schedulers:
            scheduler.stop()  # without effect where a test did so
        for process in self._processes:
            process.end()
        for place in self.places:
            self.run(place.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _made_on_loop(process: WorkerProcess, reads_steps: bool) -> Place:
    return Place(process, reads_steps)
