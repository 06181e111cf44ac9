"""What a decode step of a model costs on 1, 2 and 4 ranks: `python -m benchmarks.parallel_ranks` (two minutes).

Each rank is a process with one thread; weights are random, in the sizes below. On fewer cores than ranks, or over
gloo, this shows what the ranks give each other, and not how fast they are: that takes a GPU for each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from octavo.bench import machine
from octavo.shared.ports import LOOPBACK, free_port

if TYPE_CHECKING:
    from worker_svc.steps.model_runner import ModelRunner

SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}
CONTEXT, STEPS, WARM_UP = 64, 20, 3
BLOCK_SIZE = 16


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Measures decode steps of a model that is split over ranks.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32], help="sequences in a step")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    print(json.dumps(machine.describe()))
    print("| ranks | rows | tokens/s | step, ms | bytes sent a step by a rank | weights of a rank, MiB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for size in arguments.ranks:
        for rows in arguments.rows:
            step_s, num_bytes, weights = measure(size, rows, arguments.device)
            print(f"| {size} | {rows} | {rows / step_s:.1f} | {step_s * 1e3:.1f} | {num_bytes:,} | {weights >> 20} |")
    return 0


def measure(size: int, rows: int, device: str) -> tuple[float, int, int]:
    """Median seconds of a step, bytes that each rank gave the others in it, and of its weights."""
    from worker_svc.parallel.membership import Membership

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SIZES))
        port, processes = free_port(), []
        for rank in range(size):
            environment = os.environ | Membership(rank, size, rank, size, LOOPBACK, port).variables()
            work = f"from benchmarks.parallel_ranks import run_rank; run_rank({folder!r}, {size}, {rows}, {device!r})"
            command = [sys.executable, "-c", work]
            processes.append(
                subprocess.Popen(command, env=environment | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True)
            )
        said = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a rank has failed")
    seconds, num_bytes, weights = json.loads(said[0])
    return seconds, num_bytes, weights


def run_rank(folder: str, size: int, rows: int, device_name: str) -> None:
    """One rank: prefills `rows` sequences, decodes, and, as rank 0, prints what `measure` returns."""
    import torch

    from octavo.shared import log
    from protos import ranks_pb2
    from worker_svc.models.config import ModelConfig
    from worker_svc.models.loader import load_model
    from worker_svc.models.parts import ModelPart
    from worker_svc.parallel.group import meet
    from worker_svc.parallel.membership import membership_of
    from worker_svc.parallel.ranks import OnlyRank
    from worker_svc.service.devices import choose_device
    from worker_svc.steps.model_runner import ModelRunner

    log.configure("warning")
    torch.set_num_threads(1)
    member = membership_of(size, os.environ)
    device = choose_device(device_name, member.local_rank if member else 0)
    group = meet(member, device, is_ordered=False) if member else None
    part = ModelPart.of(ModelConfig.from_folder(folder, device=str(device)), group.ranks if group else OnlyRank())
    model = load_model(folder, part, device, "dummy")
    steps = decode_steps(ModelRunner(model, part.own, BLOCK_SIZE, device), rows)
    for _ in range(WARM_UP):
        next(steps)
    if group:
        group.ranks.bytes_sent = 0
    seconds = [next(steps) for _ in range(STEPS)]
    num_bytes = group.ranks.bytes_sent // STEPS if group else 0
    if group is None or group.is_first:
        print(json.dumps([median(seconds), num_bytes, model.weights_bytes]), flush=True)
    if group:
        group.exchange(ranks_pb2.RankGraphs())  # none leaves before all have ended
        os._exit(0)  # without a word about ranks that have ended


def decode_steps(runner: ModelRunner, rows: int) -> Iterator[float]:
    """Prefills `rows` sequences, and then gives the seconds of one decode step of all after the other."""
    from protos import worker_pb2
    from worker_svc.mirror.sequence_states import SequenceStates
    from worker_svc.steps.step_timer import StepTimer

    length = CONTEXT + WARM_UP + STEPS + 2
    num_blocks = -(-length // BLOCK_SIZE)  # of each
    runner.allocate_cache(rows * num_blocks, 0)
    states = SequenceStates(rows, length, BLOCK_SIZE, rows * num_blocks)
    slots = np.arange(rows, dtype="<u2").tobytes()
    prefill = worker_pb2.Step(
        rows=worker_pb2.Rows(
            slots_u16=slots,
            query_lens_u32=np.full(rows, CONTEXT, "<u4").tobytes(),
            num_samples_u16=np.ones(rows, "<u2").tobytes(),
        )
    )
    group = prefill.groups.add(request_id="benchmark")
    group.sampling_params.seed = 0
    for slot in range(rows):
        table = range(slot * num_blocks, (slot + 1) * num_blocks)
        group.sequences.add(slot=slot, index=slot, token_ids=[7] * CONTEXT, block_table=table)
    runner.run(states, states.apply(prefill).rows, StepTimer(time.perf_counter_ns()))
    decode = worker_pb2.Step(rows=worker_pb2.Rows(slots_u16=slots, num_decode_rows=rows))
    while True:
        begun_s = time.perf_counter()
        runner.run(states, states.apply(decode).rows, StepTimer(time.perf_counter_ns()))
        yield time.perf_counter() - begun_s


if __name__ == "__main__":
    sys.exit(main())
