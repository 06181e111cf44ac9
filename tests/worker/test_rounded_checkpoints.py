"""Checkpoints of few bits with `--quantization int8`, `int4` on a CPU: weights stay as they are, rows are rounded."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from kernels.cpu.products.packed_weight import Kind
from kernels.cpu.products.records import Codes
from kernels.oracles import reference
from tests.worker.families import VOCAB_SIZE, make_family
from tests.worker.gguf_files import write_gguf
from tests.worker.model_cases import Stepper
from tests.worker.quantised_checkpoints import FORMATS, Format, gptq, write_quantised
from worker_svc.models.checkpoint.gguf_folder import model_folder
from worker_svc.models.config import ModelConfig
from worker_svc.models.decoder import Decoder
from worker_svc.models.experts.experts import Experts
from worker_svc.models.loader import load_model
from worker_svc.models.mlp import Mlp
from worker_svc.models.products.compiled_linear import CompiledLinear
from worker_svc.models.quantized.separate_products import SeparateProducts

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
}
DOWN = "model.layers.1.mlp.down_proj.weight"
PROMPT = random.Random(1).choices(range(VOCAB_SIZE), k=70)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Octavo's cache of this test alone."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "quantized"


def make(tmp_path: Path, family: str, name: str, **changes: Any) -> tuple[Path, Path]:
    return write_quantised(make_family(family, tmp_path / "model", **(SIZES | changes)), tmp_path, FORMATS[name])


def load(folder: Path, quantization: str, dtype: str = "float32") -> Decoder:
    config = ModelConfig.from_folder(folder, dtype, quantization=quantization)
    return cast(Decoder, load_model(folder, config, "cpu"))


def logits_of(model: Decoder, cuts: list[int]) -> torch.Tensor:
    """Of the whole prompt, in pieces that end at `cuts`."""
    stepper, places = Stepper(model, [PROMPT]), [0, *cuts, len(PROMPT)]
    return torch.cat([stepper.step({0: piece})[0] for piece in itertools.pairwise(places)])


def assert_is_of_rounded_rows(product: Any, weight: torch.Tensor, groups: torch.Tensor | None = None) -> None:
    """`weight` f32[out, in]: what the checkpoint says; `groups` [in]: of act-order, by which rows are rounded."""
    order = torch.arange(weight.shape[1]) if groups is None else groups.argsort(stable=True)
    x = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(0))
    rows, pieces = reference.rounded_rows(x[:, order]), weight.shape[1] // 16
    # As in tests/kernels: roundings of a piece, times its magnitudes: a code and a zero, or an offset, of up to twice
    # what a group's largest number is each.
    most = (4 * pieces + 2) * 2.0**-24 * 4 * weight.abs().max() * rows.abs().sum(1, keepdim=True)
    assert ((product(x).double() - rows @ weight[:, order].double().T).abs() <= most).all()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["awq-32", "gptq-v1", "gptq-order", "packed-asymmetric", "packed-8-bits"])
def test_a_checkpoint_of_few_bits_keeps_its_numbers(name: str, quantization: str, tmp_path: Path, cache: Path) -> None:
    quantised, twin = make(tmp_path, "llama-gelu", name)
    model = load(quantised, quantization)
    product = cast(Mlp, model.layers[1].mlp).outer
    assert isinstance(product, CompiledLinear) and product.product.records is not None
    if (name, quantization) == ("packed-8-bits", "int4"):  # these are more bits than were asked for
        assert product.product.records.codes is Codes.UINT4
        return
    assert model.weights_bytes < load(quantised, "").weights_bytes
    groups = load_file(quantised / "model.safetensors").get(DOWN.replace("weight", "g_idx"))
    assert_is_of_rounded_rows(product, load_file(twin / "model.safetensors")[DOWN], groups)
    (stored,) = cache.iterdir()  # of the head, which is a plain one
    with safe_open(stored, "pt") as file:
        assert {name.rpartition(".")[0] for name in file.keys()} == {"lm_head"}  # noqa: SIM118 - it is no mapping
    whole = logits_of(model, [])
    assert torch.equal(logits_of(model, [1, 33, 34]), whole)
    assert torch.equal(logits_of(load(quantised, quantization), []), whole)  # the head from the cache


def test_floats_of_eight_bits_are_quantised_once_more(tmp_path: Path, cache: Path) -> None:
    quantised, twin = make(tmp_path, "llama-gelu", "fp8-blocks")
    first, again, expected = load(quantised, "int8"), load(quantised, "int8"), load(twin, "int8")
    outer = cast(Mlp, first.layers[1].mlp).outer
    assert isinstance(outer, CompiledLinear) and outer.product.kind is Kind.INT8
    assert torch.equal(logits_of(first, []), logits_of(expected, []))
    assert torch.equal(logits_of(again, []), logits_of(expected, []))


def test_experts_and_bfloat16_keep_theirs_and_routers_are_exact(tmp_path: Path) -> None:
    quantised, twin = make(tmp_path, "mixtral", "awq-32")
    model, plain = load(quantised, "int8"), load(twin, "")
    tensors = load_file(twin / "model.safetensors")
    experts = cast(Experts, model.layers[1].mlp)
    prefix = "model.layers.1.block_sparse_moe."
    assert_is_of_rounded_rows(experts._experts[2].outer, tensors[f"{prefix}experts.2.w2.weight"])
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(experts._router.logits(x), cast(Experts, plain.layers[1].mlp)._router.logits(x))
    of_bfloat16 = load(quantised, "int4", "bfloat16")
    assert torch.equal(logits_of(of_bfloat16, [1, 33]), logits_of(of_bfloat16, []))


@pytest.mark.parametrize("quantization", ["", "int8"])
def test_rows_in_an_order_of_their_own_are_those_of_a_product_of_its_own(quantization: str, tmp_path: Path) -> None:
    folder = make_family("llama-gelu", tmp_path / "model", **SIZES)
    mixed = Format(gptq().config, gptq().quantise, {"q_proj": gptq(has_order=True).quantise})
    quantised, twin = write_quantised(folder, tmp_path, mixed)
    model, whole = load(quantised, quantization), load(twin, "")
    qkv = model.layers[0].qkv
    assert isinstance(qkv, SeparateProducts) and len(qkv.products) == 2 and model._fused is None
    expected, tolerance = logits_of(whole, []), 0.1 if quantization else 1e-4  # here rows of 7 bits and a sign
    torch.testing.assert_close(logits_of(model, [7]), expected, rtol=0, atol=tolerance * float(expected.abs().max()))


def mixed_gguf(folder: Path, path: Path) -> Path:
    """Q4_0, but Q8_0 for values and the table, as files of mixed types have more bits there."""
    few, more = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0
    writer_of = gguf.GGUFWriter.add_tensor

    def add(self: gguf.GGUFWriter, name: str, tensor: np.ndarray, *args: Any, **_: Any) -> None:
        if tensor.ndim < 2:
            return writer_of(self, name, tensor, *args)
        kind = more if ".attn_v." in name or name.startswith("token_embd") else few
        writer_of(self, name, gguf.quantize(np.ascontiguousarray(tensor), kind), raw_dtype=kind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tensor", add)
        return write_gguf(folder, path, "llama")


@pytest.mark.parametrize("quantization", ["", "int8", "int4"])
def test_layers_of_mixed_types_are_computed_in_one_call(quantization: str, tmp_path: Path) -> None:
    """Queries, keys and values are one product, though values have more bits; with the bits of layers one by one."""
    folder = make_family("llama-gelu", tmp_path / "model", **SIZES, tie_word_embeddings=True)
    with model_folder(mixed_gguf(folder, tmp_path / "tiny.gguf")) as read:
        model = load(read, quantization)
        qkv = model.layers[0].qkv
        assert isinstance(qkv, CompiledLinear) and model._fused is not None
        logits = logits_of(model, [5])
        model._fused = None
        assert torch.equal(logits_of(model, []), logits)
        assert model._head is not None
        head = model._head._product
        # The table has eight bits: as they are, or one scale an output where weights are to have four.
        expected = {"": Kind.RECORDS, "int8": Kind.ROUNDED_RECORDS, "int4": Kind.INT8}
        assert isinstance(head, CompiledLinear) and head.product.kind is expected[quantization]
