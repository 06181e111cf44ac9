"""Says that sampling is being compiled for a CPU, some ten seconds once on a machine: a row for people, or log lines.

Of numba's kernels, which are those of sampling; the library of the others says itself that it is compiled. To be
imported by workers on a CPU only: others need no compiler of CPU code.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import structlog
from numba.core import event

from octavo.shared.log import is_terminal

log = structlog.get_logger()
_SILENT_S = 1.0  # what takes less is not worth a word


class CompileProgress(event.Listener):  # type: ignore[misc]  # numba is not read for types
    """Follows numba's compiler in all threads of this process, from `start` on."""

    def __init__(self) -> None:
        self._is_shown = is_terminal()
        self._reset()

    def start(self) -> None:
        """Once a process."""
        event.register("numba:compile", self)

    def finish(self) -> None:
        """What was compiled until now is all that belongs together: takes the row away, and logs how long it took."""
        if self._is_told:
            self._draw("")
            log.info("CPU kernels compiled", functions=self._num_functions, seconds=round(self._seconds, 1))
        self._reset()

    def on_start(self, event: Any) -> None:
        """Called by numba as it begins a function; those that it calls are compiled within."""
        self._look(done=0)

    def on_end(self, event: Any) -> None:
        """Called by numba as it is done with a function."""
        self._look(done=1)

    def _reset(self) -> None:
        self._num_functions, self._seconds = 0, 0.0
        self._started_s: float | None = None
        self._is_told = False

    def _look(self, done: int) -> None:
        now_s = time.monotonic()
        self._started_s = now_s if self._started_s is None else self._started_s
        self._num_functions += done
        self._seconds = now_s - self._started_s
        if self._seconds < _SILENT_S:
            return
        if not self._is_told:
            self._is_told = True
            log.info("compiling CPU kernels for sampling, some ten seconds once on this machine")
        self._draw(f"compiling CPU kernels: {self._num_functions} functions in {self._seconds:.0f} s")

    def _draw(self, text: str) -> None:
        if self._is_shown:
            sys.stderr.write(f"\r{text}\x1b[K")
            sys.stderr.flush()
