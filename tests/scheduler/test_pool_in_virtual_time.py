"""What a common prefix, a loss, a large prompt and preemption cost: the real engine over simulated workers.

A step takes 20 ms and 20 us a token; the scheduler's own work takes no time.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.bench.fleet.outcomes import Loss, Outcome, Run
from octavo.bench.fleet.requests import OWN_TEXT, Load, Request
from octavo.bench.fleet.simulation import Simulation
from octavo.bench.fleet.worker import WorkerKind

KIND = WorkerKind(step_ms=20, token_us=20, max_num_seqs=64)
LARGEST_STEP_S = 0.020 + 0.000020 * 2048
BACKLOG = {"prompt_tokens": 64, "output_tokens": 32}
REQUESTS_A_SECOND = 0.8 * 85  # 80 % of what a worker does of the backlog


@pytest.mark.parametrize("num_workers", [2, pytest.param(8, marks=pytest.mark.chaos)])
def test_a_short_prefix_that_all_share_leaves_the_pool_balanced(num_workers: int) -> None:
    load = Load(requests=300 * num_workers, rate=num_workers * REQUESTS_A_SECOND, shared_tokens=16, **BACKLOG)
    run = Simulation([KIND] * num_workers, load.arrivals(0)).run()
    tokens = [worker.num_computed_tokens for worker in run.workers]
    assert max(tokens) < 1.1 * min(tokens), tokens


# ---- losses, large prompts, preempted groups ------------------------------------------------------------------------


def request(at_s: float, number: int, num_prompt_tokens: int, num_output_tokens: int) -> Request:
    return Request(round(at_s * 1e9), ((OWN_TEXT + number, num_prompt_tokens),), num_output_tokens)


def of_length(run: Run, num_prompt_tokens: int) -> list[Outcome]:
    return [outcome for outcome in run.outcomes if outcome.request.num_prompt_tokens == num_prompt_tokens]


def longest_silence_s(outcomes: list[Outcome]) -> float:
    return max(outcome.longest_gap_ns for outcome in outcomes) / 1e9


LARGE, SMALL = 2040, 40


@pytest.mark.parametrize("pool", [1, 2])
def test_large_prompts_silence_a_stream_as_long_as_was_asked_for(pool: int) -> None:
    """A step of 2,048 tokens takes 2.07 s here. What prompts cost with a goal is the base of more steps."""
    kind = WorkerKind(step_ms=20, token_us=1000)
    streams = [request(0.0, number, SMALL, 400) for number in range(pool)]
    prompts = [request(0.5 + 0.1 * number, 100 + number, LARGE, 4) for number in range(4 * pool)]
    silence_s, last_s = {}, {}
    for goal_s in (0.0, 0.25):
        run = Simulation([kind] * pool, [*streams, *prompts], step_time_goal=goal_s).run()
        assert not any(outcome.error for outcome in run.outcomes)
        silence_s[goal_s] = longest_silence_s(of_length(run, SMALL))
        last_s[goal_s] = max(outcome.ttft_ns for outcome in of_length(run, LARGE)) / 1e9
    assert silence_s[0.0] > 2.0 and silence_s[0.25] < 0.3, silence_s
    assert last_s[0.25] < 1.15 * last_s[0.0], last_s


@pytest.mark.parametrize("num_streams", [1, 200])
def test_prompts_get_half_of_steps_that_are_long_without_them(num_streams: int) -> None:
    """Each takes 400 ms for its weights, or 20 for these and 200 for decodes, so a step has at least as much again of a
    prompt: all of it takes little more than twice as long as by itself."""
    kind = WorkerKind(step_ms=400) if num_streams == 1 else WorkerKind(step_ms=20, token_us=1000)
    kind = replace(kind, token_us=1000, max_num_seqs=256)
    streams = [request(0.0, number, SMALL, 160) for number in range(num_streams)]
    prompt = request(20.0, 1000, LARGE, 4)
    run = Simulation([kind], [*streams, prompt], step_time_goal=0.25).run()
    without_s = kind.step_ms / 1e3 + num_streams * 0.001
    assert longest_silence_s(of_length(run, SMALL)[:1]) < 2.5 * without_s + 0.05
    steps = LARGE / (without_s * 1000)
    assert of_length(run, LARGE)[0].ttft_ns / 1e9 < 2 * (steps + 2) * without_s


def test_whoever_decodes_has_its_pace_between_its_steps_too() -> None:
    """Beams and stages have none of it in every second step, and what was lost is computed in steps of its own: these
    take no longer."""
    kind = WorkerKind(step_ms=20, token_us=1000)
    streams = [request(0.0, number, SMALL, 400) for number in range(2)]
    large = [request(0.5, 100 + number, LARGE, 100) for number in range(8)]
    run = Simulation([kind] * 2, [*streams, *large], [Loss(0, 4.0)], step_time_goal=0.25).run()
    kept = [outcome for outcome in of_length(run, SMALL) if not outcome.num_moves]
    assert kept and any(outcome.num_moves for outcome in of_length(run, LARGE))
    assert longest_silence_s(kept) < 0.6, "one step of those that were lost, and one of its own"


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_loss_of_130_000_tokens_silences_nobody_else(num_workers: int) -> None:
    """They are computed again in steps of their own, as nobody knows who was the reason; others have every second step.

    The worker that is left, or that takes the place of the only one, has a steady load of small requests.
    """
    large = [request(0.0, number, LARGE, 200) for number in range(64 * num_workers)]
    small = [request(5.0 + 0.03 * number, 500 + number, SMALL, 60) for number in range(200)]
    loss = Loss(0, 6.0, 6.05 if num_workers == 1 else None)
    run = Simulation([WorkerKind()] * num_workers, [*large, *small], [loss]).run()
    assert not any(outcome.error for outcome in run.outcomes)
    num_lost = sum(outcome.num_moves > 0 for outcome in of_length(run, LARGE))
    assert num_lost * LARGE > 130_000
    others = [outcome for outcome in of_length(run, SMALL) if not outcome.num_moves]
    assert len(others) > 100
    assert longest_silence_s(others) < 4 * LARGEST_STEP_S
    assert max(outcome.ttft_ns for outcome in others if outcome.request.at_ns > 6.1e9) < 12 * LARGEST_STEP_S * 1e9


def test_what_was_lost_is_computed_again_by_all_who_are_left() -> None:
    """In half the time by four workers as by two."""
    mean_s = []
    for num_left in (2, 4):
        large = [request(0.0, number, LARGE, 200) for number in range(32 * (num_left + 1))]
        run = Simulation([WorkerKind()] * (num_left + 1), large, [Loss(0, 4.0)]).run()
        lost = [outcome for outcome in run.outcomes if outcome.num_moves]
        assert len(lost) == 32 and not any(outcome.error for outcome in run.outcomes)
        mean_s.append(sum(outcome.longest_gap_ns for outcome in lost) / 32e9)
    assert mean_s[1] < 0.65 * mean_s[0], mean_s


def test_a_large_prompt_waits_at_one_worker_and_the_others_stay_full() -> None:
    """It needs nine tenths of a cache, and requests keep coming."""
    kind = WorkerKind(cache_tokens=4096, max_num_seqs=16)
    small = [request(0.012 * number, number, 64, 64) for number in range(400)]
    large = request(2.0, 5000, 3600, 8)
    runs = [Simulation([kind] * 4, requests).run() for requests in ([*small, large], small)]
    (outcome,) = of_length(runs[0], 3600)
    assert not outcome.error and outcome.ttft_ns < 6e9
    ended_s = [max(outcome.ended_ns for outcome in of_length(run, 64)) / 1e9 for run in runs]
    assert ended_s[0] < 1.1 * ended_s[1], ended_s


def test_nobody_who_was_preempted_waits_beside_a_worker_that_has_nothing_to_do() -> None:
    """Eight requests outgrow the cache of one worker; before that a second one has come, which nobody asks anything."""
    kind = WorkerKind(cache_tokens=2048, max_num_seqs=16)
    requests = [request(0.01, number, 64, 400) for number in range(8)]
    with_other, alone = (Simulation([kind] * 2, requests, [Loss(1, 0.0, back_s)]).run() for back_s in (2.0, None))
    assert with_other.num_preemptions and alone.num_preemptions
    assert longest_silence_s(with_other.outcomes) < 0.5 < 2.0 < longest_silence_s(alone.outcomes)
    assert with_other.ended_ns < 0.8 * alone.ended_ns
