"""Models with weights of eight bits or four: near the float ones, the same in any batch, and read back as they were."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.cpu.products.four_bits import quantize_four_bits
from kernels.cpu.products.packed_weight import Kind
from kernels.cpu.products.records import Codes
from tests.kernels.few_bits_weights import unpack_four_bits
from tests.tiny_models import make_tiny_llama
from tests.worker.families import FAMILIES, VOCAB_SIZE, make_family
from tests.worker.gguf_files import write_gguf
from tests.worker.kept import wait_until_kept
from tests.worker.model_cases import Stepper
from worker_svc.models.checkpoint.gguf_folder import model_folder
from worker_svc.models.config import ModelConfig, ModelError
from worker_svc.models.decoder import Decoder
from worker_svc.models.loader import Model, load_model
from worker_svc.models.mlp import Mlp
from worker_svc.models.products.compiled_linear import CompiledLinear
from worker_svc.models.products.quantized_store import QuantizedStore
from worker_svc.service.devices import cache_dtype

LENGTHS = [1, 7, 83]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Octavo's cache of this test alone."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "quantized"


def tokens(length: int) -> list[int]:
    return random.Random(length).choices(range(VOCAB_SIZE), k=length)


def load(folder: Path, quantization: str = "int8", dtype: str = "float32", load_format: str = "auto") -> Model:
    config = ModelConfig.from_folder(folder, dtype, quantization=quantization)
    model = load_model(folder, config, "cpu", load_format)
    wait_until_kept()
    return model


def served(model: Model, sequences: list[list[int]]) -> Stepper:
    """With keys and values of the type that a worker keeps of such a model."""
    return Stepper(model, sequences, cache_dtype("auto", torch.device("cpu"), model.config.quantization))


def logits_of(model: Model) -> list[torch.Tensor]:
    """f32[length, vocab] of each of LENGTHS, all in one step."""
    pieces = {i: (0, length) for i, length in enumerate(LENGTHS)}
    return list(served(model, [tokens(length) for length in LENGTHS]).step(pieces).values())


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_every_family_are_near_those_of_float32_and_the_same_from_the_cache(
    name: str, tmp_path: Path, cache: Path
) -> None:
    folder = make_family(name, tmp_path / "model")
    exact, made = logits_of(load(folder, "")), logits_of(load(folder))
    one, other = torch.cat(exact), torch.cat(made)
    # Small random weights wander through three layers; a row that chooses another expert is far off. Float weights
    # against themselves: below 1e-6.
    assert 0.01 < ((one - other).std(dim=1) / one.std(dim=1)).median() < 0.12
    (file,) = cache.iterdir()
    written = file.stat().st_mtime_ns
    for one, other in zip(made, logits_of(load(folder)), strict=True):
        assert torch.equal(one, other)
    assert file.stat().st_mtime_ns == written


@pytest.mark.parametrize("name", ["llama-gelu", "gpt2", "bloom", "mixtral"])
def test_a_row_is_the_same_in_chunks_and_alone(name: str, tmp_path: Path) -> None:
    model, sequence = load(make_family(name, tmp_path / "model")), tokens(83)
    whole = logits_of(model)[2]
    alone = served(model, [sequence])
    for first, last in ((0, 40), (40, 41), (41, 43), (43, 82), (82, 83)):
        assert torch.equal(alone.step({0: (first, last)})[0], whole[first:last])


@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
def test_bfloat16_computes_with_weights_of_eight_bits_too(name: str, tmp_path: Path, cache: Path) -> None:
    folder = make_family(name, tmp_path / "model")
    exact, made = logits_of(load(folder, ""))[2], logits_of(load(folder, dtype="bfloat16"))[2]
    assert (exact - made).abs().mean() < 0.12 * exact.std()
    load(folder)
    assert len(list(cache.iterdir())) == 2  # weights that were rounded to bfloat16 first are others


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "opt", "qwen3-moe"])
def test_weights_take_a_byte_each(name: str, tmp_path: Path) -> None:
    model, plain = load(make_family(name, tmp_path / "model")), load(tmp_path / "model", "")
    assert model.config.weights_bytes == pytest.approx(model.weights_bytes, rel=0.4)  # sizes of 60 are filled up to 64
    assert model.weights_bytes < 0.5 * plain.weights_bytes


@pytest.mark.parametrize("quantization", ["int4", "int4-128"])
@pytest.mark.parametrize("name", ["qwen3", "gpt2", "mixtral"])
def test_four_bits_are_the_same_from_the_cache_and_in_chunks(
    name: str, quantization: str, tmp_path: Path, cache: Path
) -> None:
    folder = make_family(name, tmp_path / "model")
    model = load(folder, quantization)
    made = logits_of(model)
    for one, other in zip(made, logits_of(load(folder, quantization)), strict=True):
        assert torch.equal(one, other)
    alone = served(model, [tokens(83)])
    for first, last in ((0, 40), (40, 41), (41, 83)):
        assert torch.equal(alone.step({0: (first, last)})[0], made[2][first:last])
    load(folder, "int8")
    assert len(list(cache.iterdir())) == 2  # each is kept by itself


@pytest.mark.parametrize(("quantization", "group"), [("int4", 32), ("int4-128", 128)])
def test_four_bits_give_the_logits_of_a_model_with_these_very_weights(
    quantization: str, group: int, tmp_path: Path
) -> None:
    folder = make_tiny_llama(tmp_path / "model", hidden_size=192, intermediate_size=224)
    exact, found = torch.cat(logits_of(load(folder, ""))), torch.cat(logits_of(load(folder, quantization)))
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("proj.weight"):
            tensors[name] = unpack_four_bits(quantize_four_bits(tensor, group)).contiguous()
    save_file(tensors, folder / "model.safetensors")
    own = torch.cat(logits_of(load(folder, "")))
    # Rows of eight bits are what is left; see the families above.
    assert 0.002 < ((found - own).std(dim=1) / own.std(dim=1)).median() < 0.06
    assert (found - own).std() < 0.4 * (found - exact).std()


def test_four_bits_are_for_all_products_but_the_head(tmp_path: Path) -> None:
    model = load(make_family("qwen2", tmp_path / "model"), "int4")
    assert isinstance(model, Decoder) and model._head is not None
    for layer in model.layers:
        assert isinstance(layer.mlp, Mlp)
        for linear in (layer.qkv, layer.attention_out, layer.mlp.inner, layer.mlp.outer):
            assert isinstance(linear, CompiledLinear) and linear.product.records is not None
            assert linear.product.records.codes is Codes.UINT4 and linear.product.records.group == 32
    assert isinstance(model._head._product, CompiledLinear) and model._head._product.product.kind is Kind.INT8


def test_a_gguf_file_is_quantised_as_the_model_that_it_was_made_of(tmp_path: Path, cache: Path) -> None:
    folder = make_family("qwen3", tmp_path / "model")
    with model_folder(write_gguf(folder, tmp_path / "tiny.gguf", "qwen3")) as read:
        for model in (load(read), load(read)):  # made, found
            assert torch.equal(logits_of(model)[2], logits_of(load(folder))[2])
    assert len(list(cache.iterdir())) == 2


def test_dummy_weights_are_quantised_and_not_kept(tmp_path: Path, cache: Path) -> None:
    folder = make_family("qwen2", tmp_path / "model")
    assert logits_of(load(folder, load_format="dummy"))[1].isfinite().all()
    assert not cache.exists()


@pytest.mark.parametrize("damage", ["cut short", "not a file of tensors", "of other sizes", "of other types"])
def test_a_damaged_file_is_made_again(damage: str, tmp_path: Path, cache: Path) -> None:
    folder = make_family("qwen2", tmp_path / "model")
    expected = logits_of(load(folder))[1]
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    if damage == "of other sizes":
        tensors = load_file(file)
        for name in ("lm_head.packed", "model.layers.1.mlp.gate_proj.scale", "model.layers.2.mlp.down_proj.packed"):
            tensors[name] = tensors[name][1:].contiguous()
        save_file(tensors, file)
    elif damage == "of other types":
        tensors = load_file(file)
        inner, outer = "model.layers.1.mlp.gate_proj", "model.layers.2.mlp.down_proj"
        tensors["lm_head.packed"] = tensors["lm_head.packed"].view(torch.int8)
        tensors[f"{inner}.packed"] = tensors[f"{inner}.packed"].transpose(3, 4).contiguous()
        tensors[f"{outer}.scale"] = tensors[f"{outer}.scale"].double()
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(3)
        tensors["model.layers.0.mlp.down_proj.records"] = torch.tensor([1.5])
        save_file(tensors, file)
    else:
        file.write_bytes(whole[: len(whole) // 2] if damage == "cut short" else b"\x10" + bytes(40))
    assert torch.equal(logits_of(load(folder))[1], expected)
    assert file.read_bytes() == whole


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, cache: Path) -> None:
    folder = make_family("qwen2", tmp_path / "model")
    cache.parent.mkdir()
    cache.write_text("a file where a folder should be")
    assert torch.equal(logits_of(load(folder))[1], logits_of(load(folder))[1])


def test_another_fine_tuning_is_not_taken_for_the_same_model(tmp_path: Path, cache: Path) -> None:
    first, second = (load(make_family("qwen2", tmp_path / str(seed), seed)) for seed in (1, 2))
    assert not torch.equal(logits_of(first)[1], logits_of(second)[1])
    assert len(list(cache.iterdir())) == 2


def test_missing_and_surplus_tensors_are_still_named(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The surplus one also where the products of these very files are found in the cache."""
    folder = make_family("qwen2", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    missing = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.up" not in name}
    save_file(missing, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"no tensor .*layers\.1\.mlp\.up_proj"):
        load(folder)
    save_file(tensors, folder / "model.safetensors")
    monkeypatch.setattr("worker_svc.models.products.quantized_store.kept_path", lambda part, files: cache / "kept")
    load(folder)
    assert (cache / "kept").exists()
    save_file(tensors | {"model.extra": torch.ones(1)}, folder / "model.safetensors")
    monkeypatch.setattr(QuantizedStore, "make", lambda store, name, *_: pytest.fail(f"{name} is not found"))
    with pytest.raises(ModelError, match=r"no place for tensor model\.extra"):
        load(folder)


def test_what_cannot_be_quantised_is_refused(tmp_path: Path) -> None:
    folder = make_family("qwen2", tmp_path / "model")
    config = ModelConfig.from_folder(folder, "float32", quantization="int8")
    with pytest.raises(ModelError, match="int8 is computed on a CPU alone: --device cpu, not cuda"):
        load_model(folder, config, "cuda")
    config = ModelConfig.from_folder(folder, "float32", impl="transformers", quantization="int8")
    with pytest.raises(ModelError, match="int8 is for the families that Octavo computes itself; Qwen2ForCausalLM is"):
        load_model(folder, config, "cpu")
