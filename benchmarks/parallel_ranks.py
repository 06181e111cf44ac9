"""What a decode step of a model costs on several ranks, which share each layer or have some of the layers each:
`python -m benchmarks.parallel_ranks` (three minutes).

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
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.bench import machine
from octavo.shared.ports import LOOPBACK, free_port

if TYPE_CHECKING:
    from worker_svc.parallel.group import ParallelGroup
    from worker_svc.steps.launched_step import Launched
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


@dataclass(frozen=True)
class Case:
    """`rows` sequences, in so many micro-batches, each of which has a step in flight."""

    tensor_size: int
    num_stages: int
    num_micro_batches: int
    rows: int

    @property
    def size(self) -> int:
        """Ranks."""
        return self.tensor_size * self.num_stages


# Ranks that share each layer; stages, with one step in flight and with one for each; both.
LAYOUTS = ((1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 2, 2), (1, 4, 4), (2, 2, 2))


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Measures decode steps of a model that is split over ranks.")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32], help="sequences in a step")
    parser.add_argument("--most-ranks", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    print(json.dumps(machine.describe()))
    print("| ranks of a stage | stages | in flight | rows | tokens/s | ms for all | bytes by rank 0 | idle | MiB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for layout in LAYOUTS:
        for rows in arguments.rows:
            case = Case(*layout, rows)
            if case.size > arguments.most_ranks or rows < case.num_micro_batches:
                continue
            found = measure(case, arguments.device)
            idle = f"{found['idle']:.0%}" if case.tensor_size == 1 else ""
            print(
                f"| {case.tensor_size} | {case.num_stages} | {case.num_micro_batches} | {rows} "
                f"| {rows / found['seconds']:.1f} | {found['seconds'] * 1e3:.1f} | {found['bytes']:,} | {idle} "
                f"| {found['weights'] >> 20} |",
                flush=True,
            )
    return 0


def measure(case: Case, device: str) -> dict[str, Any]:
    """Median seconds in which all sequences get a token, bytes that rank 0 gave the others meanwhile, of its weights,
    and the share of their time in which ranks had nothing to compute."""
    from worker_svc.parallel.membership import Membership

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SIZES))
        port, processes = free_port(), []
        for rank in range(case.size):
            environment = os.environ | Membership(rank, case.size, rank, case.size, LOOPBACK, port).variables()
            work = f"from benchmarks.parallel_ranks import Case, run_rank; run_rank({folder!r}, {case!r}, {device!r})"
            command = [sys.executable, "-c", work]
            processes.append(
                subprocess.Popen(command, env=environment | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True)
            )
        said = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a rank has failed")
    found: dict[str, Any] = json.loads(said[0])
    return found


def run_rank(folder: str, case: Case, device_name: str) -> None:
    """One rank: prefills the sequences, decodes, and, as rank 0, prints what `measure` returns."""
    import torch

    from octavo.shared import log
    from worker_svc.models.config import ModelConfig
    from worker_svc.models.loader import load_model
    from worker_svc.models.parts import ModelPart
    from worker_svc.parallel.group import meet
    from worker_svc.parallel.membership import membership_of
    from worker_svc.service.devices import choose_device
    from worker_svc.steps.model_runner import ModelRunner
    from worker_svc.steps.stage_answers import StageAnswers

    log.configure("warning")
    torch.set_num_threads(1)
    member = membership_of(case.size, os.environ)
    device = choose_device(device_name, member.local_rank if member else 0)
    group = meet(member, device, num_stages=case.num_stages, is_ordered=False) if member else None
    ranks, stages = (group.ranks, group.stages) if group else (None, None)
    part = ModelPart.of(ModelConfig.from_folder(folder, device=str(device)), ranks, stages)
    model = load_model(folder, part, device, "dummy")
    answers = StageAnswers(group.answers, is_last=part.is_last) if group and case.num_stages > 1 else None
    rounds = decode_rounds(ModelRunner(model, part.own, BLOCK_SIZE, device, answers=answers), case)
    for _ in range(WARM_UP):
        next(rounds)
    before = _counts(group)
    begun_s = time.perf_counter()
    found = [next(rounds) for _ in range(STEPS)]
    elapsed_s = time.perf_counter() - begun_s
    num_bytes, waited_s = (now - then for now, then in zip(_counts(group), before, strict=True))
    busy = (sum(seconds for _, seconds in found) - waited_s) / elapsed_s
    idle = 1 - _mean_of_ranks(busy, group)
    if group is None or group.is_first:
        seconds = median(seconds for seconds, _ in found)
        said = {"seconds": seconds, "bytes": int(num_bytes) // STEPS, "weights": model.weights_bytes, "idle": idle}
        print(json.dumps(said), flush=True)
    if group:
        os._exit(0)  # without a word about ranks that have ended


def _counts(group: ParallelGroup | None) -> tuple[float, float]:
    """Bytes given to others, and seconds waited for the stage before."""
    if group is None:
        return 0.0, 0.0
    return group.ranks.bytes_sent + group.stages.bytes_sent, getattr(group.stages, "waited_ns", 0) / 1e9


def _mean_of_ranks(value: float, group: ParallelGroup | None) -> float:
    """Returns when all ranks have asked for it."""
    import torch
    import torch.distributed as dist

    if group is None:
        return value
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / group.member.size


def decode_rounds(runner: ModelRunner, case: Case) -> Iterator[tuple[float, float]]:
    """Prefills the sequences; then, of one token for each of them after the other, the seconds from the last one's to
    this one's, and those of them in which steps were launched."""
    from protos import worker_pb2
    from worker_svc.mirror.sequence_states import SequenceStates
    from worker_svc.steps.step_timer import StepTimer

    rows, length = case.rows, CONTEXT + WARM_UP + STEPS + 4
    num_blocks = -(-length // BLOCK_SIZE)  # of each
    runner.allocate_cache(rows * num_blocks, 0)
    states = SequenceStates(rows, length, BLOCK_SIZE, rows * num_blocks)
    prefill = worker_pb2.Step(
        rows=worker_pb2.Rows(
            slots_u16=np.arange(rows, dtype="<u2").tobytes(),
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
    steps = [
        worker_pb2.Step(rows=worker_pb2.Rows(slots_u16=slots.astype("<u2").tobytes(), num_decode_rows=slots.size))
        for slots in np.array_split(np.arange(rows), case.num_micro_batches)
    ]
    in_flight: deque[Launched] = deque()
    while True:
        begun_s, launching_s = time.perf_counter(), 0.0
        for step in steps:
            if len(in_flight) == len(steps):
                in_flight.popleft().outputs(StepTimer(time.perf_counter_ns()))
            launched_s = time.perf_counter()
            in_flight.append(runner.launch(states, states.apply(step).rows, StepTimer(time.perf_counter_ns())))
            launching_s += time.perf_counter() - launched_s
            if not runner.is_late:  # the stages before wait for what this one has drawn
                in_flight.popleft().outputs(StepTimer(time.perf_counter_ns()))
        yield time.perf_counter() - begun_s, launching_s


if __name__ == "__main__":
    sys.exit(main())
