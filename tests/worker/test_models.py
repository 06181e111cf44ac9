"""The forward pass against transformers in float32, in whatever pieces and batches a sequence is computed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.models.resolve import resolve_model
from tests.tiny_models import make_tiny_llama
from tests.worker.exact_logits import FACTOR_OF_LONG_SUMS, truth_of_folder
from tests.worker.model_cases import Stepper
from worker_svc.models.config import DTYPES, ModelConfig
from worker_svc.models.loader import Model, load_model
from worker_svc.steps.model_runner import ModelRunner

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "uneven": {},
    "tied": {"tie_word_embeddings": True},
    "multi-head": {"num_heads": 3, "num_kv_heads": 3, "hidden_size": 42},
    "multi-query": {"num_heads": 5, "num_kv_heads": 1, "hidden_size": 50, "head_dim": 16},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.5}},
    "llama3 rope": {"rope_parameters": LLAMA3},
}

LENGTHS = [1, 5, 83, 140]


def tokens(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 1000 + length).choices(range(1031), k=length)


def load(folder: Path, dtype: str = "auto") -> Model:
    config = ModelConfig.from_folder(folder, dtype)
    return load_model(folder, config, "cpu")


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "uneven")


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "model", seed=3, **VARIANTS[name])
    sequences = [tokens(length) for length in LENGTHS]
    got = Stepper(load(folder), sequences).step({i: (0, length) for i, length in enumerate(LENGTHS)})
    truth_of_folder(folder, sequences).check_whole([got[i] for i in range(len(sequences))])


def test_pieces_and_company_change_no_bit(uneven: Path) -> None:
    """Whole prompts alone are the reference; then decode rows, chunks and mixtures of both must give the same bits."""
    model = load(uneven)
    sequences = [tokens(length) for length in LENGTHS]
    alone = [Stepper(model, [sequence]).step({0: (0, len(sequence))})[0] for sequence in sequences]
    truth_of_folder(uneven, sequences).check_whole(alone)

    one_by_one = Stepper(model, [sequences[2]])
    for position in range(len(sequences[2])):
        logits = one_by_one.step({0: (position, position + 1)})[0]
        assert torch.equal(logits[0], alone[2][position]), position

    mixed, done, numbers = Stepper(model, sequences), [0] * len(sequences), random.Random(5)
    while unfinished := [i for i, sequence in enumerate(sequences) if done[i] < len(sequence)]:
        chosen = numbers.sample(unfinished, numbers.randint(1, len(unfinished)))
        pieces = {i: (done[i], min(len(sequences[i]), done[i] + numbers.choice([1, 1, 3, 40]))) for i in chosen}
        for i, logits in mixed.step(pieces).items():
            first, last = pieces[i]
            assert torch.equal(logits, alone[i][first:last]), (i, first, last)
            done[i] = last


def test_greedy_output_is_that_of_transformers_generate(uneven: Path) -> None:
    from transformers import LlamaForCausalLM

    model, oracle = load(uneven), LlamaForCausalLM.from_pretrained(uneven, dtype=torch.float32)
    prompt, length = tokens(11), 40
    expected = oracle.generate(
        torch.tensor([prompt]), max_new_tokens=length, min_new_tokens=length, do_sample=False, eos_token_id=None
    )[0].tolist()
    sequence = prompt + [0] * length
    stepper, computed = Stepper(model, [sequence]), 0
    for known in range(len(prompt), len(sequence)):
        sequence[known] = int(stepper.step({0: (computed, known)})[0][-1].argmax())
        computed = known
    assert sequence == expected


def test_bfloat16_is_near_float32(uneven: Path) -> None:
    sequence = tokens(30)
    full, half = (Stepper(load(uneven, dtype), [sequence]).step({0: (0, 30)})[0] for dtype in ("float32", "bfloat16"))
    assert half.dtype == torch.float32
    assert (full - half).abs().mean() < 0.05 * full.std()


@pytest.mark.parametrize(("cache_dtype", "error"), [("float16", 2e-3), ("bfloat16", 1.5e-2)])
def test_a_narrower_cache_costs_its_rounding(uneven: Path, cache_dtype: str, error: float) -> None:
    """And no more: chunks and single tokens still give the bits of a whole prompt, as both read what is stored."""
    model, sequence, dtype = load(uneven), tokens(60), DTYPES[cache_dtype]
    exact = Stepper(model, [sequence]).step({0: (0, 60)})[0]
    whole = Stepper(model, [sequence], dtype).step({0: (0, 60)})[0]
    assert 0 < (whole - exact).abs().mean() < error * exact.std()
    stepper = Stepper(model, [sequence], dtype)
    for piece in ((0, 20), (20, 21), (21, 60)):
        assert torch.equal(stepper.step({0: piece})[0], whole[slice(*piece)])


def test_blocks_are_as_large_as_the_type_of_the_cache(uneven: Path) -> None:
    model = load(uneven)
    sizes = [ModelRunner(model, model.config, 16, cache_dtype=dtype).block_bytes for dtype in (None, torch.float16)]
    assert sizes == [2 * 3 * 2 * 10 * 16 * 4, 2 * 3 * 2 * 10 * 16 * 2]


@pytest.mark.parametrize("rows", [[], [4], [0, 2, 2]])
def test_only_the_rows_asked_for_get_logits(uneven: Path, rows: list[int]) -> None:
    model = load(uneven)
    full = Stepper(model, [tokens(5)]).step({0: (0, 5)})[0]
    picked = Stepper(model, [tokens(5)]).step({0: (0, 5)}, logits_rows=rows)[0]
    assert torch.equal(picked, full[rows])


def test_weights_bytes_counts_what_is_held(uneven: Path, without_padding: None) -> None:
    on_disk = (uneven / "model.safetensors").stat().st_size
    assert on_disk < load(uneven).weights_bytes < on_disk + 2048 * 10 * 4 + 2**16  # rotary table; the file has a header


@pytest.mark.smollm2
def test_smollm2_logits_and_greedy_tokens() -> None:
    """The real model, in a batch and alone."""
    folder = resolve_model("smollm2-135m-instruct")
    # "The capital of France is", and 24 arbitrary tokens.
    sequences = [[504, 3575, 282, 4649, 314], random.Random(0).choices(range(49152), k=24)]
    got = Stepper(load(folder), sequences).step({0: (0, 5), 1: (0, 24)})
    truth = truth_of_folder(folder, sequences)
    truth.check_whole([got[i] for i in range(len(sequences))], FACTOR_OF_LONG_SUMS)
    for i, exact in enumerate(truth.exact):  # the token is the one of the truth, but where two are nearly as likely
        chosen = exact.gather(1, got[i].argmax(-1, keepdim=True))[:, 0]
        assert (exact.amax(-1) - chosen <= 2 * (got[i] - exact).abs().amax()).all()

    one_by_one = Stepper(load(folder), sequences[1:])
    for position in range(24):
        assert torch.equal(one_by_one.step({0: (position, position + 1)})[0][0], got[1][position]), position
