"""What is passed on to schedulers: by a stand-in for the client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway_svc.upstream.schedulers import Schedulers
from octavo.retrying import RetryPolicy
from protos import inference_pb2 as pb
from tests.waiting import until


class Client:
    """Answers a call once it is let. A call that is given up says so."""

    def __init__(self) -> None:
        self.is_let = asyncio.Event()
        self.num_begun = self.num_ended = self.num_given_up = 0

    async def call(self, *question: Any, **options: Any) -> pb.ListModelsResponse:
        self.num_begun += 1
        try:
            await self.is_let.wait()
        except asyncio.CancelledError:
            self.num_given_up += 1
            raise
        self.num_ended += 1
        return pb.ListModelsResponse()


async def test_a_question_is_asked_to_its_end_though_whoever_asks_leaves() -> None:
    """A scheduler cuts a connection on which many calls are given up at once, and others' streams go over it."""
    schedulers, client = Schedulers("127.0.0.1:1", RetryPolicy()), Client()
    given: Any = client
    schedulers._clients, schedulers._num_streams = [given], [0]
    asking = asyncio.create_task(schedulers.list_models(()))
    await until(lambda: client.num_begun)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    client.is_let.set()
    await until(lambda: client.num_ended + client.num_given_up)
    assert (client.num_ended, client.num_given_up) == (1, 0)
