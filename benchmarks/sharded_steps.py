"""What a step costs a scheduler in one to four shards: `python -m benchmarks.sharded_steps`.

Two simulated workers a shard, each with 64 sequences that decode at a steady pace. Clients take each answer in one
message, so that steps are most of the work. The figure is the processor time of the shards' processes for 1,000 steps
of their workers, as Linux counts it; it should not rise with the number of shards. With one shard it is that of the
process that schedules; `--frontends 2` keeps clients out of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil

from octavo.bench import machine
from octavo.shared.options import environment_without_options
from octavo.shared.ports import LOOPBACK, free_port
from octavo.shared.rpc import CHANNEL_OPTIONS
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc

WORKERS_A_SHARD, SEQUENCES = 2, 64
MAX_MODEL_LEN, PROMPT_TOKENS = 8192, 64
SETTLE_S, READY_S = 3.0, 60.0
RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Prints a row a number of shards; with --save keeps them in benchmarks/results/."""
    parser = argparse.ArgumentParser(description="Measures processor time for 1,000 steps by the number of shards.")
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--step-ms", type=float, default=50.0, help="how long a worker takes for a step")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each count")
    parser.add_argument("--save", action="store_true", help="keep the figures in benchmarks/results")
    arguments = parser.parse_args()
    facts = machine.describe()
    figures = []
    print("shards workers    steps/s  CPU s per 1,000 steps: shards  parent and frontends  tokens/s")
    for num_shards in arguments.shards:
        with service(num_shards, arguments.step_ms) as (address, pid):
            figure = asyncio.run(measure(address, pid, num_shards, arguments.seconds))
        figures.append(figure)
        print(
            f"{num_shards:>6} {figure['workers']:>7} {figure['steps_per_s']:>10.1f}"
            f" {figure['shard_cpu_s_per_1000_steps']:>30.3f} {figure['other_cpu_s_per_1000_steps']:>21.3f}"
            f" {figure['tokens_per_s']:>9.0f}",
            flush=True,
        )
    if arguments.save:
        options = {"step_ms": arguments.step_ms, "sequences_a_worker": SEQUENCES, "workers_a_shard": WORKERS_A_SHARD}
        path = RESULTS / f"{time.strftime('%Y-%m-%d')}-sharded-steps-{machine.slug(facts)}.json"
        path.write_text(json.dumps({"machine": facts, "options": options, "figures": figures}, indent=1) + "\n")
        print(f"kept in {path}")
    return 0


@contextmanager
def service(num_shards: int, step_ms: float) -> Iterator[tuple[str, int]]:
    """Address and process id of a scheduler with all its workers."""
    port = free_port()
    scheduler = [sys.executable, "-m", "octavo", "scheduler", f"--port={port}", "--log-level=warning"]
    scheduler += ["--metrics-port=0", f"--max-waiting-requests={8 * SEQUENCES}"]
    scheduler += ["--frontends=2"] if num_shards == 1 else [f"--shards={num_shards}"]
    with ExitStack() as stack:
        for _ in range(num_shards * WORKERS_A_SHARD):
            worker_port = free_port()
            worker = [sys.executable, "-m", "octavo.bench.simulated_worker", f"--port={worker_port}"]
            worker += [f"--max-num-seqs={SEQUENCES}", f"--max-model-len={MAX_MODEL_LEN}", f"--step-ms={step_ms}"]
            stack.enter_context(_running(worker))
            scheduler.append(f"--worker={LOOPBACK}:{worker_port}")
        process = stack.enter_context(_running(scheduler))
        yield f"{LOOPBACK}:{port}", process.pid


@contextmanager
def _running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, env=environment_without_options())
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


async def measure(address: str, pid: int, num_shards: int, seconds: float) -> dict[str, Any]:
    """Figures of `seconds` in which every worker has all its sequences."""
    num_workers = num_shards * WORKERS_A_SHARD
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        inference, control = inference_pb2_grpc.InferenceStub(channel), inference_pb2_grpc.ControlStub(channel)
        await _until_serving(control, num_workers)
        # One more than there are slots: a slot that becomes free is taken at once.
        requests = [asyncio.create_task(_request(inference, n)) for n in range(num_workers * SEQUENCES)]
        try:
            await _until_running(control, num_workers * SEQUENCES)
            await asyncio.sleep(SETTLE_S)
            before, steps, started_s = cpu_s(pid, num_shards), await _num_steps(control), time.monotonic()
            await asyncio.sleep(seconds)
            after, steps, wall_s = (
                cpu_s(pid, num_shards),
                await _num_steps(control) - steps,
                time.monotonic() - started_s,
            )
            load = await control.GetLoad(pb.GetLoadRequest())
            by_worker = [worker.num_running for worker in load.workers]
            if failed := [each for each in requests if each.done()]:
                await failed[0]  # raises: all were to run to the end
        finally:
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
    shard, other = (after[each] - before[each] for each in ("shard", "other"))
    return {
        "shards": num_shards,
        "workers": num_workers,
        "steps_per_s": round(steps / wall_s, 1),
        "tokens_per_s": round(steps / wall_s * sum(by_worker) / num_workers, 1),
        "running_by_worker": by_worker,
        "shard_cpu_s_per_1000_steps": round(1000 * shard / steps, 4),
        "other_cpu_s_per_1000_steps": round(1000 * other / steps, 4),
    }


def cpu_s(pid: int, num_shards: int) -> dict[str, float]:
    """Processor time so far of all shards, or of the one core, and of everything else of the scheduler."""
    parent = psutil.Process(pid)
    spent = {"shard": 0.0, "other": 0.0}
    for process in (parent, *parent.children(recursive=True)):
        is_shard = process == parent if num_shards == 1 else "scheduler_svc.shards.shard_process" in process.cmdline()
        times = process.cpu_times()
        spent["shard" if is_shard else "other"] += times.user + times.system
    return spent


async def _request(inference: inference_pb2_grpc.InferenceStub, number: int) -> None:
    """A request that runs longer than the measurement; its seed and prompt are its own."""
    ids = [(7 * number + place) % 200 + 30 for place in range(PROMPT_TOKENS)]
    request = pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=ids), stream=False)
    request.sampling_params.max_tokens, request.sampling_params.seed = MAX_MODEL_LEN - PROMPT_TOKENS, number
    request.sampling_params.ignore_eos = True
    async for _ in inference.Generate(request):
        pass


async def _until_serving(control: inference_pb2_grpc.ControlStub, num_workers: int) -> None:
    deadline_s = time.monotonic() + READY_S
    while True:
        try:
            workers = (await control.ListWorkers(pb.ListWorkersRequest(), wait_for_ready=True)).workers
            if sum(worker.health == pb.WORKER_HEALTH_SERVING for worker in workers) == num_workers:
                await asyncio.sleep(0.5)  # frontends hear of it, too
                return
        except grpc.aio.AioRpcError:
            pass  # a shard is being started
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"not all of {num_workers} workers served within {READY_S:g} s")
        await asyncio.sleep(0.1)


async def _until_running(control: inference_pb2_grpc.ControlStub, num_sequences: int) -> None:
    deadline_s = time.monotonic() + READY_S
    while (load := await control.GetLoad(pb.GetLoadRequest())).num_requests_running < num_sequences:
        if time.monotonic() > deadline_s:
            running = [worker.num_running for worker in load.workers]
            raise RuntimeError(f"{running} of {num_sequences} run after {READY_S:g} s")
        await asyncio.sleep(0.1)


async def _num_steps(control: inference_pb2_grpc.ControlStub) -> int:
    return sum(worker.num_steps for worker in (await control.ListWorkers(pb.ListWorkersRequest())).workers)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
