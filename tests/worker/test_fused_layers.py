"""Layers in one call of compiled code: the bits of the single operations, for what they fit and for nothing else."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import cpu
from kernels.cpu.layers import layer_stack
from tests.kernels.quantized_weights import FORMATS, Make
from tests.tiny_models import make_tiny_llama
from tests.worker.families import FAMILIES, VOCAB_SIZE, make_family
from tests.worker.model_cases import Stepper
from worker_svc.models.config import ModelConfig
from worker_svc.models.decoder import Decoder
from worker_svc.models.fused_layers import FusedLayers
from worker_svc.models.loader import load_model
from worker_svc.models.logit_reader import LogitReader
from worker_svc.models.mlp import Mlp
from worker_svc.models.products.compiled_linear import CompiledLinear

LENGTHS = [1, 7, 83, 83, 83]  # more rows than an MLP takes at once
FUSED = ["llama-dynamic", "llama-yarn", "llama-yarn-plain", "mistral", "mistral-all", "qwen2", "phi3", "phi3-partial"]
FUSED += ["llama-gelu", "qwen3", "qwen3-one-head", "qwen3-biased", "gemma", "gemma2", "gemma3"]


# What weights are kept in, and what is computed in.
KINDS = [
    ("float", "float32"),
    ("float", "bfloat16"),
    ("int8", "float32"),
    ("int8", "bfloat16"),
    ("int4", "float32"),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Octavo's cache of this test alone: quantised weights are kept there."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))


def load(folder: Path, weights: str = "float", dtype: str = "float32") -> Decoder:
    """With products of float weights, or of eight bits or four."""
    quantization = "" if weights == "float" else weights
    model = load_model(folder, ModelConfig.from_folder(folder, dtype, quantization=quantization), "cpu")
    assert isinstance(model, Decoder)
    return model


def logits_of(model: Decoder) -> list[torch.Tensor]:
    """Of prompts side by side, then of a chunk and two more tokens beside one another."""
    numbers = random.Random(1)
    stepper = Stepper(model, [numbers.choices(range(VOCAB_SIZE), k=length + 1) for length in LENGTHS])
    steps = [
        stepper.step({i: (0, length) for i, length in enumerate(LENGTHS)}),
        stepper.step({i: (length, length + 1) for i, length in enumerate(LENGTHS)}),
    ]
    return [logits for step in steps for logits in step.values()]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Of a family's model, which is made once."""
    return functools.cache(lambda name: make_family(name, tmp_path_factory.mktemp(name) / "model"))


@pytest.mark.parametrize(("weights", "dtype"), KINDS)
@pytest.mark.parametrize("name", FUSED)
def test_fused_layers_are_the_single_operations_bit_for_bit(
    name: str, weights: str, dtype: str, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one thread and by two; single operations by one."""
    model, before = load(folder_of(name), weights, dtype), torch.get_num_threads()
    assert model.is_fused
    fused = []
    try:
        for num_threads in (2, 1):
            torch.set_num_threads(num_threads)
            fused.append(logits_of(model))
        monkeypatch.setattr(model, "_fused", None)
        single = logits_of(model)
    finally:
        torch.set_num_threads(before)
    for of_threads in fused:
        for one, other in zip(of_threads, single, strict=True):
            assert torch.equal(one, other) and one.isfinite().all()


def quantized(make: Make, out_features: int, in_features: int) -> CompiledLinear:
    """A product of random numbers in a format of checkpoints."""
    weight = make(out_features, in_features, torch.Generator().manual_seed(in_features))
    product = cpu.quantized_product(replace(weight, scale=weight.scale / 8), None)
    assert product is not None
    return CompiledLinear(product)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["awq", "gptq in an order", "int8 per output", "e4m3 in blocks"])
def test_fused_layers_multiply_quantised_weights(
    kind: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(make_tiny_llama(tmp_path / "model", hidden_size=192, intermediate_size=224), dtype=dtype)
    config, make = model.config, FORMATS[kind][0]
    for layer in model.layers:
        assert isinstance(layer.mlp, Mlp)
        heads = config.num_heads * config.head_size
        layer.qkv = quantized(make, heads + 2 * config.num_kv_heads * config.head_size, config.hidden_size)
        layer.attention_out = quantized(make, config.hidden_size, heads)
        layer.mlp.inner = quantized(make, 2 * config.intermediate_size, config.hidden_size)
        layer.mlp.outer = quantized(make, config.hidden_size, config.intermediate_size)
    assert FusedLayers.is_for(config, model.layers, cpu)
    monkeypatch.setattr(model, "_fused", FusedLayers(config, model.layers))
    fused = logits_of(model)
    monkeypatch.setattr(model, "_fused", None)
    for one, other in zip(fused, logits_of(model), strict=True):
        assert torch.equal(one, other) and one.isfinite().all()


@pytest.mark.parametrize(("weights", "dtype"), KINDS)
def test_of_a_prompt_only_rows_that_are_asked_for_go_behind_the_last_attention(
    weights: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = load(make_family("llama-yarn", tmp_path / "model"), weights, dtype), []

    def run_layers(layers: Any, step: bytes, stages: range) -> None:
        calls.append((layer_stack.STEP.unpack(step)[0], stages.start, stages.stop))
        compiled(layers, step, stages)

    compiled = layer_stack.run_layers
    monkeypatch.setattr(layer_stack, "run_layers", run_layers)
    stepper = Stepper(model, [random.Random(1).choices(range(VOCAB_SIZE), k=91)])
    whole, after = stepper.step({0: (0, 90)})[0], stepper.step({0: (90, 91)})[0]
    assert calls == [(90, 0, 4), (1, 0, 4)]
    for rows, expected_calls in (
        ([89], [(90, 0, 3), (1, 3, 4)]),
        ([5, 89, 5], [(90, 0, 3), (3, 3, 4)]),
        ([], [(90, 0, 3)]),
        (list(range(1, 90)), [(90, 0, 4)]),  # nearly all: once through is quicker
    ):
        calls.clear()
        stepper = Stepper(model, [random.Random(1).choices(range(VOCAB_SIZE), k=91)])
        assert torch.equal(stepper.step({0: (0, 90)}, rows)[0], whole[rows])
        assert calls == expected_calls
        assert torch.equal(stepper.step({0: (90, 91)})[0], after)


def test_rows_that_a_reader_wants_may_be_those_that_are_drawn_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as there are tokens, and yet not all rows in turn."""
    model, sequence = load(make_family("llama-yarn", tmp_path / "model")), [3, 5]
    whole = Stepper(model, [sequence]).step({0: (0, 2)})[0]
    read: list[torch.Tensor] = []
    reader = LogitReader(torch.tensor([1]), read.append)
    monkeypatch.setattr(model, "forward", functools.partial(model.forward, reader=reader))
    found = Stepper(model, [sequence]).step({0: (0, 2)}, [1])[0]
    assert torch.equal(found, whole[1:]) and torch.equal(read[0], whole[1:])


@pytest.mark.parametrize("weights", ["float", "int8"])
@pytest.mark.parametrize("name", sorted({*FAMILIES} - {*FUSED}))
def test_layers_that_compute_something_else_are_not_fused(name: str, weights: str, tmp_path: Path) -> None:
    assert not load(make_family(name, tmp_path / "model"), weights).is_fused
