"""Writes a record of each fault into a folder: on a thread of its own, a bounded number of files, and no fault twice.

Whatever goes wrong over a file costs the file and a line of the log, never the service.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import structlog

from scheduler_svc.flight.record_file import SUFFIX, packed
from scheduler_svc.flight.record_lines import Line
from scheduler_svc.flight.recorder import Fault, Recording

log = structlog.get_logger()

MAX_FILES = 16  # of records in one folder, whoever wrote them; the oldest go
AGAIN_AFTER_S = 3600.0  # until the same fault is written down again
PAUSE_S = 10.0  # between two files of one kind of fault; what it leads to is often of another kind
MAX_KNOWN = 256  # faults that are told apart
LEFT_AFTER_S = 3600.0  # until a file that is not whole belongs to a writer that was killed
PREFIX = "octavo-flight-"

Key = tuple[str, str, str]


def default_folder() -> Path:
    """One of this user's among temporary files, which a service can write where all else is read-only."""
    return Path(tempfile.gettempdir()) / f"octavo-flight-records-{os.getuid()}"


class BlackBox:
    """Takes what a recorder has when something went wrong. `header`: of the files, see `record_file.header_of`."""

    def __init__(self, folder: Path, header: Line) -> None:
        self._folder = folder
        self._header = header
        self._waiting: queue.SimpleQueue[Recording | threading.Event | None] = queue.SimpleQueue()
        self._known: dict[Key, float] = {}  # faults, and when they were taken; the writer's thread forgets some
        self._taken_s: dict[str, float] = {}  # when one of each kind was taken last
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def take(self, recording: Recording) -> None:
        """Has a record written, unless its fault was written down not long ago. Does not wait."""
        fault, now_s = recording.fault, time.monotonic()
        if fault is None or self._is_closed:
            return
        key = _key_of(fault)
        last_s, of_kind_s = self._known.get(key), self._taken_s.get(fault.kind)
        if (last_s is not None and now_s - last_s < AGAIN_AFTER_S) or (
            of_kind_s is not None and now_s - of_kind_s < PAUSE_S
        ):
            return
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[key] = self._taken_s[fault.kind] = now_s
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="flight-records", daemon=True)
            self._thread.start()
        self._waiting.put(recording)

    def close(self) -> None:
        """What happens from now on, as a service ends, is no fault; what was taken is written, if that is soon."""
        self._is_closed = True
        self.wait()
        self._waiting.put(None)  # ends the thread
        self._thread = None

    def wait(self, timeout_s: float = 10.0) -> bool:
        """Until all that was taken is written; False after a timeout."""
        if self._thread is None:
            return True
        is_done = threading.Event()
        self._waiting.put(is_done)
        return is_done.wait(timeout_s)

    def _run(self) -> None:
        while (taken := self._waiting.get()) is not None:
            if isinstance(taken, threading.Event):
                taken.set()
                continue
            try:
                path = self._write(taken)
            except Exception as error:
                if taken.fault is not None:
                    self._known.pop(_key_of(taken.fault), None)  # the next one is written, where that is possible again
                log.warning("a flight record could not be written", folder=str(self._folder), why=_why(error))
                continue
            log.warning("flight record written", path=str(path), fault=taken.fault and taken.fault.kind)
            try:
                self._forget_oldest(path)
            except Exception as error:
                log.warning("a flight record could not be removed", folder=str(self._folder), why=_why(error))

    def _write(self, recording: Recording) -> Path:
        assert recording.fault is not None
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._folder == default_folder() and self._folder.lstat().st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "the folder is somebody else's")
        self._remove_leftovers()
        kind = re.sub(r"\W+", "-", recording.fault.kind)
        when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        path = self._folder / f"{PREFIX}{when}-{os.getpid()}-{kind}{SUFFIX}"
        partly = path.with_name(f".{path.name}")
        try:
            with open(os.open(partly, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                for piece in packed(recording, self._header):
                    file.write(piece)
                    time.sleep(0)  # the step loop goes first
            partly.replace(path)
        except BaseException:
            partly.unlink(missing_ok=True)
            raise
        return path

    def _remove_leftovers(self) -> None:
        """What writers that were killed have left, so that it takes no room from the next record."""
        now_s = time.time()
        for path, written_s in self._files(f".{PREFIX}*"):
            if abs(now_s - written_s) > LEFT_AFTER_S:  # or ahead: the clock was set back since
                with contextlib.suppress(OSError):
                    path.unlink()

    def _forget_oldest(self, newest: Path) -> None:
        """Raises OSError where a file cannot be removed."""
        others = [(written_s, path) for path, written_s in self._files(f"{PREFIX}*{SUFFIX}") if path != newest]
        now_s = time.time()
        # What lies ahead of the clock was written before that was set back, and is older than what does not.
        others.sort(key=lambda file: (file[0] <= now_s, file[0]))
        for _, path in others[: 1 - MAX_FILES]:
            path.unlink(missing_ok=True)

    def _files(self, pattern: str) -> Iterator[tuple[Path, float]]:
        """Those in the folder, and when they were written. Other processes remove files meanwhile."""
        for path in self._folder.glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                yield path, path.stat().st_mtime


def _key_of(fault: Fault) -> Key:
    """Equal for faults that are alike: of one kind, over one worker, and told apart by numbers alone."""
    return fault.kind, fault.worker, re.sub(r"\d+", "0", fault.where)


def _why(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
