"""What reaches clients: N `Generate` streams against a scheduler whose worker computes nothing.

Scheduler and load do not share a core: the load and the worker have the last of those that this process may use, the
scheduler the first, or with N frontend processes the first N + 1, as far as there are others. Messages are counted as
they arrive and read no further than their token ids.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc

from octavo.bench.figures import percentile
from octavo.shared.options import environment_without_options
from octavo.shared.ports import LOOPBACK, free_ports
from octavo.shared.processes.end_with_parent import ends_with_parent
from octavo.shared.processes.module_command import module_command
from octavo.shared.rpc import CHANNEL_OPTIONS
from protos import inference_pb2 as pb

GENERATE = "/octavo.v1.Inference/Generate"
MODEL_INFO = "/octavo.v1.Inference/GetModelInfo"
NUM_CHANNELS = 8  # connections that the streams are spread over
PROMPT_TOKENS, OUTPUT_TOKENS = 16, 4096
MAX_MODEL_LEN = 8192
READY_TIMEOUT_S = 30.0
SETTLE_S = 1.0  # from the first token of the last stream to the beginning of the count
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class StreamingFigures:
    """One count over `seconds`. Service CPU time is that of the scheduler and its frontends, all threads."""

    streams: int
    streams_served: int  # of those, how many received anything: the rest waited for their next request to begin
    seconds: float
    messages_per_s: float
    tokens_per_s: float
    messages_per_cpu_s: float  # a second of the service's CPU time
    tokens_per_cpu_s: float
    cpu_s_per_1000_tokens: float
    cpu_share: float  # of one core
    between_messages_p50_ms: float  # of one stream
    between_messages_p99_ms: float
    admission_p50_ms: (
        float  # from a request to its first message, of all requests of the run: all streams begin at once
    )
    admission_p99_ms: float

    def as_dict(self) -> dict[str, Any]:
        """Every field by its name, for JSON."""
        return asdict(self)


@dataclass
class _Count:
    """What the streams have received so far."""

    messages: int = 0
    tokens: int = 0
    num_started: int = 0
    served: set[int] = field(default_factory=set)  # streams that received anything
    gaps_ns: list[int] = field(default_factory=list)  # between two messages of a stream
    admissions_ns: list[int] = field(default_factory=list)  # from a request to its first message


def measure(
    streams: Sequence[int],
    seconds: float,
    *,
    step_ms: float = 0.0,
    frontends: int = 1,
    scheduler_flags: Sequence[str] = (),
) -> list[StreamingFigures]:
    """Starts a simulated worker and a scheduler for each number of streams in turn. Raises RuntimeError."""
    figures = []
    for num_streams in streams:
        with service(num_streams, step_ms, frontends, scheduler_flags) as (address, pid):
            figures.append(asyncio.run(load(address, pid, num_streams, seconds)))
    return figures


@contextmanager
def service(num_streams: int, step_ms: float, frontends: int, flags: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Address and process id of a scheduler; this process, too, keeps to its own core while it runs."""
    cores = sorted(os.sched_getaffinity(0))
    num_processes = frontends + 1 if frontends > 1 else 1
    service_cores, load_cores = set(cores[: min(num_processes, max(1, len(cores) - 1))]), {cores[-1]}
    port, worker_port = free_ports(2)
    worker = module_command("octavo.bench.simulated_worker", f"--port={worker_port}")
    worker += [f"--max-num-seqs={max(8, num_streams)}", f"--max-model-len={MAX_MODEL_LEN}", f"--step-ms={step_ms}"]
    scheduler = module_command("octavo", "scheduler", f"--worker={LOOPBACK}:{worker_port}", f"--port={port}")
    scheduler += ["--log-level=warning", "--metrics-port=0", f"--frontends={frontends}", *flags]
    processes = []
    try:
        for own_cores, command in ((service_cores, scheduler), (load_cores, worker)):
            os.sched_setaffinity(0, own_cores)  # what is started takes it over
            processes.append(subprocess.Popen(ends_with_parent(command), env=environment_without_options()))
        yield f"{LOOPBACK}:{port}", processes[0].pid
    finally:
        os.sched_setaffinity(0, cores)
        for process in processes:  # the scheduler first, so that it loses no worker
            process.terminate()
            process.wait()


async def load(address: str, pid: int, num_streams: int, seconds: float) -> StreamingFigures:
    """Streams from a scheduler that runs, and counts. Raises RuntimeError."""
    options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]  # a connection a channel
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(min(NUM_CHANNELS, num_streams))]
    await wait_until_ready(channels[0])
    count = _Count()
    tasks = [
        asyncio.create_task(_stream(number, channels[number % len(channels)], count)) for number in range(num_streams)
    ]
    try:
        while count.num_started < num_streams:
            _raise_first_failure(tasks)
            await asyncio.sleep(0.05)
        await asyncio.sleep(SETTLE_S)
        count.gaps_ns.clear()
        count.served.clear()
        messages, tokens, cpu_s, started = count.messages, count.tokens, cpu_seconds(pid), time.monotonic()
        await asyncio.sleep(seconds)
        wall_s, cpu_s = time.monotonic() - started, cpu_seconds(pid) - cpu_s
        messages, tokens = count.messages - messages, count.tokens - tokens
        num_served = len(count.served)
        _raise_first_failure(tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in channels:
            await channel.close()
    return StreamingFigures(
        streams=num_streams,
        streams_served=num_served,
        seconds=wall_s,
        messages_per_s=messages / wall_s,
        tokens_per_s=tokens / wall_s,
        messages_per_cpu_s=messages / cpu_s,
        tokens_per_cpu_s=tokens / cpu_s,
        cpu_s_per_1000_tokens=1000 * cpu_s / tokens,
        cpu_share=cpu_s / wall_s,
        between_messages_p50_ms=percentile(count.gaps_ns, 50) / 1e6,
        between_messages_p99_ms=percentile(count.gaps_ns, 99) / 1e6,
        admission_p50_ms=percentile(count.admissions_ns, 50) / 1e6,
        admission_p99_ms=percentile(count.admissions_ns, 99) / 1e6,
    )


async def wait_until_ready(channel: grpc.aio.Channel) -> None:
    """Until a scheduler serves there. Raises RuntimeError after READY_TIMEOUT_S."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        try:
            await channel.unary_unary(MODEL_INFO)(b"", wait_for_ready=True, timeout=READY_TIMEOUT_S)
            return
        except grpc.aio.AioRpcError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the scheduler did not get ready: {error.details()}") from error
        await asyncio.sleep(0.05)


async def _stream(number: int, channel: grpc.aio.Channel, count: _Count) -> None:
    """One client: its next request begins when the last has ended."""
    request = pb.GenerateRequest(
        prompt_token_ids=pb.TokenIds(ids=[ord("a") + place % 26 for place in range(PROMPT_TOKENS)]),
        sampling_params=pb.SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, temperature=0),
    ).SerializeToString()
    generate = channel.unary_stream(GENERATE)
    has_started = False
    while True:
        last_ns, sent_ns = 0, time.monotonic_ns()
        async for data in generate(request):
            response = pb.GenerateResponse.FromString(data)
            if response.HasField("admission"):
                count.admissions_ns.append(time.monotonic_ns() - sent_ns)
            if not response.outputs:
                continue
            now_ns = time.monotonic_ns()
            if last_ns:
                count.gaps_ns.append(now_ns - last_ns)
            last_ns = now_ns
            count.messages += 1
            count.served.add(number)
            for output in response.outputs:
                count.tokens += len(output.token_ids)
            if not has_started:
                has_started = True
                count.num_started += 1


def _raise_first_failure(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done() and (error := task.exception()) is not None:
            raise RuntimeError(f"a stream failed: {error}") from error


def cpu_seconds(pid: int) -> float:
    """CPU time, user and system, of a process and its children that are there now."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = int(fields[11]) + int(fields[12])  # utime and stime, counted from the field after the name
    return own / _TICKS_PER_S + sum(cpu_seconds(int(child)) for child in children)


_HEADERS = (
    "streams",
    "served",
    "messages/s",
    "tokens/s",
    "CPU s / 1,000 tokens",
    "of a core",
    "between messages p50 / p99",
    "admission p50 / p99",
)


def table(rows: Sequence[StreamingFigures]) -> str:
    """A Markdown table, a row a number of streams."""
    cells = [_HEADERS, tuple("---" for _ in _HEADERS), *map(_cells, rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def _cells(row: StreamingFigures) -> tuple[str, ...]:
    return (
        f"{row.streams:,}",
        f"{row.streams_served:,}",
        f"{row.messages_per_s:,.0f}",
        f"{row.tokens_per_s:,.0f}",
        f"{row.cpu_s_per_1000_tokens:.4f}",
        f"{100 * row.cpu_share:.0f} %",
        f"{row.between_messages_p50_ms:.2f} / {row.between_messages_p99_ms:.2f} ms",
        f"{row.admission_p50_ms:.0f} / {row.admission_p99_ms:.0f} ms",
    )
