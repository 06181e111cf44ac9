"""The `octavo` command: finds the subcommand, and turns what it raises into a line and an exit code.

Exit codes: 0 done, 1 failed, 2 bad usage, 130 interrupted; `octavo health` has its own. What failed says why in the
last line on standard error, which begins with the command's name. Nothing is imported for commands that are not run.
Each command is a module of `octavo.commands` with `add_arguments(parser)` and `run(arguments) -> int`.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from octavo.shared.command_line import Parser, did_you_mean
from octavo.shared.options import OptionError
from octavo.shared.terminal_text import say

COMMANDS = {
    "serve": "a scheduler and workers on this machine, in one command",
    "scheduler": "the scheduler service alone",
    "worker": "a worker service alone",
    "gateway": "OpenAI's API over HTTP, in front of a scheduler",
    "generate": "complete a text, streamed to the terminal",
    "chat": "talk with the model",
    "model": "fetch, list, show or remove models",
    "adapter": "load, list or unload low-rank adapters of a server",
    "certs": "make certificates for trying TLS out",
    "keys": "make, list or remove keys of those who may call a server",
    "top": "watch a server: models, workers, queues and blocks",
    "completion": "let a shell complete commands and options with Tab",
    "replay": "fetch, show or play what a server did last: its flight record",
    "health": "ask a server whether it is ready, by exit code",
    "bench": "measure speed, in this process or against a server",
}
INTERRUPTED = 130  # as shells report SIGINT
_OWN_PACKAGES = frozenset({"octavo", "protos", "scheduler_svc", "worker_svc", "gateway_svc", "kernels"})
_PARTS = {"scheduler_svc": "scheduler", "worker_svc": "worker", "kernels": "worker", "gateway_svc": "gateway"}
_BROKEN_PIPE = 141  # as shells report SIGPIPE


class CommandError(Exception):
    """Something the user can understand and act on; the message is one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (None: this process's) and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if os.getpid() == 1:
        _hear_sigterm()
    # gRPC's C core logs ordinary events, such as a server that goes away, to the terminal.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    if not arguments or arguments[0] not in COMMANDS:
        return _without_command(arguments)
    name = arguments[0]
    prog = f"octavo {name}"
    try:
        command = import_module(f"octavo.commands.{name}")
        parser = Parser(prog=prog, description=COMMANDS[name])
        command.add_arguments(parser)
        code: int = command.run(parser.parse_args(arguments[1:]))
        sys.stdout.flush()
        return code
    except OptionError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has left; Python must not fail again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except ModuleNotFoundError as error:
        if (part := _PARTS.get(error.name or "")) is not None:  # each image has one of them
            print(f"{prog}: error: there is no {part} here: the image octavo-{part} has it, and pip install "
                  "'.[all]' in a clone of Octavo brings all", file=sys.stderr)  # fmt: skip
            return 1
        if error.name is None or error.name.partition(".")[0] in _OWN_PACKAGES:
            raise
        where = "pip install '.[all]' in a clone of Octavo"
        print(f"{prog}: error: {error.name} is missing; {where} brings it", file=sys.stderr)
        return 1
    except Exception as error:
        why = " ".join(str(error).split())
        if isinstance(error, OSError) and error.strerror:
            why = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
        elif not _is_expected(error):  # an error of ours: its traceback is needed to mend it
            say(traceback.format_exc(), sys.stderr, end="")
            why = f"unexpected {type(error).__name__}: {why}"
        say(f"{prog}: error: {why}", sys.stderr)
        return 1


def _hear_sigterm() -> None:
    """Lets SIGTERM end this process, until a service handles it in its own way.

    It does so by itself, except in the first process of a container: there the kernel drops a signal that has no
    handler (pid_namespaces(7)), so a container that is stopped while it loads would have to be killed.
    """
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))


def _without_command(arguments: list[str]) -> int:
    name = arguments[0] if arguments and not arguments[0].startswith("-") else None
    parser = Parser(
        prog="octavo",
        usage="octavo COMMAND ...",
        description="Serves language models with PagedAttention.",
        epilog="commands:\n" + "".join(f"  {name:<11}{text}\n" for name, text in COMMANDS.items())
        + "\n`octavo COMMAND --help` describes each.",
    )  # fmt: skip
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("command", nargs="?", help="one of those below")
    if name:
        hint = did_you_mean(name, COMMANDS) or f"; there are {', '.join(COMMANDS)}"
        parser.error(f"no command is called {name!r}{hint}")
    namespace = parser.parse_args(arguments)
    if namespace.version:
        import octavo

        print(f"octavo {octavo.__version__}")
        return 0
    parser.print_help(sys.stderr)
    return 2


def _is_expected(error: Exception) -> bool:
    """Errors whose message is meant for users; only their modules that are loaded can have raised them."""
    if isinstance(error, CommandError):
        return True
    expected = {
        "octavo.errors": ("RequestFailed", "WorkerEnded"),
        "octavo.models.resolve": ("ModelNotFound",),
        "octavo.models.errors": ("FetchError",),
        "octavo.shared.ports": ("BindError",),
        "octavo.serving.plan": ("PlanError",),
        "worker_svc.errors": ("StartupError",),
        "worker_svc.models.errors": ("ModelError",),
    }
    return any(
        isinstance(error, getattr(sys.modules[module], name))
        for module, names in expected.items()
        if module in sys.modules
        for name in names
    )
