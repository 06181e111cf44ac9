"""Why an adapter is not loaded: one line that names what is wrong."""

from __future__ import annotations

_MOST_CHARS = 600  # a status goes as a header, of which 8 KiB are taken; a character takes up to 12 bytes there


class AdapterError(Exception):
    """An adapter's folder is damaged, is for another model, or asks for what is not computed.

    The message may quote paths, and names of tensors, that hold anything: it becomes one line, of which the middle is
    left out where it is long.
    """

    def __init__(self, message: str) -> None:
        line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in message[: 8 * _MOST_CHARS])
        if len(message) > len(line):
            line += message[-_MOST_CHARS:]
        half = _MOST_CHARS // 2
        super().__init__(line if len(line) <= _MOST_CHARS else f"{line[:half]} ... {line[-half:]}")
