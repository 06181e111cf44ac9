"""Adapters of a sharded scheduler: every shard has them, and each that comes gets what the others have."""

from __future__ import annotations

import asyncio
import contextlib

import grpc

from protos import inference_pb2 as pb
from scheduler_svc.errors import NotReady
from scheduler_svc.frontends.forwarding import answer_of
from scheduler_svc.shards.shards import LiveShard, Shards

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 4.0  # between two attempts, for a shard that has no worker yet
NO_SHARD = "no shard of this scheduler runs at this moment"


class ShardedAdapters:
    """Generations are each shard's own; what is cached with one shard's is never looked for with another's."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._loaded: dict[str, str] = {}  # paths by name
        self._catching_up: set[asyncio.Task[None]] = set()
        shards.came.append(lambda live: self._give(live, {}))

    async def load(self, request: pb.ControlLoadAdapterRequest) -> pb.ControlLoadAdapterResponse:
        """Where a shard refuses it, it is taken back from the others; one without workers for it gets it later.

        Raises AioRpcError, NotReady.
        """
        lives = list(self._shards.live.values())
        if not lives:
            raise NotReady(NO_SHARD)
        answers = await asyncio.gather(
            *(answer_of(live.control.LoadAdapter(request)) for live in lives), return_exceptions=True
        )
        loaded = [live for live, answer in zip(lives, answers, strict=True) if not isinstance(answer, BaseException)]
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        refused = [error for error in failed if not _has_no_worker(error)] or ([] if loaded else failed)
        if refused:
            if request.name not in self._loaded:
                undone = pb.ControlUnloadAdapterRequest(name=request.name)
                await asyncio.gather(
                    *(answer_of(live.control.UnloadAdapter(undone)) for live in loaded), return_exceptions=True
                )
            raise refused[0]
        self._loaded[request.name] = request.path
        for live in self._shards.live.values():  # also those that came while the others loaded it
            if live not in loaded:
                self._give(live, {})
        generations = [answer.generation for answer in answers if not isinstance(answer, BaseException)]
        return pb.ControlLoadAdapterResponse(generation=max(generations))

    async def unload(self, request: pb.ControlUnloadAdapterRequest) -> pb.ControlUnloadAdapterResponse:
        """That a shard never had it is no reason to refuse, unless none had. Raises AioRpcError, NotReady."""
        lives = list(self._shards.live.values())
        if not lives:
            raise NotReady(NO_SHARD)
        answers = await asyncio.gather(
            *(answer_of(live.control.UnloadAdapter(request)) for live in lives), return_exceptions=True
        )
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        if other := [error for error in failed if not _is_unknown(error)]:
            raise other[0]
        if failed and len(failed) == len(answers):
            raise failed[0]
        path = self._loaded.pop(request.name, "")
        for live in self._shards.live.values():
            if live not in lives:  # it came while the others unloaded it, and may have been given it
                self._give(live, {request.name: path})
        return pb.ControlUnloadAdapterResponse()

    def _give(self, live: LiveShard, given: dict[str, str]) -> None:
        """`given`: what the shard may have, besides what there is."""
        task = asyncio.create_task(self._catch_up(live, given))
        self._catching_up.add(task)
        task.add_done_callback(self._catching_up.discard)

    async def _catch_up(self, live: LiveShard, given: dict[str, str]) -> None:
        """Loads what there is, as soon as the shard has a worker; what is unloaded meanwhile it gives up, too. What it
        cannot load keeps nothing else from it."""
        pause_s = FIRST_PAUSE_S
        while self._shards.live.get(live.index) is live and given != self._loaded:
            for name, _ in given.items() - self._loaded.items():  # or another is called so now
                with contextlib.suppress(grpc.aio.AioRpcError):  # it has heard so already
                    await answer_of(live.control.UnloadAdapter(pb.ControlUnloadAdapterRequest(name=name)))
                del given[name]
            is_whole = True
            for name, path in [each for each in self._loaded.items() if each not in given.items()]:
                try:
                    await answer_of(live.control.LoadAdapter(pb.ControlLoadAdapterRequest(name=name, path=path)))
                    given[name] = path
                except grpc.aio.AioRpcError:
                    is_whole = False
            if not is_whole:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _has_no_worker(error: BaseException) -> bool:
    """That takes adapters: none is there now, or none ever was."""
    codes = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNIMPLEMENTED)
    return isinstance(error, grpc.aio.AioRpcError) and error.code() in codes


def _is_unknown(error: BaseException) -> bool:
    return isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.NOT_FOUND
