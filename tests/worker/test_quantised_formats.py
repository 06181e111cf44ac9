"""Layers of quantised checkpoints: read number by number as their formats say, or refused by name in one line."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.quantized_weight import Inputs, Numbers, QuantizedWeight
from tests.worker.quantised_checkpoints import FORMATS, Tensors, compressed, fp8_blocks, gptq, in_words, packed
from worker_svc.models import patterns
from worker_svc.models.checkpoint.stored_tensor import MadeTensor, StoredTensor
from worker_svc.models.errors import ModelError
from worker_svc.models.quantized.checkpoint_format import CheckpointFormat, with_quantized
from worker_svc.models.quantized.detect import detect_format
from worker_svc.models.quantized.quantized_tensor import QuantizedTensor
from worker_svc.models.quantized.shaping import fit_together
from worker_svc.models.raw_config import RawConfig

CPU = torch.device("cpu")
LAYER = "model.layers.1.mlp.up_proj"
WEIGHT = torch.randn(72, 192, generator=torch.Generator().manual_seed(3))


def detected(config: dict[str, Any]) -> CheckpointFormat:
    found = detect_format(RawConfig({"quantization_config": config}, Path("config.json")))
    assert found is not None
    return found


def stored(leaves: Tensors) -> dict[str, StoredTensor]:
    def made(tensor: torch.Tensor) -> StoredTensor:
        return MadeTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    return {f"{LAYER}.{leaf}": made(tensor) for leaf, tensor in leaves.items()}


def tensor_of(config: dict[str, Any], leaves: Tensors) -> QuantizedTensor:
    (found,) = with_quantized(Path("model"), detected(config), stored(leaves)).values()
    assert isinstance(found, QuantizedTensor)
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_says_what_its_format_says_whole_and_in_parts(name: str) -> None:
    format_ = FORMATS[name]
    leaves, expected = format_.quantise(WEIGHT)
    tensor = tensor_of(format_.config, leaves)
    every = range(192)
    assert torch.equal(tensor.read(range(72), every, CPU).dequantized(), expected)
    assert tensor.num_bytes == sum(leaf.nbytes for leaf in leaves.values())
    parts = [(range(8, 40), every), (range(71, 72), every), (range(3, 70), every)]
    if not tensor.is_ordered():
        parts += [(range(72), range(96, 192)), (range(5, 11), range(32)), (range(72), range(64, 128))]
    for rows, columns in parts:
        if name == "fp8-small-blocks" and len(columns) < 192:
            continue
        weight = tensor.read(rows, columns, CPU)
        for field in (weight.codes, weight.scale, weight.zero):
            assert field is None or field.is_contiguous()
        assert torch.equal(weight.dequantized(), expected[rows.start : rows.stop, columns.start : columns.stop])
    several = tensor.quantized([range(40, 60), range(4)], every, CPU)
    assert torch.equal(several.dequantized(), torch.cat([expected[40:60], expected[:4]]))
    out = torch.empty(30, 20, dtype=torch.bfloat16)
    tensor.read_into(out, [range(10, 40)], [range(100, 110), range(10)])
    assert torch.equal(out, torch.cat([expected[10:40, 100:110], expected[10:40, :10]], dim=1).bfloat16())


@pytest.mark.parametrize(
    ("name", "numbers", "group", "inputs", "input_scale"),
    [
        ("awq-32", Numbers.UINT4, 32, Inputs.AS_THEY_ARE, None),
        ("gptq-8-bits", Numbers.INT8, 32, Inputs.AS_THEY_ARE, None),
        ("packed-all", Numbers.UINT4, 192, Inputs.AS_THEY_ARE, None),
        ("packed-8-bits", Numbers.INT8, 32, Inputs.AS_THEY_ARE, None),
        ("int8-channel", Numbers.INT8, 192, Inputs.INT8, None),
        ("float8-channel", Numbers.E4M3, 192, Inputs.E4M3, None),
        ("float8-tensor", Numbers.E4M3, 192, Inputs.E4M3, 0.01),
        ("fp8", Numbers.E4M3, 192, Inputs.E4M3, None),
        ("fp8-static", Numbers.E4M3, 192, Inputs.E4M3, 0.01),
        ("fp8-blocks", Numbers.E4M3, 128, Inputs.E4M3_BY_GROUP, None),
        ("fp8-small-blocks", Numbers.E4M3, 40, Inputs.AS_THEY_ARE, None),
    ],
)
def test_a_format_says_how_rows_are_rounded_too(
    name: str, numbers: Numbers, group: int, inputs: Inputs, input_scale: float | None
) -> None:
    format_ = FORMATS[name]
    weight = tensor_of(format_.config, format_.quantise(WEIGHT)[0]).read(range(72), range(192), CPU)
    assert (weight.numbers, weight.group, weight.inputs) == (numbers, group, inputs)
    assert weight.input_scale == (None if input_scale is None else pytest.approx(input_scale))


@pytest.mark.parametrize("name", ["gptq-8-bits-symmetric", "int8-channel", "float8-channel"])
def test_symmetric_weights_of_eight_bits_have_no_zero(name: str) -> None:
    format_ = FORMATS[name]
    assert tensor_of(format_.config, format_.quantise(WEIGHT)[0]).read(range(72), range(192), CPU).zero is None


def test_inputs_of_an_act_order_are_in_groups_once_they_are_ordered() -> None:
    format_ = gptq(has_order=True)
    leaves, _ = format_.quantise(WEIGHT)
    weight = tensor_of(format_.config, leaves).read(range(72), range(192), CPU)
    assert weight.order is not None
    assert torch.equal(leaves["g_idx"][weight.order], torch.arange(192, dtype=torch.int32) // 32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_zeros_of_symmetric_weights_are_believed_to_be_so_whatever_the_version(bits: int, is_symmetric: bool) -> None:
    """Some files of version 1 hold the zeros as version 2 does."""
    leaves, expected = gptq(bits=bits, is_symmetric=True, version=2).quantise(WEIGHT)
    config = gptq(bits=bits, is_symmetric=is_symmetric, version=1).config
    found = tensor_of(config, leaves).read(range(72), range(192), CPU).dequantized()
    assert torch.equal(found, expected) == is_symmetric


@pytest.mark.parametrize("zeros", [[0, 5, 15, 0, 0, 8, 1, 0], [0] * 8])
def test_zeros_of_0_are_carried_through_the_words_of_version_1(zeros: list[int]) -> None:
    """As GPTQModel writes them: what version 2 has less 1 in every field, of the word as a whole."""
    random = torch.Generator().manual_seed(4)
    codes = torch.randint(0, 16, (8, 64), generator=random)
    scales = torch.rand(1, 8, generator=random).half()
    leaves = {
        "qweight": in_words(codes.numpy(), 4).t().contiguous(),
        "qzeros": in_words(torch.tensor([zeros]).numpy(), 4) - 0x11111111,
        "scales": scales,
    }
    found = tensor_of(gptq(-1).config, leaves).read(range(8), range(64), CPU)
    assert found.zero is not None and found.zero[:, 0].tolist() == zeros
    assert torch.equal(found.codes, codes.to(torch.uint8))


def test_older_zero_points_are_a_byte_each() -> None:
    format_ = packed(is_symmetric=False)
    leaves, expected = format_.quantise(WEIGHT)
    words = leaves["weight_zero_point"].t().contiguous().view(torch.uint8)
    fields = torch.stack([words & 15, words >> 4], dim=-1).flatten(1).t().to(torch.int8) - 8
    found = tensor_of(format_.config, leaves | {"weight_zero_point": fields.contiguous()})
    assert torch.equal(found.read(range(72), range(192), CPU).dequantized(), expected)


@pytest.mark.parametrize(
    "weights",
    [
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": False},
        {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": False},
        {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    ],
)
@pytest.mark.parametrize("layout", ["pack-quantized", "int-quantized"])
def test_what_the_library_of_the_format_writes_is_read_as_it_reads_it(layout: str, weights: dict[str, Any]) -> None:
    library = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    arguments = quantization.QuantizationArgs(**weights)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=arguments)
    compressor = library.BaseCompressor.get_value_from_registry(layout)
    groups = 192 // weights.get("group_size", 192)
    by_group = WEIGHT.view(72, groups, -1)
    low, high = by_group.amin(2).clamp(max=0), by_group.amax(2).clamp(min=0)
    scale, zero = quantization.utils.calculate_qparams(low, high, arguments)
    leaves = compressor.compress({"weight": WEIGHT, "weight_scale": scale, "weight_zero_point": zero}, scheme)
    expected = compressor.decompress(leaves, scheme)["weight"]
    found = tensor_of(compressed(layout, weights, None), leaves).read(range(72), range(192), CPU)
    assert torch.equal(found.dequantized(), expected)


PER_TENSOR = {"num_bits": 8, "type": "int", "strategy": "tensor"}


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "'bitsandbytes' (nf4)"),
        ({"quant_method": "hqq"}, "weights quantised by 'hqq' are not read; read are awq, compressed-tensors"),
        ({"bits": 4}, "weights quantised by 'quantization_config' are not read"),
        (gptq().config | {"bits": 3}, "gptq with 3 bits is not read, only with 4 and 8"),
        (gptq().config | {"checkpoint_format": "marlin"}, "gptq with checkpoint_format 'marlin' is not read"),
        (gptq().config | {"is_marlin_format": True}, "gptq with checkpoint_format 'marlin' is not read"),
        (gptq().config | {"group_size": 0}, "group_size must be -1 or a positive integer, not 0"),
        (gptq().config | {"dynamic": {"+:(": {"bits": 8}}}, "dynamic '+:(' is no regular expression"),
        (FORMATS["awq-32"].config | {"version": "gemv"}, "awq packed for 'gemv' is not read, only for 'gemm'"),
        (FORMATS["awq-32"].config | {"backend": "llm-awq"}, "awq packed for 'llm-awq' is not read"),
        ({"quant_method": "awq", "w_bit": 3, "q_group_size": 128}, "awq with 3 bits is not read, only with 4"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 of 'e5m2' is not read"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two positive integers"),
        (compressed("marlin-24", PER_TENSOR, None), "compressed-tensors 'marlin-24' is not read, only pack-quantized"),
        (compressed("nvfp4-pack-quantized", PER_TENSOR, None), "'nvfp4-pack-quantized' is not read"),
        (compressed("pack-quantized", {"num_bits": 2}, None), "group_0: int of 2 bits is not read"),
        (compressed("float-quantized", {"num_bits": 4, "type": "float"}, None), "group_0: float of 4 bits is not read"),
        (
            compressed("int-quantized", PER_TENSOR | {"strategy": "tensor_group"}, None),
            "strategy 'tensor_group' is not",
        ),
        (
            compressed("pack-quantized", {"num_bits": 4, "group_size": "128"}, None),
            "group_size must be -1 or a positive integer, not '128'",
        ),
        (compressed("dense", PER_TENSOR, None) | {"sparsity_config": {"format": "sparse-24"}}, "sparse weights is not"),
        (compressed("dense", PER_TENSOR, None) | {"transform_config": {"a": 1}}, "with a transform_config is not read"),
    ],
)
def test_what_is_not_read_is_refused_by_its_config(config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=re.escape(complaint)) as raised:
        detected(config)
    assert str(raised.value).startswith("config.json: ") and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    [
        ("awq-32", {"scales": None}, "awq layer {}: the checkpoint has no tensor scales"),
        (
            "awq-32",
            {"qzeros": torch.zeros(5, 9, dtype=torch.int32)},
            "qzeros is [5, 9], the layer's other tensors make",
        ),
        ("awq-32", {"qweight": torch.zeros(190, 9, dtype=torch.int32)}, "190 inputs do not divide into groups of 32"),
        (
            "awq-all",
            {"qweight": torch.zeros(0, 9, dtype=torch.int32)},
            "awq layer {}: qweight is [0, 9], which holds no numbers",
        ),
        ("gptq-order", {"g_idx": None}, "gptq layer {}: the checkpoint has no tensor g_idx, which says the order"),
        ("gptq-v1", {"qweight": None}, "gptq layer {}: the checkpoint has no tensor qweight"),
        ("gptq-v1", {"qweight": torch.zeros(24, 72)}, "qweight is float32 [24, 72], not int32 of 2 dimensions"),
        ("gptq-v1", {"scales": torch.ones(6, 71)}, "scales is [6, 71], the layer's other tensors make it [6, 72]"),
        ("gptq-v1", {"g_idx": torch.zeros(191, dtype=torch.int32)}, "g_idx is [191], the layer's other"),
        ("gptq-v1", {"qweight": torch.zeros(24, 75, dtype=torch.int32)}, "75 outputs do not fill words of 32 bits"),
        ("packed", {"weight_shape": torch.tensor([72, 180])}, "weight_packed is [72, 24], the layer's other tensors"),
        ("packed", {"weight_shape": torch.tensor([72])}, "weight_shape is [1], the layer's other tensors make it [2]"),
        ("packed", {"weight_scale": None}, "no tensor weight_scale"),
        (
            "int8-channel",
            {"weight_scale": None},
            "compressed-tensors int-quantized layer {}: the checkpoint has no tensor",
        ),
        ("int8-channel", {"weight_scale": torch.ones(71, 1)}, "weight_scale is [71, 1], the layer's other"),
        (
            "int8-channel",
            {"weight": torch.ones(72, 192).to(torch.float8_e5m2)},
            "weight is float8_e5m2 [72, 192], not int8",
        ),
        ("fp8", {"weight": torch.ones(72, 192, dtype=torch.int8)}, "weight is int8 [72, 192], not float8_e4m3fn"),
        ("fp8-blocks", {"weight_scale_inv": torch.ones(1, 3)}, "weight_scale_inv is [1, 3], the layer's other"),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused(
    name: str, changes: dict[str, torch.Tensor | None], complaint: str
) -> None:
    format_ = FORMATS[name]
    leaves = format_.quantise(WEIGHT)[0] | changes
    with pytest.raises(ModelError, match=re.escape(complaint.format(LAYER))) as raised:
        tensor_of(format_.config, {leaf: tensor for leaf, tensor in leaves.items() if tensor is not None})
    assert f" layer {LAYER}: " in str(raised.value) and "\n" not in str(raised.value)


def test_an_act_order_with_groups_of_other_sizes_is_refused() -> None:
    format_ = gptq(has_order=True)
    leaves, _ = format_.quantise(WEIGHT)
    tensor = tensor_of(format_.config, leaves | {"g_idx": torch.zeros(192, dtype=torch.int32)})
    with pytest.raises(ModelError, match=f"gptq layer {LAYER}: g_idx does not put 32 inputs into every group"):
        tensor.is_ordered()


def test_a_dynamic_rule_for_bits_that_are_not_read_names_the_layer() -> None:
    config = gptq().config | {"dynamic": {r".*\.layers\.1\..*": {"bits": 3}}}
    with pytest.raises(ModelError, match=f"gptq layer {LAYER}: weights of 3 bits are not read, only of 4 and 8"):
        tensor_of(config, gptq().quantise(WEIGHT)[0])


@pytest.mark.parametrize(
    ("targets", "is_for"),
    [([LAYER], True), (["re:.*up_proj$"], True), (["Linear"], True), (["re:.*down_proj"], False), (["up_proj"], False)],
)
def test_groups_of_a_config_are_for_layers_by_name_by_look_or_for_all(targets: list[str], is_for: bool) -> None:
    """The first that fits by its own name, then by a pattern, then by class: the other group here has other bits."""
    config = packed().config
    first = config["config_groups"]["group_0"]
    other = first | {"targets": targets, "weights": first["weights"] | {"num_bits": 8}}
    config = config | {"config_groups": {"group_1": other, "group_0": first}}
    leaves, expected = (packed(bits=8) if is_for else packed()).quantise(WEIGHT)
    assert torch.equal(tensor_of(config, leaves).read(range(72), range(192), CPU).dequantized(), expected)


def test_a_layer_that_no_group_is_for_is_refused() -> None:
    config = packed().config
    groups = {"group_0": config["config_groups"]["group_0"] | {"targets": ["re:.*down_proj"]}}
    with pytest.raises(ModelError, match=f"{LAYER}: it is quantised, and none of the config_groups is for it"):
        tensor_of(config | {"config_groups": groups}, packed().quantise(WEIGHT)[0])


@pytest.mark.parametrize("is_gptq", [False, True])
def test_a_pattern_that_would_take_years_is_refused(is_gptq: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "PATTERNS_TIMEOUT_S", 0.3)
    slow = "([a-z_.0-9]+)+X"
    if is_gptq:
        config, leaves = gptq().config | {"dynamic": {f"+:{slow}": {"bits": 8}}}, gptq().quantise(WEIGHT)[0]
    else:
        config, leaves = packed().config, packed().quantise(WEIGHT)[0]
        group = config["config_groups"]["group_0"]
        config = config | {"config_groups": {"group_0": group | {"targets": [f"re:{slow}", "Linear"]}}}
    complaint = (
        f"model/config.json: the patterns of quantization_config take too long, more than 0.3 s, such as '{slow}'"
    )
    with pytest.raises(ModelError, match=re.escape(complaint)):
        tensor_of(config, leaves)


@pytest.mark.parametrize("structure", [[128, 128], "128x128", None])
def test_blocks_of_compressed_tensors(structure: object) -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": structure}
    inputs = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True}
    leaves, expected = fp8_blocks().quantise(WEIGHT)
    renamed = {"weight": leaves["weight"], "weight_scale": leaves["weight_scale_inv"]}
    weight = tensor_of(compressed("float-quantized", weights, inputs), renamed).read(range(72), range(192), CPU)
    assert torch.equal(weight.dequantized(), expected) and weight.inputs is Inputs.E4M3_BY_GROUP


def test_a_group_of_all_inputs_is_a_scale_an_output() -> None:
    leaves, expected = packed(-1).quantise(WEIGHT)
    config = packed(-1).config
    config["config_groups"]["group_0"]["weights"] |= {"strategy": "group", "group_size": -1}
    assert torch.equal(tensor_of(config, leaves).read(range(72), range(192), CPU).dequantized(), expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32])
def test_rows_may_have_a_zero_of_their_own(dtype: torch.dtype) -> None:
    """Beside a scale: rows that are rounded one by one are rounded around 0."""
    format_, zero = FORMATS["int8-channel"], torch.tensor([3], dtype=dtype)
    leaves = format_.quantise(WEIGHT)[0] | {"input_zero_point": zero}
    weight = tensor_of(format_.config, leaves | {"input_scale": torch.tensor([0.1])}).read(range(72), range(192), CPU)
    assert weight.inputs is Inputs.INT8 and weight.input_scale == pytest.approx(0.1) and weight.input_zero == 3
    assert tensor_of(format_.config, leaves).read(range(72), range(192), CPU).input_zero == 0
    others = [replace(weight, input_zero=4), replace(weight, input_scale=0.2), replace(weight, input_zero=0)]
    assert fit_together(weight, weight) and not any(fit_together(weight, other) for other in others)


@pytest.mark.parametrize(
    ("name", "zero", "complaint"),
    [
        ("int8-channel", torch.tensor([3, 4], dtype=torch.int8), "input_zero_point has several numbers"),
        ("int8-channel", torch.tensor([0.5]), "input_zero_point is float32 [1], not int8 or int32"),
        (
            "float8-tensor",
            torch.tensor([3], dtype=torch.int8),
            "input_zero_point is 3, and floats are rounded around 0",
        ),
        ("float8-tensor", torch.zeros(1).to(torch.float8_e4m3fn), ""),
    ],
)
def test_zeros_of_rows_that_are_not_read_are_refused(name: str, zero: torch.Tensor, complaint: str) -> None:
    leaves = FORMATS[name].quantise(WEIGHT)[0] | {"input_zero_point": zero, "input_scale": torch.tensor([0.1])}

    def read() -> QuantizedWeight:
        return tensor_of(FORMATS[name].config, leaves).read(range(72), range(192), CPU)

    if not complaint:
        assert read().input_zero == 0
        return
    with pytest.raises(ModelError, match=re.escape(f"layer {LAYER}: {complaint}")):
        read()


def test_plain_layers_of_a_quantised_checkpoint_stay_as_they_are() -> None:
    for format_ in (fp8_blocks(), packed()):
        plain = stored({"weight": WEIGHT, "bias": WEIGHT[:, 0]})
        assert with_quantized(Path("model"), detected(format_.config), plain) == plain


def test_an_older_config_is_found_too() -> None:
    config = json.loads(json.dumps(packed().config))
    del config["quant_method"]
    found = detect_format(RawConfig({"compression_config": config}, Path("config.json")))
    assert found == detected(packed().config)
    assert detect_format(RawConfig({"compression_config": {"format": "dense"}}, Path("config.json"))) is None
    assert detect_format(RawConfig({}, Path("config.json"))) is None
