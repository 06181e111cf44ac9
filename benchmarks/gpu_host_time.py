"""How long the host of a GPU worker takes for a step, and what it launches: `python -m benchmarks.gpu_host_time`.

A GPU is not needed: `benchmarks.stand_in_driver` counts launches where they would happen, and torch's operators run on
the CPU over tensors so small that their time is that of launching them. Layers, experts and norms of heads are those of
the models named; widths are not, nor heads, of which all have two, for the host's time does not depend on them. Steps
are those of a worker, from a message to draws that are on their way:

    decode   64 sequences, one token each
    mixed    32 sequences, one token each, and a prompt's chunk of 32
    prompt   one prompt of 64 tokens
    drawn    as decode, with temperature and top-p
    sampled  as drawn, with penalties and logprobs

With graphs a captured pass is one call, which takes a few microseconds on a GPU and nothing here. Times are of
the processor, and the least of some steps, for other work on the machine only adds. What the driver and the GPU take
comes on top.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)  # the interpreter launches nothing

import numpy as np
import torch

from benchmarks.stand_in_driver import Launches, stand_in
from kernels import select
from octavo.bench import machine
from protos import inference_pb2, worker_pb2
from worker_svc.host import uploads
from worker_svc.host.output_copies import HostOutput
from worker_svc.mirror.sequence_states import SequenceStates
from worker_svc.models.config import ModelConfig
from worker_svc.models.loader import load_model
from worker_svc.models.names import LLAMA, MIXTRAL
from worker_svc.models.products import linear
from worker_svc.models.products.float_linear import FloatLinear
from worker_svc.models.rope import Rope
from worker_svc.models.style import DecoderStyle, ExpertStyle
from worker_svc.steps.launched_step import Launched
from worker_svc.steps.model_runner import ModelRunner
from worker_svc.steps.step_timer import StepTimer

RESULTS = Path(__file__).parent / "results"
DEVICE = torch.device("cpu")
VOCAB_SIZE, WIDTH, BLOCK_SIZE, MAX_LEN = 256, 16, 16, 256
NUM_DECODES, NUM_MIXED_DECODES, NUM_CHUNK, NUM_PROMPT = 64, 32, 32, 64
_WARM_UP = 3
STEPS = ("decode", "mixed", "prompt", "drawn", "sampled")
GREEDY = inference_pb2.SamplingParams(seed=1, temperature=0.0)
DRAWN = inference_pb2.SamplingParams(seed=1, temperature=0.8, top_p=0.9)
SAMPLED = inference_pb2.SamplingParams(
    seed=1, temperature=0.8, top_p=0.9, repetition_penalty=1.1, frequency_penalty=0.1, logprobs=5
)
PHASES = ("prepare_ns", "forward_ns", "sample_ns")


def style(num_layers: int, *, has_head_norms: bool = False, experts: tuple[int, int] | None = None) -> DecoderStyle:
    """Llama's, or one of its kin."""
    mixture = experts and ExpertStyle(*experts, WIDTH, True, is_sparse=(True,) * num_layers)
    names = MIXTRAL if experts and not has_head_norms else LLAMA
    return DecoderStyle(names=names, has_head_norms=has_head_norms, experts=mixture or None, ropes=(Rope(WIDTH),))


MODELS = {
    "Llama 3.1 8B": style(32),
    "Qwen3 0.6B": style(28, has_head_norms=True),
    "Qwen3 8B": style(36, has_head_norms=True),
    "Mixtral 8x7B": style(32, experts=(8, 2)),
}
LAYERS = {"Llama 3.1 8B": 32, "Qwen3 0.6B": 28, "Qwen3 8B": 36, "Mixtral 8x7B": 32}


class LateOutputs:
    """As a GPU's: what is drawn stays on the device for the next step."""

    is_late = True

    def start(self, tensors: Any) -> HostOutput:
        """Copies nothing."""
        return HostOutput(tensors)


class CountedGraphs:
    """What is captured runs once, and a replay launches it in one call."""

    def __init__(self, launches: Launches) -> None:
        self._launches = launches

    def capture(self, work: Callable[[], None]) -> CountedGraphs:
        """See `GraphBackend`."""
        work()
        return self

    def replay(self) -> None:
        """One launch."""
        self._launches.triton["graph"] += 1

    def new_pool(self) -> None:
        """There is no memory to be shared."""

    def bytes_taken(self) -> int:
        """None: nothing is kept."""
        return 0


class CpuTimer(StepTimer):
    """Phases by the processor's time of this thread, which other work on the machine does not add to; nothing waits."""

    def __init__(self) -> None:
        super().__init__(time.perf_counter_ns())
        self.phases_ns: dict[str, int] = {}
        self._began_ns = time.thread_time_ns()

    def end_phase(self, name: str) -> None:
        """See `StepTimer`."""
        now_ns = time.thread_time_ns()
        self.phases_ns[name], self._began_ns = now_ns - self._began_ns, now_ns


def upload_packed(device: Any, *arrays: Any) -> tuple[torch.Tensor, ...]:
    """What `upload` does for a GPU, into memory that is not pinned."""
    packed, places = uploads.pack(arrays, pin_memory=False)
    return uploads.unpack(packed.clone(), arrays, places)


@contextmanager
def gpu_worker() -> Iterator[None]:
    """The code that a worker runs on a GPU, on the CPU's tensors."""
    with ExitStack() as patches:
        patches.enter_context(mock.patch.dict(select._MODULES, cpu="kernels.gpu.operations"))
        patches.enter_context(
            mock.patch.object(linear, "dense", lambda weight, bias=None, **_: FloatLinear(weight, bias))
        )
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("worker_svc") and hasattr(module, "upload"):
                patches.enter_context(mock.patch.object(module, "upload", upload_packed))
        yield


class Worker:
    """A runner with its mirror, and steps for it."""

    def __init__(self, name: str, launches: Launches, *, has_graphs: bool, num_prompts: int) -> None:
        config = ModelConfig(
            architecture="LlamaForCausalLM",
            vocab_size=VOCAB_SIZE,
            hidden_size=WIDTH,
            intermediate_size=WIDTH,
            num_layers=LAYERS[name],
            num_heads=2,
            num_kv_heads=1,
            head_size=WIDTH,
            max_positions=MAX_LEN,
            max_model_len=MAX_LEN,
            tie_word_embeddings=True,
            style=MODELS[name],
            dtype=torch.float32,
            eos_token_ids=(2,),
            model_name=name,
            model_hash="0",
        )
        max_num_seqs = NUM_DECODES + num_prompts
        self._num_blocks = MAX_LEN // BLOCK_SIZE  # of a sequence
        graphs = (lambda device: CountedGraphs(launches)) if has_graphs else None
        self.runner = ModelRunner(
            load_model("", config, DEVICE, "dummy"),
            config,
            BLOCK_SIZE,
            DEVICE,
            outputs=LateOutputs(),
            graph_backend=graphs,
        )
        self.runner.allocate_cache(max_num_seqs * self._num_blocks, 0)
        self.runner.allocate_scratch(max_num_seqs, MAX_LEN)
        self.runner.capture_graphs(max_num_seqs, MAX_LEN, 1 << 30)
        self.runner.capture_mixed_graphs(2 * NUM_PROMPT, MAX_LEN, 1 << 30)
        self.states = SequenceStates(max_num_seqs, MAX_LEN, BLOCK_SIZE, max_num_seqs * self._num_blocks)
        self._step_id, self._next_slot = 0, 0
        self._launched: Launched | None = None

    def run(self, decodes: range, prompt_len: int, params: inference_pb2.SamplingParams, timer: StepTimer) -> None:
        """One token more for `decodes`, and a new prompt of `prompt_len` tokens; 0: none."""
        self._step_id += 1
        step = worker_pb2.Step(step_id=self._step_id)
        query_lens, slots = [1] * len(decodes), list(decodes)
        if prompt_len:
            slot, self._next_slot = self._next_slot, self._next_slot + 1
            group = step.groups.add(request_id=f"request-{slot}", sampling_params=params)
            table = range(slot * self._num_blocks, (slot + 1) * self._num_blocks)
            group.sequences.add(slot=slot, token_ids=[3] * prompt_len, block_table=table)
            slots.append(slot)
            query_lens.append(prompt_len)
            step.rows.query_lens_u32 = np.array([prompt_len], "<u4").tobytes()
            step.rows.num_samples_u16 = np.array([1], "<u2").tobytes()
        step.rows.slots_u16 = np.array(slots, "<u2").tobytes()
        step.rows.num_decode_rows = len(decodes)
        rows = self.states.apply(step).rows
        launched, self._launched = self._launched, self.runner.launch(self.states, rows, timer)
        if launched is not None:  # the step before: two are on their way
            launched.outputs(CpuTimer())

    def begin(self, params: inference_pb2.SamplingParams) -> None:
        """Sequences that will decode."""
        for _ in range(NUM_DECODES):
            self.run(range(0), 3, params, CpuTimer())


def measure(launches: Launches, name: str, kind: str, num_steps: int, *, has_graphs: bool) -> dict[str, Any]:
    """One kind of step of one model."""
    with gpu_worker():
        worker = Worker(name, launches, has_graphs=has_graphs, num_prompts=num_steps + _WARM_UP + 1)
        params = {"drawn": DRAWN, "sampled": SAMPLED}.get(kind, GREEDY)
        worker.begin(params)
        decodes, prompt_len = {
            "decode": (range(NUM_DECODES), 0),
            "mixed": (range(NUM_MIXED_DECODES), NUM_CHUNK),
            "prompt": (range(0), NUM_PROMPT),
            "drawn": (range(NUM_DECODES), 0),
            "sampled": (range(NUM_DECODES), 0),
        }[kind]
        phases: dict[str, list[int]] = {phase: [] for phase in PHASES}
        for number in range(_WARM_UP + num_steps):
            timer = CpuTimer()
            worker.run(decodes, prompt_len, params, timer)
            if number >= _WARM_UP:
                for phase in PHASES:
                    phases[phase].append(timer.phases_ns[phase])
        launches.clear()
        with launches.watched():
            worker.run(decodes, prompt_len, params, CpuTimer())
        return {
            "model": name,
            "layers": LAYERS[name],
            "step": kind,
            "graphs": has_graphs,
            **{f"{phase[:-3]}_ms": round(min(phases[phase]) / 1e6, 3) for phase in PHASES},
            "step_ms": round(min(map(sum, zip(*phases.values(), strict=True))) / 1e6, 3),
            "triton_launches": sum(launches.triton.values()),
            "torch_operators": sum(launches.torch.values()),
            "triton_python_ms": round(1e3 * launches.triton_s, 3),
            "launches": dict(launches.triton.most_common()),
            "operators": dict(launches.torch.most_common()),
        }


def main() -> None:
    """Prints a table; `--save` keeps the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="of each kind")
    parser.add_argument("--model", choices=MODELS, action="append", help="default: all")
    parser.add_argument("--step", choices=STEPS, action="append", help="default: all")
    parser.add_argument("--verbose", action="store_true", help="print what is launched")
    parser.add_argument("--save", action="store_true", help="keep the figures in benchmarks/results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    facts, found = machine.describe(), []
    heads = [f"{name:>8}" for name in ("prepare", "forward", "sample", "triton", "torch", "ms")]
    print(f"{'model':14} {'step':8} graphs", *heads)
    names, kinds = arguments.model or MODELS, arguments.step or STEPS
    with stand_in() as launches:
        for name, kind, has_graphs in itertools.product(names, kinds, (False, True)):
            row = measure(launches, name, kind, arguments.steps, has_graphs=has_graphs)
            found.append(row)
            print(
                f"{name:14} {kind:8} {'yes' if has_graphs else 'no':6} {row['prepare_ms']:8.3f} "
                f"{row['forward_ms']:8.3f} {row['sample_ms']:8.3f} {row['triton_launches']:8} "
                f"{row['torch_operators']:8} {row['step_ms']:8.3f}",
                flush=True,
            )
            if arguments.verbose:
                print(
                    f"    {row['launches']}\n    {row['operators']}\n    triton's Python: {row['triton_python_ms']} ms"
                )
    if arguments.save:
        path = RESULTS / f"{time.strftime('%Y-%m-%d')}-gpu-host-time-{machine.slug(facts)}.json"
        path.write_text(json.dumps({"machine": facts, "steps": found}, indent=1) + "\n")
        print(path)


if __name__ == "__main__":
    main()
