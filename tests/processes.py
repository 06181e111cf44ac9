"""Processes that tests start."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil


@contextmanager
def started(arguments: list[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process that the end of the block waits for, and that is killed where a check in it fails: the block of `Popen`
    waits then too, for ever. `options` are those of `Popen`."""
    with subprocess.Popen(arguments, **options) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def is_alive(process: psutil.Process) -> bool:
    """Whether it still runs. One whose parent has ended may stay, ended, for as long as nobody asks how it ended."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
