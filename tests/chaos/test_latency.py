"""A network that takes its time between scheduler and worker: the same tokens, and how fast they come."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from protos import inference_pb2 as pb
from tests.chaos.cluster import Cluster
from tests.chaos.throughputs import THROUGHPUTS, Throughput
from tests.chaos.workload import Received, assert_same, make_requests, run_requests

DELAYS_MS = (5, 50)  # each way
DEPTHS = (1, 2)
NUM_BRIEF = 6
MAX_TOKENS_BRIEF = 10


@pytest.fixture(scope="module")
def network(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, whose network and scheduler are as they were afterwards."""
    yield cluster
    set_delay(cluster, 0.0)
    cluster.restart_scheduler()


def set_delay(cluster: Cluster, delay_s: float) -> None:
    for place in cluster.places:
        place.network.delay_s = delay_s


def run_without_delay(cluster: Cluster, requests: list[pb.GenerateRequest]) -> dict[str, Received]:
    set_delay(cluster, 0.0)
    cluster.wait_until_whole()
    return cluster.run(run_requests(cluster.address, requests))


def check(
    cluster: Cluster, requests: list[pb.GenerateRequest], undisturbed: dict[str, Received], delay_ms: int, depth: int
) -> None:
    """The tokens are those of a network without delay."""
    started_s = time.monotonic()
    received = cluster.run(run_requests(cluster.address, requests))
    took_s = time.monotonic() - started_s
    assert_same(received, undisturbed)
    num_tokens = sum(len(output.token_ids) for one in received.values() for output in one.outputs.values())
    THROUGHPUTS.append(Throughput(delay_ms, depth, len(requests), num_tokens / took_s))


@pytest.mark.parametrize("depth", DEPTHS)
def test_latency_changes_no_token(network, depth):
    """Of the longest from a scheduler's first word on; then of the others."""
    requests = make_requests(0)[:NUM_BRIEF]
    for request in requests:
        request.sampling_params.max_tokens = MAX_TOKENS_BRIEF
    undisturbed = run_without_delay(network, requests)
    set_delay(network, max(DELAYS_MS) / 1e3)
    network.restart_scheduler(f"--steps-in-flight={depth}")
    for delay_ms in sorted(DELAYS_MS, reverse=True):
        set_delay(network, delay_ms / 1e3)
        check(network, requests, undisturbed, delay_ms, depth)


@pytest.mark.chaos
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("delay_ms", (0, *DELAYS_MS))
def test_throughput_over_a_network_that_takes_its_time(network, delay_ms, depth):
    requests = make_requests(0)
    undisturbed = run_without_delay(network, requests)
    set_delay(network, delay_ms / 1e3)
    network.restart_scheduler(f"--steps-in-flight={depth}")
    check(network, requests, undisturbed, delay_ms, depth)
