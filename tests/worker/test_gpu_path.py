"""A worker's way through a GPU, in small: Triton kernels, steps on their way together, replayed decode steps.

Without a GPU the kernels run in Triton's interpreter and graphs are computed again; all else is the code that a GPU
worker runs.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels import select
from protos import worker_pb2
from tests.kernels.device import DEVICE, IS_INTERPRETED
from tests.tiny_models import make_tiny_llama
from tests.worker.fake_model import decode, greedy, prefill, slots_u16, tokens_of, u32
from tests.worker.late_outputs import Arrivals, LateOutputs
from tests.worker.model_cases import Stepper
from tests.worker.replayed_graphs import ReplayedGraphs, kept
from worker_svc.host.graph_backend import CudaGraphBackend
from worker_svc.host.memory import GIB
from worker_svc.mirror.sequence_states import SequenceStates
from worker_svc.models.cache_scales.cache_scales import CacheScales
from worker_svc.models.config import ModelConfig
from worker_svc.models.loader import Model, load_model
from worker_svc.steps.model_runner import ModelRunner
from worker_svc.steps.step_pipeline import StepPipeline
from worker_svc.steps.step_timer import StepTimer

VOCAB_SIZE, BLOCK_SIZE, MAX_SEQS, MAX_LEN = 283, 8, 4, 32
PROMPTS = [[5, 7, 11, 3, 90, 17, 64, 2, 88, 41, 6], [100]]
NUM_NEW = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(
        tmp_path_factory.mktemp("models") / "tiny",
        seed=11,
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        num_layers=2,
        num_heads=3,
        num_kv_heads=1,
        intermediate_size=40,
        max_position_embeddings=64,
        head_dim=32,
    )


@pytest.fixture
def model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """On the GPU's kernels, wherever it is."""
    monkeypatch.setitem(select._MODULES, "cpu", "kernels.gpu.operations")
    return load_model(folder, ModelConfig.from_folder(folder, device=DEVICE), DEVICE)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[list[int], torch.Tensor]]:
    """By transformers, for each prompt: it and its greedy successors, and the logits f32[length, vocab] of all."""
    from transformers import LlamaForCausalLM

    oracle, found = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32), []
    for prompt in PROMPTS:
        tokens = oracle.generate(torch.tensor([prompt]), max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None)[
            0
        ].tolist()
        with torch.inference_mode():
            found.append((tokens, oracle(torch.tensor([tokens])).logits[0]))
    return found


def test_logits_of_prompts_chunks_and_single_tokens_are_those_of_transformers(
    model: Model, expected: list[tuple[list[int], torch.Tensor]]
) -> None:
    sequences = [tokens for tokens, _ in expected]
    stepper = Stepper(model, sequences, block_size=BLOCK_SIZE)
    for pieces in ({0: (0, 5), 1: (0, 7)}, {0: (5, 13)}, {0: (13, 14)}, {0: (14, 17)}):
        for sequence, logits in stepper.step(pieces).items():
            first, last = pieces[sequence]
            torch.testing.assert_close(logits.cpu(), expected[sequence][1][first:last], rtol=1e-4, atol=1e-4)


def test_a_cache_of_8_bits_costs_its_rounding(model: Model, expected: list[tuple[list[int], torch.Tensor]]) -> None:
    sequence, exact = expected[0]
    stepper = Stepper(model, [sequence], torch.float8_e4m3fn, BLOCK_SIZE)
    found = torch.cat([stepper.step({0: piece})[0].cpu() for piece in ((0, 9), (9, 10), (10, len(sequence)))])
    # Three bits of mantissa, which the interpreter cuts rather than rounds; unrelated logits differ by 1.1 of it.
    assert 1e-3 * exact.std() < (found - exact).abs().mean() < 0.3 * exact.std()


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("impl", ["octavo", "transformers"])
def test_scales_bring_large_keys_into_a_cache_of_8_bits(
    impl: str, folder: Path, tmp_path: Path, expected: list[tuple[list[int], torch.Tensor]]
) -> None:
    """Keys that are 1024 times as large, under queries that are as much smaller, are the same model: bit for bit, with
    scales, and cut without. Values likewise, before a product that makes up for them."""
    large = shutil.copytree(folder, tmp_path / "large")
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        for part, factor in {"k_proj": 1024, "q_proj": 1 / 1024, "v_proj": 2048, "o_proj": 1 / 2048}.items():
            if part in name:
                tensor *= factor
    save_file(tensors, large / "model.safetensors", metadata={"format": "pt"})
    sequence, exact = expected[0]

    def logits(folder: Path, scales: CacheScales | None) -> torch.Tensor:
        config = ModelConfig.from_folder(folder, device=DEVICE, impl=impl)
        model = load_model(folder, replace(config, cache_scales=scales), DEVICE)
        stepper = Stepper(model, [sequence], torch.float8_e4m3fn, BLOCK_SIZE)
        return torch.cat([stepper.step({0: piece})[0].cpu() for piece in ((0, 9), (9, 10), (10, len(sequence)))])

    plain = logits(folder, None)
    assert torch.equal(logits(large, CacheScales(((1024.0,),) * 2, ((2048.0,),) * 2)), plain)
    cut = logits(large, CacheScales.ones(2, 1))
    assert (cut - exact).abs().mean() > 0.3 * exact.std() > (plain - exact).abs().mean()


@pytest.mark.parametrize("has_graphs", [False, True], ids=["eager", "graphs"])
def test_greedy_tokens_are_those_of_transformers(
    model: Model, expected: list[tuple[list[int], torch.Tensor]], has_graphs: bool
) -> None:
    check_greedy_tokens(model, expected, has_graphs=has_graphs)


def check_greedy_tokens(model: Model, expected: list[tuple[list[int], torch.Tensor]], *, has_graphs: bool) -> None:
    """One prompt in two chunks, the other beside its second one; every step is sent off before the last one's tokens
    are here, and with graphs every one is replayed."""
    backends: list[ReplayedGraphs] = []
    backend = kept(backends) if IS_INTERPRETED else CudaGraphBackend
    runner = ModelRunner(
        model,
        model.config,
        BLOCK_SIZE,
        DEVICE,
        outputs=LateOutputs(),
        graph_backend=backend if has_graphs else None,
    )
    num_blocks = MAX_SEQS * MAX_LEN // BLOCK_SIZE
    runner.allocate_cache(num_blocks, 0)
    runner.allocate_scratch(MAX_SEQS, MAX_LEN)
    assert runner._scratch is not None
    runner._scratch.totals.fill_(-1)
    for store in (store for layer in runner.cache.layers for store in layer):
        store.fill_(torch.nan)
    states, arrivals = SequenceStates(MAX_SEQS, MAX_LEN, BLOCK_SIZE, num_blocks), Arrivals()
    runner.capture_graphs(MAX_SEQS, MAX_LEN, GIB)
    assert runner.capture_mixed_graphs(8, MAX_LEN, GIB) == ([8] if has_graphs else [])
    pipeline = StepPipeline(runner, states, 64, arrivals.when_here, lambda: None, lambda: None)
    results: list[worker_pb2.StepResult] = []

    first = prefill(1, PROMPTS[:1], block_size=BLOCK_SIZE, max_len=MAX_LEN)
    first.rows.query_lens_u32, first.rows.num_samples_u16 = u32([4]), slots_u16([0])
    second = worker_pb2.Step(step_id=2)
    group = second.groups.add(request_id="other", sampling_params=greedy())
    group.sequences.add(slot=2, token_ids=PROMPTS[1], block_table=[9, 13, 8])
    second.rows.slots_u16, second.rows.num_samples_u16 = slots_u16([0, 2]), slots_u16([1, 1])
    second.rows.query_lens_u32 = u32([len(PROMPTS[0]) - 4, 1])
    steps = [first, second, *(decode(step_id, [2, 0]) for step_id in range(3, 2 + NUM_NEW))]
    for step in steps:
        pipeline.take(step, StepTimer(time.perf_counter_ns()), results.append)
    assert results == [], "nothing was waited for"
    pipeline.settle()
    answers = np.array([tokens_of(result) for result in results[2:]])
    drawn = [tokens_of(results[1])[0], *answers[:, 1].tolist()], [tokens_of(results[1])[1], *answers[:, 0].tolist()]
    for prompt, tokens, (sequence, _) in zip(PROMPTS, drawn, expected, strict=True):
        assert [*prompt, *tokens] == sequence
    if backends:
        assert sum(backends[0].replays) == len(steps) + len(steps) - 1, "passes, and samplings of all but the first"
    totals = runner._scratch.totals[:, 0]
    assert (totals[: len(PROMPTS)] > 0).all() and (totals[len(PROMPTS) :] == -1).all(), "a line a sequence"
    states.check_integrity()
