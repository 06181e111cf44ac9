"""A fresh `octavo serve` for a measurement, and a workload over its `Generate`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from octavo import AsyncClient
from octavo.bench import closed_loop
from octavo.bench.figures import Figures
from octavo.bench.workloads import Workload
from octavo.generation import RetryPolicy
from octavo.serving_plan import free_port

PATIENT = RetryPolicy(retries_before_admission=3000, first_delay_s=0.02, max_delay_s=0.02)  # until a server is ready


@contextmanager
def served(model: str, *flags: str, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yields the address at once, ready or not; `environment` is added to this process's own."""
    port = free_port()
    command = [sys.executable, "-m", "octavo", "serve", "--model", model, "--dtype", "float32", "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--log-level", "warning", *flags],
        stdout=subprocess.DEVNULL,
        env={**os.environ, **(environment or {})},
    )
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def over_generate(address: str, workload: Workload) -> Figures:
    """One run, a stream a request."""

    async def run() -> Figures:
        async with AsyncClient(address, retry=PATIENT) as client:
            return await closed_loop.run(client, workload, num_streams=len(workload.requests))

    return asyncio.run(run())
