"""What waits to be written to a stream; the writer takes all of it at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from google.protobuf.message import Message

MAX_BATCH_BYTES = 1 << 20  # far below what a message may have; a larger event travels alone

E = TypeVar("E", bound=Message)


class Outbox(Generic[E]):
    """Events in the order in which they were put. For one event loop's thread."""

    def __init__(self) -> None:
        self._events: deque[E] = deque()
        self._has_news = asyncio.Event()
        self._is_closed = False

    def put(self, event: E) -> None:
        """Does nothing once the box is closed."""
        if not self._is_closed:
            self._events.append(event)
            self._has_news.set()

    def close(self) -> None:
        """Nothing more comes: `batches` ends with what is here."""
        self._is_closed = True
        self._has_news.set()

    async def batches(self) -> AsyncIterator[list[E]]:
        """What has come since the last batch, as often as something has."""
        while self._events or not self._is_closed:
            if self._events:
                yield self._take()
            else:
                self._has_news.clear()
                await self._has_news.wait()

    def _take(self) -> list[E]:
        batch, num_bytes = [self._events.popleft()], 0
        while self._events and (num_bytes := num_bytes + batch[-1].ByteSize()) < MAX_BATCH_BYTES:
            batch.append(self._events.popleft())
        return batch
