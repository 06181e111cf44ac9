"""What happened over HTTP, for Prometheus; of all processes that share the port, whichever is asked."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, multiprocess
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # of the library: where the processes keep their numbers
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
CLIENT_GONE = 499  # as nginx writes it: nobody was left to be told
FAILED = 500  # by a fault of the gateway's own


@dataclass(slots=True)
class Told:
    """Of one request, as far as it has come."""

    started_s: float
    status: int = CLIENT_GONE
    output_tokens: int = 0
    is_begun: bool = False


class GatewayMetrics:
    """For one process; several that were started together tell of all of them."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        options: dict[str, Any] = {"registry": self._registry}
        self._requests = Counter("octavo:http_requests", "answered", ("path", "status"), **options)
        self._open = Gauge("octavo:http_requests_open", "being answered", multiprocess_mode="livesum", **options)
        self._seconds = Histogram("octavo:http_request_seconds", "whole", ("path",), buckets=_SECONDS, **options)
        self._first = Histogram(
            "octavo:http_time_to_first_output_seconds", "until there is something to write", ("path",),
            buckets=_SECONDS, **options,
        )  # fmt: skip
        self._tokens = Counter("octavo:http_generation_tokens", "of answers that came to their end", **options)

    @contextmanager
    def request(self, path: str) -> Iterator[Told]:
        """Counts one, from here on."""
        told = Told(time.monotonic())
        self._open.inc()
        try:
            yield told
        except Exception:  # what was foreseen is answered within
            told.status = FAILED
            raise
        finally:
            self._open.dec()
            self._requests.labels(path, str(told.status)).inc()
            self._seconds.labels(path).observe(time.monotonic() - told.started_s)
            if told.output_tokens:
                self._tokens.inc(told.output_tokens)

    def begun(self, told: Told, path: str) -> None:
        """The first of an answer is there."""
        if not told.is_begun:
            told.is_begun = True
            self._first.labels(path).observe(time.monotonic() - told.started_s)

    def text(self) -> tuple[bytes, str]:
        """And its content type: never OpenMetrics, for which the library writes octavo_x for octavo:x."""
        registry = self._registry
        if folder := os.environ.get(SHARED_FOLDER):
            registry = CollectorRegistry()
            _forget_the_dead(Path(folder))
            multiprocess.MultiProcessCollector(registry, folder)  # type: ignore[no-untyped-call]  # of the library
        return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


def _forget_the_dead(folder: Path) -> None:
    """What a process that was killed had open is open no more."""
    for file in folder.glob("gauge_live*_*.db"):
        pid = file.stem.rpartition("_")[2]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            multiprocess.mark_process_dead(int(pid), str(folder))  # type: ignore[no-untyped-call]  # of the library
