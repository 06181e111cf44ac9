"""Why an adapter is not loaded: one line that names what is wrong."""

from __future__ import annotations

_MOST_CHARS = 600  # a status goes as a header, of which 8 KiB are taken; a character takes up to 12 bytes there


class AdapterError(Exception):
    """An adapter's folder is damaged, is for another model, or asks for what is not computed.

    The message may quote paths and names of tensors, which hold anything: it is made one line, and a long one is cut in
    its middle.
    """

    def __init__(self, message: str) -> None:
        if len(message) > _MOST_CHARS:
            message = f"{message[: _MOST_CHARS // 2]} ... {message[-_MOST_CHARS // 2 :]}"
        super().__init__("".join(char if char.isprintable() else repr(char)[1:-1] for char in message))
