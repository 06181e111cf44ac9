"""What adapters cost a decode step: `python -m benchmarks.adapters` (a minute, two idle cores).

64 sequences, of which each has one of 0, 1, 8 or 64 adapters of random numbers. The steps of all four take turns, so
that other work on the machine falls on each alike.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from octavo.bench import machine

if TYPE_CHECKING:
    from worker_svc.adapters.adapter_set import AdapterSet
    from worker_svc.steps.model_runner import ModelRunner

ROWS, CONTEXT, BLOCK_SIZE, WARM_UP = 64, 64, 16, 2


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Measures decode steps of sequences with adapters.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 8, 64])
    parser.add_argument("--steps", type=int, default=15)
    arguments = parser.parse_args()
    print(json.dumps(machine.describe()))
    seconds = measure(arguments)
    print(f"| adapters | step of {ROWS}, ms | tokens/s | of none |")
    print("| --- | --- | --- | --- |")
    first = median(seconds[arguments.adapters[0]])
    for count in arguments.adapters:
        step_s = median(seconds[count])
        print(f"| {count} | {step_s * 1e3:.1f} | {ROWS / step_s:.0f} | {first / step_s:.2f} |")
    return 0


def measure(arguments: argparse.Namespace) -> dict[int, list[float]]:
    """Seconds of each step, by how many adapters its sequences have."""
    from worker_svc.config import WorkerConfig
    from worker_svc.server import load

    most = max(*arguments.adapters, 1)
    config = WorkerConfig(
        model=arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        enable_lora=True,
        max_loras=most,
        max_cpu_loras=most,
        max_lora_rank=arguments.rank,
    )
    runner, _ = load(config)
    assert runner.adapters is not None
    with tempfile.TemporaryDirectory() as folder:
        for number in range(most):
            write_adapter(Path(folder), runner.adapters, arguments.rank, seed=number)
            runner.adapters.load(f"adapter {number}", 1, runner.adapters.read(folder))
    length = CONTEXT + (WARM_UP + arguments.steps) + 2
    runner.allocate_cache(ROWS * len(arguments.adapters) * -(-length // BLOCK_SIZE), 0)
    batches = {
        count: Batch(runner, count, place, len(arguments.adapters), length)
        for place, count in enumerate(arguments.adapters)
    }
    seconds: dict[int, list[float]] = {count: [] for count in batches}
    for step in range(WARM_UP + arguments.steps):
        for count, batch in batches.items():
            step_s = batch.decode()
            if step >= WARM_UP:
                seconds[count].append(step_s)
    return seconds


class Batch:
    """Sequences whose adapters are the first `num_adapters`, in turns; prefilled."""

    def __init__(self, runner: ModelRunner, num_adapters: int, place: int, num_batches: int, length: int) -> None:
        """`place`: which of `num_batches` equal parts of the cache it has."""
        from protos import worker_pb2
        from worker_svc.mirror.sequence_states import SequenceStates

        assert runner.adapters is not None
        self._runner, num_blocks = runner, -(-length // BLOCK_SIZE)
        self._states = SequenceStates(ROWS, length, BLOCK_SIZE, ROWS * num_batches * num_blocks)
        self._states.loaded_adapters = runner.adapters.names
        slots = np.arange(ROWS, dtype="<u2").tobytes()
        lengths, samples = np.full(ROWS, CONTEXT, "<u4").tobytes(), np.ones(ROWS, "<u2").tobytes()
        rows = worker_pb2.Rows(slots_u16=slots, query_lens_u32=lengths, num_samples_u16=samples)
        prefill = worker_pb2.Step(rows=rows)
        for slot in range(ROWS):
            adapter = f"adapter {slot % num_adapters}" if num_adapters else ""
            group = prefill.groups.add(request_id=str(slot), adapter=adapter)
            group.sampling_params.seed = 0
            first = (place * ROWS + slot) * num_blocks
            group.sequences.add(slot=slot, token_ids=[7] * CONTEXT, block_table=range(first, first + num_blocks))
        self._run(prefill)
        self._decode = worker_pb2.Step(rows=worker_pb2.Rows(slots_u16=slots, num_decode_rows=ROWS))

    def decode(self) -> float:
        """Seconds of one step."""
        begun_s = time.perf_counter()
        self._run(self._decode)
        return time.perf_counter() - begun_s

    def _run(self, step: object) -> None:
        from worker_svc.steps.step_timer import StepTimer

        rows = self._states.apply(step).rows  # type: ignore[arg-type]  # protos are imported where they are needed
        self._runner.run(self._states, rows, StepTimer(time.perf_counter_ns()))


def write_adapter(folder: Path, adapters: AdapterSet, rank: int, seed: int) -> None:
    """Of all products, with random numbers."""
    import torch
    from safetensors.torch import save_file

    generator, tensors = torch.Generator().manual_seed(seed), {}
    for module, size, inputs in adapters.modules():
        name = f"base_model.model.{module}.lora"
        tensors[f"{name}_A.weight"] = torch.randn(rank, inputs, generator=generator) / inputs**0.5
        tensors[f"{name}_B.weight"] = torch.randn(size, rank, generator=generator) / rank / 10
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))


if __name__ == "__main__":
    sys.exit(main())
