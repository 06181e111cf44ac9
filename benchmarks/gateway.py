"""What HTTP costs: `python -m benchmarks.gateway` (about three minutes, two idle cores).

512 streams, over gRPC, over HTTP through `octavo gateway`, and over HTTP with a gRPC call for each, in turns, from a
simulated worker at a pace that all keep up with: no two tokens of a stream share a message. The CPU seconds of
scheduler and gateway are counted, of all their threads, and the tokens that arrived. Over HTTP both share the core that
the load leaves them.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

from octavo.bench import machine, streaming
from octavo.shared.connections import allow_open_files
from octavo.shared.options import environment_without_options
from octavo.shared.ports import LOOPBACK, free_port

_FIRST_CORE = min(os.sched_getaffinity(0))  # of the scheduler, too (`streaming.service`)
_PARTS = "scheduler", "gateway"  # the scheduler with its gRPC front
RESULTS = Path(__file__).parent / "results"
_TEXT = re.compile(rb'"(?:text|content)":"([a-z ]*)"')  # the worker draws letters, one a token


def main() -> int:
    """Measures, prints, and keeps the result unless told not to."""
    parser = argparse.ArgumentParser(description="Measures what HTTP costs beside gRPC.")
    parser.add_argument("--streams", type=int, default=512)
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--path", choices=("chat", "completions"), default="chat")
    parser.add_argument("--no-results", action="store_true", help="print only")
    arguments = parser.parse_args()
    allow_open_files(4 * arguments.streams)
    facts, load, rounds = machine.describe(), round(os.getloadavg()[0], 2), []
    for _ in range(arguments.rounds):
        rounds.append(_round(arguments))
        print(json.dumps(rounds[-1]), flush=True)
    middle = {name: median(each[name] for each in rounds) for name in rounds[0]}
    result = {"load_average_before": load, "settings": vars(arguments), "rounds": rounds, "median": middle}
    print(table(middle))
    if not arguments.no_results:
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        path = RESULTS / f"{date[:10]}-gateway-{machine.slug(facts)}.json"
        path.write_text(json.dumps({"date": date, "machine": facts, **result}, indent=1) + "\n")
        print(f"written: {path}")
    return 0


def _round(arguments: argparse.Namespace) -> dict[str, float]:
    """CPU seconds for 1,000 tokens over gRPC and over HTTP, and how fast they came."""
    (grpc,) = streaming.measure([arguments.streams], arguments.seconds, step_ms=arguments.step_ms)
    found = {
        "grpc_tokens_per_s": grpc.tokens_per_s,
        "grpc_scheduler_cpu_s_per_1000_tokens": grpc.cpu_s_per_1000_tokens,
    }
    for name, flags in (("http", ()), ("own_calls", ("--no-share-calls",))):
        with streaming.service(arguments.streams, arguments.step_ms, 1, ()) as (address, scheduler_pid):
            with _gateway(address, flags) as (port, gateway_pid):
                of_http = asyncio.run(_http_load(port, (scheduler_pid, gateway_pid), arguments))
        found |= {f"{name}_{key}": value for key, value in of_http.items()}
    of_front = found["grpc_scheduler_cpu_s_per_1000_tokens"]
    return found | {"http_to_grpc": sum(found[f"http_{each}_cpu_s_per_1000_tokens"] for each in _PARTS) / of_front}


@contextmanager
def _gateway(address: str, more_flags: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Port and process id; on the scheduler's core."""
    port, own = free_port(), os.sched_getaffinity(0)
    flags = [f"--scheduler={address}", f"--port={port}", "--log-level=warning", "--drain-timeout=0", *more_flags]
    os.sched_setaffinity(0, {_FIRST_CORE})
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "octavo", "gateway", *flags], env=environment_without_options()
        )
    finally:
        os.sched_setaffinity(0, own)
    try:
        yield port, process.pid
    finally:
        process.kill()
        process.wait()


class _Count:
    """What all streams have received so far."""

    def __init__(self) -> None:
        self.tokens = self.events = self.num_started = 0


class _Stream(asyncio.Protocol):
    """One client: asks, and counts the letters that come."""

    def __init__(self, request: bytes, count: _Count) -> None:
        self._request, self._count, self._rest = request, count, b""
        self._is_started = False

    def connection_made(self, transport: Any) -> None:
        """Asks at once."""
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Whole events are counted; what has begun waits for its rest."""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            if found := _TEXT.search(event):
                self._count.tokens += len(found[1])
                self._count.events += 1
                if found[1] and not self._is_started:
                    self._is_started = True
                    self._count.num_started += 1


async def _http_load(port: int, pids: tuple[int, int], arguments: argparse.Namespace) -> dict[str, float]:
    asked: dict[str, Any] = {
        "max_tokens": streaming.OUTPUT_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    asked |= (
        {"prompt": list(range(97, 97 + streaming.PROMPT_TOKENS))}
        if arguments.path == "completions"
        else {"messages": [{"role": "user", "content": "a" * streaming.PROMPT_TOKENS}]}
    )
    path = "completions" if arguments.path == "completions" else "chat/completions"
    body = json.dumps(asked).encode()
    head = (
        f"POST /v1/{path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    count, loop, deadline = _Count(), asyncio.get_running_loop(), time.monotonic() + 60
    await _wait_until_ready(port, deadline)
    transports = []
    for _ in range(arguments.streams):
        made = await loop.create_connection(lambda: _Stream(head.encode() + body, count), LOOPBACK, port)
        transports.append(made[0])
    while count.num_started < arguments.streams:
        if time.monotonic() > deadline:
            raise RuntimeError(f"only {count.num_started} streams began")
        await asyncio.sleep(0.05)
    await asyncio.sleep(streaming.SETTLE_S)
    tokens, events, cpu_s, started = (
        count.tokens,
        count.events,
        list(map(streaming.cpu_seconds, pids)),
        time.monotonic(),
    )
    await asyncio.sleep(arguments.seconds)
    wall_s = time.monotonic() - started
    scheduler_s, gateway_s = (
        after - before for after, before in zip(map(streaming.cpu_seconds, pids), cpu_s, strict=True)
    )
    tokens, events = count.tokens - tokens, count.events - events
    for transport in transports:
        transport.abort()
    return {
        "tokens_per_s": tokens / wall_s,
        "tokens_per_event": tokens / events,
        "scheduler_cpu_s_per_1000_tokens": 1000 * scheduler_s / tokens,
        "gateway_cpu_s_per_1000_tokens": 1000 * gateway_s / tokens,
    }


async def _wait_until_ready(port: int, deadline_s: float) -> None:
    while time.monotonic() < deadline_s:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(LOOPBACK, port)
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()
            if answer.startswith(b"HTTP/1.1 200 "):
                return
        await asyncio.sleep(0.05)
    raise RuntimeError("the gateway did not get ready")


def table(middle: dict[str, float]) -> str:
    """In Markdown, of the medians."""
    ways = ("grpc", "http", "own_calls")
    rows = [
        ("CPU s for 1,000 tokens", "over gRPC", "over HTTP", "over HTTP, a gRPC call a stream"),
        ("---",) * 4,
        *((part, *(_shown(middle.get(f"{way}_{part}_cpu_s_per_1000_tokens")) for way in ways)) for part in _PARTS),
        ("tokens/s", *(f"{middle[f'{way}_tokens_per_s']:,.0f}" for way in ways)),
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _shown(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.3f}"


if __name__ == "__main__":
    sys.exit(main())
