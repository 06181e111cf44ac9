"""What `octavo serve` gives each of its processes."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from octavo.serving.plan import PlanError, ServeConfig, plan
from octavo.shared.ports import PortInUse, free_port
from octavo.shared.processes.supervisor import Child
from scheduler_svc.config import SchedulerConfig
from worker_svc.config import WorkerConfig
from worker_svc.host.memory import GIB


def workers_of(num_workers: int, **options: Any) -> list[Child]:
    _, (_, *workers) = plan(ServeConfig(workers=num_workers), SchedulerConfig(port=0), WorkerConfig(**options))
    assert len(workers) == num_workers
    return workers


def value(child: Child, flag: str) -> str:
    """Of an option that is not at its default."""
    return next(each.split("=", 1)[1] for each in child.command if each.startswith(f"--{flag}="))


@pytest.mark.parametrize(("num_workers", "share", "each"), [(1, 0.5, 0.5), (2, 1.0, 0.5), (3, 0.6, 0.2)])
def test_workers_divide_the_memory_among_them(num_workers, share, each):
    shares = [float(value(worker, "memory-share")) for worker in workers_of(num_workers, memory_share=share)]
    assert shares == pytest.approx([each] * num_workers)


def test_more_memory_than_there_is_for_all_of_them_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr("worker_svc.host.memory.available_bytes", lambda: 10 * GIB)
    assert len(workers_of(2, kv_cache_memory=4.0, swap_space=1.0)) == 2
    with pytest.raises(PlanError, match=r"3 workers with 5 GiB of cache .* 10 GiB are free"):
        workers_of(3, kv_cache_memory=4.0, swap_space=1.0)
    with pytest.raises(PlanError, match=r"1 workers of 3 ranks with 5 GiB of cache .* 10 GiB are free"):
        workers_of(1, kv_cache_memory=4.0, swap_space=1.0, pipeline_parallel_size=3)


def test_a_tokenizer_by_name_is_found_by_the_workers_alone():
    named = SchedulerConfig(port=0, tokenizer=Path("other-model"))
    _, (scheduler, worker) = plan(ServeConfig(), named, WorkerConfig(tokenizer="other-model"))
    assert value(worker, "tokenizer") == "other-model"
    assert not any(argument.startswith("--tokenizer") for argument in scheduler.command)


def test_a_gpus_cache_takes_nothing_of_the_host(monkeypatch):
    monkeypatch.setattr("worker_svc.host.memory.available_bytes", lambda: 10 * GIB)
    assert len(workers_of(3, kv_cache_memory=40.0, device="cuda")) == 3
    with pytest.raises(PlanError, match=r"3 workers with 5 GiB of swap space each are too many"):
        workers_of(3, kv_cache_memory=40.0, swap_space=5.0, device="cuda")


@pytest.mark.parametrize(
    ("num_workers", "asked", "expected"),
    [(1, "cuda", ["cuda"]), (3, "cuda", ["cuda:0", "cuda:1", "cuda:2"]), (2, "cuda:1", ["cuda:1"] * 2)],
)
def test_each_of_several_workers_has_a_gpu_of_its_own_unless_one_is_named(num_workers, asked, expected):
    assert [value(worker, "device") for worker in workers_of(num_workers, device=asked)] == expected


def test_a_gateway_stands_before_the_scheduler_where_a_port_for_http_is_asked_for():
    scheduler = SchedulerConfig(host="127.0.0.1", port=free_port(), drain_timeout=7.0)
    address, children = plan(ServeConfig(http_port=free_port()), scheduler, WorkerConfig())
    (gateway,) = (each for each in children if each.is_front)
    assert (value(gateway, "scheduler"), gateway.drain_s, gateway.essential) == (address, 7.0, False)
    _, without = plan(ServeConfig(), SchedulerConfig(port=0), WorkerConfig())
    assert not any(each.is_front for each in without)


def test_all_parts_are_told_where_traces_go_and_how_many():
    endpoint = "http://127.0.0.1:4317"
    scheduler = SchedulerConfig(port=0, otlp_traces_endpoint=endpoint, trace_sampling=0.01, trace_parents=False)
    _, children = plan(ServeConfig(http_port=free_port()), scheduler, WorkerConfig(otlp_traces_endpoint=endpoint))
    assert [value(child, "otlp-traces-endpoint") for child in children] == [endpoint] * 3
    begin_traces = children[:2]
    assert [value(child, "trace-sampling") for child in begin_traces] == ["0.01"] * 2
    assert all("--no-trace-parents" in child.command for child in begin_traces)


def test_a_port_for_http_that_is_taken_is_told_by_its_own_flag():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(PortInUse, match="--http-port chooses another"):
            plan(ServeConfig(http_port=taken.getsockname()[1]), SchedulerConfig(port=0), WorkerConfig())


def test_two_services_on_one_port_are_refused_before_a_model_is_loaded():
    port = free_port()
    with pytest.raises(PlanError, match=f"^port and http_port are both {port}: each needs a port of its own$"):
        plan(ServeConfig(http_port=port), SchedulerConfig(port=port), WorkerConfig())
    with pytest.raises(PlanError, match=r"^http_port and metrics_port are both"):
        plan(ServeConfig(http_port=port), SchedulerConfig(port=0, metrics_port=port), WorkerConfig())
    plan(ServeConfig(), SchedulerConfig(port=0, metrics_port=0, control_port=0), WorkerConfig())


def test_adapters_that_no_worker_would_take_are_refused():
    named = SchedulerConfig(port=0, lora_modules=("a=/a",))
    with pytest.raises(PlanError, match="lora_modules names adapters, which workers take with --enable-lora alone"):
        plan(ServeConfig(), named, WorkerConfig())
    plan(ServeConfig(), named, WorkerConfig(enable_lora=True))
