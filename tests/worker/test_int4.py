"""Models that were quantised to four bits once, run with `int8`: weights stay what they are, and so in the cache."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.cpu.products.packed_weight import Kind
from kernels.cpu.products.records import Codes
from tests.kernels.few_bits_weights import in_few_bits
from tests.tiny_models import make_tiny_llama
from tests.worker.kept import wait_until_kept
from tests.worker.model_cases import Stepper
from worker_svc.models.config import ModelConfig
from worker_svc.models.decoder import Decoder
from worker_svc.models.loader import load_model
from worker_svc.models.mlp import Mlp
from worker_svc.models.products.compiled_linear import CompiledLinear

LENGTHS = [1, 7, 83, 200]  # more rows than an MLP takes at once
SEQUENCES = [random.Random(length).choices(range(1000), k=length + 1) for length in LENGTHS]
EIGHT_BITS = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Octavo's cache of this test alone."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "quantized"


@pytest.fixture(params=[torch.int32, torch.uint8], ids=["scales", "scales and minima"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model whose layers' weights need four bits, but for one."""
    folder = make_tiny_llama(tmp_path / "model", hidden_size=96, intermediate_size=160, attention_bias=True)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("proj.weight") and name != EIGHT_BITS:
            tensors[name] = in_few_bits(request.param, tensors[name])
    save_file(tensors, folder / "model.safetensors")
    return folder


def load(folder: Path, dtype: str = "float32", quantization: str = "int8") -> Decoder:
    model = load_model(folder, ModelConfig.from_folder(folder, dtype, quantization=quantization), "cpu")
    wait_until_kept()
    assert isinstance(model, Decoder)
    return model


def logits_of(model: Decoder) -> list[torch.Tensor]:
    """Of prompts side by side, then of one more token of each."""
    stepper = Stepper(model, SEQUENCES)
    steps = [
        stepper.step({i: (0, length) for i, length in enumerate(LENGTHS)}),
        stepper.step({i: (length, length + 1) for i, length in enumerate(LENGTHS)}),
    ]
    return [logits for step in steps for logits in step.values()]


def kind_of(linear: object) -> Kind:
    assert isinstance(linear, CompiledLinear)
    return linear.product.kind


def test_a_later_start_finds_the_same_weights(folder: Path, cache: Path) -> None:
    model, kinds = load(folder), []
    for layer in model.layers:
        assert isinstance(layer.mlp, Mlp)
        products = layer.qkv, layer.attention_out, layer.mlp.inner, layer.mlp.outer
        kinds.append([kind_of(linear) for linear in products])
    four, eight = Kind.ROUNDED_RECORDS, Kind.INT8
    assert kinds == [[four] * 4, [four] * 3 + [eight], [four] * 4]
    (file,) = cache.iterdir()
    written = file.stat().st_mtime_ns
    for one, other in zip(logits_of(model), logits_of(load(folder)), strict=True):
        assert torch.equal(one, other)
    assert file.stat().st_mtime_ns == written


def test_logits_are_nearer_to_those_of_float32_than_with_weights_that_are_rounded_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, kept = (torch.cat(logits_of(load(folder, quantization=name))) for name in ("", "int8"))
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "another cache"))
    monkeypatch.setattr("kernels.cpu.products.four_bits.find_four_bits", lambda *_: None)
    errors = [float((one - exact).std(dim=1).median()) for one in (kept, torch.cat(logits_of(load(folder))))]
    assert 0.01 < errors[0] / exact.std() < 0.06 and errors[0] < errors[1]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_fused_layers_are_the_single_operations_bit_for_bit(
    num_threads: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, before = load(folder), torch.get_num_threads()
    assert model.is_fused
    try:
        torch.set_num_threads(num_threads)
        fused = logits_of(model)
        monkeypatch.setattr(model, "_fused", None)
        for one, other in zip(fused, logits_of(model), strict=True):
            assert torch.equal(one, other) and one.isfinite().all()
    finally:
        torch.set_num_threads(before)


def test_a_row_is_the_same_in_chunks_and_alone(folder: Path) -> None:
    model = load(folder)
    whole = logits_of(model)[2]
    alone = Stepper(model, [SEQUENCES[2]])
    for first, last in ((0, 40), (40, 41), (41, 43), (43, 82), (82, 83)):
        assert torch.equal(alone.step({0: (first, last)})[0], whole[first:last])


def test_a_damaged_file_is_made_again(folder: Path, cache: Path) -> None:
    expected = logits_of(load(folder))[2]
    (file,) = cache.iterdir()
    whole, tensors = file.read_bytes(), load_file(file)
    qkv, outer = "model.layers.0.self_attn.q_proj.packed", "model.layers.1.mlp.down_proj"
    tensors[qkv] = tensors[qkv][1:].contiguous()
    del tensors[f"{outer}.scale"]
    tensors["model.layers.2.mlp.down_proj.records"][3] = 0  # no inputs a group
    tensors["model.layers.2.self_attn.q_proj.records"][0] = Codes.INT8  # which rounded rows are not multiplied by
    save_file(tensors, file)
    assert torch.equal(logits_of(load(folder))[2], expected)
    assert file.read_bytes() == whole


def test_a_weight_that_was_rounded_to_bfloat16_takes_eight_bits(folder: Path) -> None:
    assert all(kind_of(layer.qkv) is Kind.INT8 for layer in load(folder, "bfloat16").layers)
