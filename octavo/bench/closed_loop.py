"""Runs a workload against a server: a fixed number of streams, each sending its next request when one has ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from octavo.bench.emptied_caches import empty_caches
from octavo.bench.figures import Figures, measure
from octavo.bench.workloads import BenchRequest, Workload
from octavo.client import AsyncClient
from octavo.outputs import RequestMetrics
from octavo.sampling_params import SamplingParams


async def run(client: AsyncClient, workload: Workload, num_streams: int) -> Figures:
    """One timed run, on an empty prefix cache. Raises RequestFailed as soon as a request fails."""
    await empty_caches(client)
    waiting = iter(workload.requests)
    started_ns = time.monotonic_ns()
    try:
        async with asyncio.TaskGroup() as group:
            streams = [group.create_task(_stream(client, waiting)) for _ in range(num_streams)]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None  # the first; the others were cancelled for it
    wall_ns = time.monotonic_ns() - started_ns
    metrics = [one for stream in streams for one in stream.result()]
    num_tokens = sum(one.num_output_tokens for one in metrics)
    return measure(workload.name, "Generate", workload.num_prompt_tokens, num_tokens, wall_ns, metrics)


async def _stream(client: AsyncClient, waiting: Iterator[BenchRequest]) -> list[RequestMetrics]:
    metrics = []
    for request in waiting:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=request.max_tokens)
        async for output in client.generate(prompt_token_ids=request.prompt_token_ids, sampling_params=params):
            if output.finished:
                metrics.append(output.metrics)
    return metrics
