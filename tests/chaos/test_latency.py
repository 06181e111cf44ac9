"""A network that takes its time between scheduler and worker: the same tokens, and how fast they come."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from protos import inference_pb2 as pb
from tests.chaos.cluster import Cluster
from tests.chaos.throughputs import THROUGHPUTS, Throughput
from tests.chaos.workload import assert_same, make_requests, run_requests

DELAYS_MS = (5, 50)  # each way
DEPTHS = (1, 2)
NUM_BRIEF = 6
MAX_TOKENS_BRIEF = 10


@pytest.fixture
def network(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, whose network and scheduler are as they were afterwards."""
    yield cluster
    set_delay(cluster, 0.0)
    cluster.restart_scheduler()


def set_delay(cluster: Cluster, delay_s: float) -> None:
    for place in cluster.places:
        place.network.delay_s = delay_s


def check(cluster: Cluster, requests: list[pb.GenerateRequest], delay_ms: int, depth: int) -> None:
    """The tokens are those of a network without delay."""
    cluster.wait_until_whole()
    undisturbed = cluster.run(run_requests(cluster.address, requests))
    set_delay(cluster, delay_ms / 1e3)
    cluster.restart_scheduler(f"--steps-in-flight={depth}")
    started_s = time.monotonic()
    received = cluster.run(run_requests(cluster.address, requests))
    took_s = time.monotonic() - started_s
    assert_same(received, undisturbed)
    num_tokens = sum(len(output.token_ids) for one in received.values() for output in one.outputs.values())
    THROUGHPUTS.append(Throughput(delay_ms, depth, len(requests), num_tokens / took_s))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("delay_ms", DELAYS_MS)
def test_latency_changes_no_token(network, delay_ms, depth):
    requests = make_requests(0)[:NUM_BRIEF]
    for request in requests:
        request.sampling_params.max_tokens = MAX_TOKENS_BRIEF
    check(network, requests, delay_ms, depth)


@pytest.mark.chaos
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("delay_ms", (0, *DELAYS_MS))
def test_throughput_over_a_network_that_takes_its_time(network, delay_ms, depth):
    check(network, make_requests(0), delay_ms, depth)
