"""The requests of one call of `LLM.generate`, from the first that is submitted to the last that has ended.

Several calls run at once, each on its own thread: they share the step loop, and `Callers` brings each what is its own.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import TYPE_CHECKING

from octavo.embedded.embedded import POLL_S, Embedded
from octavo.embedded.gathered_output import GatheredOutput
from octavo.embedded.progress import Progress

if TYPE_CHECKING:
    from scheduler_svc.core.sequences.sequence import SequenceGroup
    from scheduler_svc.output.output_processor import Delivery

CHECK_S = 1.0  # between two looks whether the worker is there

Inbox = queue.SimpleQueue["Delivery"]


class Callers:
    """Which caller waits for which request, by request id."""

    def __init__(self) -> None:
        self._inboxes: dict[str, Inbox] = {}
        self._lock = threading.Lock()

    def add(self, request_ids: list[str], inbox: Inbox) -> None:
        """Outputs of these requests go to `inbox` from now on."""
        with self._lock:
            self._inboxes.update(dict.fromkeys(request_ids, inbox))

    def remove(self, request_ids: list[str]) -> None:
        """What still comes for these requests is dropped; ids that are not here are ignored."""
        with self._lock:
            for request_id in request_ids:
                self._inboxes.pop(request_id, None)

    def deliver(self, delivery: Delivery) -> None:
        """On the output thread: wakes each caller once, with its own outputs; none for a request that was given up."""
        parts: dict[Inbox, Delivery] = {}
        with self._lock:
            for stream, message in delivery:
                if (inbox := self._inboxes.get(stream.group.request_id)) is not None:
                    parts.setdefault(inbox, []).append((stream, message))
        for inbox, part in parts.items():
            inbox.put(part)


class Batch:
    """Requests that were prepared, and their outputs so far.

    `groups` are in the order of their prompts; `gathered` has the output of each, by request id.
    """

    def __init__(self, embedded: Embedded, callers: Callers) -> None:
        self._embedded = embedded
        self._callers = callers
        self._inbox: Inbox = queue.SimpleQueue()
        self._unsent: list[SequenceGroup] = []  # the next one last
        self.groups: list[SequenceGroup] = []
        self.gathered: dict[str, GatheredOutput] = {}

    def add(self, group: SequenceGroup, gathered: GatheredOutput) -> None:
        """Adds a request after the others; `gathered` collects its outputs."""
        self.groups.append(group)
        self.gathered[group.request_id] = gathered

    def run(self, progress: Progress) -> None:
        """Submits as many as may wait, and the others as these begin; returns when all have ended.

        Whatever is raised meanwhile, Ctrl-C above all, ends the requests of this batch and of no other.
        """
        request_ids = list(self.gathered)
        reads_along = any(group.sampling_params.stop for group in self.groups)
        self._unsent = self.groups[::-1]
        self._callers.add(request_ids, self._inbox)
        try:
            with self._embedded.reading_along(reads_along):
                self._run(progress)
        except BaseException:
            unsent = set(self._unsent[:-1])  # the last of them may be on its way just now
            for group in self.groups:
                if group not in unsent:
                    self._embedded.engine.abort_group(group)
            raise
        finally:
            self._callers.remove(request_ids)

    def _run(self, progress: Progress) -> None:
        num_unfinished = len(self.groups)
        while num_unfinished:
            self._submit()
            progress.look()
            timeout_s = POLL_S if self._unsent else progress.interval_s or CHECK_S
            for stream, response in self._next_delivery(timeout_s):
                request = self.gathered[stream.group.request_id]
                if request.take(response):
                    request.note_times(stream.token_times_ns)
                    num_unfinished -= 1

    def _submit(self) -> None:
        from scheduler_svc.errors import NotReady, QueueFull

        while self._unsent:
            try:
                self._embedded.submit(self._unsent[-1])
            except QueueFull:
                return
            except NotReady:
                self._embedded.check()
                raise
            self._unsent.pop()

    def _next_delivery(self, timeout_s: float) -> Delivery:
        """Waits for messages, one for each request, or for so long; notices when the worker is gone for good."""
        with contextlib.suppress(queue.Empty):  # outside of which Ctrl-C is the only exception to tell of
            return self._inbox.get(timeout=timeout_s)
        self._embedded.check()
        self._embedded.worker.check()
        return []
