"""Finds a thread that hangs: one that turns for ever is watched from another.

A thread that has ended is found by `VitalParts`. One that hangs is as bad, and nothing else would notice.
"""

from __future__ import annotations

import sys
import threading
import traceback

import structlog

from scheduler_svc.vital_parts import VitalParts

log = structlog.get_logger()

TICK_S = 1.0
# Without a turn, where one takes milliseconds. Ticks are counted, as a clock goes on while a machine is paused.
MAX_TICKS = 60


class Turns:
    """Counted by the thread itself."""

    def __init__(self) -> None:
        self.count = 0
        self.thread_id = 0

    def note(self) -> None:
        """One more turn, on the thread that is watched."""
        self.count += 1
        self.thread_id = threading.get_ident()


class TurnWatch:
    """Fails the part `name` once its thread has begun to turn and has then stood still for a minute."""

    def __init__(self, name: str, turns: Turns, vital: VitalParts) -> None:
        self._name = name
        self._turns = turns
        self._vital = vital
        self._closed = threading.Event()
        self._thread = vital.thread(f"{name}-watch", self._watch, lambda: self._closed.is_set() or bool(vital.failure))

    def start(self) -> None:
        """Watches from now on, on a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """It may take as long as it likes from now on."""
        self._closed.set()

    def _watch(self) -> None:
        num_seen = num_ticks = 0
        while not self._closed.wait(TICK_S) and not self._vital.failure:
            count = self._turns.count
            num_ticks = num_ticks + 1 if count == num_seen and count else 0
            num_seen = count
            if num_ticks >= MAX_TICKS:
                log.critical("a thread hangs", part=self._name, stack=_stack_of(self._turns.thread_id))
                self._vital.fail(self._name, TimeoutError(f"no turn of it for {MAX_TICKS * TICK_S:g} s"))


def _stack_of(thread_id: int) -> str:
    frame = sys._current_frames().get(thread_id)
    return "".join(traceback.format_stack(frame)) if frame else "it has ended"
