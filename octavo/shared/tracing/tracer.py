"""Which requests are traced, and the thread that their spans are exported on.

Whoever measures hands a plain record over and goes on: nothing is woken, nothing waits, and what the collector does not
take in time is dropped and counted.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from octavo.shared.tracing.context import TraceContext, new_id
from octavo.shared.tracing.options import check_tracing_packages
from octavo.shared.tracing.span import Span

log = structlog.get_logger()

MAX_WAITING_SPANS = 16_384  # some 16 MB, beyond which spans are dropped
BATCH_SPANS = 512
INTERVAL_S = 1.0  # between two exports, unless OTEL_BSP_SCHEDULE_DELAY says otherwise, in ms
FLUSH_S = 1.0  # at the end, for what waits: who is told to end has few seconds
_TRACE_ID_BITS = (1 << 64) - 1  # of which OpenTelemetry's sampler by ratio looks at


class Exporter(Protocol):
    """Where spans go."""

    def export(self, spans: Sequence[Span]) -> str:
        """Takes as long as it takes. What went wrong; "" for nothing."""

    def close(self) -> None:
        """Gives up on what it is about; `export` returns soon."""


class Tracer:
    """For one process. Any thread may call it.

    Args:
        sampling: share of the requests that are traced where no caller has decided.
        follows_parents: whether callers may decide.
        new_exporter: called on the thread that exports.
    """

    def __init__(self, sampling: float, new_exporter: Callable[[], Exporter], *, follows_parents: bool = True) -> None:
        self._most_id = int(sampling * (1 << 64))
        self._follows_parents = follows_parents
        self._new_exporter = new_exporter
        self._exporter: Exporter | None = None
        self._waiting: deque[Span] = deque()
        self._num_dropped = self._num_dropped_told = 0
        self._is_failing = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def begin(self, parent: TraceContext | None) -> TraceContext:
        """The context of a request's own span: of the trace that its caller began, or of a new one.

        `is_sampled` says whether it is to be recorded.
        """
        if parent is not None and self._follows_parents:
            return parent.child()
        if parent is not None:  # in its trace, and by a number that its caller did not choose
            return TraceContext(parent.trace_id, new_id(64), new_id(64) < self._most_id, parent.state)
        trace_id = new_id(128)
        return TraceContext(trace_id, new_id(64), trace_id & _TRACE_ID_BITS < self._most_id, "")

    def emit(self, span: Span) -> None:
        """Has it exported soon; dropped where too many wait."""
        if len(self._waiting) < MAX_WAITING_SPANS:
            self._waiting.append(span)
        else:
            self._num_dropped += 1

    def close(self, flush_s: float = FLUSH_S) -> None:
        """Exports what waits, for at most that long; nothing is exported after that."""
        self._ending.set()
        self._thread.join(0.0 if self._is_failing else flush_s)
        if self._exporter is not None:
            self._exporter.close()

    # ---- on the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            exporter = self._exporter = self._new_exporter()
        except Exception as error:
            log.error("traces are not exported", why=str(error))
            return
        while not self._ending.wait(_interval_s()):
            self._export_waiting(exporter)
        self._export_waiting(exporter)

    def _export_waiting(self, exporter: Exporter) -> None:
        """A batch after the other; a batch that nobody takes is lost, and the next one waits for the next time."""
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(BATCH_SPANS, len(self._waiting)))]
            try:
                problem = exporter.export(batch)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            self._tell(problem, len(batch))
            if problem:
                return

    def _tell(self, problem: str, num_spans: int) -> None:
        """One line when it begins to fail, and one when it goes well again, with what was lost between."""
        if problem:
            self._num_dropped += num_spans
        if bool(problem) is not self._is_failing:
            self._is_failing = bool(problem)
            if problem:
                log.warning("traces cannot be exported; spans are dropped until they can", why=problem)
            else:
                log.info("traces are exported again", dropped=self._num_dropped - self._num_dropped_told)
                self._num_dropped_told = self._num_dropped
        elif not problem and self._num_dropped > self._num_dropped_told:
            log.warning("spans came faster than the collector takes them", dropped=self._num_dropped)
            self._num_dropped_told = 2 * self._num_dropped  # once more when they are three times as many


def _interval_s() -> float:
    try:
        return float(os.environ["OTEL_BSP_SCHEDULE_DELAY"]) / 1e3
    except (KeyError, ValueError):
        return INTERVAL_S


def new_tracer(service: str, endpoint: str, sampling: float = 1.0, *, follows_parents: bool = True) -> Tracer | None:
    """None where there is no endpoint: tracing is off. `service`: its name in traces.

    Raises OptionError where packages are missing.
    """
    if not endpoint:
        return None
    check_tracing_packages()

    def new_exporter() -> Exporter:
        from octavo.shared.tracing.otlp import OtlpExporter  # and OpenTelemetry with it: a quarter of a second

        return OtlpExporter(service, endpoint)

    return Tracer(sampling, new_exporter, follows_parents=follows_parents)
