"""Child processes that do not outlive the one which started them, however it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# Runs in the child, which then becomes the command. Not as a `preexec_fn`: Python code between fork and exec was seen
# to crash where the parent has gRPC's threads. 1 is PR_SET_PDEATHSIG (linux/prctl.h); it survives exec.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent was gone before its child began")
os.execv(sys.argv[2], sys.argv[2:])
"""


def ends_with_parent(command: Sequence[str]) -> list[str]:
    """The command, such that on Linux the kernel sends it SIGKILL when the thread that starts it ends.

    `command[0]` is a path. To be called in the process that starts it. Elsewhere than on Linux: the command itself.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]
