"""One text process, seen from the process that started it: asked one thing at a time, and killed at will."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress

from octavo.shared.options import environment_without_options
from octavo.shared.processes.end_with_parent import ends_with_parent
from octavo.shared.processes.module_command import module_command
from scheduler_svc.models.model_description import encode_models
from scheduler_svc.models.served_models import ServedModels
from scheduler_svc.requests import frames
from scheduler_svc.requests.frames import Answer, Ask

READ_BYTES = 65_536
COMMAND = module_command("scheduler_svc.requests.text_process")


class KillableProcess:
    """For one event loop.

    Attributes:
        loaded: the models that it has; None until `load`.
    """

    def __init__(self, process: asyncio.subprocess.Process, on_end: Callable[[], None]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.loaded: ServedModels | None = None
        self._process = process
        self._stdin, self._stdout = process.stdin, process.stdout
        self._ended = asyncio.create_task(process.wait())
        self._ended.add_done_callback(lambda _: on_end())

    @classmethod
    async def start(cls, on_end: Callable[[], None]) -> KillableProcess:
        """`on_end` is called once it has ended, however that came. Raises OSError."""
        process = await asyncio.create_subprocess_exec(
            *ends_with_parent(COMMAND),
            env={**environment_without_options(), "TOKENIZERS_PARALLELISM": "false"},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            process_group=0,  # Ctrl-C at the terminal is not for it
        )
        return cls(process, on_end)

    @property
    def pid(self) -> int:
        """Means nothing once it has ended."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Asked of the system: asyncio hears of it a little later."""
        if self._ended.done():
            return True
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    async def load(self, models: ServedModels, settings: bytes) -> None:
        """Files of tokenizers are sent where it does not have them, and it forgets models that are not among these.

        Raises as `ask`, RuntimeError for what it cannot load.
        """
        parts = [settings, encode_models(models).SerializeToString()]
        for model in (each.model for each in models.known):
            if self.loaded is None or self.loaded.find(model.fingerprint) is None:
                files = (part for name, content in model.tokenizer.files.items() for part in (name.encode(), content))
                parts.append(frames.pack([model.fingerprint.encode(), *files]))
        answer, payload = await self.ask(Ask.LOAD, frames.pack(parts))
        if answer is not Answer.OK:
            raise RuntimeError(f"a text process could not load the tokenizer: {payload.decode(errors='replace')}")
        self.loaded = models

    async def ask(self, kind: Ask, payload: bytes) -> tuple[Answer, bytes]:
        """Raises EOFError or ConnectionError where it dies meanwhile."""
        self._stdin.writelines((frames.HEADER.pack(len(payload), kind), payload))  # one system call
        await self._stdin.drain()
        length, answer = frames.HEADER.unpack(await self._stdout.readexactly(frames.HEADER.size))
        data = await self._stdout.readexactly(length)
        return Answer(answer), data

    async def kill(self) -> None:
        """Returns when it has ended; whoever waits for an answer gets none."""
        if not self.has_ended:  # else its number may be another's
            with suppress(ProcessLookupError):  # it was about to end, and a thread of asyncio's has been told since
                os.kill(self.pid, signal.SIGKILL)
        while await self._stdout.read(READ_BYTES):
            pass  # asyncio says that it has ended once all that it wrote is read, and reads no more than somebody wants
        await self._ended
