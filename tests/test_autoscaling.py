"""The HPA rule against Kubernetes' own examples, pods that start and drain, and days that can be worked out by hand."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from deploy.kubernetes import make_chart
from octavo.bench.autoscaling import days, manifest, play
from octavo.bench.autoscaling.control import HpaControl
from octavo.bench.autoscaling.hpa import Autoscaler, Behavior, Metric, Policy, Reading, Rule, replicas_for
from octavo.bench.autoscaling.judged import Objective, judge, num_turns
from octavo.bench.autoscaling.pods import Deployment
from octavo.bench.autoscaling.signals import SIGNALS, Sample, signal_of
from octavo.bench.fleet.outcomes import Outcome
from octavo.bench.fleet.requests import Load, Request
from octavo.bench.fleet.simulation import Simulation
from octavo.bench.fleet.worker import WorkerKind
from octavo.cli import main

AVERAGE = Metric("m", "External", "AverageValue", 100.0)
WHOLE = Metric("m", "External", "Value", 100.0)
CPU = Metric("cpu", "Resource", "Utilization", 0.5)
AT_ONCE = Behavior(0.0, (Policy("Percent", 1000, 15.0), Policy("Pods", 100, 15.0)))


def ready(count: int, starting: int = 0) -> dict[str, bool]:
    return {f"p{n}": n < count for n in range(count + starting)}


# ---- one metric -----------------------------------------------------------------------------------------------------


def test_twice_the_target_doubles_and_half_of_it_halves() -> None:
    """The example of the documentation: 200m of 100m doubles, 50m halves."""
    assert replicas_for(WHOLE, 4, ready(4), 200.0) == 8
    assert replicas_for(WHOLE, 4, ready(4), 50.0) == 2
    assert replicas_for(AVERAGE, 4, ready(4), 800.0) == 8
    assert replicas_for(AVERAGE, 4, ready(4), 401.0 * 1.2) == 5, "rounded up"


@pytest.mark.parametrize(("reading", "wanted"), [(110.0, 4), (90.0, 4), (111.0, 5), (74.9, 3)])
def test_within_a_tenth_nothing_changes(reading: float, wanted: int) -> None:
    assert replicas_for(WHOLE, 4, ready(4), reading) == wanted


def test_a_value_of_the_whole_counts_pods_that_are_ready() -> None:
    """Four of which two still start: what two have above target asks for three, fewer than there are."""
    assert replicas_for(WHOLE, 4, ready(2, starting=2), 150.0) == 3
    assert replicas_for(AVERAGE, 4, ready(2, starting=2), 600.0) == 6, "an average is over all that are to be there"


def test_pods_that_are_not_ready_count_as_idle_when_pods_would_come() -> None:
    assert replicas_for(CPU, 3, ready(3), {"p0": 0.9, "p1": 0.9, "p2": 0.9}) == 6
    busy = {"p0": 0.9, "p1": 0.9, "p2": 0.9}
    assert replicas_for(CPU, 5, ready(3, starting=2), busy) == 5, "0.54 over five is within a tenth of 0.5"
    assert replicas_for(CPU, 4, ready(3, starting=1), busy) == 6, "0.675 over four"


def test_pods_without_a_reading_are_idle_for_more_and_busy_for_fewer() -> None:
    pods_metric = Metric("m", "Pods", "AverageValue", 10.0)
    assert replicas_for(pods_metric, 4, ready(4), {"p0": 20.0, "p1": 20.0, "p2": 20.0}) == 6, "15 over four"
    assert replicas_for(pods_metric, 4, ready(4), {"p0": 2.0, "p1": 2.0, "p2": 2.0}) == 2, "4 over four"
    assert replicas_for(pods_metric, 2, ready(2), {"p0": 15.0}) == 2, "it would turn the other way"
    assert replicas_for(pods_metric, 2, ready(2), {}) is None


# ---- the rule -------------------------------------------------------------------------------------------------------


def rule(**changes: object) -> Rule:
    changed: Any = changes
    return dataclasses.replace(Rule(1, 100, (AVERAGE,), AT_ONCE, AT_ONCE), **changed)


def decide(scaler: Autoscaler, now_s: float, current: int, *readings: Reading) -> int:
    return scaler.decide(now_s, current, ready(current), readings)


def test_the_largest_of_several_metrics_wins_and_an_unknown_one_only_keeps_from_shrinking() -> None:
    both = rule(metrics=(AVERAGE, WHOLE))
    assert decide(Autoscaler(both), 0.0, 4, 800.0, 300.0) == 12
    assert decide(Autoscaler(both), 0.0, 4, None, 200.0) == 8
    assert decide(Autoscaler(both), 0.0, 4, 100.0, None) == 4
    assert decide(Autoscaler(both), 0.0, 4, None, None) == 4


def test_default_behaviour_adds_four_or_doubles_every_15_s_and_waits_five_minutes_before_it_shrinks() -> None:
    scaler = Autoscaler(Rule(1, 100, (AVERAGE,)))
    assert decide(scaler, 0.0, 1, 10_000.0) == 5
    assert decide(scaler, 15.0, 5, 10_000.0) == 10
    assert decide(scaler, 30.0, 10, 10_000.0) == 20
    at_s, count = 45.0, 20
    while decide(scaler, at_s, count, 100.0) == count:
        at_s += 15.0
    assert at_s == 30.0 + 300.0, "the last that asked for more was at 30 s"


def test_policies_of_the_documentation_4_pods_or_a_tenth_a_minute() -> None:
    """80 pods to 10: `Pods 4` and `Percent 10` of the documentation take 8 of 80, and 4 of 40, whichever is more."""
    down = Behavior(0.0, (Policy("Pods", 4, 60.0), Policy("Percent", 10, 60.0)))
    scaler, count, went = Autoscaler(rule(down=down)), 80, []
    for minute in range(12):
        wanted = decide(scaler, minute * 60.0, count, 1000.0)
        assert decide(scaler, minute * 60.0 + 30.0, wanted, 1000.0) == wanted, "not twice within a minute"
        went.append(count - wanted)
        count = wanted
    assert went[0] == 8 and went[1] == 8 and went[-1] == 4
    least = dataclasses.replace(down, select="Min")
    assert decide(Autoscaler(rule(down=least)), 0.0, 80, 1000.0) == 76
    off = dataclasses.replace(down, select="Disabled")
    assert decide(Autoscaler(rule(down=off)), 0.0, 80, 1000.0) == 80


def test_a_window_upwards_takes_the_least_of_what_was_asked_within_it() -> None:
    up = dataclasses.replace(AT_ONCE, stabilization_s=60.0)
    scaler = Autoscaler(rule(up=up))
    assert [decide(scaler, at_s, 2, 1000.0) for at_s in (0.0, 30.0, 59.0)] == [2, 2, 2]
    assert decide(scaler, 75.0, 2, 500.0) == 5, "of ten, ten and five"


def test_percent_of_few_is_rounded_up_and_a_minimum_and_maximum_hold() -> None:
    up = Behavior(0.0, (Policy("Percent", 10, 15.0),))
    assert decide(Autoscaler(rule(up=up)), 0.0, 1, 1000.0) == 2
    assert decide(Autoscaler(rule(up=up)), 0.0, 10, 10_000.0) == 11, "and ten percent of ten is one"
    assert decide(Autoscaler(rule(max_replicas=3)), 0.0, 2, 1000.0) == 3
    assert decide(Autoscaler(rule(min_replicas=3)), 0.0, 4, 0.0) == 3
    assert decide(Autoscaler(rule(min_replicas=3)), 0.0, 1, 0.0) == 3
    assert decide(Autoscaler(rule(max_replicas=3)), 0.0, 9, 900.0) == 3


@given(
    readings=st.lists(st.one_of(st.none(), st.floats(0, 1e5)), min_size=1, max_size=60),
    least=st.integers(1, 4),
    most=st.integers(4, 30),
    pods=st.integers(1, 5),
    period_s=st.sampled_from([15.0, 60.0, 120.0]),
    window_s=st.sampled_from([0.0, 30.0, 300.0]),
)
def test_bounds_policies_and_windows_hold_whatever_is_read(
    readings: list[float | None], least: int, most: int, pods: int, period_s: float, window_s: float
) -> None:
    behavior = Behavior(window_s, (Policy("Pods", pods, period_s),))
    scaler = Autoscaler(Rule(least, most, (AVERAGE,), behavior, behavior))
    counts = [least]
    for number, reading in enumerate(readings):
        counts.append(decide(scaler, 15.0 * number, counts[-1], reading))
        if reading is None:
            assert counts[-1] == counts[-2], "nobody knows"
    assert all(least <= count <= most for count in counts)
    steps = round(period_s / 15.0)
    changes = [after - before for before, after in itertools.pairwise(counts)]
    for place in range(1, len(counts)):
        # What went within the period before a rise may come again on top of it, and the other way round.
        lately, longer = changes[max(0, place - steps) : place], changes[max(0, place - 2 * steps) : place]
        assert sum(max(0, each) for each in lately) <= pods + sum(max(0, -each) for each in longer)
        assert sum(max(0, -each) for each in lately) <= pods + sum(max(0, each) for each in longer)


# ---- manifests and signals ------------------------------------------------------------------------------------------

KUBERNETES = make_chart.HERE


def test_the_shipped_manifests_are_one_rule_and_their_queries_are_those_that_are_simulated() -> None:
    hpa = manifest.read(manifest.SHIPPED)
    keda = manifest.read(KUBERNETES / "components/keda/keda.yaml")
    assert dataclasses.replace(keda, metrics=()) == dataclasses.replace(hpa, metrics=())
    assert [(signal_of(each).name, each.target_kind, each.target) for each in keda.metrics] == [
        (each.name, each.target_kind, each.target) for each in hpa.metrics
    ]
    adapter = yaml.safe_load((KUBERNETES / "prometheus-adapter.yaml").read_text(encoding="utf-8"))
    shipped = {each["name"]["as"]: each["metricsQuery"] for each in adapter["rules"]["external"]}
    assert shipped == {signal.name: signal.query for signal in SIGNALS if signal.query}


def test_what_the_shipped_rule_says() -> None:
    hpa = manifest.read(manifest.SHIPPED)
    assert (hpa.min_replicas, hpa.max_replicas) == (1, 8)
    assert {each.name: each.target for each in hpa.metrics}["octavo_kv_cache_usage"] == pytest.approx(0.6)
    assert hpa.down == Behavior(900.0, (Policy("Pods", 1, 120.0),))


BAD = {
    "kind: Pod": "0 HorizontalPodAutoscalers",
    "{]": "no YAML",
    "kind: HorizontalPodAutoscaler\nspec: {maxReplicas: 3}": "metrics",
    "kind: HorizontalPodAutoscaler\nspec: {minReplicas: 0, maxReplicas: 3, metrics: []}": "0 to 3",
    "kind: HorizontalPodAutoscaler\nspec: {maxReplicas: 3, metrics: [{type: Object}]}": "type Object",
    "kind: HorizontalPodAutoscaler\nspec: {maxReplicas: 3, metrics: [{type: External, external: {metric: {name: a},"
    " target: {type: Value, value: 1x}}}]}": "no quantity",
    "kind: ScaledObject\nspec: {minReplicaCount: 0, triggers: []}": "minReplicaCount is 0",
    "kind: ScaledObject\nspec: {minReplicaCount: 1, triggers: [{type: cron}]}": "type cron",
    "kind: HorizontalPodAutoscaler\nspec: {maxReplicas: 3, metrics: [{type: External, external: {metric: {name: a},"
    " target: {type: Value, value: 1}}}]}": "the metric 'a' is not simulated",
}


@pytest.mark.parametrize("text", BAD)
def test_a_manifest_that_cannot_be_played_is_one_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rule.yaml"
    path.write_text(text)
    assert main(["bench", "fleet", "--autoscale", str(path), *SMALL_DAY]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert BAD[text] in line


def sample(at_s: float, waiting: int, tokens: float, count: int) -> Sample:
    return Sample(at_s, 3, waiting, 1, 0.5, tokens, count, {"p0": at_s / 2})


def test_signals_are_what_their_queries_say() -> None:
    read = {signal.name: signal.read for signal in SIGNALS}
    samples = [sample(0.0, 0, 1000.0, 10), sample(15.0, 4, 1600.0, 12)]
    assert read["octavo_waiting_tokens"](samples) == 4 * 300.0
    assert read["octavo_waiting_tokens"](samples[1:]) == 4 * 256.0, "no prompt within the window"
    assert read["octavo_requests"](samples) == 3 + 4 + 1
    assert read["octavo_kv_cache_usage"](samples) == 0.5
    assert read["cpu"](samples) == {"p0": 0.5} and read["cpu"](samples[:1]) == {}


# ---- pods -----------------------------------------------------------------------------------------------------------

KIND = WorkerKind(step_ms=100, token_us=1000, max_num_seqs=4, cache_tokens=4096)


def test_pods_start_late_and_leave_at_once_and_every_request_has_its_tokens_once() -> None:
    requests = Load(requests=120, prompt_tokens=32, output_tokens=20, spread=0.5, rate=2.0).arrivals(3)
    simulation = Simulation([KIND], requests)
    deployment = Deployment(simulation, KIND, start_s=5.0)
    for at_s, replicas in ((3.0, 3), (6.0, 2), (20.0, 4), (22.0, 3), (40.0, 1), (45.0, 2), (46.0, 1)):
        simulation.at(at_s, partial(deployment.scale, replicas))
    run = simulation.run()
    assert [outcome.num_output_tokens for outcome in run.outcomes] == [each.num_output_tokens for each in requests]
    assert not any(outcome.error for outcome in run.outcomes)
    assert any(outcome.num_moves for outcome in run.outcomes), "some were on a worker that left"
    assert all(pod.ready_ns == pod.created_ns + 5_000_000_000 for pod in deployment.pods if pod.ready_ns)
    gone = [pod for pod in deployment.pods if pod.told_to_end_ns]
    never = [pod for pod in gone if pod.link is None]
    assert len(gone) == 5 and len(never) == 3, "two were told to end before they were ready, and the one at 46 s"
    for pod in gone:
        if pod.link is not None:
            assert pod.link.is_closed and 0 <= pod.ended_ns(1 << 60) - pod.told_to_end_ns <= 2e9, "within its steps"


def test_the_last_worker_ends_its_requests_before_it_goes() -> None:
    request = Request(0, ((1, 16),), 30)
    simulation = Simulation([KIND], [request])
    deployment = Deployment(simulation, KIND, start_s=1.0)
    simulation.at(1.0, lambda: deployment.scale(0))
    (outcome,) = simulation.run().outcomes
    (pod,) = deployment.pods
    assert (outcome.num_output_tokens, outcome.num_moves) == (30, 0)
    assert outcome.ended_ns <= pod.ended_ns(1 << 60) < outcome.ended_ns + 1e9


# ---- figures --------------------------------------------------------------------------------------------------------


def test_worker_hours_count_from_creation_to_end() -> None:
    """One pod for all 100 s, one from 10 s on which is told at 50 s and idle by then, one that never starts."""
    requests = [Request(0, ((1, 16),), 2), Request(100_000_000_000, ((2, 16),), 2)]
    simulation = Simulation([KIND], requests)
    deployment = Deployment(simulation, KIND, start_s=20.0)
    for at_s, replicas in ((10.0, 2), (50.0, 1), (60.0, 2), (70.0, 1)):
        simulation.at(at_s, partial(deployment.scale, replicas))
    run = simulation.run()
    assert deployment.worker_s(100_000_000_000) == pytest.approx(100 + 40 + 10, abs=0.01)
    judged = judge("x", run, deployment, Objective(1.0, 200.0), 100.0)
    assert (judged.worker_hours, judged.changes, judged.turns, judged.most_workers) == (round(150 / 3600, 2), 4, 3, 2)
    assert judged.good == 1.0 and judged.is_kept
    assert judged.windows[0]["arrivals_per_s"] == round(2 / 300, 4) and judged.windows[0]["workers"] == 0.5


def test_a_request_is_good_when_both_of_its_times_are() -> None:
    outcome = Outcome(Request(0, ((1, 1),), 5), 0, 2_000_000_000, 2_400_000_000, 5)
    assert Objective(2.0, 100.0).is_met(outcome)
    assert not Objective(1.9, 100.0).is_met(outcome) and not Objective(2.0, 99.0).is_met(outcome)
    assert Objective(2.0, 25.0).is_met(outcome, tokens_each=4)
    outcome.error = "lost"
    assert not Objective(2.0, 100.0).is_met(outcome)


def test_turns_are_changes_back_within_half_an_hour() -> None:
    minute = 60_000_000_000
    assert num_turns([(0, 1), (minute, 2), (2 * minute, 3), (20 * minute, 2), (90 * minute, 3)]) == 1


def test_who_knows_orders_workers_before_they_are_needed() -> None:
    """Windows of 300 s with 30, 90 and 30 arrivals, 0.1 a second and worker: 1, 3 and 1 of them."""
    arrivals = [*range(0, 300, 10), *(300 + n * 300 / 90 for n in range(90)), *range(600, 900, 10)]
    requests = [Request(round(at_s * 1e9), ((n, 1),), 1) for n, at_s in enumerate(arrivals)]
    scene = play.Scene(KIND, requests, Objective(), start_s=120.0)
    assert play.plan_of_one_who_knows(scene, 0.1, 1.0) == [(0.0, 1), (180.0, 3), (600.0, 1)]
    assert play.plan_of_one_who_knows(dataclasses.replace(scene, start_s=400.0), 0.1, 1.0) == [(0.0, 3), (600.0, 1)]
    assert play.plan_of_one_who_knows(scene, 0.1, 0.5, least=2) == [(0.0, 2), (180.0, 6), (600.0, 2)]


def test_a_day_follows_its_curve() -> None:
    day = dataclasses.replace(days.DAYS["chat"], bursts=0, peak_rate=0.2)
    requests = day.requests(0)
    assert [each.at_ns for each in requests] == sorted(each.at_ns for each in requests)
    expected = sum(day.rate(minute * 60.0) * 60 for minute in range(1440))
    assert len(requests) == pytest.approx(expected, rel=4 / expected**0.5)
    hours = [sum(hour <= each.at_ns / 3.6e12 < hour + 1 for each in requests) for hour in (3, 15)]
    assert hours[1] > 5 * hours[0]
    coarse = days.coarser([Request(0, ((5, 512), (6, 10)), 3)], 16)
    assert coarse[0].content == ((5, 32), (6, 1)) and coarse[0].num_output_tokens == 2


SMALL_DAY = ["--day", "documents", "--peak-rate", "0.01", "--tokens-each", "50", "--step-ms", "60", "--token-us", "600"]


def test_a_day_is_the_same_each_time_and_a_rule_that_sees_load_adds_workers() -> None:
    kind = WorkerKind(step_ms=600, token_us=6000, max_num_seqs=4, cache_tokens=4096)
    requests = Load(requests=60, prompt_tokens=24, output_tokens=12, spread=0.5, rate=0.6).arrivals(0)
    scene = play.Scene(kind, requests, Objective(5.0, 2000.0, 0.5), start_s=20.0)
    wanted = Rule(1, 4, (Metric("octavo_requests", "External", "AverageValue", 2.0),))
    first, second = (play.with_rule("rule", scene, wanted) for _ in range(2))
    assert first == second
    assert first.most_workers > 1 and first.failed == 0 and first.requests == 60
    alone = play.with_plan("one", scene, [(0.0, 1)])
    assert first.good > alone.good and first.worker_hours > alone.worker_hours
    assert play.ideal(scene).is_kept and play.fixed(scene, 1).is_kept
    simulation = Simulation([kind], requests)
    with pytest.raises(ValueError, match="not simulated"):
        HpaControl(simulation, Deployment(simulation, kind, 1.0), Rule(1, 2, (CPU, WHOLE)), 1)


def test_the_command_plays_a_day(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "day.svg"
    assert main(["bench", "fleet", "--autoscale", *SMALL_DAY, "--json", "--picture", str(path)]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["failed"] == 0 and row["worker_hours"] >= 24 and len(row["windows"]) == 288
    assert {"workers", "what arrives"} <= set(re.findall(r">([^<>]+)</text>", path.read_text()))


@pytest.mark.parametrize(
    "flags",
    [
        ["--day", "chat"],
        ["--compare"],
        ["--autoscale", "--workers", "2"],
        ["--autoscale", "--rate", "2"],
        ["--autoscale", "--requests", "2"],
        ["--autoscale", "--shards", "2"],
        ["--autoscale", "--speeds", "1,2"],
        ["--autoscale", "--trace", "x", "--day", "chat"],
        ["--autoscale", "--trace", "x", "--peak-rate", "1"],
        ["--autoscale", "--slo-share", "2"],
    ],
)
def test_flags_that_do_not_go_together_are_one_line(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["bench", "fleet", *flags])
    except SystemExit as ended:
        code = int(ended.code or 0)
    shown = capsys.readouterr()
    assert code == 2 and len(shown.err.splitlines()) == 1 and not shown.out
