"""A terminal that tests sit at: what a program shows there, and keys for it."""

from __future__ import annotations

import os
import pty
import select
from types import TracebackType

PATIENCE_S = 60.0  # of a whole program's start on a busy machine


class Terminal:
    """`inside` is for the program, as its standard input and output."""

    def __init__(self) -> None:
        self._outside, self.inside = pty.openpty()
        self._shown = b""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._outside)
        os.close(self.inside)

    def wait_for(self, text: bytes) -> bytes:
        """What is shown up to `text` and with it; what came along behind it is for the next call.

        Keys count only once a program waits for them: a terminal changes its mode around each input.
        """
        while text not in self._shown:
            readable, _, _ = select.select([self._outside], [], [], PATIENCE_S)
            assert readable, f"{text!r} does not come after {self._shown[-2000:]!r}"
            self._shown += os.read(self._outside, 65536)
        before, _, self._shown = self._shown.partition(text)
        return before + text

    def press(self, keys: bytes) -> None:
        """As if they were typed."""
        os.write(self._outside, keys)
