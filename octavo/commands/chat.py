"""`octavo chat`: a conversation at the terminal, or one question as an argument or through a pipe."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

from octavo.commands import connection, sampling

if TYPE_CHECKING:
    from octavo.client import Client
    from octavo.sampling_params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("question", nargs="?", help="ask only this; without it and at a terminal: a conversation")
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    parser.add_argument("--stats", action="store_true", help="print tokens and speed to standard error after answers")
    sampling.add_arguments(parser, max_tokens=512)
    connection.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    from octavo.commands.terminal import read_prompt
    from octavo.options import OptionError

    params = sampling.sampling_params(arguments)
    question = read_prompt(arguments.question)
    if question == "":
        raise OptionError("the question is empty")
    with connection.connect(arguments) as client:
        conversation = Conversation(client, params, arguments.system, arguments.stats)
        if question is not None:
            conversation.ask(question)
        else:
            _converse(conversation, f"{client.model_info().model} at {arguments.address}")
    return 0


class Conversation:
    """Messages so far; each answer is printed and becomes one of them."""

    def __init__(self, client: Client, params: SamplingParams, system: str | None, with_figures: bool) -> None:
        self._client = client
        self._params = params
        self._with_figures = with_figures
        self._messages = [{"role": "system", "content": system}] if system else []

    def ask(self, question: str) -> None:
        """Raises KeyboardInterrupt when the answer is cut short; what was printed of it is remembered."""
        from octavo.commands.terminal import Answer

        asked = [*self._messages, {"role": "user", "content": question}]
        answer = Answer()
        stream = self._client.generate(messages=asked, sampling_params=self._params)
        try:
            answer.show(stream)
        finally:
            stream.close()
            if answer.text:
                self._messages = [*asked, {"role": "assistant", "content": answer.text}]
        if self._with_figures:
            print(answer.figures(), file=sys.stderr)


def _converse(conversation: Conversation, partner: str) -> None:
    with contextlib.suppress(ImportError):  # not on every platform
        import readline  # noqa: F401  # gives input() editing and history by being there
    print(f"{partner}. Ctrl-C cuts an answer short, Ctrl-D leaves.", file=sys.stderr)
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            print()
            return
        if not question:
            continue
        try:
            conversation.ask(question)
        except KeyboardInterrupt:
            print()
