"""What tracing costs: `python -m benchmarks.tracing` (about five minutes, two cores).

Counted is CPU time of the scheduler's process, all threads: a core is what limits a scheduler, and its throughput falls
as this time grows. A simulated worker answers at once, and a collector of its own process takes the spans. Whether a
request is traced is said by its client.

    own     the share of that time that is spent in the code of tracing, each part with a clock around it. On a busy
            machine this is the sharp measure, if a little too large, as the clocks count themselves
    loops   two schedulers side by side, one without tracing, one with it, and closed loops of half a second in random
            order, with none, 1 % and all of the requests traced. What others do on the machine only adds to the time of
            a token, so loops of one kind are compared by their lower quartiles
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from octavo.bench import machine, streaming
from octavo.bench.figures import percentile
from octavo.shared.options import environment_without_options
from octavo.shared.ports import LOOPBACK, free_ports
from octavo.shared.rpc import CHANNEL_OPTIONS
from octavo.shared.tracing.context import TraceContext
from protos import inference_pb2 as pb

RESULTS = Path(__file__).parent / "results"
OFF, ON = "off", "none"  # without tracing; with it, and no request traced
# By mode: of how many requests one is traced, its client saying so; 0: none is.
MODES = {OFF: 0, ON: 0, "1 %": 100, "100 %": 1}
BESIDE = {ON: OFF, "1 %": ON, "100 %": ON}  # what each is compared with
RARELY = {"100 %": 4}  # in every fourth round: what it costs is seen sooner
OUTPUT_TOKENS = {"short": 16, "long": 256}  # of a request, by workload
NUM_TOKENS = {"short": 4_096, "long": 32_768}  # of one closed loop
OWN_SHARES = (ON, "1 %", "100 %")
OWN_TOKENS = {"short": 49_152, "long": 393_216}
NUM_CHANNELS = 8
EXPORT_MS, EXPORTED_S = 200, 0.35  # how often spans are exported in loops, and after what time they certainly are
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


def main() -> int:
    """Measures, prints, and keeps the result unless told not to."""
    parser = argparse.ArgumentParser(description="Measures what tracing costs a scheduler.")
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=12, help="with one pair of schedulers")
    parser.add_argument("--starts", type=int, default=3, help="pairs of schedulers, one after the other")
    parser.add_argument("--no-results", action="store_true", help="print only")
    parser.add_argument("--scheduler", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("--collector", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.collector:
        return _collect(arguments.collector)
    if arguments.scheduler:
        return _run_with_clocks(arguments.scheduler)
    facts, loops = machine.describe(), []
    own = [_own(share, workload, arguments.streams) for workload in OUTPUT_TOKENS for share in OWN_SHARES]
    for start in range(arguments.starts):
        loops += _measure(arguments.streams, arguments.rounds, start)
    sizes = {"streams": arguments.streams, "prompt_tokens": streaming.PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS}
    settings = {"starts": arguments.starts, "rounds_a_start": arguments.rounds, "tokens_a_loop": NUM_TOKENS}
    result = {**sizes, **settings, "own": own, "cost": costs(loops), "loops": loops}
    print(table(result))
    if not arguments.no_results:
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        path = RESULTS / f"{date[:10]}-tracing-{machine.slug(facts)}.json"
        path.write_text(json.dumps({"date": date, "machine": facts, **result}, indent=1) + "\n")
        print(f"written: {path}")
    return 0


@dataclass
class _Service:
    """A scheduler, and ways to it."""

    address: str
    pid: int
    channels: Sequence[grpc.aio.Channel] = ()

    def cpu_ns(self) -> int:
        """Of all threads that it has now; a tick of /proc/PID/stat is a hundredth of a second."""
        files = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(file.read_text().split()[0]) for file in files)


def _measure(num_streams: int, num_rounds: int, start: int) -> list[dict[str, Any]]:
    """With a pair of schedulers that are started for it."""
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        (port,) = free_ports(1)
        stack.enter_context(_process(cores[-1], sys.executable, "-m", "benchmarks.tracing", f"--collector={port}"))
        off, on = (stack.enter_context(_service(each, port, num_streams, cores)) for each in (False, True))
        os.sched_setaffinity(0, {cores[-1]})
        try:
            return asyncio.run(
                _loops({mode: off if mode == OFF else on for mode in MODES}, num_streams, num_rounds, start)
            )
        finally:
            os.sched_setaffinity(0, cores)


@contextmanager
def _service(
    traces: bool, collector: int, num_streams: int, cores: list[int], clocks: Path | None = None
) -> Iterator[_Service]:
    """On the first core; its worker has the last, as the load does. `clocks`: where what they count is written."""
    port, worker_port = free_ports(2)
    worker = ["-m", "octavo.bench.simulated_worker", f"--port={worker_port}", f"--max-num-seqs={num_streams}"]
    often = {"OTEL_BSP_SCHEDULE_DELAY": str(EXPORT_MS)} if clocks is None else {}
    module = ["octavo"] if clocks is None else ["benchmarks.tracing", "--scheduler", str(clocks)]
    scheduler = ["-m", *module, "scheduler", f"--worker={LOOPBACK}:{worker_port}", f"--port={port}"]
    scheduler += ["--log-level=warning", "--metrics-port=0"]
    if traces:
        scheduler += [f"--otlp-traces-endpoint=http://{LOOPBACK}:{collector}", "--trace-sampling=0"]
    with (
        _process(cores[-1], sys.executable, *worker),
        _process(cores[0], sys.executable, *scheduler, environment=often) as process,
    ):
        yield _Service(f"{LOOPBACK}:{port}", process.pid)


def _own(mode: str, workload: str, num_streams: int) -> dict[str, Any]:
    """Runs a scheduler with clocks in it, and reads what these have counted."""
    cores, tokens_each = sorted(os.sched_getaffinity(0)), OUTPUT_TOKENS[workload]
    (collector,) = free_ports(1)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        told = Path(folder) / "told.json"
        stack.enter_context(_process(cores[-1], sys.executable, "-m", "benchmarks.tracing", f"--collector={collector}"))
        with _service(True, collector, num_streams, cores, told) as service:
            os.sched_setaffinity(0, {cores[-1]})
            try:
                num_requests, every = OWN_TOKENS[workload] // tokens_each, MODES[mode]
                traced = [every > 0 and number % every == 0 for number in range(num_requests)]
                asyncio.run(_connected_loop(service, num_streams, traced, tokens_each))
            finally:
                os.sched_setaffinity(0, cores)
        parts = json.loads(told.read_text())
    cpu_ns = parts.pop("process")
    percent = {name: round(100 * spent_ns / cpu_ns, 3) for name, spent_ns in parts.items()}
    whole = round(sum(percent.values()), 2)
    return {"workload": workload, "traced": mode, "own_cpu_percent": whole, "of_which": percent}


async def _connected_loop(service: _Service, num_streams: int, traced: Sequence[bool], tokens_each: int) -> None:
    options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    service.channels = [grpc.aio.insecure_channel(service.address, options=options) for _ in range(NUM_CHANNELS)]
    await streaming.wait_until_ready(service.channels[0])
    await _loop(service, num_streams, traced, tokens_each)
    for channel in service.channels:
        await channel.close()


def _run_with_clocks(arguments: Sequence[str]) -> int:
    """A scheduler that writes into the first argument, when it ends, how much CPU time each part of tracing took."""
    from octavo.cli import main as octavo
    from octavo.shared.tracing.tracer import Tracer
    from scheduler_svc.api.request_trace import RequestTrace
    from scheduler_svc.engine.metrics.metrics import Metrics
    from scheduler_svc.engine.step_traces import StepTraces
    from scheduler_svc.tracing.step_trace import StepTrace

    spent_ns: dict[str, int] = {}

    def clocked(owner: type, name: str) -> None:
        function, key = getattr(owner, name), f"{owner.__name__}.{name}"
        spent_ns[key] = 0

        def run(*given: Any, **named: Any) -> Any:
            started_ns = time.thread_time_ns()
            try:
                return function(*given, **named)
            finally:
                spent_ns[key] += time.thread_time_ns() - started_ns

        setattr(owner, name, run)

    clocked(Tracer, "begin")
    clocked(Tracer, "_export_waiting")
    for name in ("prepared", "admitted", "_end"):
        clocked(RequestTrace, name)
    for name in ("of_step", "ended"):
        clocked(StepTraces, name)
    clocked(StepTrace, "requests")
    clocked(Metrics, "traced")
    code = octavo(list(arguments[1:]))
    Path(arguments[0]).write_text(json.dumps({**spent_ns, "process": time.process_time_ns()}))
    return code


@contextmanager
def _process(core: int, *command: str, environment: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})  # what is started takes it over
    try:
        environment = environment_without_options() | (environment or {})
        process = subprocess.Popen(command, env=environment)
    finally:
        os.sched_setaffinity(0, own)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


async def _loops(services: dict[str, _Service], num_streams: int, num_rounds: int, start: int) -> list[dict[str, Any]]:
    options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    for service in (services[OFF], services[ON]):
        service.channels = [grpc.aio.insecure_channel(service.address, options=options) for _ in range(NUM_CHANNELS)]
        await streaming.wait_until_ready(service.channels[0])
    order, found, num_sent = random.Random(start), [], dict.fromkeys(MODES, 0)
    for number in range(-2, num_rounds):  # the first ones warm up
        modes = [mode for mode in MODES if number < 0 or number % RARELY.get(mode, 1) == 0]
        for workload, tokens_each in OUTPUT_TOKENS.items():
            for mode in order.sample(modes, len(modes)):
                num_requests, every = NUM_TOKENS[workload] // tokens_each, MODES[mode]
                numbers = range(num_sent[mode], num_sent[mode] + num_requests)
                num_sent[mode] += num_requests
                traced = [every > 0 and each % every == 0 for each in numbers]
                one = await _loop(services[mode], num_streams, traced, tokens_each)
                if number >= 0:
                    found.append({"start": start, "workload": workload, "mode": mode, **one})
    for service in (services[OFF], services[ON]):
        for channel in service.channels:
            await channel.close()
    return found


async def _loop(service: _Service, num_streams: int, traced: Sequence[bool], tokens_each: int) -> dict[str, float]:
    """A closed loop of a request for each of `traced`, which says whether its client traces it."""
    request = pb.GenerateRequest(
        prompt_token_ids=pb.TokenIds(ids=[ord("a") + place % 26 for place in range(streaming.PROMPT_TOKENS)]),
        sampling_params=pb.SamplingParams(max_tokens=tokens_each, ignore_eos=True, temperature=0),
    ).SerializeToString()
    waiting = iter(traced)

    async def stream(channel: grpc.aio.Channel) -> None:
        generate = channel.unary_stream(streaming.GENERATE)
        for is_traced in waiting:
            metadata = tuple(TraceContext.new_root().fields()) if is_traced else ()
            async for _ in generate(request, metadata=metadata):
                pass

    cpu_ns, started_ns = service.cpu_ns(), time.monotonic_ns()
    await asyncio.gather(*(stream(service.channels[number % NUM_CHANNELS]) for number in range(num_streams)))
    wall_ns = time.monotonic_ns() - started_ns
    await asyncio.sleep(EXPORTED_S)
    cpu_ns, num_tokens = service.cpu_ns() - cpu_ns, len(traced) * tokens_each
    return {
        "tokens_per_s": round(num_tokens / wall_ns * 1e9),
        "cpu_us_per_token": round(cpu_ns / num_tokens / 1e3, 3),
    }


def costs(loops: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By workload and mode, how much more CPU time a token takes than in the mode that it is compared with, in percent:
    lower quartiles over all starts, and the interval that holds 90 % of what loops drawn anew give."""
    found = []
    for workload in OUTPUT_TOKENS:
        for mode, other in BESIDE.items():
            ours, theirs = ([one["cpu_us_per_token"] for one in _of(loops, workload, each)] for each in (mode, other))
            draw = random.Random(0)
            drawn = sorted(
                _more(draw.choices(ours, k=len(ours)), draw.choices(theirs, k=len(theirs))) for _ in range(2000)
            )
            found.append(
                {
                    "workload": workload,
                    "traced": mode,
                    "beside": other,
                    "loops": len(ours),
                    "more_cpu_percent": round(_more(ours, theirs), 2),
                    "more_cpu_percent_90": [round(drawn[100], 2), round(drawn[1899], 2)],
                }
            )
    return found


def _of(loops: Sequence[dict[str, Any]], workload: str, mode: str) -> list[dict[str, Any]]:
    return [one for one in loops if (one["workload"], one["mode"]) == (workload, mode)]


def _more(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return 100 * (percentile(ours, 25) / percentile(theirs, 25) - 1)


def table(result: dict[str, Any]) -> str:
    """In Markdown."""
    head = ("output tokens", "traced", "CPU time of tracing", "more CPU time a token")
    rows = [head, ("---",) * len(head)]
    for own in result["own"]:
        compared = {(cost["workload"], cost["traced"]): cost for cost in result["cost"]}
        cost = compared[own["workload"], own["traced"]]
        low, high = cost["more_cpu_percent_90"]
        shown = f"{cost['more_cpu_percent']:.0f} % ({low:.0f} to {high:.0f} %)"
        rows.append((str(OUTPUT_TOKENS[own["workload"]]), own["traced"], f"{own['own_cpu_percent']:.2g} %", shown))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _collect(port: int) -> int:
    """Takes spans until it is ended, and forgets them unread."""
    handler = grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
    service, _, method = EXPORT[1:].rpartition("/")
    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {method: handler})])
    server.add_insecure_port(f"{LOOPBACK}:{port}")
    server.start()
    server.wait_for_termination()
    return 0


if __name__ == "__main__":
    sys.exit(main())
