"""A large file of Octavo's cache: whole or not there, and written by one process at a time.

It is written under another name, `NAME.partial`, and renamed once all of it is on the disk. Who writes holds a lock on
the partial file, which ends with the process: one that nobody holds is left by a process that was killed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PARTIAL = ".partial"


class KeptFile:
    """A file, and what was there when this process looked first."""

    def __init__(self, path: Path) -> None:
        self.path, self._before = path, _identity(path)

    def write(self, num_bytes: int, write: Callable[[Path], None]) -> bool:
        """Puts a file of about `num_bytes` here, which `write` fills under the name that it is given.

        False where another process is about to, or has done so since this was made: nothing is written then, and
        nobody waits. Raises OSError, and leaves nothing, where there is no space or no leave to write.
        """
        folder, partial = self.path.parent, self.path.with_name(self.path.name + _PARTIAL)
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"*{_PARTIAL}"):
            with suppress(OSError), _locked(left) as descriptor:
                if descriptor is not None:
                    left.unlink()
        with _locked(partial) as descriptor:
            if descriptor is None:
                return False
            is_kept = False
            try:
                if _identity(self.path) == self._before:
                    if shutil.disk_usage(folder).free < num_bytes:  # rather than to fill the disk at every start
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    write(partial)
                    os.fsync(descriptor)  # else a crash might leave the name without the numbers
                    partial.replace(self.path)
                    is_kept = True
            finally:
                if not is_kept:
                    with suppress(OSError):
                        partial.unlink()
            return is_kept


@contextmanager
def _locked(path: Path) -> Iterator[int | None]:
    """A descriptor of the file, made where there is none, that holds its lock; None where another process has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        except OSError:  # a file system without locks: nobody writes here
            with suppress(OSError):
                path.unlink()
            raise
        yield descriptor if _has_name(descriptor, path) else None  # not where it was renamed or removed meanwhile
    finally:
        os.close(descriptor)


def _has_name(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _identity(path: Path) -> tuple[int, int, int] | None:
    """What tells a file from another that took its name; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
