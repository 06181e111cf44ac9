"""What tracing costs: `python -m benchmarks.tracing` (about four minutes, two idle cores).

Three schedulers run side by side, without tracing, with 1 % and with 100 % of the requests traced, each with a
simulated worker that answers at once; a collector of its own process takes the spans. In each round all of them get the
same closed loop of requests, one after the other and in random order: what else the machine does meanwhile falls on all
alike. Compared are tokens per second, and the CPU time of the scheduler's process, all threads, for a token. The second
is the sharper measure on a machine that others use, too.
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
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import grpc

from octavo.bench import machine, streaming
from octavo.shared.options import environment_without_options
from octavo.shared.ports import LOOPBACK, free_ports
from octavo.shared.rpc import CHANNEL_OPTIONS
from protos import inference_pb2 as pb

RESULTS = Path(__file__).parent / "results"
MODES = {"off": None, "1 %": 0.01, "100 %": 1.0}  # shares of the requests that are traced
OUTPUT_TOKENS = {"short": 16, "long": 256}  # of a request, by workload
NUM_TOKENS = {"short": 16_384, "long": 131_072}  # of one measurement, about two seconds
NUM_CHANNELS = 8
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


def main() -> int:
    """Measures, prints, and keeps the result unless told not to."""
    parser = argparse.ArgumentParser(description="Measures what tracing costs a scheduler.")
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-results", action="store_true", help="print only")
    parser.add_argument("--collector", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.collector:
        return _collect(arguments.collector)
    facts = machine.describe()
    rounds = _measure(arguments.streams, arguments.rounds)
    sizes = {"streams": arguments.streams, "prompt_tokens": streaming.PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS}
    result = {**sizes, "tokens": NUM_TOKENS, "cost": costs(rounds), "rounds": rounds}
    print(table(result))
    if not arguments.no_results:
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        path = RESULTS / f"{date[:10]}-tracing-{machine.slug(facts)}.json"
        path.write_text(json.dumps({"date": date, "machine": facts, **result}, indent=1) + "\n")
        print(f"written: {path}")
    return 0


def _measure(num_streams: int, num_rounds: int) -> list[dict[str, Any]]:
    cores = sorted(os.sched_getaffinity(0))
    order, rounds = random.Random(0), []
    with ExitStack() as stack:
        (port,) = free_ports(1)
        stack.enter_context(_process(cores[-1], sys.executable, "-m", "benchmarks.tracing", f"--collector={port}"))
        services = {
            mode: stack.enter_context(_service(share, port, num_streams, cores)) for mode, share in MODES.items()
        }
        os.sched_setaffinity(0, {cores[-1]})
        try:
            for number in range(-1, num_rounds):  # the first one warms up
                for workload, tokens_each in OUTPUT_TOKENS.items():
                    for mode in order.sample(list(MODES), len(MODES)):
                        address, pid = services[mode]
                        one = asyncio.run(
                            _load(address, pid, num_streams, NUM_TOKENS[workload] // tokens_each, tokens_each)
                        )
                        if number >= 0:
                            rounds.append({"round": number, "workload": workload, "mode": mode, **one})
                print(f"round {number + 1} of {num_rounds}", file=sys.stderr, flush=True)
        finally:
            os.sched_setaffinity(0, cores)
    return rounds


@contextmanager
def _service(share: float | None, collector: int, num_streams: int, cores: list[int]) -> Iterator[tuple[str, int]]:
    """Address and process id of a scheduler, on the first core; its worker has the last, as the load does."""
    port, worker_port = free_ports(2)
    worker = ["-m", "octavo.bench.simulated_worker", f"--port={worker_port}", f"--max-num-seqs={num_streams}"]
    scheduler = ["-m", "octavo", "scheduler", f"--worker={LOOPBACK}:{worker_port}", f"--port={port}"]
    scheduler += ["--log-level=warning", "--metrics-port=0"]
    if share is not None:
        scheduler += [f"--otlp-traces-endpoint=http://{LOOPBACK}:{collector}", f"--trace-sampling={share}"]
    with _process(cores[-1], sys.executable, *worker), _process(cores[0], sys.executable, *scheduler) as process:
        yield f"{LOOPBACK}:{port}", process.pid


@contextmanager
def _process(core: int, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})  # what is started takes it over
    try:
        process = subprocess.Popen(command, env=environment_without_options())
    finally:
        os.sched_setaffinity(0, own)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


async def _load(address: str, pid: int, num_streams: int, num_requests: int, tokens_each: int) -> dict[str, float]:
    """A closed loop of so many requests."""
    options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(NUM_CHANNELS)]
    await streaming.wait_until_ready(channels[0])
    request = pb.GenerateRequest(
        prompt_token_ids=pb.TokenIds(ids=[ord("a") + place % 26 for place in range(streaming.PROMPT_TOKENS)]),
        sampling_params=pb.SamplingParams(max_tokens=tokens_each, ignore_eos=True, temperature=0),
    ).SerializeToString()
    waiting = iter(range(num_requests))

    async def stream(channel: grpc.aio.Channel) -> None:
        generate = channel.unary_stream(streaming.GENERATE)
        for _ in waiting:
            async for _ in generate(request):
                pass

    cpu_ns, started_ns = _cpu_ns(pid), time.monotonic_ns()
    await asyncio.gather(*(stream(channels[number % NUM_CHANNELS]) for number in range(num_streams)))
    wall_ns, cpu_ns = time.monotonic_ns() - started_ns, _cpu_ns(pid) - cpu_ns
    for channel in channels:
        await channel.close()
    num_tokens = num_requests * tokens_each
    return {
        "tokens_per_s": round(num_tokens / wall_ns * 1e9, 1),
        "requests_per_s": round(num_requests / wall_ns * 1e9, 1),
        "cpu_us_per_token": round(cpu_ns / num_tokens / 1e3, 4),
    }


def _cpu_ns(pid: int) -> int:
    """CPU time of all threads that a process has now; a tick of /proc/PID/stat is a hundredth of a second."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))


def costs(rounds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each workload and share, against the same round without tracing: medians, and the interval that holds 90 % of
    the medians of rounds drawn anew."""
    found = []
    for workload in OUTPUT_TOKENS:
        of_mode = {mode: _of(rounds, workload, mode) for mode in MODES}
        for mode in list(MODES)[1:]:
            pairs = list(zip(of_mode["off"], of_mode[mode], strict=True))
            cpu = [after["cpu_us_per_token"] / before["cpu_us_per_token"] - 1 for before, after in pairs]
            speed = [1 - after["tokens_per_s"] / before["tokens_per_s"] for before, after in pairs]
            found.append(
                {
                    "workload": workload,
                    "traced": mode,
                    "more_cpu_percent": _percent(cpu),
                    "more_cpu_percent_90": _interval(cpu),
                    "less_throughput_percent": _percent(speed),
                    "less_throughput_percent_90": _interval(speed),
                }
            )
    return found


def _of(rounds: Sequence[dict[str, Any]], workload: str, mode: str) -> list[dict[str, Any]]:
    return [one for one in rounds if (one["workload"], one["mode"]) == (workload, mode)]


def _percent(shares: Sequence[float]) -> float:
    return round(100 * median(shares), 2)


def _interval(shares: Sequence[float]) -> list[float]:
    draw = random.Random(0)
    medians = sorted(median(draw.choices(shares, k=len(shares))) for _ in range(2000))
    return [round(100 * medians[place], 2) for place in (100, 1899)]


def table(result: dict[str, Any]) -> str:
    """In Markdown."""
    rows = [("output tokens", "traced", "tokens/s without", "more CPU time a token", "less throughput"), ("---",) * 5]
    for cost in result["cost"]:
        without = median(one["tokens_per_s"] for one in _of(result["rounds"], cost["workload"], "off"))
        cells = [
            f"{cost[f'{name}_percent']:.1f} % ({low:.1f} to {high:.1f})"
            for name in ("more_cpu", "less_throughput")
            for low, high in [cost[f"{name}_percent_90"]]
        ]
        rows.append((str(OUTPUT_TOKENS[cost["workload"]]), cost["traced"], f"{without:,.0f}", *cells))
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
