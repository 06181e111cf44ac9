"""`octavo chat`: a conversation at the terminal, or one question as an argument or through a pipe."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

from octavo.commands import connection, sampling

if TYPE_CHECKING:
    from octavo.client import Client
    from octavo.commands.conversation import Conversation
    from octavo.sampling_params import SamplingParams

HELP = """\
/help          this text
/bye, exit     leave, as Ctrl-D does
Ctrl-C         cuts an answer short
What is too long for the model is forgotten, the oldest first; it is said when that happens."""
_LEAVING = frozenset({"/bye", "/exit", "/quit", "exit", "quit", "bye"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The question, how to sample, and where the server is."""
    parser.add_argument("question", nargs="?", help="ask only this; without it and at a terminal: a conversation")
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    parser.add_argument("--stats", action="store_true", help="print tokens and speed to standard error after answers")
    sampling.add_arguments(parser, max_tokens=512)
    sampling.add_model(parser)
    connection.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Answers one question, or talks until the end of input."""
    from octavo.commands.conversation import Conversation
    from octavo.commands.terminal import read_prompt
    from octavo.shared.options import OptionError

    params = sampling.sampling_params(arguments)
    question = read_prompt(arguments.question)
    if question == "":
        raise OptionError("the question is empty")
    with connection.connect(arguments) as client:
        if question is not None:
            _ask(Conversation(client, params, arguments.system, model=arguments.model), question, arguments.stats)
        else:
            _converse(client, params, arguments)
    return 0


def _ask(conversation: Conversation, question: str, with_figures: bool) -> None:
    """Raises KeyboardInterrupt when the answer is cut short; what was printed of it is remembered."""
    answer = conversation.ask(question)
    if with_figures:
        print(answer.figures(), file=sys.stderr)


def _converse(client: Client, params: SamplingParams, arguments: argparse.Namespace) -> None:
    from octavo.commands.conversation import Conversation

    with contextlib.suppress(ImportError):  # not on every platform
        import readline  # noqa: F401  # gives input() editing and history by being there
    info = client.model_info(arguments.model)
    conversation = Conversation(client, params, arguments.system, info.max_model_len, arguments.model)
    print(f"{info.model} at {arguments.address}. /help says more, /bye leaves.", file=sys.stderr)
    while (question := _read_question()) is not None:
        if question:
            _answer(conversation, question, arguments)


def _read_question() -> str | None:
    """What was typed for the model; empty where it was not for the model; None at the end."""
    try:
        line = input("> ").strip()
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:  # while nothing is answered: the line is given up, as in a shell
        print()
        return ""
    if line.lower() in _LEAVING:
        return None
    if line.startswith("/") and len(line.split()) == 1 and "/" not in line[1:]:
        known = line.lower() in ("/help", "/?")
        print(HELP if known else f"{line} is not known here; /help lists what is", file=sys.stderr)
        return ""
    return line


def _answer(conversation: Conversation, question: str, arguments: argparse.Namespace) -> None:
    """What goes wrong with one answer is said, and the conversation goes on."""
    from octavo.cli import CommandError
    from octavo.errors import RequestFailed

    try:
        _ask(conversation, question, arguments.stats)
    except KeyboardInterrupt:
        print()
    except (RequestFailed, CommandError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
