"""What a service that answers clients needs of an engine, and that of the engine in this process.

The other `Core` is the link of a frontend process to the engine in another one. So all of it is awaited.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from protos import inference_pb2 as pb
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.engine.engine import Engine
from scheduler_svc.errors import RequestRefused


class Core(Protocol):
    """The engine in this process, or the link to the one that has it."""

    async def check_room(self, request: pb.GenerateRequest, num_preparing: int, num_bytes: int = 0) -> None:
        """Raises QueueFull where `submit` would for one of so many bytes, `num_preparing` others having come before:
        nothing is prepared yet."""

    def refused(self, refusal: RequestRefused) -> None:
        """Takes note of a request that was refused before it was submitted."""

    async def submit(self, group: SequenceGroup, *, replaces: bool) -> None:
        """Queues a group, `replaces`: in place of a live one of its tenant and id. Raises RequestRefused."""

    def forget(self, group: SequenceGroup) -> None:
        """A submitted group has ended, and everything is written."""

    def abandon(self, group: SequenceGroup) -> None:
        """Nobody reads it any more; does nothing for one that has ended."""

    async def abort(self, request_id: str, tenant: str | None) -> bool:
        """Ends live requests of this id, of one tenant or of all; False when there is none."""

    async def adapters(self) -> list[str]:
        """Names of those that a request may use now."""

    async def catch_up(self) -> None:
        """Returns once this process knows of the models what any other has been told by now. Raises NotReady."""


class EngineCore:
    """The engine in this process. Of its own it has only that `submit` ends what a group replaces first."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def check_room(self, request: pb.GenerateRequest, num_preparing: int, num_bytes: int = 0) -> None:
        """See `Core`."""
        self._engine.check_room(request.tenant, request.request_id, num_preparing, num_bytes)

    def refused(self, refusal: RequestRefused) -> None:
        """See `Core`."""
        self._engine.refused(refusal)

    async def submit(self, group: SequenceGroup, *, replaces: bool) -> None:
        """See `Core`; a request that is replaced has ended when this returns."""
        # Once more where another replacement was faster.
        for replaced in self._engine.find(group.request_id, group.tenant) if replaces else ():
            self._engine.abandon(replaced)
        while replaces and self._engine.abort(group.request_id, group.tenant):
            await asyncio.wrap_future(self._engine.call(lambda: None))  # between steps: the id is free by then
        self._engine.submit(group)

    def forget(self, group: SequenceGroup) -> None:
        """The engine has done so when it ended."""

    def abandon(self, group: SequenceGroup) -> None:
        """See `Core`."""
        self._engine.abandon(group)

    async def abort(self, request_id: str, tenant: str | None) -> bool:
        """See `Core`."""
        return self._engine.abort(request_id, tenant)

    async def adapters(self) -> list[str]:
        """See `Core`."""
        return self._engine.adapter_names()

    async def catch_up(self) -> None:
        """See `Core`; nobody is told sooner."""
