"""The parent's side of its shards: processes that are kept, the links to them, and who has which worker."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import structlog

from octavo.shared.options import to_arguments
from octavo.shared.processes.module_command import module_command
from octavo.shared.rpc import WORKER_CHANNEL_OPTIONS
from protos import inference_pb2_grpc, shards_pb2, shards_pb2_grpc
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.frontends.kept_processes import KeptProcesses
from scheduler_svc.frontends.outbox import Outbox
from scheduler_svc.shards.worker_names import WorkerNames
from scheduler_svc.shards.worker_shares import WorkerShares
from scheduler_svc.vital_parts import VitalParts

log = structlog.get_logger()

SILENCE_MS = 6_000  # of a shard that is killed for it; frontends have gone on elsewhere sooner
CHANNEL_OPTIONS = (
    *(each for each in WORKER_CHANNEL_OPTIONS if "timeout" not in each[0]),
    ("grpc.keepalive_timeout_ms", SILENCE_MS),
    ("grpc.http2.ping_timeout_ms", SILENCE_MS),
)
HAND_OVER_S = 5.0  # that a shard has to start, or to come back, before others take its workers
LOOK_INTERVAL_S = 0.5  # between two looks at names, and at who has been away for too long
STOP_GRACE_S = 8.0


@dataclass(eq=False)
class LiveShard:
    """One life of a shard, from the first status to the end of the link."""

    index: int
    socket: str
    channel: grpc.aio.Channel
    status: shards_pb2.ShardStatus = field(default_factory=shards_pb2.ShardStatus)
    shares: Outbox[shards_pb2.WorkerShare] = field(default_factory=Outbox)

    def __post_init__(self) -> None:
        self.shard = shards_pb2_grpc.ShardStub(self.channel)
        self.control = inference_pb2_grpc.ControlStub(self.channel)
        self.told: shards_pb2.WorkerShare | None = None


def tokenizer_folder(socket: str) -> Path:
    """Where a shard at this address writes tokenizer files for frontends. It removes them, if it ends in peace."""
    return Path(f"{socket.removeprefix('unix:')}.tokenizers")


class Shards:
    """Attributes:
    live: those that are up, by index.
    """

    def __init__(self, config: SchedulerConfig, folder: Path, vital: VitalParts, on_change: Callable[[], None]) -> None:
        self.live: dict[int, LiveShard] = {}
        self.came: list[Callable[[LiveShard], None]] = []  # called with each life that begins
        self._config = config
        self._folder = folder
        self._vital = vital
        self._on_change = on_change
        self._names = WorkerNames(config.worker, config.max_workers)
        self._shares = WorkerShares(config.shards, HAND_OVER_S, time.monotonic())
        self._drained: set[str] = set()  # instances that any life of any shard has given back for good
        self._num_started = 0
        self._processes = KeptProcesses("shard", self._command, config.shards, vital)
        self._sockets: dict[int, str] = {}  # of the last life that was started, by index
        self._followers: dict[int, asyncio.Task[None]] = {}
        self._dividing: asyncio.Task[None] | None = None
        self._is_stopping = False

    def start(self) -> None:
        """Starts the processes, and divides the workers among them from now on."""
        self._processes.start()
        dividing = self._divide_again()
        self._dividing = self._vital.task("shares of the workers", dividing, lambda: self._is_stopping)

    async def stop(self) -> None:
        """Ends every shard in order: it aborts what is left, and gives its workers back."""
        self._is_stopping = True
        for live in self.live.values():
            live.shares.close()
        for index in range(self._config.shards):
            if index not in self.live:
                self._processes.kill(index)  # it has yet to come, and has no workers that it could give back
        await self._processes.stop(STOP_GRACE_S)
        tasks = [*self._followers.values(), *([self._dividing] if self._dividing else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def owner(self, address: str) -> LiveShard | None:
        """Who serves a worker, or is to."""
        for live in self.live.values():
            if address in live.status.serving:
                return live
        index = self._shares.owner(address)
        return self.live.get(index) if index is not None else None

    @property
    def addresses(self) -> list[str]:
        """Of all workers that are looked for."""
        return self._names.known

    # ---- processes and links ----------------------------------------------------------------------------------------

    def _command(self, index: int) -> list[str]:
        self._num_started += 1
        if index in self._sockets:  # of a life that is over, perhaps by force
            shutil.rmtree(tokenizer_folder(self._sockets[index]), ignore_errors=True)
        socket = self._sockets[index] = f"unix:{self._folder}/shard-{index}.{self._num_started}"
        if (former := self._followers.get(index)) is not None:
            former.cancel()
        self._followers[index] = asyncio.create_task(self._follow(index, socket))
        options = to_arguments(dataclasses.replace(self._config, metrics_port=None))
        return module_command("scheduler_svc.shards.shard_process", f"--socket={socket}", f"--index={index}", *options)

    async def _follow(self, index: int, socket: str) -> None:
        """One life, as far as it can be reached; at its end the process is ended, too, should it still be there."""
        async with grpc.aio.insecure_channel(socket, options=CHANNEL_OPTIONS) as channel:
            live = LiveShard(index, socket, channel)
            call = live.shard.Own(_messages(live.shares), wait_for_ready=True)
            try:
                async for status in call:
                    live.status = status
                    is_news = not self._drained.issuperset(status.drained)
                    self._drained.update(status.drained)
                    if index not in self.live or self.live[index] is not live:
                        self._begin(live)
                    elif is_news:
                        self._divide()
                    self._on_change()
                why = "it has ended"
            except grpc.aio.AioRpcError as error:
                why = error.details() or error.code().name
            finally:
                call.cancel()
                live.shares.close()
                if self.live.get(index) is live:
                    del self.live[index]
                    self._shares.shard_went(index, time.monotonic())
            if not self._is_stopping:
                log.warning("a shard is lost", shard=index, why=why)
                if self._sockets[index] == socket:
                    self._processes.kill(index)  # it may only have been stopped, or be cut off
                self._on_change()

    def _begin(self, live: LiveShard) -> None:
        log.info("shard is up", shard=live.index)
        self.live[live.index] = live
        self._shares.shard_came(live.index)
        for listener in self.came:
            listener(live)
        self._divide()

    # ---- workers ----------------------------------------------------------------------------------------------------

    async def _divide_again(self) -> None:
        while not self._is_stopping:
            served = {address for live in self.live.values() for address in live.status.serving}
            await self._names.look_up(served)
            self._divide()
            await asyncio.sleep(LOOK_INTERVAL_S)

    def _divide(self) -> None:
        shares = self._shares.divide(self._names.known, time.monotonic())
        for live in self.live.values():
            share = shards_pb2.WorkerShare(addresses=shares.get(live.index, []), drained=sorted(self._drained))
            if share != live.told:
                live.told = share
                live.shares.put(share)


async def _messages(shares: Outbox[shards_pb2.WorkerShare]) -> AsyncIterator[shards_pb2.WorkerShare]:
    async for batch in shares.batches():
        yield batch[-1]  # the last one says it all
