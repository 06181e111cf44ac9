"""Workers that are replaced, slow, all gone for a while, or wanted by two schedulers."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from protos import inference_pb2 as pb
from tests.chaos.cluster import Cluster
from tests.chaos.moments import Strike
from tests.chaos.scheduler_process import SchedulerProcess
from tests.chaos.step_proxy import StepProxy
from tests.chaos.workload import Received, assert_same, make_requests, run_requests
from tests.tiny_models import make_tiny_llama

TWO_IN_FLIGHT = "two steps in flight"


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> dict[str, Received]:
    cluster.wait_until_whole()
    return cluster.run(run_requests(cluster.address, make_requests(0)))


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same sizes, as a fine-tuned one is."""
    return make_tiny_llama(tmp_path_factory.mktemp("fine-tuned"), seed=1)


def serving(scheduler: SchedulerProcess) -> list[str]:
    return [worker.address for worker in scheduler.workers() if worker.health == pb.WORKER_HEALTH_SERVING]


def test_another_model_at_the_address_of_a_lost_worker_takes_none_of_its_requests(cluster, undisturbed, other_folder):
    place = cluster.places[0]
    other = cluster.start_worker(other_folder)
    other.wait_until_ready()

    async def run() -> dict[str, Received]:
        moving: list[asyncio.Task[None]] = []

        def strike(proxy: StepProxy) -> None:
            place.process.send_signal(signal.SIGKILL)
            moving.append(asyncio.create_task(place.move_in(other)))

        cluster.watch(Strike(TWO_IN_FLIGHT, strike))
        received = await run_requests(cluster.address, make_requests(0))
        cluster.watch(None)
        await moving[0]
        return received

    cluster.wait_until_whole()
    try:
        assert_same(cluster.run(run()), undisturbed)

        def model_of_place() -> str:
            workers = {worker.address: worker for worker in cluster.scheduler.workers()}
            state = workers.get(place.address)
            return state.model if state is not None and state.health == pb.WORKER_HEALTH_SERVING else ""

        cluster.scheduler.wait_until(lambda: model_of_place() == other_folder.name, "worker of another model")
        assert len(serving(cluster.scheduler)) == 2
    finally:
        other.end()
        cluster.run(cluster.replace(place))
    cluster.wait_until_whole()


def test_requests_wait_while_every_worker_is_gone(cluster, undisturbed):
    async def come_back() -> None:
        await asyncio.sleep(0.5)
        for place in cluster.places:
            await cluster.replace(place)

    async def run() -> dict[str, Received]:
        coming_back: list[asyncio.Task[None]] = []

        def strike(proxy: StepProxy) -> None:
            for place in cluster.places:
                place.process.send_signal(signal.SIGKILL)
            coming_back.append(asyncio.create_task(come_back()))

        cluster.watch(Strike(TWO_IN_FLIGHT, strike, skip=20))
        received = await run_requests(cluster.address, make_requests(0))
        cluster.watch(None)
        await coming_back[0]
        return received

    cluster.wait_until_whole()
    received = cluster.run(run())
    assert_same(received, undisturbed)
    assert sum(one.times_moved > 0 for one in received.values()) > 5


def test_a_slow_worker_is_not_a_lost_one(cluster, undisturbed):
    cluster.wait_until_whole()
    num_lost = len(cluster.scheduler.events("worker lost"))
    slow = cluster.places[0].steps
    slow.result_delay_s = 0.05
    try:
        assert_same(cluster.run(run_requests(cluster.address, make_requests(0))), undisturbed)
    finally:
        slow.result_delay_s = 0.0
    assert len(cluster.scheduler.events("worker lost")) == num_lost


# ---- Two schedulers -------------------------------------------------------------------------------------------------


@pytest.fixture
def pool(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, which has its scheduler again afterwards."""
    cluster.wait_until_whole()
    yield cluster
    cluster.restart_scheduler()


def test_a_second_scheduler_gets_the_workers_when_the_first_is_gone(pool, undisturbed):
    second = pool.start_scheduler("--preemption-mode=swap")
    try:

        def is_told_of_the_lease() -> bool:
            return all("another scheduler holds it" in worker.problem for worker in second.workers())

        second.wait_until(is_told_of_the_lease, "refusals of a lease")
        assert len(serving(pool.scheduler)) == 2 and not serving(second)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            pool.run(run_requests(second.address, make_requests(0)[:1]))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE, "it never had a worker"
        assert_same(pool.run(run_requests(pool.address, make_requests(0))), undisturbed)
        pool.scheduler.kill()
        second.wait_for_workers(2)
        assert_same(pool.run(run_requests(second.address, make_requests(0))), undisturbed)
    finally:
        second.stop()


def test_two_schedulers_share_the_workers_and_each_serves_everybody(pool, undisturbed):
    pool.scheduler.kill()
    sharing = [pool.start_scheduler("--max-workers=1", "--preemption-mode=swap") for _ in range(2)]
    try:
        for scheduler in sharing:
            scheduler.wait_for_workers(1)

        async def run() -> list[dict[str, Received]]:
            return await asyncio.gather(*(run_requests(each.address, make_requests(0)) for each in sharing))

        for received in pool.run(run()):
            assert_same(received, undisturbed)
        held = [serving(scheduler) for scheduler in sharing]
        assert sorted(address for addresses in held for address in addresses) == sorted(
            place.address for place in pool.places
        ), "each has one of its own"
    finally:
        for scheduler in sharing:
            scheduler.stop()
