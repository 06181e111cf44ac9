"""Models of quantised checkpoints on a GPU's kernels: products of few bits in every layer, and what they compute."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels import select
from kernels.gpu.quantized import rounded_product
from kernels.gpu.quantized.packed_codes import PackedCodes
from kernels.gpu.quantized.rounded_rows import rounded_rows
from kernels.gpu.quantized.rounding import RoundedRows, Rounding
from tests.kernels.device import DEVICE
from tests.tiny_models import make_tiny_llama
from tests.worker import test_gpu_path
from tests.worker.families import VOCAB_SIZE, make_family
from tests.worker.model_cases import Stepper
from tests.worker.quantised_checkpoints import FORMATS, write_quantised
from worker_svc.models import loader
from worker_svc.models.config import ModelConfig, ModelError
from worker_svc.models.decoder import Decoder
from worker_svc.models.experts.grouped_experts import GroupedExperts
from worker_svc.models.loader import check_quantization, load_model
from worker_svc.models.mlp import Mlp
from worker_svc.models.products.compiled_linear import CompiledLinear
from worker_svc.models.products.float_linear import FloatLinear
from worker_svc.models.products.rows import rounding_of
from worker_svc.models.quantized.quantized_linear import QuantizedLinear
from worker_svc.models.quantized.separate_products import SeparateProducts

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
PROMPT = random.Random(1).choices(range(VOCAB_SIZE), k=9)
# Of the logits' own spread, by which unrelated ones differ 1.1 times: what rounding rows to eight bits may cost.
ROUNDED = {"int8-channel": 0.03, "fp8-blocks": 0.2}
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


@pytest.fixture
def on_gpu_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(select._MODULES, "cpu", "kernels.gpu.operations")
        yield


def load(folder: Path, device: str, quantization: str = "") -> Decoder:
    model = load_model(folder, ModelConfig.from_folder(folder, "float32", quantization=quantization), device)
    assert isinstance(model, Decoder)
    return model


def logits_of(model: Decoder) -> torch.Tensor:
    """A prompt, and then a token of its own."""
    stepper = Stepper(model, [PROMPT])
    return torch.cat([stepper.step({0: piece})[0].cpu() for piece in ((0, 8), (8, 9))])


def twins(family: str, form: str, tmp_path: Path) -> tuple[Decoder, torch.Tensor]:
    """A quantised model on a GPU's kernels, and the logits of its expanded twin on a CPU's."""
    made = make_family(family, tmp_path / "model", hidden_size=64, intermediate_size=96, **SIZES)
    quantised, twin = write_quantised(made, tmp_path, FORMATS[form])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(select._MODULES, "cpu", "kernels.cpu")
        exact = logits_of(load(twin, "cpu"))
    return load(quantised, DEVICE), exact


@pytest.mark.usefixtures("on_gpu_kernels")
@pytest.mark.parametrize("form", ["awq-32", "gptq-order", *ROUNDED])
def test_logits_are_those_of_the_expanded_twin(form: str, tmp_path: Path) -> None:
    """To the order of sums; where rows are rounded, to that."""
    model, exact = twins("llama-gelu", form, tmp_path)
    for layer in model.layers:
        assert isinstance(layer.mlp, Mlp)
        for product in (layer.qkv, layer.attention_out, layer.mlp.inner, layer.mlp.outer):
            assert isinstance(product, QuantizedLinear)
    found = logits_of(model)
    if form in ROUNDED:
        assert 1e-4 * exact.std() < (found - exact).abs().mean() < ROUNDED[form] * exact.std()
    else:
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("on_gpu_kernels")
@pytest.mark.parametrize(
    ("family", "form", "alone", "in_all"),
    [
        *[("mistral-all", form, 4, 16) for form in (*ROUNDED, "fp8-static")],
        ("mixtral", "int8-channel", 4, 8),  # experts and router read numbers
        ("deepseek-v3", "int8-channel", 6, 24),  # two products read what a norm gives
    ],
)
def test_norm_and_gate_round_rows_for_the_products_behind_them(
    family: str, form: str, alone: int, in_all: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the same logits. In two passes of two layers so many rows are rounded by themselves, of so many: those of
    attention, and where something else needs the numbers."""
    made = make_family(family, tmp_path / "model", num_hidden_layers=2)
    model, sizes = load(write_quantised(made, tmp_path, FORMATS[form])[0], DEVICE), []

    def counted(x: torch.Tensor, rounding: Rounding) -> RoundedRows:
        sizes.append(rounding.size)
        return rounded_rows(x, rounding)

    monkeypatch.setattr(rounded_product, "rounded_rows", counted)
    found = logits_of(model)
    assert len(sizes) == alone
    out = model.layers[0].attention_out
    assert rounding_of([out, out]) is not None and rounding_of([out, SeparateProducts([out])]) is None
    sizes.clear()
    monkeypatch.setattr(QuantizedLinear, "rounding", None)
    assert torch.equal(logits_of(model), found) and len(sizes) == in_all


_LATENTS = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
_LATENTS |= {"num_attention_heads": 4, "num_key_value_heads": 4, "moe_intermediate_size": 32}


@pytest.mark.parametrize("kernels", ["kernels.cpu", "kernels.gpu.operations"])
@pytest.mark.parametrize(
    ("family", "layer", "changes"),
    [
        ("mixtral", "model.layers.0.block_sparse_moe.experts.1.w3", SIZES),
        ("deepseek-v2", "model.layers.0.self_attn.kv_b_proj", _LATENTS),
    ],
)
def test_zeros_for_biases_are_left_out_wherever_a_writer_puts_them(
    kernels: str, family: str, layer: str, changes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AutoGPTQ gives every layer some."""
    monkeypatch.setitem(select._MODULES, "cpu", kernels)
    sizes = {"hidden_size": 64, "intermediate_size": 96, **changes, "num_hidden_layers": 1}
    made = make_family(family, tmp_path / "model", **sizes)
    quantised, _ = write_quantised(made, tmp_path, FORMATS["gptq-v1"])
    tensors = load_file(path := quantised / "model.safetensors")
    modules = [name.removesuffix(".scales") for name in tensors if name.endswith(".scales")]
    biases = {f"{name}.bias": torch.zeros(tensors[f"{name}.scales"].shape[1]) for name in modules}
    assert f"{layer}.bias" in biases
    save_file(tensors | biases, path)
    load(quantised, DEVICE if "gpu" in kernels else "cpu")
    save_file(tensors | biases | {f"{layer}.bias": torch.ones_like(biases[f"{layer}.bias"])}, path)
    with pytest.raises(ModelError, match=f"{layer}.bias is not zero, and the model has no place for it"):
        load(quantised, DEVICE if "gpu" in kernels else "cpu")


@pytest.mark.usefixtures("on_gpu_kernels")
@pytest.mark.parametrize("form", ["awq-32", "gptq-order"])
def test_experts_keep_few_bits_where_one_launch_multiplies_them(form: str, tmp_path: Path) -> None:
    """Inputs in an order of each expert's own are the case in which they are expanded."""
    model, exact = twins("mixtral", form, tmp_path)
    experts = model.layers[0].mlp
    assert isinstance(experts, GroupedExperts)
    assert isinstance(experts._inner, PackedCodes) == (form == "awq-32")
    torch.testing.assert_close(logits_of(model), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("on_gpu_kernels")
@pytest.mark.parametrize("family", ["llama-gelu", "mixtral"])
def test_a_model_in_16_bits_is_quantised_to_fp8_when_it_is_loaded(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its products but head and router."""
    monkeypatch.setattr(loader, "check_quantization", lambda config, device: None)  # here a CPU has a GPU's kernels
    made = make_family(family, tmp_path / "model", hidden_size=64, intermediate_size=96, **SIZES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(select._MODULES, "cpu", "kernels.cpu")
        exact = logits_of(load(made, "cpu"))
    model = load(made, DEVICE, "fp8")
    for layer in model.layers:
        assert isinstance(layer.qkv, QuantizedLinear) and isinstance(layer.attention_out, QuantizedLinear)
        if isinstance(layer.mlp, Mlp):
            assert isinstance(layer.mlp.inner, QuantizedLinear) and isinstance(layer.mlp.outer, QuantizedLinear)
        else:
            assert isinstance(layer.mlp, GroupedExperts) and isinstance(layer.mlp._outer, PackedCodes)
    assert model._head is not None and isinstance(model._head._product, CompiledLinear | FloatLinear)
    error = (logits_of(model) - exact).abs().mean()
    assert 1e-3 * exact.std() < error < 0.2 * exact.std()


def test_fp8_is_for_gpus_and_int8_for_cpus(tmp_path: Path) -> None:
    folder = make_family("llama-gelu", tmp_path / "model", hidden_size=64, intermediate_size=96, **SIZES)
    for quantization, device, said in (("fp8", "cpu", "GPU alone: --device cuda"), ("int8", "cuda", "CPU alone")):
        config = ModelConfig.from_folder(folder, "float32", quantization=quantization)
        with pytest.raises(ModelError, match=f"quantization {quantization} is computed on a {said}"):
            check_quantization(config, torch.device(device))


@pytest.mark.usefixtures("on_gpu_kernels")
def test_replayed_steps_draw_the_twins_tokens(tmp_path: Path) -> None:
    """Decode steps are graphs, sent off before the last one's tokens are here."""
    from transformers import LlamaForCausalLM

    made = make_tiny_llama(
        tmp_path / "model",
        seed=11,
        vocab_size=test_gpu_path.VOCAB_SIZE,
        hidden_size=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        intermediate_size=64,
        max_position_embeddings=64,
        head_dim=32,
    )
    quantised, twin = write_quantised(made, tmp_path, FORMATS["awq-32"])
    oracle, expected = LlamaForCausalLM.from_pretrained(twin, dtype=torch.float32), []
    for prompt in test_gpu_path.PROMPTS:
        options = {"max_new_tokens": test_gpu_path.NUM_NEW, "do_sample": False, "eos_token_id": None}
        expected.append((oracle.generate(torch.tensor([prompt]), **options)[0].tolist(), torch.empty(0)))
    model = load(quantised, DEVICE)
    test_gpu_path.check_greedy_tokens(model, expected, has_graphs=True)
