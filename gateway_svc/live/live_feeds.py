"""A feed for each key that looks on: what is seen is what the scheduler shows to that key, asked with it.

With a key of role metrics that is the load alone: queues and workers, no requests and no blocks.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Protocol

import grpc

from gateway_svc.errors import RATE_LIMIT, HttpError
from gateway_svc.live.live_feed import REFUSALS, LiveFeed
from octavo.errors import RequestFailed
from protos import inference_pb2 as pb

MAX_VIEWERS = 64  # of all feeds
Metadata = Sequence[tuple[str, str]]


class Asked(Protocol):
    """What is asked of `Schedulers`. All raise RequestFailed."""

    def watch_steps(self, metadata: Metadata) -> AsyncGenerator[pb.StepSummary, None]:
        """From now on, without an end."""

    async def view(self, request: pb.GetViewRequest, metadata: Metadata) -> pb.View:
        """How it stands."""

    async def load(self, metadata: Metadata) -> pb.Load:
        """Queues and workers."""


class LiveFeeds:
    """For one event loop. `extras`: what every whole frame says besides."""

    def __init__(self, schedulers: Asked, **extras: Any) -> None:
        self._schedulers, self._extras = schedulers, extras
        self._feeds: dict[tuple[Metadata, bool], LiveFeed] = {}  # by key, and whether it may see the load alone
        self._num_viewers: Counter[LiveFeed] = Counter()
        self._num_asking = 0  # viewers that have no feed yet
        self._is_closed = False

    @asynccontextmanager
    async def frames(self, metadata: Metadata = ()) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        """`LiveFeed.frames` for one who brings this. Raises RequestFailed where that is not to see anything, HttpError
        where too many look already."""
        self._check_room()
        self._num_asking += 1
        try:
            sees_load_alone = await self._sees_load_alone(metadata)
        finally:
            self._num_asking -= 1
        feed = self._feed(tuple(metadata), sees_load_alone)
        self._num_viewers[feed] += 1
        try:
            async with aclosing(feed.frames()) as frames:
                yield frames
        finally:
            self._num_viewers[feed] -= 1
            if not self._num_viewers[feed]:
                del self._num_viewers[feed]
                self._feeds = {key: other for key, other in self._feeds.items() if other is not feed}

    def close(self) -> None:
        """Ends all streams of frames."""
        self._is_closed = True
        for feed in self._num_viewers:
            feed.close()

    def _feed(self, metadata: Metadata, sees_load_alone: bool) -> LiveFeed:
        key = (metadata, sees_load_alone)
        if key not in self._feeds or self._feeds[key].is_closed:
            seen = _Load(self._schedulers, metadata) if sees_load_alone else _All(self._schedulers, metadata)
            extras = {"load_alone": True} if sees_load_alone else self._extras
            self._feeds[key] = LiveFeed(seen, **extras)
        if self._is_closed:
            self._feeds[key].close()
        return self._feeds[key]

    def _check_room(self) -> None:
        num_viewers = self._num_viewers.total() + self._num_asking
        if num_viewers >= MAX_VIEWERS:
            what = f"{num_viewers} pages look at this server, at most {MAX_VIEWERS} may"
            raise HttpError(429, what, type=RATE_LIMIT)

    async def _sees_load_alone(self, metadata: Metadata) -> bool:
        """Raises RequestFailed for a key that may see nothing. A scheduler that is away says so in the feed."""
        try:
            await self._schedulers.view(pb.GetViewRequest(max_requests=1, max_blocks=1), metadata)
        except RequestFailed as failure:
            if failure.code is grpc.StatusCode.PERMISSION_DENIED:
                try:
                    await self._schedulers.load(metadata)
                except RequestFailed:
                    raise failure from None  # which names the role that opens all of it
                return True
            if failure.code in REFUSALS:
                raise
        return False


class _All:
    """`Watched` of a feed, for a key of role control or a server without keys."""

    def __init__(self, schedulers: Asked, metadata: Metadata) -> None:
        self._schedulers, self._metadata = schedulers, metadata

    def watch_steps(self) -> AsyncGenerator[pb.StepSummary, None]:
        return self._schedulers.watch_steps(self._metadata)

    async def view(self, request: pb.GetViewRequest) -> pb.View:
        return await self._schedulers.view(request, self._metadata)


class _Load:
    """Likewise, for one of role metrics: it is looked at every now and then."""

    def __init__(self, schedulers: Asked, metadata: Metadata) -> None:
        self._schedulers, self._metadata = schedulers, metadata

    async def watch_steps(self) -> AsyncGenerator[pb.StepSummary, None]:
        await asyncio.Event().wait()
        yield pb.StepSummary()

    async def view(self, request: pb.GetViewRequest) -> pb.View:
        return pb.View(load=await self._schedulers.load(self._metadata))
