"""`octavo completion`: a script that lets a shell complete commands, options and their values with Tab."""

from __future__ import annotations

import argparse
from pathlib import Path

SHELLS = ("bash", "zsh", "fish")
_HOW = """\
for now:    eval "$(octavo completion bash)"     (zsh likewise; fish: octavo completion fish | source)
for good:   octavo completion bash > ~/.local/share/bash-completion/completions/octavo
            octavo completion zsh > DIRECTORY/_octavo      (a directory of $fpath)
            octavo completion fish > ~/.config/fish/completions/octavo.fish"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The shell."""
    parser.epilog = _HOW
    parser.add_argument("shell", choices=SHELLS, help="the script is for this one")


def run(arguments: argparse.Namespace) -> int:
    """Prints the script. It knows what this version has: to be made anew after an update."""
    import shtab

    print(shtab.complete(_whole_parser(), shell=arguments.shell))
    return 0


def _whole_parser() -> argparse.ArgumentParser:
    """All commands under one parser; `octavo.cli` makes only that of the command it runs."""
    from importlib import import_module

    import shtab

    from octavo.cli import COMMANDS
    from octavo.shared.command_line import Parser

    whole = Parser(prog="octavo", description="Serves language models with PagedAttention.")
    whole.add_argument("--version", action="store_true", help="print the version")
    commands = whole.add_subparsers(dest="command")
    for name, text in COMMANDS.items():
        parser = commands.add_parser(name, help=text, description=text)
        import_module(f"octavo.commands.{name}").add_arguments(parser)
        for action in parser._actions:
            if action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # where shtab looks for it
            elif isinstance(action.metavar, str) and "|" in action.metavar:  # so help shows what an option accepts
                action.choices = action.metavar.split("|")
    return whole
