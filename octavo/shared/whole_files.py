"""Files that are there whole or not at all, also after a crash: written beside their place, synced, and renamed."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def replacing(path: Path, mode: int = 0o600) -> Iterator[TextIO]:
    """A file in UTF-8 that takes the place of `path` when the block ends without an error. `mode` is that of a new one,
    less what umask takes; one that was there stays whose it was. Raises OSError."""
    path = path.resolve()  # a link stays one
    if path.exists() and not path.is_file():  # a device would be replaced by a file
        number = errno.EISDIR if path.is_dir() else errno.EEXIST
        raise OSError(number, os.strerror(number), str(path))
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            if path.exists():
                before = path.stat()
                if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)
                os.fchmod(file.fileno(), before.st_mode & 0o777)
            yield file
            file.flush()
            os.fsync(file.fileno())  # else a crash might leave the name without what is in it
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Returns once a crash loses nothing of the folder and of what is in it. Raises OSError."""
    for inside, _, names in os.walk(folder):
        for name in [*names, "."]:
            descriptor = os.open(os.path.join(inside, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
