"""What `octavo serve` starts: one scheduler and N workers on this machine, their ports, threads and environment."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.shared.cores import available_cores
from octavo.shared.options import COMMON, check_port, environment_without_options, option, to_arguments
from octavo.shared.ports import LOOPBACK, check_port_is_free, free_port, free_ports, is_loopback, reachable
from octavo.shared.processes.module_command import module_command
from octavo.shared.tracing.options import check_tracing_packages

if TYPE_CHECKING:
    from octavo.shared.processes.supervisor import Child
    from scheduler_svc.config import SchedulerConfig
    from worker_svc.config import WorkerConfig

# How often a thread of OpenMP looks for work at a barrier before it sleeps. Such threads have sampling and torch's
# operators; the layers have their own (`kernels/cpu/native/threads.cpp`). The figures are older than that, of passes
# with hundreds of barriers: two cores, SmolLM2 over `octavo serve`, tokens/s of W1 and W2 (benchmarks.thread_settings),
# alone on a Zen 5, then on a Zen 4 alone and beside one busy neighbour, with fewer threads then (`giving_way`):
#     never (passive)   126  389    73  229    79  136        20,000 looks    162  379    97  238    64  136
#     1,000 looks       153  393   112  226    73  129        for ever        149  396   119  234    57   84
#     one thread that never waits: 134  238    89  138    81  138
SPIN_COUNT = "1000"


class PlanError(Exception):
    """Something that would keep the services from starting. The message is one line for the user."""


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """Options of `octavo serve` itself; it takes those of the scheduler and the worker as well."""

    workers: int = option(1, "worker processes to start", group=COMMON)
    http_port: int | None = option(
        None, "port for OpenAI's API over HTTP, 0 takes a free one (default: none)", group=COMMON, metavar="PORT"
    )

    live_panel: bool | None = option(
        None,
        "show on the page of --http-port what the scheduler does (default: on loopback, without --control-port)",
        group=COMMON,
    )

    demo: bool = option(
        False,
        "let that page withhold cache blocks of workers, to watch preemption; not for a server in use",
        group=COMMON,
    )

    def __post_init__(self) -> None:
        check_port("http_port", self.http_port)
        if self.workers < 1:
            raise ValueError(f"workers is {self.workers}, at least 1 is accepted")


def plan(serve: ServeConfig, scheduler: SchedulerConfig, worker: WorkerConfig) -> tuple[str, list[Child]]:
    """The address clients will use, and the children; workers share cores and memory. Raises PlanError, BindError,
    OptionError.

    How the parts know each other is in their options already (`octavo.serving.links`).
    """
    if scheduler.lora_modules and not worker.enable_lora:
        raise PlanError("lora_modules names adapters, which workers take with --enable-lora alone")
    if scheduler.otlp_traces_endpoint:
        check_tracing_packages()
    check_memory(serve.workers, worker)
    port = scheduler.port or free_port()
    check_port_is_free(scheduler.host, port)
    taken = [port, serve.http_port, scheduler.metrics_port, scheduler.control_port]
    _check_ports_differ(dict(zip(("port", "http_port", "metrics_port", "control_port"), taken, strict=True)))
    ports = free_ports(serve.workers, besides=taken)
    num_ranks = worker.num_ranks
    threads = worker.num_threads
    if not threads and not os.environ.get("OMP_NUM_THREADS"):  # which a worker obeys that is told no number
        threads = max(1, available_cores() // (serve.workers * num_ranks))
    worker = dataclasses.replace(worker, num_threads=threads, memory_share=worker.memory_share / serve.workers)
    scheduler = dataclasses.replace(
        scheduler,
        port=port,
        worker=tuple(f"{LOOPBACK}:{worker_port}" for worker_port in ports),
        tokenizer=None,  # that of the workers, which find it by name, too
    )
    drained = _child("scheduler", "scheduler", scheduler, environment_without_options(), essential=True)
    children = [dataclasses.replace(drained, drain_s=scheduler.drain_timeout)]
    address = reachable(scheduler.host, port)
    if serve.http_port is not None:
        children.append(_gateway(serve, address, scheduler))
    for index, worker_port in enumerate(ports):
        name = "worker" if serve.workers == 1 else f"worker {index}"
        config = dataclasses.replace(
            worker, host=LOOPBACK, port=worker_port, device=device_of(index, serve.workers, worker.device, num_ranks)
        )
        children.append(_child(name, "worker", config, worker_environment(threads), essential=False))
    return address, children


def _check_ports_differ(ports: dict[str, int | None]) -> None:
    """Raises PlanError for two services on one port, before a model is loaded for the second."""
    first: dict[int, str] = {}
    for name, port in ports.items():
        if port and first.setdefault(port, name) != name:
            raise PlanError(f"{first[port]} and {name} are both {port}: each needs a port of its own")


def _gateway(serve: ServeConfig, address: str, scheduler: SchedulerConfig) -> Child:
    """Before the scheduler at `address`, and reached from where that is, with the same certificates."""
    from gateway_svc.config import GatewayConfig

    port = serve.http_port or free_port()
    check_port_is_free(scheduler.host, port, "--http-port")
    is_local = is_loopback(scheduler.host)
    is_shown = is_local and scheduler.control_port is None  # which the panel asks
    shows_live = is_shown if serve.live_panel is None else serve.live_panel
    sockets = [scheduler.local_socket(frontend) or address for frontend in range(scheduler.frontends)]
    config = GatewayConfig(
        host=scheduler.host,
        port=port,
        scheduler=",".join(dict.fromkeys(sockets)),
        tls_cert_file=scheduler.tls_cert_file,
        tls_key_file=scheduler.tls_key_file,
        tls_client_ca_file=scheduler.tls_client_ca_file,
        live_panel=shows_live,
        insecure=scheduler.insecure or scheduler.knows_callers,  # which its requests need as well
        demo=serve.demo,
        drain_timeout=scheduler.drain_timeout,
        metrics_port=0 if scheduler.metrics_port == 0 else None,
        log_level=scheduler.log_level,
        otlp_traces_endpoint=scheduler.otlp_traces_endpoint,
        trace_sampling=scheduler.trace_sampling,
        trace_parents=scheduler.trace_parents,
    )
    child = _child("gateway", "gateway", config, environment_without_options(), essential=False)
    return dataclasses.replace(child, drain_s=config.drain_timeout, is_front=True)


def _child(name: str, command: str, config: object, environment: Mapping[str, str], *, essential: bool) -> Child:
    # Here, with structlog: the worker of an `LLM` starts 40 ms sooner without.
    from octavo.shared.processes.supervisor import Child

    arguments = module_command("octavo", command, *to_arguments(config))
    return Child(name, arguments, environment, essential)


def worker_environment(num_threads: int) -> dict[str, str]:
    """The environment of a worker that computes with `num_threads` threads; what the user has set stays as it is."""
    return {"OMP_NUM_THREADS": str(num_threads), **waiting_threads(), **environment_without_options()}


def waiting_threads() -> dict[str, str]:
    """How threads of a worker wait for one another, where the user has not said. Read when OpenMP is loaded."""
    is_set = "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ
    return {} if is_set else {"GOMP_SPINCOUNT": SPIN_COUNT}


def device_of(index: int, num_workers: int, asked: str, num_ranks: int = 1) -> str:
    """The first device of one worker: with `cuda`, several workers have a GPU each, or as many as they have ranks; a
    GPU that is named is shared."""
    return f"cuda:{index * num_ranks}" if asked == "cuda" and num_workers > 1 else asked


def computes_on_host(device: str) -> bool:
    """Whether a worker's cache is in this machine's own memory, as far as can be told without torch."""
    return device == "cpu" or (device == "auto" and not Path("/dev/nvidiactl").exists())


def check_memory(num_workers: int, worker: WorkerConfig) -> None:
    """Raises PlanError where the workers together were told to take more memory than there is."""
    from worker_svc.host.memory import GIB, available_bytes

    cache = (worker.kv_cache_memory or 0.0) if computes_on_host(worker.device) else 0.0
    each, free = cache + (worker.swap_space or 0.0), available_bytes() / GIB
    if num_workers * worker.num_ranks * each > free:
        what = "cache and swap space" if cache else "swap space"
        of_ranks = f" of {worker.num_ranks} ranks" if worker.num_ranks > 1 else ""
        raise PlanError(
            f"{num_workers} workers{of_ranks} with {each:.3g} GiB of {what} each are too many: {free:.3g} GiB are free"
        )
