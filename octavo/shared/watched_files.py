"""Files that are read again when they change: what was read last stays in force while they cannot be read."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

log = structlog.get_logger()

LOOK_AGAIN_S = 1.0

T = TypeVar("T")


class WatchedFiles(Generic[T]):
    """What `read` makes of some files. Thread-safe.

    Args:
        what: they hold, for the log.
        read: raises ValueError with a line for people.

    Attributes:
        content: of the last time that went well.
        num_failures: states of the files in which they could not be read again.
    """

    def __init__(self, what: str, paths: Sequence[Path], read: Callable[[], T], clock: Callable[[], float]) -> None:
        """Raises what `read` raises."""
        self._what, self._paths, self._read, self._clock = what, paths, read, clock
        self._lock = threading.Lock()
        self._stamp, self._looked_s = self._stamp_now(), clock()
        self.content = read()
        self.num_failures = 0
        self._failed: tuple[object, ...] | None = None  # the stamp of the last failure

    def look_again(self) -> None:
        """Reads them where they have changed; once a second at most."""
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_AGAIN_S or not self._lock.acquire(blocking=False):
            return
        try:
            self._looked_s, stamp = now_s, self._stamp_now()
            if stamp == self._stamp:
                return
            content = self._read()
            if stamp != self._stamp_now():
                return  # they are being replaced: what was read may be half of the old and half of the new
            self.content, self._stamp, self._failed = content, stamp, None
            log.info(f"{self._what} were read again", files=list(map(str, self._paths)))
        except ValueError as error:  # it is tried again: a file system may be away, a certificate may begin later
            if stamp != self._failed:
                self.num_failures += 1
                log.error(f"{self._what} stay as they were", why=str(error))
            self._failed = stamp
        finally:
            self._lock.release()

    def _stamp_now(self) -> tuple[object, ...]:
        """Changes when one of them does, or who may read it."""
        stamp: list[object] = []
        for path in self._paths:
            with contextlib.suppress(OSError):
                found = path.stat()
                stamp.append((str(path), found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino))
        return tuple(stamp)
