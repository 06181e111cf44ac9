"""Child processes that do not outlive the process which started them, however it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Loaded here: between fork and exec only the call itself is safe.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent() -> Callable[[], None]:
    """A `preexec_fn`: on Linux the kernel sends SIGKILL to the child when the thread that started it ends."""
    parent = os.getpid()

    def before_exec() -> None:
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it was gone before the call
                os._exit(1)

    return before_exec
