"""How a child process is started, and how long to wait before it is started again."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Mapping, Sequence

from octavo.shared.backoff import backoff_s
from octavo.shared.processes.end_with_parent import ends_with_parent


async def start_child(
    command: Sequence[str], environment: Mapping[str, str], stderr: int | None = None
) -> asyncio.subprocess.Process:
    """Starts a child that does not outlive this process, reads nothing and gets no Ctrl-C: its parent ends it.

    `stderr`: a file descriptor in place of ours. Raises OSError.
    """
    return await asyncio.create_subprocess_exec(
        *ends_with_parent(command),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stderr=stderr,
        process_group=0,
    )


class Restarts:
    """Restarts of one child. The pause before each is twice the last one; after a good life it is the first again.

    Args:
        first_s, longest_s: of the pauses.
        good_life_s: from one start to its end.
    """

    def __init__(self, first_s: float, longest_s: float, good_life_s: float) -> None:
        self.count = 0
        self._first_s = first_s
        self._longest_s = longest_s
        self._good_life_s = good_life_s
        self._started_s = time.monotonic()

    def started(self) -> None:
        """A life begins, or the attempt at one."""
        self._started_s = time.monotonic()

    def ended(self) -> None:
        """The life is over; counts it unless it was a good one."""
        if time.monotonic() - self._started_s > self._good_life_s:
            self.count = 0

    def pause_s(self) -> float:
        """How long to wait before the next start, which counts as one more."""
        self.count += 1
        return backoff_s(self._first_s, self.count, self._longest_s)
