"""How the ranks that run now find each other in a store which may have outlived others.

torchrun's agent keeps its store when it starts ranks anew, and how often it has done so each machine counts by itself.
So rank 0 gives the meeting a name that none had, and tells it to whoever is there:

    octavo/hello/R        what rank R has drawn when it came
    octavo/welcome/R/D    the name of the meeting, for the rank R that has drawn D
    NAME/...              all that is of this meeting, first of all a count of each rank (`Watch`)
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, TCPStore

from worker_svc.parallel.watch import count_key

_LOOK_S = 0.02


def join_meeting(store: TCPStore, rank: int, size: int, timeout_s: float) -> tuple[PrefixStore, str]:
    """Waits until all ranks are there; what is of their meeting alone, in `store`, and its name.

    Raises RuntimeError where one does not come in time.
    """
    name = _invite(store, size, timeout_s) if rank == 0 else _ask(store, rank, timeout_s)
    meeting = PrefixStore(name, store)
    meeting.set(count_key(rank), "0")
    meeting.wait([count_key(each) for each in range(size)], timedelta(seconds=timeout_s))
    return meeting, name


def _ask(store: TCPStore, rank: int, timeout_s: float) -> str:
    drawn = secrets.token_hex(8)
    store.set(f"octavo/hello/{rank}", drawn)
    welcome = f"octavo/welcome/{rank}/{drawn}"
    store.wait([welcome], timedelta(seconds=timeout_s))
    return store.get(welcome).decode()


def _invite(store: TCPStore, size: int, timeout_s: float) -> str:
    """On rank 0. A rank may have said hello and ended, and another one come in its place."""
    name, deadline_s = f"octavo/{secrets.token_hex(8)}", time.monotonic() + timeout_s
    missing, answered = set(range(1, size)), set[str]()
    while missing:
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"no word of rank {', '.join(map(str, sorted(missing)))} within {timeout_s:g} s")
        for rank in sorted(missing):
            if store.check([f"{name}/{count_key(rank)}"]):
                missing.remove(rank)
            elif store.check([f"octavo/hello/{rank}"]):
                welcome = f"octavo/welcome/{rank}/{store.get(f'octavo/hello/{rank}').decode()}"
                if welcome not in answered:
                    store.set(welcome, name)
                    answered.add(welcome)
        time.sleep(_LOOK_S)
    return name
