"""What is counted, against what happened, and the names and numbers that Prometheus reads."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from protos import inference_pb2 as pb
from scheduler_svc.api.metrics_exporter import EngineCollector
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.metrics.histogram import Histogram
from scheduler_svc.engine.metrics.metrics import Metrics
from scheduler_svc.engine.metrics.model_metrics import MAX_NAMES, ModelMetrics
from scheduler_svc.errors import QueueFull, UnknownName
from tests.fakes import FakeWorker
from tests.scheduler.hand_turned_loop import Loop
from tests.scheduler.test_engine import client

NAMES = {  # as dashboards know them; counters carry `_total` in the text
    "octavo:num_requests_running",
    "octavo:num_requests_waiting",
    "octavo:num_requests_swapped",
    "octavo:num_requests_held",
    "octavo:num_workers",
    "octavo:kv_cache_usage_perc",
    "octavo:cpu_cache_usage_perc",
    "octavo:num_preemptions",
    "octavo:prefix_cache_queries",
    "octavo:prefix_cache_hits",
    "octavo:prompt_tokens",
    "octavo:generation_tokens",
    "octavo:request_success",
    "octavo:admission_rejections",
    "octavo:tenant_refusals",
    "octavo:worker_losses",
    "octavo:requests_resumed",
    "octavo:time_to_first_token_seconds",
    "octavo:aborted_wait_seconds",
    "octavo:inter_token_latency_seconds",
    "octavo:e2e_request_latency_seconds",
    "octavo:request_queue_time_seconds",
    "octavo:request_prompt_tokens",
    "octavo:request_generation_tokens",
    "octavo:iteration_tokens_total",
    "octavo:step_phase_seconds",
}


def read(engine: Engine) -> dict[str, float]:
    """Every sample by name and label values, as a Prometheus server parses them."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
    samples: dict[str, float] = {}
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    assert {family.name for family in families} == NAMES
    for family in families:
        for sample in family.samples:
            labels = filter(None, (sample.labels[label] for label in sorted(sample.labels)))  # no model has the name ""
            samples[" ".join([sample.name, *labels])] = sample.value
    return samples


@given(st.lists(st.floats(0, 20), min_size=1, max_size=50))
def test_a_histogram_counts_as_that_of_numpy(values: list[float]) -> None:
    bounds = [0.5, 1.0, 5.0]
    one_by_one, at_once = Histogram(bounds), Histogram(bounds)
    for value in values:
        one_by_one.observe(value)
    at_once.observe_all(np.array(values))
    edges = [-np.inf, *bounds, np.inf]  # numpy's buckets are open above; what is on a bound belongs below it here
    counts, _ = np.histogram(-np.array(values), -np.array(edges[::-1]))
    assert one_by_one.counts.tolist() == at_once.counts.tolist() == counts[::-1].tolist()
    assert one_by_one.total == pytest.approx(sum(values)) and at_once.total == pytest.approx(sum(values))


def test_requests_from_admission_to_their_ends() -> None:
    loop = Loop(max_waiting_requests=3)
    loop.submit("one", "two", "three")
    with pytest.raises(QueueFull):
        loop.submit("four")
    loop.turn()
    assert read(loop.engine)["octavo:num_requests_waiting"] == 3
    link = loop.join(max_num_seqs=2)
    loop.turn()
    samples = read(loop.engine)
    assert (samples["octavo:num_requests_running"], samples["octavo:num_requests_waiting"]) == (2, 1)
    assert samples["octavo:kv_cache_usage_perc"] == pytest.approx(2 / 32)
    loop.run_to_end(link)
    samples = read(loop.engine)
    assert samples["octavo:admission_rejections_total queue_full"] == 1
    assert samples["octavo:request_success_total length"] == 3
    assert samples["octavo:prompt_tokens_total"] == samples["octavo:prefix_cache_queries_total"] == 9
    assert samples["octavo:generation_tokens_total"] == 27
    assert samples["octavo:time_to_first_token_seconds_count"] == 3
    assert samples["octavo:inter_token_latency_seconds_count"] == 3 * 8
    assert samples["octavo:request_generation_tokens_sum"] == 27
    assert samples["octavo:request_generation_tokens_bucket 5"] == 0
    assert samples["octavo:request_generation_tokens_bucket 10"] == 3
    assert samples["octavo:iteration_tokens_total_sum"] == 3 * 3 + 3 * 8
    assert samples["octavo:step_phase_seconds_count schedule"] == samples["octavo:iteration_tokens_total_count"]
    phases = {"schedule", "encode", "wire", "queue", "cache_ops", "prepare", "forward", "sample", "decode", "process"}
    assert {name.split()[1] for name in samples if "step_phase_seconds_count" in name} == phases
    assert samples["octavo:num_requests_running"] == samples["octavo:kv_cache_usage_perc"] == 0


def test_times_between_tokens_are_those_between_answers_preempted_or_not() -> None:
    loop = Loop()
    link = loop.join()
    loop.submit("one")
    loop.turn()
    started = time.monotonic()
    loop.answer(link)
    loop.turn()
    before = loop.engine.metrics.total().inter_token_latency_s.total
    (worker,) = loop.engine.workers
    (group,) = worker.scheduler.groups.running
    while worker.in_flight:
        loop.answer(link)
        loop.engine.take_events()
    worker.scheduler._preemption.preempt_for_step(group, _plan())
    loop.run_to_end(link)
    elapsed = time.monotonic() - started
    histogram = loop.engine.metrics.total().inter_token_latency_s
    assert histogram.counts.sum() == 8, "the one across the preemption as well"
    assert before <= histogram.total <= elapsed


def test_tokens_that_come_after_a_preemption_are_generated_like_any_others() -> None:
    loop = Loop()
    link = loop.join()
    loop.submit("one")
    loop.turn()
    loop.answer(link)
    loop.turn()
    (worker,) = loop.engine.workers
    (group,) = worker.scheduler.groups.running
    assert len(worker.in_flight) == 2
    worker.scheduler._preemption.preempt_for_step(group, _plan())
    loop.run_to_end(link)
    metrics = loop.engine.metrics.total()
    assert len(loop.token_ids["one"]) == metrics.num_generation_tokens == 9
    assert metrics.inter_token_latency_s.counts.sum() == 8 - 2, "the slot they come from may be another's by then"


def test_tokens_of_beams_are_generated_too() -> None:
    with FakeWorker() as worker, client(worker) as it:
        it.submit("one", max_tokens=5, use_beam_search=True, best_of=3, ignore_eos=True)
        it.finish("one")
        samples = read(it.serving.engine)
    assert samples["octavo:request_success_total length fake-model"] == 1
    assert samples["octavo:time_to_first_token_seconds_count fake-model"] == 1
    assert samples["octavo:generation_tokens_total fake-model"] == 1 + 4 * 3, "they begin as one"


def test_each_model_by_its_name_revisions_together_and_what_was_counted_stays() -> None:
    loop = Loop()
    for fingerprint, name in (("1", "a"), ("2", "a"), ("3", "b")):
        loop.engine.metrics.introduce(fingerprint, name)
    links = {model: loop.join(f"worker {model}", model=model) for model in ("1", "2", "3")}
    for request_id, model in (("one", "1"), ("two", "2"), ("three", "3"), ("four", "3")):
        loop.engine.submit(loop.group(request_id, model=model))
    loop.turn()
    samples = read(loop.engine)
    assert samples["octavo:num_requests_running a"] == samples["octavo:num_requests_running b"] == 2
    assert samples["octavo:kv_cache_usage_perc a"] == pytest.approx(2 / 64)
    assert samples["octavo:kv_cache_usage_perc b"] == pytest.approx(2 / 32)
    while loop.engine.live_groups():
        for worker in loop.engine.workers:
            if worker.in_flight:
                loop.answer(links[worker.model])
        loop.turn()
    loop.engine.submit(loop.group("waits", model="4"))
    loop.engine.worker_lost(links["2"], "gone")
    loop.turn()
    samples = read(loop.engine)
    for name in ("a", "b"):
        assert samples[f"octavo:generation_tokens_total {name}"] == 18
        assert samples[f"octavo:request_success_total length {name}"] == 2
        assert samples[f"octavo:e2e_request_latency_seconds_count {name}"] == 2
    assert (samples["octavo:worker_losses_total a"], samples["octavo:worker_losses_total b"]) == (1, 0)
    assert samples["octavo:num_requests_waiting"] == 1, "of a model that nobody has named"
    total = loop.engine.metrics.total()
    assert total.num_generation_tokens == 36 and total.e2e_request_latency_s.counts.sum() == 4


def test_models_names_do_not_grow_without_end() -> None:
    metrics = ModelMetrics(counts_prefixes=True)
    for number in range(MAX_NAMES + 9):
        metrics.introduce(str(number), f"model {number}")
        metrics.of(str(number)).num_generation_tokens += 1
    assert len(metrics.by_name()) == MAX_NAMES + 1 and metrics.by_name()["others"].num_generation_tokens == 9
    assert metrics.total().num_generation_tokens == MAX_NAMES + 9


def test_requests_that_are_given_up_before_their_first_token_are_told_by_how_long_they_waited() -> None:
    now_ns = 0
    loop = Loop(clock=lambda: now_ns)
    link = loop.join(max_num_seqs=1)
    loop.submit("runs", "waits", "waits, too", "never ends")
    for _ in range(2):
        loop.turn()
        loop.answer(link)
    now_ns = 1_200_000_000
    assert loop.engine.abort("waits")
    loop.turn()
    now_ns = 30_000_000_000
    for request_id in ("waits, too", "runs"):
        assert loop.engine.abort(request_id)
        loop.turn()
    samples = read(loop.engine)
    assert samples["octavo:request_success_total abort"] == 3
    assert samples["octavo:time_to_first_token_seconds_count"] == 1
    assert samples["octavo:aborted_wait_seconds_count"] == 2, "one had begun, and one still waits"
    assert samples["octavo:aborted_wait_seconds_bucket 1"] == 0
    assert samples["octavo:aborted_wait_seconds_bucket 2.5"] == 1
    assert samples["octavo:aborted_wait_seconds_sum"] == pytest.approx(31.2)


def test_what_is_of_no_model_is_told_once_something_was_counted() -> None:
    metrics = ModelMetrics(counts_prefixes=True)
    assert list(metrics.by_name()) == [""]
    metrics.introduce("1", "a")
    assert list(metrics.by_name()) == ["a"]
    for count in ("num_worker_losses", "num_finished", "e2e_request_latency_s", "phase_s"):
        nameless = metrics._by_name[""] = Metrics(counts_prefixes=True)
        assert not nameless.has_counted()
        if count == "num_worker_losses":
            nameless.num_worker_losses += 1
        elif count == "num_finished":
            nameless.num_finished[FinishReason.ERROR] += 1
        elif count == "phase_s":
            nameless.phase_s["schedule"] = Histogram([1.0])
        else:
            nameless.e2e_request_latency_s.observe(0.1)
        assert list(metrics.by_name()) == ["", "a"], count


def _plan() -> Any:
    from scheduler_svc.core.step_plan import SchedulingBudget, StepPlan

    return StepPlan(SchedulingBudget(0, 0))


def test_a_request_begins_once_however_many_outputs_it_has() -> None:
    loop = Loop()
    link = loop.join()
    group = loop.group("two", num_outputs=2)
    loop.engine.submit(group)
    loop.run_to_end(link)
    samples = read(loop.engine)
    assert samples["octavo:time_to_first_token_seconds_count"] == 1
    assert samples["octavo:prompt_tokens_total"] == 3
    assert samples["octavo:request_success_total length"] == 1
    assert samples["octavo:generation_tokens_total"] == 18


def test_requests_without_a_slot_are_swapped_or_wait() -> None:
    loop = Loop()
    loop.join()
    loop.submit("one", "two", "three")
    loop.turn()
    (worker,) = loop.engine.workers
    scheduler = worker.scheduler
    scheduler._preemption.preempt_for_step(next(iter(scheduler.groups.running)), _plan())
    swapped = next(iter(scheduler.groups.running))
    scheduler.groups.running.remove(swapped)
    scheduler.groups.swapped.append(swapped)
    samples = read(loop.engine)
    names = ("num_requests_running", "num_requests_waiting", "num_requests_swapped")
    assert [samples[f"octavo:{name}"] for name in names] == [1, 1, 1]


def test_aborts_errors_and_losses() -> None:
    loop = Loop(max_worker_losses=1)
    link = loop.join()
    loop.submit("lost", "aborted")
    loop.turn()
    loop.engine.abort("aborted")
    loop.turn()
    loop.engine.worker_lost(link, "gone")
    loop.turn()
    samples = read(loop.engine)
    assert samples["octavo:request_success_total abort"] == 1
    assert samples["octavo:request_success_total error"] == 1
    assert samples["octavo:worker_losses_total"] == 1
    assert samples["octavo:e2e_request_latency_seconds_count"] == 2


def test_a_request_for_an_adapter_that_is_not_there_is_a_rejection() -> None:
    loop = Loop()
    loop.join(max_loras=1)
    loop.turn()
    with pytest.raises(UnknownName):
        loop.engine.submit(loop.group("one", adapter="none"))
    assert read(loop.engine)["octavo:admission_rejections_total unknown_name"] == 1


def test_preemptions_by_mode() -> None:
    from scheduler_svc.leases.step_statistics import AnsweredStep

    loop = Loop()
    link = loop.join()
    loop.submit("one")
    loop.turn()
    (worker,) = loop.engine.workers
    step = worker.in_flight[0]
    step.num_preempted, step.num_swapped_out_groups = 5, 2
    seen: list[AnsweredStep] = []
    stop = loop.engine.observe_steps(lambda _, answered: seen.append(answered))
    loop.answer(link)
    loop.turn()
    stop()
    loop.run_to_end(link)
    assert [answered.step for answered in seen] == [step]
    samples = read(loop.engine)
    assert samples["octavo:num_preemptions_total swap"] == 2
    assert samples["octavo:num_preemptions_total recompute"] == 3


def test_resumed_requests_are_counted() -> None:
    loop = Loop()
    group = loop.group("again", resumed_token_ids=[[5, 6]])
    group.sampling_params.CopyFrom(pb.SamplingParams(seed=1))
    loop.engine.submit(group)
    loop.submit("new")
    loop.run_to_end(loop.join())
    samples = read(loop.engine)
    assert samples["octavo:requests_resumed_total"] == 1
    assert samples["octavo:generation_tokens_total"] == 7 + 9
    assert loop.engine.metrics.total().num_finished[FinishReason.LENGTH] == 2
