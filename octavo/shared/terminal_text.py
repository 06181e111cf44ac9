"""Text of others for a terminal. What a model, a server or a client says may hold control characters, which would move
the cursor, hide text or write to the clipboard of whoever reads it.

They are spelt out as JSON writes them (`\\u001b`), so JSON stays what it is. Carriage returns are left out: line ends
of Windows stay line ends. Pipes and files get every byte as it came.
"""

from __future__ import annotations

import os
import sys
from typing import TextIO

TERMINAL = "OCTAVO_TERMINAL"  # set for a child whose standard error is a pipe to a terminal (`child_output`)
_CONTROLS = {code: f"\\u{code:04x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
_CONTROLS[ord("\r")] = ""


def is_terminal() -> bool:
    """Whether people read what this process writes to standard error, as it comes.

    A program without a console has None there.
    """
    return sys.stderr is not None and (TERMINAL in os.environ or _is_tty(sys.stderr))


def harmless(text: str) -> str:
    """`text` with its control characters spelt out: C0 except newlines and tabs, DEL and C1. No carriage returns."""
    return text.translate(_CONTROLS)


def harmless_line(text: str) -> str:
    """`text` with all spelt out that cannot be printed: line ends too, and what turns the direction of writing."""
    return "".join(each if each.isprintable() else _spelt_out(ord(each)) for each in text)


def _is_tty(file: TextIO) -> bool:
    """One that copies output may only know `write`."""
    return hasattr(file, "isatty") and file.isatty()


def _spelt_out(code: int) -> str:
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def say(text: str, file: TextIO | None = None, end: str = "\n") -> None:
    """Prints at once to `file` (default: standard output); at a terminal, what is `harmless` of it."""
    file = sys.stdout if file is None else file
    at_terminal = is_terminal() if file is sys.stderr else _is_tty(file)
    print(harmless(text) if at_terminal else text, end=end, file=file, flush=True)
