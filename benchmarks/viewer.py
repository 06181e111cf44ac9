"""What a viewer of the page costs the scheduler: `python -m benchmarks.viewer` (about three minutes, two idle cores).

256 streams from a simulated worker, without and with one reader of a gateway's live feed, in turns. Once as fast as it
goes: the time of a step. And once at a pace that is kept easily: the CPU time of the scheduler's process. The gateway
shares a core with the load, and takes nothing of the scheduler's.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from statistics import median

from octavo.bench import machine, streaming
from octavo.shared.connections import allow_open_files
from octavo.shared.options import environment_without_options
from octavo.shared.ports import LOOPBACK, free_port


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Measures what a viewer of the page costs the scheduler.")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=50.0, help="the pace at which CPU time is counted")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    allow_open_files(4 * arguments.streams)
    print(json.dumps(machine.describe()))
    found: dict[tuple[float, bool], list[streaming.StreamingFigures]] = {}
    for _ in range(arguments.rounds):
        for step_ms in (0.0, arguments.step_ms):
            for is_viewed in (False, True):
                figures = measure(arguments.streams, step_ms, arguments.seconds, is_viewed=is_viewed)
                found.setdefault((step_ms, is_viewed), []).append(figures)
    print(table(found, arguments.streams, arguments.step_ms))
    return 0


def measure(streams: int, step_ms: float, seconds: float, *, is_viewed: bool) -> streaming.StreamingFigures:
    """One count, of a scheduler that is started for it."""
    with streaming.service(streams, step_ms, 1, ()) as (address, pid):
        with viewer(address) if is_viewed else nullcontext():
            return asyncio.run(streaming.load(address, pid, streams, seconds))


@contextmanager
def viewer(address: str) -> Iterator[None]:
    """A page that looks on. Raises RuntimeError where it saw nothing move."""
    port = free_port()
    flags = [f"--scheduler={address}", f"--port={port}", "--live-panel", "--log-level=warning"]
    process = subprocess.Popen([sys.executable, "-m", "octavo", "gateway", *flags], env=environment_without_options())
    num_frames, is_over = 0, threading.Event()

    def look() -> None:
        nonlocal num_frames
        while not is_over.is_set():
            with suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection(LOOPBACK, port, timeout=30)
                connection.request("GET", "/live")
                for line in connection.getresponse():
                    num_frames += line.startswith(b"data: ")
            time.sleep(0.05)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        process.kill()
        process.wait()
        thread.join()
    if num_frames < 10:
        raise RuntimeError(f"the page got {num_frames} frames")


def table(found: dict[tuple[float, bool], list[streaming.StreamingFigures]], streams: int, step_ms: float) -> str:
    """In Markdown: the median of each, and of all rounds the least and the most."""
    times = [[1e3 * streams / each.tokens_per_s for each in found[0.0, viewed]] for viewed in (False, True)]
    cpu = [[streams * each.cpu_s_per_1000_tokens for each in found[step_ms, viewed]] for viewed in (False, True)]
    rows = [
        ["", "nobody looks", "one page looks"],
        ["---", "---", "---"],
        ["a step, as fast as it goes, ms", *map(_cell, times)],
        [f"CPU time of the scheduler, ms a step of {step_ms:g} ms", *map(_cell, cpu)],
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _cell(values: list[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    sys.exit(main())
