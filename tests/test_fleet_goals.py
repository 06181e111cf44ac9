"""What a pool is for, in virtual time: more workers are as much faster, nobody waits longer, a loss hurts few."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest

from octavo.bench.fleet.figures import FleetFigures, measure
from octavo.bench.fleet.outcomes import Loss
from octavo.bench.fleet.requests import Load
from octavo.bench.fleet.simulation import Simulation
from octavo.bench.fleet.worker import WorkerKind

SMALL = WorkerKind(max_num_seqs=32, cache_tokens=16_384)
SHORT = Load(requests=0, prompt_tokens=64, output_tokens=24, spread=0.5)


def play(num_workers: int, load: Load, kind: WorkerKind = SMALL, seed: int = 0) -> FleetFigures:
    return measure(Simulation([kind] * num_workers, load.arrivals(seed), seed=seed).run(), num_workers)


@cache
def backlog(num_workers: int) -> FleetFigures:
    """Three times as many as run at once."""
    return play(num_workers, Load(requests=96 * num_workers, prompt_tokens=32, output_tokens=24))


@pytest.mark.parametrize("num_workers", [2, 8, pytest.param(64, marks=pytest.mark.chaos)])
def test_a_backlog_is_done_as_much_faster_as_there_are_workers(num_workers: int) -> None:
    assert backlog(num_workers).tokens_per_s >= 0.95 * num_workers * backlog(1).tokens_per_s


@cache
def at_80_percent(num_workers: int) -> FleetFigures:
    rate = 0.8 * backlog(1).tokens_per_s / SHORT.output_tokens * num_workers
    return play(num_workers, dataclasses.replace(SHORT, requests=1200, rate=rate))


@pytest.mark.parametrize("num_workers", [2, 8])
def test_the_first_token_comes_no_later_from_many_workers_than_from_one_as_busy(num_workers: int) -> None:
    many, one = at_80_percent(num_workers), at_80_percent(1)
    assert many.ttft_mean_ms <= one.ttft_mean_ms
    assert many.ttft_p99_ms <= one.ttft_p99_ms


def test_two_workers_are_no_slower_than_one_at_what_one_just_cannot_do() -> None:
    load = Load(requests=600, rate=100.0)
    one, two = (play(count, load, WorkerKind()) for count in (1, 2))
    assert two.virtual_s <= one.virtual_s
    assert two.ttft_p99_ms <= one.ttft_p99_ms


def test_those_who_were_not_on_a_lost_worker_notice_little_and_all_others_end() -> None:
    """At half load, so that what is computed again finds room. Trials hold up others there for a few steps."""
    rate = 0.5 * 4 * backlog(1).tokens_per_s / SHORT.output_tokens
    load = dataclasses.replace(SHORT, requests=1200, rate=rate)
    loss = Loss(0, 2.0, 4.0)
    run = Simulation([SMALL] * 4, load.arrivals(0), [loss]).run()
    moved = [outcome for outcome in run.outcomes if outcome.num_moves]
    stayed = [outcome for outcome in run.outcomes if not outcome.num_moves]
    assert 4 <= len(moved) <= 64, "what ran or waited there"
    assert not any(outcome.error for outcome in run.outcomes)
    assert max(outcome.longest_gap_ns for outcome in stayed) <= 8 * SMALL.step_ns(64)
    assert max(outcome.longest_gap_ns for outcome in moved) <= 20 * SMALL.step_ns(64)
