"""The rules that Octavo's is compared with choose as their formulas say, and every workload can be played by all."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from benchmarks import routing
from benchmarks.routing_rules import RULES, Asked, Seen
from octavo.bench.fleet.outcomes import Loss
from octavo.bench.fleet.requests import Load

ASKED = Asked(num_tokens=160, num_blocks=10, block_size=16)


def seen(number: int, requests: int = 0, uncomputed: float = 0, blocks: float = 0, hits: int = 0) -> Seen:
    return Seen(number, requests, uncomputed, blocks, hits, 10 * requests)


@pytest.mark.parametrize(
    ("rule", "workers", "costs"),
    [
        ("least-loaded", [seen(0, 3, hits=9), seen(1, 2)], [3, 2]),
        ("prefix only", [seen(0, 3, hits=1), seen(1, 2)], [(-1, 30, 3), (0, 20, 2)]),
        ("SGLang", [seen(0, 33, hits=6), seen(1, 1)], [-6, 0]),  # 32 more are not yet too many
        ("SGLang", [seen(0, 34, hits=6), seen(1, 1)], [34, 1]),
        ("SGLang", [seen(0, 3, hits=5), seen(1, 1)], [3, 1]),  # half of it and no more
        ("SGLang", [seen(0, 1034, hits=6), seen(1, 1001)], [-6, 0]),  # 33 more, but less than a tenth
        ("Dynamo", [seen(0, 3, 32, 7, hits=4), seen(1)], [2 + 10 - 4 + 7 + 10 - 4, 10 + 10]),
        ("LMetric", [seen(0, 3, 32, 7, hits=4), seen(1, 0, 10)], [(32 + 160 - 64) * 4, 170]),
    ],
)
def test_costs_are_those_of_the_formulas(rule: str, workers: list[Seen], costs: list[Any]) -> None:
    assert RULES[rule]()(ASKED, workers) == costs


def test_round_robin_takes_turns() -> None:
    rule = RULES["round-robin"]()
    turns = [rule(ASKED, [seen(0), seen(1), seen(2)]).index(False) for _ in range(6)]
    assert turns == [1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("rule", [*RULES, routing.OWN_BOUND_ONCE, routing.OWN])
def test_every_rule_serves_all(rule: str) -> None:
    tiny = Load(requests=60, shared_tokens=64, tenants=4, prompt_tokens=32, output_tokens=8, rate=100)
    workload = dataclasses.replace(routing.WORKLOADS["loss"], requests=tiny.arrivals, losses=(Loss(0, 0.2, 0.4),))
    figures = routing.play(workload, rule, 0)
    assert (figures.requests, figures.failed, figures.output_tokens) == (60, 0, 480)
    assert figures.cache_hit_rate > 0.3
    shown = routing.table("loss", {rule: routing.medians([figures])})
    assert f"| {rule} | " in shown


@pytest.mark.parametrize("name", routing.WORKLOADS)
def test_workloads_have_a_pool_and_are_the_same_for_a_seed(name: str) -> None:
    workload = routing.WORKLOADS[name]
    assert len(workload.pool) == routing.NUM_WORKERS
    one, same, other = (workload.requests(seed) for seed in (0, 0, 1))
    assert [request.content for request in one] == [request.content for request in same]
    assert [request.at_ns for request in one] == [request.at_ns for request in same]
    assert [(r.at_ns, r.content) for r in one] != [(r.at_ns, r.content) for r in other]
