"""gRPC in a process that was forked from one which used it: its threads are missing, and calls crash or never end."""

from __future__ import annotations

import os

from octavo.errors import Forked


class _FirstUse:
    pid = 0


def refuse_in_fork() -> None:
    """Before gRPC is used. Raises Forked where it was used first in a process that this one was forked from."""
    _FirstUse.pid = _FirstUse.pid or os.getpid()
    if _FirstUse.pid != os.getpid():
        raise Forked(
            "this process was forked from one that has had an LLM or a client, and gRPC does not work in a fork: "
            'start it anew, with multiprocessing\'s "spawn" for one'
        )
