"""Command lines as Octavo reads them: bad usage is one line, a wrong name gets the nearest one, help fits a screen.

Knows nothing of any particular command.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterable
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """An argument parser that reports bad usage in one line, exit code 2, and completes no abbreviated flags.

    A flag or command that it does not know is answered with the nearest one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", HelpFormatter)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Prints one line to standard error and exits with code 2."""
        self.exit(2, f"{self.prog}: error: {message} (--help lists the options)\n")

    def parse_args(  # type: ignore[override]  # one signature in place of the base's overloads
        self, args: Any = None, namespace: Any = None
    ) -> argparse.Namespace:
        """As argparse's; what it does not know is an error that names the nearest flag or command."""
        found: argparse.Namespace
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._no_such(unknown, found))
        return found

    def _no_such(self, unknown: list[str], found: argparse.Namespace) -> str:
        flag = next((each.partition("=")[0] for each in unknown if each.startswith("-") and each != "-"), None)
        if flag is None:
            return f"{unknown[0]!r} is one argument too many"
        return f"no option is called {flag}{did_you_mean(flag, self._flags(found))}"

    def _flags(self, found: argparse.Namespace) -> list[str]:
        """All of this command, and of the subcommand that was chosen."""
        flags = [flag for action in self._actions if action.help != argparse.SUPPRESS for flag in action.option_strings]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                chosen = action.choices.get(getattr(found, action.dest, None) or "")
                flags += chosen._flags(found) if isinstance(chosen, Parser) else []
        return flags

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = [str(each) for each in action.choices]
            raise argparse.ArgumentError(action, f"{value!r} is none of {', '.join(names)}{did_you_mean(value, names)}")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Flags in a column that holds most of them, so that an option takes a line or two; `--[no-]x` for a switch."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=min(shutil.get_terminal_size().columns, 120) - 2)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"--[no-]{action.option_strings[0].removeprefix('--')}"
        return super()._format_action_invocation(action)


def listed(names: Iterable[str]) -> str:
    """`'a', 'b' and 'c' are`, or `'a' is`; of one name at least."""
    *others, last = map(repr, names)
    return f"{', '.join(others)} and {last} are" if others else f"{last} is"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest of `names`, or nothing where none is near."""
    import difflib  # imported only after a mistake

    alike = {each.lower().replace("_", "-"): each for each in sorted(names)}
    asked = name.lower().replace("_", "-")
    near = difflib.get_close_matches(asked, alike, n=1, cutoff=0.7)
    near += [each for each in alike if len(asked) > 4 and each.startswith(asked)]
    return f"; did you mean {alike[near[0]]}?" if near else ""
