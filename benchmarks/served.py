"""A fresh `octavo serve` for a measurement, and a workload over its `Generate`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import grpc

from octavo import AsyncClient
from octavo.bench import closed_loop
from octavo.bench.figures import Figures
from octavo.bench.streaming import MODEL_INFO
from octavo.bench.workloads import Workload
from octavo.retrying import RetryPolicy
from octavo.shared.ports import free_port
from octavo.shared.processes.end_with_parent import ends_with_parent

PATIENT = RetryPolicy(first_delay_s=0.02, max_delay_s=0.02)  # until a server is ready
READY_TIMEOUT_S = 60.0


@contextmanager
def served(model: str, *flags: str, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yields the address at once, ready or not; `environment` is added to this process's own."""
    port = free_port()
    command = [sys.executable, "-m", "octavo", "serve", "--model", model, "--dtype", "float32", "--port", str(port)]
    process = subprocess.Popen(
        ends_with_parent([*command, "--log-level", "warning", *flags]),
        stdout=subprocess.DEVNULL,
        env={**os.environ, **(environment or {})},
    )
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def wait_until_ready(address: str, timeout_s: float = READY_TIMEOUT_S) -> None:
    """Raises TimeoutError with what the server said last."""
    deadline, said = time.monotonic() + timeout_s, "nothing"
    with grpc.insecure_channel(address) as channel:
        while time.monotonic() < deadline:
            try:
                channel.unary_unary(MODEL_INFO)(b"", timeout=2.0)
                return
            except grpc.RpcError as error:
                said = str(error.details())
            time.sleep(0.1)
    raise TimeoutError(f"the server is not ready after {timeout_s:.0f} s: {said}")


def over_generate(address: str, workload: Workload) -> Figures:
    """One run, a stream a request."""

    async def run() -> Figures:
        async with AsyncClient(address, retry=PATIENT) as client:
            return await closed_loop.run(client, workload, num_streams=len(workload.requests))

    return asyncio.run(run())
