"""Ends a rank within 2 s of another's end, or silence: nobody can compute without all, and collectives wait for ever.

Every rank counts in a key of the group's store, from a thread of its own. Rank 0 looks at all others' counts, they at
its count. A process that ends this way answers nothing more; schedulers see one lost worker. A rank that ends by itself
says why before, in another key.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Protocol

BEAT_S = 0.2
SILENCE_S = 1.4
STARTING_SILENCE_S = 30.0  # until `ready`: imports and compilers keep a process from its other threads for seconds
FAILURE = "octavo/failure"  # key
STALL_S = 0.5  # a beat that is later than this tells of a process that was stopped or starved itself


class Store(Protocol):
    """Of `torch.distributed.Store`, what is used here. Any call may raise once the process that has it is gone."""

    def set(self, key: str, value: str) -> None:
        """Replaces a value."""

    def get(self, key: str) -> bytes:
        """Waits until there is one."""

    def check(self, keys: list[str]) -> bool:
        """Whether all of them are there."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Of calls from now on."""


class Watch:
    """A thread that counts and looks."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        end: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            store: a connection of its own, with the counts of all ranks in it (`count_key`).
            end: called once, with why, when another rank is lost; it is to end the process.
        """
        self._store, self._rank, self._end, self._clock = store, rank, end, clock
        self._others = range(1, size) if rank == 0 else range(1)
        self._seen: dict[int, tuple[bytes, float]] = {}  # by rank: its last count, and since when it is that
        self._silence_s = STARTING_SILENCE_S
        store.set_timeout(timedelta(seconds=STARTING_SILENCE_S))
        self._is_over = threading.Event()
        self._beats = 0
        self._looked_s = self._clock()  # when rank 0's store answered last
        self._thread = threading.Thread(target=self._run, name="watch of ranks", daemon=True)
        self._guard = threading.Thread(target=self._run_guard, name="watch of rank 0's store", daemon=True)

    def start(self) -> None:
        """Begins to count. Returns at once."""
        self._looked_s = self._clock()
        self._thread.start()
        self._guard.start()

    def ready(self) -> None:
        """From now on a rank is lost after SILENCE_S."""
        self._store.set_timeout(timedelta(seconds=SILENCE_S))
        self._silence_s, self._looked_s = SILENCE_S, self._clock()
        self._seen.clear()

    def stop(self) -> None:
        """The end of others means nothing any more."""
        self._is_over.set()

    def tell_failure(self, why: str) -> None:
        """This rank is about to end: the others end with its reason, at their next look."""
        with contextlib.suppress(Exception):  # the others are gone, or will miss this rank
            self._store.set(FAILURE, f"rank {self._rank}: {why}")

    def look(self) -> str:
        """Counts, and says which rank is lost and why; empty: none."""
        now_s = self._clock()
        self._beats += 1
        try:
            self._store.set(count_key(self._rank), str(self._beats))
            if self._store.check([FAILURE]):
                return self._store.get(FAILURE).decode()
            counts = {rank: self._store.get(count_key(rank)) for rank in self._others}
        except Exception as error:  # of several kinds, by version and by what happened to the connection
            return f"rank 0 cannot be reached: {' '.join(str(error).split())[:200]}"
        for rank, count in counts.items():
            last, since_s = self._seen.get(rank, (b"", now_s))
            if count != last:
                self._seen[rank] = count, now_s
            elif now_s - since_s > self._silence_s:
                return f"rank {rank} has been silent for {now_s - since_s:.1f} s"
        return ""

    def look_at_store(self) -> str:
        """Says whether rank 0 is lost because its store does not answer; empty: it is not. A call to the store of a
        process that was stopped, or of a machine that is gone, waits for ever, whatever its timeout is."""
        silent_s = self._clock() - self._looked_s
        return f"rank 0 has not answered for {silent_s:.1f} s" if silent_s > self._silence_s else ""

    def _run(self) -> None:
        for has_slept in self._beat():
            if has_slept:
                self._seen.clear()
            why = self.look()
            self._looked_s = self._clock()
            if self._has_ended(why):
                return

    def _run_guard(self) -> None:
        for has_slept in self._beat():
            if has_slept:
                self._looked_s = self._clock()
            if self._has_ended(self.look_at_store()):
                return

    def _beat(self) -> Iterator[bool]:
        """At every beat until `stop`: whether this process has slept. Who sleeps has heard nothing."""
        planned_s = self._clock()
        while not self._is_over.wait(max(planned_s - self._clock(), 0)):
            yield self._clock() - planned_s > STALL_S
            planned_s = self._clock() + BEAT_S

    def _has_ended(self, why: str) -> bool:
        """Ends the group where `why` says so, unless it is over."""
        if not why or self._is_over.is_set():
            return False
        self._is_over.set()
        self._end(why)
        return True


def count_key(rank: int) -> str:
    """Where a rank counts."""
    return f"octavo/beats/{rank}"
