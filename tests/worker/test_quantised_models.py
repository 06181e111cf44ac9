"""Models of quantised checkpoints compute what their weights say in float32: each format, whole and in parts."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from kernels import cpu
from kernels.cpu.products.quantized_product import quantized_product
from kernels.oracles import reference
from kernels.quantized_weight import Numbers, QuantizedWeight
from octavo.shared.terminal_row import ByteBar
from tests.worker.families import VOCAB_SIZE, make_family
from tests.worker.gguf_files import write_gguf
from tests.worker.kept import wait_until_kept
from tests.worker.model_cases import Stepper
from tests.worker.quantised_checkpoints import FORMATS, Format, gptq, write_quantised
from tests.worker.ranks_in_threads import ThreadRank, on_all_ranks
from worker_svc.models.checkpoint.checkpoint_files import open_checkpoint
from worker_svc.models.checkpoint.gguf_folder import model_folder
from worker_svc.models.checkpoint.stored_tensor import MadeTensor, StoredTensor
from worker_svc.models.checkpoint.weights import CheckpointWeights
from worker_svc.models.config import ModelConfig, ModelError
from worker_svc.models.decoder import Decoder
from worker_svc.models.experts.grouped_experts import take_grouped_experts
from worker_svc.models.experts.router import take_router
from worker_svc.models.loader import Model, load_model
from worker_svc.models.parts import ModelPart
from worker_svc.models.products.compiled_linear import CompiledLinear
from worker_svc.models.quantized.checkpoint_format import with_quantized
from worker_svc.models.quantized.quantized_products import QuantizedProducts
from worker_svc.models.quantized.quantized_tensor import QuantizedTensor
from worker_svc.parallel.ranks import Ranks

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
}
CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 16},
    "qwen3-moe": {"moe_intermediate_size": 64, "head_dim": 16},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}
PROMPT = random.Random(1).choices(range(VOCAB_SIZE), k=40)


class SecondOfTwo:
    """The last stage of a pipeline, which computes nothing here."""

    stage, count, bytes_sent = 1, 2, 0

    def hand_on(self, x: torch.Tensor) -> None:
        raise NotImplementedError

    def receive(self, x: torch.Tensor) -> None:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are read and expanded: what a device's own products make of them is theirs to show."""
    monkeypatch.setattr(cpu, "quantized_product", lambda weight, bias: None, raising=False)


def make(
    tmp_path: Path, family: str, format_: Format, plain: tuple[str, ...] = (), **changes: Any
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


def logits_of_ranks(folder: Path, size: int) -> torch.Tensor:
    """Of the whole prompt, by a group of so many ranks."""

    def work(ranks: Ranks) -> torch.Tensor:
        part = ModelPart.of(ModelConfig.from_folder(folder, "float32"), ranks)
        return Stepper(load_model(folder, part, "cpu"), [PROMPT]).step({0: (0, len(PROMPT))})[0]

    first, *others = on_all_ranks(size, work)
    assert all(torch.equal(first, other) for other in others)
    return first


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "fp8-small-blocks"])
def test_ranks_have_parts_of_the_same_weights(name: str, tmp_path: Path) -> None:
    """With act-order too: such a weight is expanded where ranks share its inputs."""
    quantised, twin = make(tmp_path, "qwen2", FORMATS[name])
    assert torch.equal(logits_of_ranks(quantised, 2), logits_of_ranks(twin, 2))


@pytest.mark.parametrize("name", ["awq-32", "packed-8-bits"])
def test_groups_that_ranks_would_cut_become_smaller(name: str, tmp_path: Path) -> None:
    """192 / 4 = 48 inputs are one group of 32 and half of another."""
    quantised, twin = make(tmp_path, "qwen2", FORMATS[name], num_key_value_heads=4)
    assert torch.equal(logits_of_ranks(quantised, 4), logits_of_ranks(twin, 4))


def test_groups_that_would_become_too_small_are_refused(tmp_path: Path) -> None:
    quantised, _ = make(tmp_path, "qwen2", FORMATS["fp8-small-blocks"])
    refused = "o_proj.weight: inputs .* of 64 cannot be had alone: they share scales in groups of 40"
    with pytest.raises(ModelError, match=refused):
        logits_of_ranks(quantised, 2)


@pytest.mark.parametrize("name", ["gptq-order", "fp8-small-blocks"])
def test_stages_have_their_layers_alone(name: str, tmp_path: Path) -> None:
    quantised, twin = make(tmp_path, "qwen2", FORMATS[name])
    last = []
    for folder in (quantised, twin):
        part = ModelPart.of(ModelConfig.from_folder(folder, "float32"), stages=SecondOfTwo())
        layer = cast(Decoder, load_model(folder, part, "cpu")).layers[0]
        last.append(layer.qkv(torch.ones(1, SIZES["hidden_size"])))
    assert torch.equal(*last)


def test_layers_that_stay_plain_and_others_share_a_product(tmp_path: Path) -> None:
    """Members of a fused product that disagree keep weights of their own: plain ones, and of other groups or orders."""
    mixed = Format(
        gptq().config
        | {"dynamic": {r"-:.*\.k_proj": {}, r"+:.*up_proj": {"group_size": 64}, r"+:.*v_proj": {"bits": 8}}},
        gptq().quantise,
        {
            "up_proj": gptq(64).quantise,
            "v_proj": gptq(bits=8).quantise,
            "layers.1.self_attn.q": gptq(has_order=True).quantise,
        },
    )
    quantised, twin = make(tmp_path, "qwen2", mixed, plain=("k_proj",))
    model = cast(Decoder, load(quantised))
    assert all(isinstance(layer.qkv, CompiledLinear) for layer in model.layers)  # of several in one call
    (tokens, logits), (expected, exact) = greedy(model, 3), greedy(load(twin), 3)
    assert tokens == expected and torch.equal(logits, exact)


@pytest.mark.parametrize("name", ["awq-32", "gptq-symmetric", "float8-tensor"])
def test_a_head_may_be_quantised_too_also_one_that_could_be_tied(name: str, tmp_path: Path) -> None:
    logits = []
    for index, is_tied in enumerate((False, True)):
        where = tmp_path / str(index)
        folder = make_family("qwen2", where / "model", **SIZES, vocab_size=536)
        quantised, twin = write_quantised(folder, where, FORMATS[name], also=("lm_head",))
        for path in (quantised, twin):
            config = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(
                json.dumps(config | {"tie_word_embeddings": is_tied and path == quantised})
            )
        logits += [greedy(load(quantised), 1)[1], greedy(load(twin), 1)[1]]
    assert all(torch.equal(one, logits[0]) for one in logits)


def test_biases_of_zeros_that_a_writer_has_added_are_no_part_of_the_model(tmp_path: Path) -> None:
    quantised, twin = make(tmp_path, "llama-gelu", FORMATS["gptq-v1"])
    path = quantised / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.down_proj.bias"
    save_file(tensors | {name: torch.zeros(64)}, path)
    assert torch.equal(greedy(load(quantised), 1)[1], greedy(load(twin), 1)[1])
    assert logits_of_ranks(quantised, 2).isfinite().all()
    save_file(tensors | {name: torch.ones(64)}, path)
    with pytest.raises(ModelError, match=f"{name} is not zero, and the model has no place for it"):
        load(quantised)


def test_what_is_expanded_is_said_in_a_line_for_each_reason(tmp_path: Path) -> None:
    quantised, _ = make(tmp_path, "llama-gelu", FORMATS["fp8-blocks"])
    with capture_logs() as logs:
        load(quantised)
    lines = [entry for entry in logs if entry["event"] == "quantised weights expanded"]
    assert [(line["format"], line["products"], line["dtype"], line["why"]) for line in lines] == [
        ("fp8", 6, "float32", "there is no product of e4m3 with one scale an output"),
        ("fp8", 2, "float32", "there is no product of e4m3 with groups of 128"),
    ]


def sound(numbers: Numbers, in_features: int, group: int) -> QuantizedWeight:
    codes = torch.ones(64, in_features, dtype=torch.uint8)
    return QuantizedWeight(numbers, codes, torch.full((64, -(-in_features // group)), 1.1), group)


@pytest.mark.parametrize(
    ("weight", "why"),
    [
        (sound(Numbers.UINT4, 128, 16), "there is no product of uint4 with groups of 16"),
        (sound(Numbers.UINT4, 72, 32), "there is no product of uint4 with groups of 32 for 72 inputs"),
        (sound(Numbers.E4M3, 72, 72), "there is no product of e4m3 with one scale an output for 72 inputs"),
        (
            replace(sound(Numbers.INT8, 64, 32), offset=torch.ones(64, 2)),
            "there is no product of int8 with groups of 32 and offsets",
        ),
        (
            replace(sound(Numbers.E4M3, 64, 32), codes=torch.tensor([1, 0x7F], dtype=torch.uint8).repeat(64, 32)),
            "its numbers or scales are none that a product of e4m3 with groups of 32 has",
        ),
        (
            replace(sound(Numbers.UINT4, 64, 32), offset=torch.full((64, 2), 0.1)),
            "its numbers or scales are none that a product of uint4 with groups of 32 and offsets has",
        ),
    ],
)
def test_why_a_weight_is_expanded_is_the_very_reason(
    weight: QuantizedWeight, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the CPU's own products have it: a number of inputs, NaN, and scales that float16 does not have."""
    monkeypatch.setattr(cpu, "quantized_product", quantized_product)
    products = QuantizedProducts(torch.device("cpu"), torch.float32)
    products.make("a format", weight, None, is_batch_invariant=False)
    with capture_logs() as logs:
        products.finish()
    assert [(line["format"], line["why"]) for line in logs] == [("a format", why)]


def test_a_device_that_has_a_product_is_given_the_weight_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[QuantizedWeight] = []

    class Product:
        """In float32, of what it was made of."""

        def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None, **_: object) -> None:
            given.append(weight)
            self._weight, self._bias, self.weight_bytes = weight.dequantized(), bias, 7

        def multiply(self, out: torch.Tensor, x: torch.Tensor) -> None:
            out.copy_(torch.nn.functional.linear(x, self._weight, self._bias))

    monkeypatch.setattr(cpu, "quantized_product", Product)
    quantised, twin = make(tmp_path, "qwen2", FORMATS["packed"])
    model = cast(Decoder, load(quantised))
    assert model.weights_bytes < load(twin).weights_bytes
    sizes = {(each.out_features, each.in_features) for each in given if each.out_features > 1}
    assert sizes >= {(128, 64), (64, 64), (384, 64), (64, 192)}
    logits, expected = greedy(model, 1)[1], greedy(load(twin), 1)[1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_int8_is_made_of_what_the_weights_say_where_they_have_no_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    quantised, twin = make(tmp_path, "qwen2", FORMATS["awq-32"])
    one, other = (greedy(load(folder, quantization="int8"), 1)[1] for folder in (quantised, twin))
    assert torch.equal(one, other)


def test_bfloat16_rounds_what_the_weights_say(tmp_path: Path) -> None:
    quantised, twin = make(tmp_path, "qwen2", FORMATS["gptq-v1"])
    one, other = (greedy(load(folder, "bfloat16"), 1)[1] for folder in (quantised, twin))
    assert torch.equal(one, other)


def test_experts_that_are_multiplied_together_are_expanded(tmp_path: Path) -> None:
    quantised, twin = make(tmp_path, "mixtral", FORMATS["awq-32"])
    kernels: Any = SimpleNamespace(silu_and_mul=None, grouped_matmul=reference.grouped_matmul)
    taken = []
    for folder in (quantised, twin):
        config = ModelConfig.from_folder(folder, "float32")
        part = ModelPart.of(config, ThreadRank(1, 2))
        tensors = open_checkpoint([folder / "model.safetensors"], "safetensors")
        if config.weights_format is not None:
            tensors = with_quantized(folder, config.weights_format, tensors)
        weights = CheckpointWeights(folder, tensors, config.dtype, torch.device("cpu"), ByteBar("", 0))
        prefix = "model.layers.1."
        router = take_router(weights, prefix, config.style, SIZES["hidden_size"], kernels)
        experts = take_grouped_experts(part, weights, prefix, router, kernels)
        taken.append([experts._inner, experts._outer])
    for one, other in zip(*taken, strict=True):
        assert one.std() > 0 and torch.equal(one, other)


def test_memory_is_asked_for_what_products_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantised, _ = make(tmp_path, "llama-gelu", FORMATS["gptq-v1"])
    config = ModelConfig.from_folder(quantised, "float32")
    table, layers = VOCAB_SIZE * 64, 2 * (64 * (64 + 2 * 32 + 64) + 3 * 64 * 192)
    assert config.weights_bytes == 2 * table * 4 + int(layers * (4 + 20 / 32) / 8)
    needed: list[int] = []

    def ask(part: ModelPart, device: torch.device, num_bytes: int, free_bytes: int | None) -> None:
        needed.append(num_bytes)

    monkeypatch.setattr("worker_svc.models.loader._check_memory", ask)
    load(quantised)

    def a_byte_each(weight: QuantizedWeight, bias: torch.Tensor | None, **_: object) -> Any:
        return SimpleNamespace(weight_bytes=weight.codes.numel())

    monkeypatch.setattr(cpu, "quantized_product", a_byte_each)
    load(quantised)
    norms, head_as_read, gate_and_up = 5 * 64, 4 * table, 2 * 64 * 192
    assert needed == [
        4 * (2 * table + layers + norms) + (2 + 4) * gate_and_up,  # expanded, beside their codes
        4 * (2 * table + norms) + layers + head_as_read,
    ]
    described = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps(described | {"tie_word_embeddings": True}))
    stored = load_file(quantised / "model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, quantised / "model.safetensors")
    load(quantised)  # a head that is the same stays tied
    widest_codes = 3 * gate_and_up  # on their way into a product of two parts
    assert needed[2] == needed[1] - head_as_read + widest_codes


@pytest.mark.parametrize(
    ("format_", "quantization", "is_kept"),
    [("gptq-8-bits", "int8", True), ("gptq-8-bits", "int4", False), ("fp8", "int8", False)],
)
def test_memory_is_asked_for_weights_that_are_expanded_and_quantised_again(
    format_: str, quantization: str, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gate and up are the most that is expanded at once, in float32 beside their codes."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    quantised, _ = make(tmp_path, "llama-gelu", FORMATS[format_], vocab_size=260)

    def a_byte_each(weight: QuantizedWeight, bias: torch.Tensor | None, **_: object) -> Any:
        return SimpleNamespace(weight_bytes=weight.codes.numel())

    needed: list[int] = []
    monkeypatch.setattr(cpu, "quantized_product", a_byte_each)
    monkeypatch.setattr("worker_svc.models.loader._check_memory", lambda part, device, num, free: needed.append(num))
    load(quantised, quantization=quantization)
    wait_until_kept()
    table, layers, norms = 260 * 64, 2 * (64 * (64 + 2 * 32 + 64) + 3 * 64 * 192), 5 * 64
    a_number = {"int8": 1.0, "int4": 0.625}[quantization]
    stays = 4 * table + table + layers * (1 if is_kept else a_number) + norms * a_number
    assert needed == [int(stays + 2 * 64 * 192 * (3 if is_kept else 4 + 2))]


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), ("cuda", torch.bfloat16)])
def test_a_gguf_file_is_float32_on_a_cpu_and_bfloat16_on_a_gpu(device: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = make_family("llama-gelu", tmp_path / "model", **SIZES)
    with model_folder(write_gguf(folder, tmp_path / "tiny.gguf", "llama")) as read:
        assert ModelConfig.from_folder(read, device=device).dtype == dtype
        assert ModelConfig.from_folder(read, "float16", device="cuda").dtype == torch.float16


def test_float16_checkpoints_are_float32_on_a_cpu_whatever_their_format(tmp_path: Path) -> None:
    quantised, _ = make(tmp_path, "qwen2", FORMATS["awq-32"], dtype="float16")
    assert ModelConfig.from_folder(quantised).dtype == torch.float32
    assert ModelConfig.from_folder(quantised, device="cuda").dtype == torch.float16


def test_transformers_is_not_given_a_quantised_model(tmp_path: Path) -> None:
    quantised, _ = make(tmp_path, "qwen2", FORMATS["awq-32"])
    refused = "Qwen2ForCausalLM is computed by transformers: weights quantised as awq are read for the families"
    with pytest.raises(ModelError, match=refused):
        ModelConfig.from_folder(quantised, impl="transformers")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_a_tied_table_of_a_gguf_file_is_multiplied_as_it_is_stored(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so are the rest, with the rows of queries and keys in the model's order."""
    folder = make_family("llama-gelu", tmp_path / "model", **SIZES, tie_word_embeddings=True)
    type_of = gguf.GGMLQuantizationType[kind]

    def stored(_: str, values: np.ndarray) -> np.ndarray:
        return gguf.quantize(np.ascontiguousarray(values), type_of)

    path = write_gguf(folder, tmp_path / "tiny.gguf", "llama", quantised=(type_of, stored))
    given: list[QuantizedWeight] = []
    with model_folder(path) as read:
        expected = greedy(load(read), 1)[1]
        monkeypatch.setattr(cpu, "quantized_product", lambda weight, bias: given.append(weight))
        assert torch.equal(greedy(load(read), 1)[1], expected)
    shapes = [(weight.out_features, weight.in_features) for weight in given[-9:]]
    assert shapes == [(128, 64), (64, 64), (384, 64), (64, 192)] * 2 + [(VOCAB_SIZE, 64)]


@pytest.mark.parametrize("name", ["awq-32", "gptq-8-bits", "packed", "int8-channel", "fp8", "fp8-blocks"])
def test_dummy_weights_are_quantised_as_the_config_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And are those of one model on all ranks, near in size to what other dummy weights are."""
    quantised, twin = make(tmp_path, "mixtral", FORMATS[name])
    given: list[QuantizedWeight] = []
    monkeypatch.setattr(cpu, "quantized_product", lambda weight, bias: given.append(weight))
    dummy, plain = (
        load_model(folder, ModelConfig.from_folder(folder, "float32"), "cpu", "dummy") for folder in (quantised, twin)
    )
    given = [
        weight for weight in given if len(weight.codes.unique()) > 1
    ]  # others are tried to say why these have none
    assert len(given) == 2 * (2 + 2 * 5)  # of attention, and of each expert
    stored = load_file(quantised / "model.safetensors")
    (read,) = with_quantized(quantised, cast(Any, dummy.config.weights_format), stored_tensors(stored)).values()
    expected = cast(QuantizedTensor, read).read(range(64), range(64), torch.device("cpu"))
    assert (given[1].numbers, given[1].group, given[1].inputs) == (expected.numbers, expected.group, expected.inputs)
    assert given[1].dequantized().abs().max() <= 64**-0.5
    logits, others = greedy(dummy, 1)[1], greedy(plain, 1)[1]
    assert logits.isfinite().all() and 0.1 < logits.std() / others.std() < 10

    def work(ranks: Ranks) -> torch.Tensor:
        part = ModelPart.of(ModelConfig.from_folder(quantised, "float32"), ranks)
        return greedy(load_model(quantised, part, "cpu", "dummy"), 1)[1]

    for of_rank in on_all_ranks(2, work):
        torch.testing.assert_close(of_rank, logits, rtol=1e-4, atol=1e-5)


def stored_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, StoredTensor]:
    """Those of one layer's attention output."""

    def made(tensor: torch.Tensor) -> StoredTensor:
        return MadeTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    return {name: made(tensor) for name, tensor in tensors.items() if "layers.0.self_attn.o_proj" in name}
