"""Models of quantised checkpoints compute what their weights say in float32: each format, whole and in parts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from kernels import cpu
from tests.worker.families import VOCAB_SIZE, make_family
from tests.worker.model_cases import Stepper
from tests.worker.quantised_checkpoints import FORMATS, Format, write_quantised
from worker_svc.models.config import ModelConfig
from worker_svc.models.loader import Model, load_model

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
}
CHANGES: dict[str, dict[str, object]] = {
    "gemma2": {"head_dim": 16},
    "qwen3-moe": {"moe_intermediate_size": 64, "head_dim": 16},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}
PROMPT = random.Random(1).choices(range(VOCAB_SIZE), k=40)


@pytest.fixture(autouse=True)
def expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are read and expanded: what a device's own products make of them is theirs to show."""
    monkeypatch.setattr(cpu, "quantized_product", lambda weight, bias: None, raising=False)


def make(
    tmp_path: Path, family: str, format_: Format, plain: tuple[str, ...] = (), **changes: object
) -> tuple[Path, Path]:
    folder = make_family(family, tmp_path / "model", **(SIZES | changes))
    return write_quantised(folder, tmp_path, format_, plain)


def load(folder: Path, dtype: str = "float32", quantization: str = "") -> Model:
    return load_model(folder, ModelConfig.from_folder(folder, dtype, quantization=quantization), "cpu")


def greedy(model: Model, count: int = 12) -> tuple[list[int], torch.Tensor]:
    """Tokens after the prompt, and the logits of the last of them."""
    tokens = list(PROMPT)
    for _ in range(count):
        logits = Stepper(model, [tokens]).step({0: (0, len(tokens))}, [len(tokens) - 1])[0]
        tokens.append(int(logits.argmax()))
    return tokens[len(PROMPT) :], logits


@pytest.mark.parametrize("name", FORMATS)
def test_greedy_tokens_are_those_of_the_expanded_twin(name: str, tmp_path: Path) -> None:
    quantised, twin = make(tmp_path, "llama-gelu", FORMATS[name])
    (tokens, logits), (expected, exact) = greedy(load(quantised)), greedy(load(twin))
    assert tokens == expected and len(set(tokens)) > 3
    assert torch.equal(logits, exact)


@pytest.mark.parametrize("family", ["qwen2", "mixtral", "gemma2", "phi3", "qwen3-moe"])
@pytest.mark.parametrize("name", ["awq-32", "gptq-order", "packed-asymmetric", "int8-channel", "fp8-blocks"])
def test_families_are_read_alike(name: str, family: str, tmp_path: Path) -> None:
    sizes = CHANGES.get(family, {})
    quantised, twin = make(tmp_path, family, FORMATS[name], **sizes)
    (tokens, logits), (expected, exact) = greedy(load(quantised), 3), greedy(load(twin), 3)
    assert tokens == expected and torch.equal(logits, exact)
