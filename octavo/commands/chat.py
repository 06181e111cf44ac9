"""`octavo chat`: a conversation at the terminal, or one question as an argument or through a pipe."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from octavo.commands.flags import connection, sampling
from octavo.shared.terminal_text import say

if TYPE_CHECKING:
    from octavo.chat.conversation import Conversation
    from octavo.client import Client
    from octavo.sampling_params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The question, how to sample, and where the server is."""
    parser.add_argument("question", nargs="?", help="ask only this; without it and at a terminal: a conversation")
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    parser.add_argument(
        "--stats", action="store_true", help="print tokens and speed to standard error after answers; not with --json"
    )
    parser.add_argument("--json", action="store_true", help="with a question: print the answer as one object of JSON")
    parser.add_argument("--no-history", action="store_true", help="keep no file of what is typed")
    sampling.add_arguments(parser, max_tokens=512)
    sampling.add_model(parser)
    connection.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Answers one question, or talks until the end of input."""
    from octavo.chat.conversation import Conversation
    from octavo.chat.terminal import print_json, read_prompt
    from octavo.shared.options import OptionError

    params = sampling.sampling_params(arguments)
    if arguments.json and arguments.stats:
        raise OptionError("--stats does not go with --json, whose `metrics` have tokens and times")
    question = read_prompt(arguments.question)
    if question == "":
        raise OptionError("the question is empty")
    if arguments.json and question is None:
        raise OptionError("--json wants a question, as an argument or through a pipe: a conversation is for people")
    with connection.connect(arguments) as client:
        if arguments.json:
            system = [{"role": "system", "content": arguments.system}] if arguments.system else []
            messages = [*system, {"role": "user", "content": question}]
            named = {"model": arguments.model, "adapter": arguments.adapter}
            return print_json(client.complete(None, params, messages=messages, **named))
        if question is not None:
            named = {"model": arguments.model, "adapter": arguments.adapter}
            _ask(Conversation(client, params, arguments.system, **named), question, arguments.stats)
        else:
            _converse(client, params, arguments)
    return 0


def _ask(conversation: Conversation, question: str, with_figures: bool) -> None:
    """Raises KeyboardInterrupt when the answer is cut short; what was printed of it is remembered."""
    answer = conversation.ask(question)
    if with_figures:
        print(answer.figures(), file=sys.stderr)


def _converse(client: Client, params: SamplingParams, arguments: argparse.Namespace) -> None:
    from octavo.chat.chat_commands import ChatCommands
    from octavo.chat.conversation import Conversation
    from octavo.chat.line_reader import LineReader

    info = client.model_info(arguments.model)
    lengths_and_names = info.max_model_len, arguments.model, arguments.adapter
    conversation = Conversation(client, params, arguments.system, *lengths_and_names)
    commands = ChatCommands(conversation, client, with_figures=arguments.stats)
    say(f"{info.model} at {arguments.address}. /help says more, /bye leaves.", sys.stderr)
    with LineReader(commands.names, keeps_history=not arguments.no_history) as reader:
        while not commands.is_over and (line := reader.read()) is not None:
            if question := commands.take(line):
                _answer(conversation, question, commands.with_figures)


def _answer(conversation: Conversation, question: str, with_figures: bool) -> None:
    """What goes wrong with one answer is said, and the conversation goes on."""
    from octavo.cli import CommandError
    from octavo.errors import RequestFailed

    try:
        _ask(conversation, question, with_figures)
    except KeyboardInterrupt:
        print()
    except (RequestFailed, CommandError) as error:
        say(f"error: {' '.join(str(error).split())}", sys.stderr)
