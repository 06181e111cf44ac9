"""A network between clients and their scheduler that loses bytes and says nothing, both ways or one: requests go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from octavo import AsyncClient, SamplingParams
from octavo.retrying import RetryPolicy, Waiting
from tests.chaos.leftovers import wait_until_nothing_is_left
from tests.chaos.tcp_proxy import TcpProxy
from tests.fakes import FakeWorker
from tests.integration.scheduler_process import Service, scheduler

PARAMS = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
STEP_S = 0.02
# Pings leave 10 s after the last byte and are waited for for 5 s; without an end of their own they took a minute more.
GOES_ON_WITHIN_S = 40.0

pytestmark = pytest.mark.chaos  # each waits for those pings


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with FakeWorker(delay_s=STEP_S, num_blocks=512, max_model_len=256) as worker:
        with scheduler(f"--worker={worker.address}") as service:
            service.wait_until_ready()
            yield service


@asynccontextmanager
async def proxied(service: Service) -> AsyncIterator[TcpProxy]:
    network = TcpProxy(int(service.address.rpartition(":")[2]))
    await network.start()
    try:
        yield network
    finally:
        await network.close()


async def _read(client: AsyncClient, prompt: str, begun: asyncio.Event) -> list[int]:
    token_ids: list[int] = []
    async for output in client.generate(prompt, PARAMS):
        token_ids += output.outputs[0].token_ids
        if len(token_ids) > 5:
            begun.set()
    return token_ids


@pytest.mark.parametrize(
    ("there", "back"), [(True, True), (True, False), (False, True)], ids=["both ways", "there", "back"]
)
async def test_requests_go_on_where_the_network_says_nothing(service: Service, there: bool, back: bool) -> None:
    """One that streams, and one that is sent into the silence."""
    waits: list[Waiting] = []
    async with AsyncClient(service.address) as plain:
        undisturbed = [await _read(plain, prompt, asyncio.Event()) for prompt in ("one|", "two|")]
    async with proxied(service) as network:
        addresses = [f"127.0.0.1:{network.port}", service.address]
        async with AsyncClient(addresses, retry=RetryPolicy(on_wait=waits.append)) as client:
            begun = asyncio.Event()
            one = asyncio.create_task(_read(client, "one|", begun))
            await begun.wait()
            network.swallow(there=there, back=back)
            began_s = time.monotonic()
            two = asyncio.create_task(_read(client, "two|", asyncio.Event()))
            disturbed = await asyncio.wait_for(asyncio.gather(one, two), GOES_ON_WITHIN_S)
            assert list(disturbed) == undisturbed
            print(f"done after {time.monotonic() - began_s:.1f} s, {len(waits)} waits")
            assert waits, "the network was meant to cost something"
    wait_until_nothing_is_left(service.address, counts_calls=False)
