"""Lines from a terminal: edited, with a history that outlives the command, and with Tab for names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

_MAX_HISTORY = 1000  # lines
_BORDER = '"""'  # begins and ends a text of several lines
_PROMPT, _MORE = "> ", ". "


def history_file() -> Path:
    """`chat_history` among the user's state (`XDG_STATE_HOME`, else `~/.local/state`), in `octavo/`."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "octavo" / "chat_history"


class LineReader:
    """Reads until closed; a context manager. Without readline (not on every platform) lines are plain.

    `names`: what Tab completes at the beginning of a line.
    """

    def __init__(self, names: Sequence[str], keeps_history: bool) -> None:
        self._names = sorted(names)
        self._file = history_file() if keeps_history else None
        self._readline: ModuleType | None = None

    def __enter__(self) -> LineReader:
        with contextlib.suppress(ImportError):
            import readline  # gives input() editing and history by being there

            self._readline = readline
            readline.set_completer(self._complete)
            readline.set_completer_delims("")
            readline.parse_and_bind("tab: complete")
            if self._file is not None:
                with contextlib.suppress(OSError):  # the first time there is none
                    readline.read_history_file(self._file)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._readline is None or self._file is None:
            return
        self._readline.set_history_length(_MAX_HISTORY)
        with contextlib.suppress(OSError):  # a home that cannot be written is no reason to fail at the end
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.touch(mode=0o600)  # what people ask is theirs
            self._readline.write_history_file(self._file)

    def read(self) -> str | None:
        """The next line, without spaces around it, or all lines between two `\"\"\"`, the later ones as they were
        typed; nothing where Ctrl-C has given it up; None at the end of input."""
        try:
            return _question()
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:  # as in a shell
            print()
            return ""

    def _complete(self, text: str, state: int) -> str | None:
        found = [name for name in self._names if name.startswith(text)] if text.startswith("/") else []
        return found[state] if state < len(found) else None


def _question() -> str:
    """Raises EOFError and KeyboardInterrupt."""
    line = input(_PROMPT).strip()
    if not line.startswith(_BORDER):
        return line
    parts = [line.removeprefix(_BORDER).lstrip()]
    while not parts[-1].rstrip().endswith(_BORDER):
        parts.append(input(_MORE))
    return "\n".join(parts).rstrip().removesuffix(_BORDER).rstrip().lstrip("\n")
