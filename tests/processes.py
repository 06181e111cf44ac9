"""Processes that tests start."""

from __future__ import annotations

import contextlib
import io
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
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


def run_script(path: Path) -> None:
    """`python PATH`, in this process: a worker that it starts may be forked then (`tests.forked_worker`).

    Unlike `runpy`, this leaves the main module alone, which every process that is forked would run again.
    """
    exec(compile(path.read_text(encoding="utf-8"), path, "exec"), {"__name__": "__main__", "__file__": str(path)})


class Unread(io.StringIO):
    """Standard error whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def is_alive(process: psutil.Process) -> bool:
    """Whether it still runs. One whose parent has ended may stay, ended, for as long as nobody asks how it ended."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def processes_of(pids: Iterable[int]) -> list[psutil.Process]:
    """Those that still run."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return [process for process in found if is_alive(process)]
