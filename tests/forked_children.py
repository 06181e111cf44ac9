"""Children of a process that is forked (`tests.forkserver`), which are forked like it: instead of `start_child`.

They do not outlive it, read nothing and get no Ctrl-C, as `octavo.shared.processes.child_process` says. Only the
environment that is read at an import is not theirs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection

from octavo.shared.processes.module_command import module_command
from tests import forkserver
from tests.forked_process import ForkedProcess, ends_with_parent
from tests.forked_ranks import fork_ranks
from tests.forked_text_processes import fork_text_processes


def fork_children(births: Connection, missing: Sequence[str]) -> None:
    """From now on in this process. `births` is told what each runs, and its process id; see `ForkedCommand`."""
    from octavo.shared.processes import supervisor
    from scheduler_svc.frontends import kept_processes

    async def start_child(
        command: Sequence[str], environment: Mapping[str, str], stderr: int | None = None
    ) -> ForkedChild:
        module, *arguments = command[len(module_command("")) - 1 :]
        assert list(command) == module_command(module, *arguments), "one that is not Python's"
        child = ForkedChild([module, *arguments], environment, 2 if stderr is None else stderr, missing)
        births.send((arguments[0] if module == "octavo" else module, child.pid))
        return child

    for module in (supervisor, kept_processes):
        module.__dict__["start_child"] = start_child
    fork_ranks()
    fork_text_processes()
    forkserver.is_there()


class ForkedChild(ForkedProcess):
    """A module that is run, with arguments."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], stderr: int, missing: Sequence[str]
    ) -> None:
        with Connection(os.dup(stderr), readable=False) as said:
            super().__init__(_run, (list(arguments), dict(environment), said, missing))


def _run(arguments: list[str], environment: dict[str, str], said: Connection, missing: Sequence[str]) -> None:
    ends_with_parent()
    fork_text_processes()  # of a frontend
    forkserver.is_there()
    module, *options = arguments
    if module == "octavo":
        missing = () if options[0] == "worker" else forkserver.WITHOUT_TORCH
    forkserver.prepare(environment, said, missing)
    forkserver.run("octavo.cli" if module == "octavo" else module, options)
