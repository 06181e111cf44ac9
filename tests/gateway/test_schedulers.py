"""What is passed on to schedulers: by a stand-in for the client."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from gateway_svc.upstream import schedulers as module
from gateway_svc.upstream.schedulers import Schedulers
from octavo.errors import RequestFailed
from octavo.retrying import RetryPolicy, Waiting
from protos import inference_pb2 as pb
from tests.integration.fake_inference import FakeServer
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


async def test_what_waits_for_a_scheduler_is_bounded_and_one_line_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Waiting] = []
    schedulers = Schedulers("127.0.0.1:1", RetryPolicy(window_s=60.0, on_wait=told.append))
    monkeypatch.setattr(module, "MAX_WAITING_PROMPTS", 5)
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 1_000)
    two = [pb.GenerateRequest(model="m", prompt="a")] * 2
    large = [pb.GenerateRequest(model="m", prompt="a" * 2_000)]
    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(schedulers.prepare(two, ())) for _ in range(2)]
        await until(lambda: told)
        for more in (two, large):
            with pytest.raises(RequestFailed) as refused:
                await schedulers.prepare(more, ())
            assert refused.value.code is grpc.StatusCode.UNAVAILABLE
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        alone = group.create_task(schedulers.prepare(large, ()))
        await asyncio.sleep(0.3)  # which is many attempts
        assert not alone.done() and len(told) == 1
        alone.cancel()
    await schedulers.close()


async def test_a_model_that_was_found_is_not_asked_for_again() -> None:
    with FakeServer() as server:
        schedulers = Schedulers(server.address, RetryPolicy())
        for name, num_asked in (("fake", 1), ("fake@aaaa", 1), ("adapter", 2), ("owner/name", 2)):
            await schedulers.prepare([pb.GenerateRequest(model=name)] * 3, ())
            assert server.inference.num_listed == num_asked
        await schedulers.close()
