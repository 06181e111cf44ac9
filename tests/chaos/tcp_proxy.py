"""A TCP proxy on loopback that can be slow, cut or silent: the network between a scheduler and a worker, or a client.

Bytes are never lost or changed while a connection lives, as TCP has it; a cut connection is reset. For an event loop;
its switches may be set between any two events of that loop.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from typing import Any

CHUNK_BYTES = 1 << 16


class TcpProxy:
    """Listens on a free port and carries every connection to `target_port` of loopback.

    Attributes:
        delay_s: how long bytes are on their way, in each direction.
        target_port: where new connections go to.
    """

    def __init__(self, target_port: int, delay_s: float = 0.0) -> None:
        self.target_port = target_port
        self.delay_s = delay_s
        self.port = 0
        self._is_cut = False
        self._flows_there, self._flows_back = asyncio.Event(), asyncio.Event()  # cleared: a black hole
        self.heal()
        self._writers: set[asyncio.StreamWriter] = set()
        self._carrying: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        self._flows_there.set()
        self._flows_back.set()
        await asyncio.gather(*self._carrying)  # a task that the loop's end cancels is a complaint of asyncio's

    def cut(self) -> None:
        """Resets every connection, and those that are opened before `heal`."""
        self._is_cut = True
        for writer in list(self._writers):
            _reset(writer)

    def swallow(self, *, there: bool = True, back: bool = True) -> None:
        """From now on nothing comes through, and nobody is told; connections stay open. `there`: to the target."""
        if there:
            self._flows_there.clear()
        if back:
            self._flows_back.clear()

    def heal(self) -> None:
        """As if nothing had been; bytes that were swallowed arrive where their connection still lives."""
        self._is_cut = False
        self._flows_there.set()
        self._flows_back.set()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            _reset(writer)
            return
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            _reset(writer)
            return
        self._writers |= {writer, there_writer}
        for one in (writer, there_writer):
            one.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ways = [
            asyncio.create_task(self._carry_one_way(reader, there_writer, self._flows_there)),
            asyncio.create_task(self._carry_one_way(there_reader, writer, self._flows_back)),
        ]
        this_one: Any = asyncio.current_task()
        self._carrying.add(this_one)
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            await self._flows_there.wait()  # that one side is gone is no secret, but it travels as bytes do
            await self._flows_back.wait()
        finally:
            for way in ways:
                way.cancel()
            for one in (writer, there_writer):
                self._writers.discard(one)
                one.close()
            self._carrying.discard(this_one)

    async def _carry_one_way(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flows: asyncio.Event
    ) -> None:
        """Reads at once and writes when the time has come, so that a delay costs latency and no throughput."""
        on_the_way: deque[tuple[float, bytes]] = deque()
        arrived = asyncio.Event()
        loop = asyncio.get_running_loop()

        async def deliver() -> None:
            while True:
                while not on_the_way:
                    arrived.clear()
                    await arrived.wait()
                due_s, data = on_the_way.popleft()
                if (left_s := due_s - loop.time()) > 0:
                    await asyncio.sleep(left_s)
                await flows.wait()
                if not data:
                    return
                writer.write(data)
                await writer.drain()

        async def read() -> None:
            while data := await reader.read(CHUNK_BYTES):
                on_the_way.append((loop.time() + self.delay_s, data))
                arrived.set()
            on_the_way.append((loop.time() + self.delay_s, b""))
            arrived.set()

        reading = asyncio.create_task(read())
        try:
            await deliver()
        except OSError:
            return  # the other side is gone
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Closes with RST in place of FIN."""
    if (sock := writer.get_extra_info("socket")) is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
