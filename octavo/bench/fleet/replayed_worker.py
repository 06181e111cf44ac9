"""The link of a worker in a record: it tells what it is sent, and says nothing by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo.bench.fleet.worker import NEVER_SILENT_NS
from protos import worker_pb2

if TYPE_CHECKING:
    from scheduler_svc.leases.worker_handle import AdapterRequest


class ReplayedLink:
    """`was_sent` is told of each step, with the worker's number."""

    def __init__(self, number: int, was_sent: Callable[[int, worker_pb2.Step], None]) -> None:
        self.number = number
        self.address = f"worker-{number}"
        self.last_heard_ns = NEVER_SILENT_NS
        self._was_sent = was_sent
        self._asked: dict[str, list[Callable[[str], None]]] = {}  # by adapter, the first first

    def send(self, data: bytes) -> None:
        """See `WorkerLink`."""
        request = worker_pb2.StepRequest.FromString(data)
        if request.WhichOneof("kind") == "step":
            self._was_sent(self.number, request.step)

    def call(self, request: AdapterRequest, done: Callable[[str], None]) -> None:
        """See `WorkerLink`; it is done when the record says so."""
        self._asked.setdefault(request.name, []).append(done)

    def is_done(self, adapter: str, problem: str) -> None:
        """The oldest call for an adapter is answered."""
        if self._asked.get(adapter):
            self._asked[adapter].pop(0)(problem)

    def distrust(self) -> None:
        """What it says is the record's."""

    def close(self) -> None:
        """Its lease has ended."""
