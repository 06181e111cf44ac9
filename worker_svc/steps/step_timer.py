"""Measures the phases of one step in nanoseconds, for the answer's `StepTimings`."""

from __future__ import annotations

import time

from protos import worker_pb2


class StepTimer:
    """Phases follow each other; `end_phase` names the one that has just ended. Times are of the monotonic clock."""

    def __init__(self, arrived_ns: int) -> None:
        self._arrived_ns = arrived_ns
        self._phase_started_ns = time.perf_counter_ns()
        self._ns = {"queue_ns": max(self._phase_started_ns - arrived_ns, 0)}

    def end_phase(self, name: str) -> None:
        """`name` is a field of StepTimings, such as forward_ns."""
        now_ns = time.perf_counter_ns()
        self._ns[name] = self._ns.get(name, 0) + now_ns - self._phase_started_ns
        self._phase_started_ns = now_ns

    def set_phase(self, name: str, duration_ns: int) -> None:
        """Sets a phase that a clock other than the host's has measured."""
        self._ns[name] = duration_ns

    def timings(self) -> worker_pb2.StepTimings:
        """All phases so far; the total ends now."""
        return worker_pb2.StepTimings(**self._ns, total_ns=time.perf_counter_ns() - self._arrived_ns)
