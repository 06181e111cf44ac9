"""A stream of a GPU beside that of the steps, with moments that others can wait for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Timeline:
    """Work in order on a stream of its own. Each piece of work ends with a moment, numbered from 1 on; 0 has passed.

    Who waits for a moment has waited for all before it, so that of several the latest is enough.
    """

    def __init__(self, device: torch.device) -> None:
        """Its work comes after what is enqueued on the current stream by now, whose memory it may have been given."""
        self._stream = torch.cuda.Stream(device)
        self._moment = 0  # of the last work
        self._ahead: deque[torch.cuda.Event] = deque()  # the last moments, those that may not have passed
        self.wait_for_steps()

    def may_use(self, tensor: torch.Tensor) -> None:
        """Memory that is not given to others before this stream is done with it."""
        tensor.record_stream(self._stream)

    def wait_for_steps(self) -> None:
        """What follows here comes after what is enqueued on the current stream by now."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def wait_for(self, other: Timeline, moment: int) -> None:
        """What follows here comes after this moment of another one."""
        other._hold(self._stream, moment)

    def hold_steps(self, moment: int) -> None:
        """What follows on the current stream comes after this moment."""
        self._hold(torch.cuda.current_stream(self._stream.device), moment)

    @contextmanager
    def work(self) -> Iterator[int]:
        """Has what is enqueued within go here. Gives the moment at which that will be done, even should it raise: what
        was enqueued before is done all the same."""
        try:
            with torch.cuda.stream(self._stream):
                yield self._moment + 1
        finally:
            event = torch.cuda.Event()
            event.record(self._stream)
            self._ahead.append(event)
            self._moment += 1

    @property
    def is_idle(self) -> bool:
        """Whether every moment has passed on the device."""
        return self._passed() == self._moment

    def _hold(self, stream: torch.cuda.Stream, moment: int) -> None:
        if moment > self._passed():
            stream.wait_event(self._ahead[moment - self._moment - 1])

    def _passed(self) -> int:
        """The last moment that is known to have passed."""
        while self._ahead and self._ahead[0].query():
            self._ahead.popleft()
        return self._moment - len(self._ahead)
