"""The command that runs a module of ours in a process of its own."""

from __future__ import annotations

import sys


def module_command(module: str, *arguments: str) -> list[str]:
    """`python -P -m MODULE ARGUMENTS`, by this interpreter.

    Without -P the current folder comes first in `sys.path`: a numpy.py beside somebody else's model would run.
    PYTHONPATH and installed packages count as before.
    """
    return [sys.executable, "-P", "-m", module, *arguments]
