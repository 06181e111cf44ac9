"""`octavo generate`: completes one text, streamed to the terminal."""

from __future__ import annotations

import argparse
import sys

from octavo.commands.flags import connection, sampling
from octavo.shared.options import OptionError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The prompt, how to sample, and where the server is."""
    parser.add_argument("prompt", nargs="?", help="text to continue; `-` or a pipe: standard input")
    parser.add_argument("--chat", action="store_true", help="ask it as a question, in the model's chat template")
    parser.add_argument(
        "--stats", action="store_true", help="print tokens and speed to standard error at the end; not with --json"
    )
    parser.add_argument("--json", action="store_true", help="print the whole answer as one object of JSON, at its end")
    sampling.add_arguments(parser, max_tokens=128)
    sampling.add_several_outputs(parser)
    request = parser.add_argument_group("request")
    sampling.add_model(request)
    request.add_argument(
        "--priority", type=int, metavar="N", help="lower is served first, on a server with --scheduling-policy priority"
    )
    request.add_argument("--cache-salt", metavar="TEXT", help="share cached prompts only with requests of this salt")
    connection.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Streams the text to standard output; raises OptionError for an empty prompt."""
    from octavo.chat.terminal import Answer, Answers, print_json, read_prompt

    params = sampling.sampling_params(arguments)
    if arguments.json and arguments.stats:
        raise OptionError("--stats does not go with --json, whose `metrics` have tokens and times")
    prompt = read_prompt(arguments.prompt)
    if not prompt:
        raise OptionError("a prompt is wanted, as an argument or through a pipe")
    options = {
        "model": arguments.model,
        "adapter": arguments.adapter,
        "priority": arguments.priority,
        "cache_salt": arguments.cache_salt,
    }
    if arguments.chat:
        options["messages"] = [{"role": "user", "content": prompt}]
        prompt = None
    with connection.connect(arguments) as client:
        if arguments.json:
            return print_json(client.complete(prompt, params, **options))
        answer: Answer | Answers = Answers() if params.n > 1 or params.use_beam_search else Answer()
        answer.show(client.generate(prompt, params, **options))
    if arguments.stats:
        print(answer.figures(), file=sys.stderr)
    return 0
