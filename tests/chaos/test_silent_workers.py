"""Workers that are stopped, or cut off without a word, with nothing in the way that would answer pings for them."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from octavo import SamplingParams
from protos import inference_pb2 as pb
from scheduler_svc.leases.worker_handle import SILENCE_LIMIT_NS
from tests.chaos.cluster import Cluster, Place
from tests.chaos.workload import Received, assert_same, run_requests
from tests.tiny_models import make_tiny_llama

OPTIONS = ("--max-model-len=256", "--max-num-seqs=8", "--kv-cache-memory=0.02", "--swap-space=0")
DELAY_S = 0.01  # of the network, each way: so a request takes a second or two
FOUND_WITHIN_S = 10.0  # 2.5 s are promised; want of messages is found later than this

FAULTS: dict[str, Callable[[Place], None]] = {
    "stopped": lambda place: place.process.send_signal(signal.SIGSTOP),
    "nothing arrives there": lambda place: place.network.swallow(back=False),
    "nothing comes back": lambda place: place.network.swallow(there=False),
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder, logs = make_tiny_llama(tmp_path_factory.mktemp("tiny")), tmp_path_factory.mktemp("logs")
    with Cluster(folder, logs, worker_options=OPTIONS, delay_s=DELAY_S, reads_steps=False) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def requests() -> list[pb.GenerateRequest]:
    requests = []
    for number in range(8):
        params = SamplingParams(temperature=number % 2, seed=number, max_tokens=200, ignore_eos=True)
        request = pb.GenerateRequest(request_id=f"r{number}", prompt=f"say {number}|")
        request.sampling_params.CopyFrom(params.to_proto())
        requests.append(request)
    return requests


async def begin(
    cluster: Cluster, requests: list[pb.GenerateRequest]
) -> tuple[asyncio.Task[dict[str, Received]], Place]:
    """A run, and a place that is at work on it. Who comes too late to see one, on a busy machine, has it run again."""
    while True:
        running = asyncio.create_task(run_requests(cluster.address, requests))
        while not running.done():
            workers = await asyncio.to_thread(cluster.scheduler.workers)
            if busy := [worker.address for worker in workers if worker.num_running]:
                return running, next(place for place in cluster.places if place.address == busy[0])
        await running


@pytest.mark.parametrize("fault", FAULTS)
def test_a_silent_worker_is_found_by_the_schedulers_own_pings(
    cluster: Cluster, requests: list[pb.GenerateRequest], fault: str
) -> None:
    assert FOUND_WITHIN_S < SILENCE_LIMIT_NS / 1e9
    cluster.wait_until_whole()
    undisturbed = cluster.run(run_requests(cluster.address, requests))
    lost_before = len(cluster.scheduler.events("worker lost"))

    async def run() -> float:
        """Seconds until the scheduler has found it."""
        running, place = await begin(cluster, requests)
        FAULTS[fault](place)
        struck_s = time.monotonic()
        try:
            while len(cluster.scheduler.events("worker lost")) == lost_before:
                assert time.monotonic() < struck_s + FOUND_WITHIN_S, "pings do not find it"
                await asyncio.sleep(0.05)
            found_s = time.monotonic() - struck_s
            received = await running
        finally:
            place.process.send_signal(signal.SIGCONT)
            place.network.heal()
        assert any(one.times_moved for one in received.values()), "the fault was meant to interrupt somebody"
        assert_same(received, undisturbed)
        return found_s

    print(f"{fault}: found after {cluster.run(run()):.2f} s, {cluster.scheduler.events('worker lost')[-1]['why']}")
    cluster.wait_until_whole()  # it comes back
    assert not cluster.scheduler.blocks_in_use()
