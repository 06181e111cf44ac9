"""GGUF files of every architecture that can be read, against the models that they were made of."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from octavo.models.errors import GGUFError
from octavo.models.gguf_convert import read_tensors
from tests.worker.exact_logits import Truth, truth_of, truth_of_folder
from tests.worker.families import VOCAB_SIZE, make_family
from tests.worker.gguf_files import write_gguf
from tests.worker.model_cases import Stepper
from worker_svc.models.checkpoint.gguf_folder import model_folder
from worker_svc.models.config import ModelConfig, ModelError
from worker_svc.models.loader import load_model

_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_PHI3 = {"rope__scaling__original_context_length": 192, "rope__dimension_count": 10}
_YARN = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 64}
_LINEAR = {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0}
# Family in `families` -> architecture, what the file says besides, what the model is made with besides.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mistral-all": ("llama", {}, {}),
    "llama-yarn": ("llama", _YARN, {}),
    "llama-gelu": ("llama", {}, {"hidden_act": "silu", "rope_parameters": _LLAMA3}),
    "mixtral": ("llama", {}, {}),
    "qwen2": ("qwen2", {}, {"use_sliding_window": False, "sliding_window": None}),
    "qwen3": ("qwen3", {}, {}),
    "qwen3-moe": ("qwen3moe", {}, {"norm_topk_prob": True, "use_sliding_window": False, "sliding_window": None}),
    "phi3": ("phi3", _PHI3, {}),
    "phi3-partial": ("phi3", {"rope__dimension_count": 6}, {}),
    "starcoder2": ("starcoder2", {}, {}),
    "gemma": ("gemma", {}, {}),
    "gemma2": ("gemma2", {}, {"query_pre_attn_scalar": 12}),
    "gemma3": ("gemma3", _LINEAR | {"attention__sliding_window_pattern": 2}, {"query_pre_attn_scalar": 12}),
    "gpt2": ("gpt2", {}, {}),
    "bloom": ("bloom", {}, {}),
}
READ_BY_TRANSFORMERS = [name for name in CASES if name not in ("mistral-all", "mixtral", "gemma")]


@contextmanager
def case(name: str, folder: Path, **metadata: Any) -> Iterator[tuple[Path, Path]]:
    """The model's folder, and that of its GGUF file as a worker sees it."""
    kind, told, made = CASES[name]
    original = make_family(name, folder / "model", **made)
    extra: dict[str, np.ndarray] = {}
    rope = json.loads((original / "config.json").read_text()).get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        extra["rope_freqs.weight"] = _divisors(rope, 10)
    for length in ("short", "long"):
        if factors := rope.get(f"{length}_factor"):
            extra[f"rope_factors_{length}.weight"] = np.array(factors, np.float32)
    path = write_gguf(original, folder / f"{name}.gguf", kind, extra, **told | metadata)
    with model_folder(path) as read:
        yield original, read


def _divisors(rope: dict[str, Any], head_size: int) -> np.ndarray:
    """By what llama.cpp's converter says that Llama 3.1's frequencies are divided."""
    trained, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    divisors = []
    for i in range(head_size // 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (2 * i / head_size)
        if wavelength < trained / high:
            divisors.append(1.0)
        elif wavelength > trained / low:
            divisors.append(factor)
        else:
            smooth = (trained / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    assert 1.0 in divisors and factor in divisors
    return np.array(divisors, np.float32)


def tokens(length: int = 90) -> list[int]:
    return random.Random(length).choices(range(VOCAB_SIZE), k=length)


def logits(folder: Path) -> torch.Tensor:
    model = load_model(folder, ModelConfig.from_folder(folder, "float32"), "cpu")
    return Stepper(model, [tokens()]).step({0: (0, len(tokens()))})[0]


def read_by_transformers(path: Path, original: Path) -> Truth:
    """With the weights as the library reads them; of sizes and windows it leaves much to defaults."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(original)

    def make(dtype: torch.dtype) -> Any:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager").eval()
        state = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
        report = model.load_state_dict(state, strict=False)
        assert not report.unexpected_keys and set(report.missing_keys) <= {"lm_head.weight"}
        return model

    return truth_of(make, [tokens()])


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_model_that_the_file_was_made_of(name: str, tmp_path: Path) -> None:
    with case(name, tmp_path) as (original, read):
        assert json.loads((read / "config.json").read_text())["architectures"] == (
            ["LlamaForCausalLM"] if name == "mistral-all"
            else json.loads((original / "config.json").read_text())["architectures"]
        )  # fmt: skip
        truth_of_folder(original, [tokens()]).check_whole([logits(read)])


@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_transformers_reads_the_same_out_of_these_files(name: str, tmp_path: Path) -> None:
    """So that the order of their rows is llama.cpp's, and not one that writer and reader here agree upon."""
    with case(name, tmp_path) as (original, read):
        read_by_transformers(tmp_path / f"{name}.gguf", original).check_whole([logits(read)])


def test_a_gemma3_without_a_window_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Rnj-1, whose rope is stretched by other borders than the usual ones, too."""
    stretched = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 4.0}
    ropes = {"full_attention": stretched | {"rope_theta": 1e4}, "sliding_attention": {"rope_type": "default"}}
    told = _YARN | {"attention__sliding_window": None, "rope__scaling__yarn_beta_fast": 4.0}
    told |= {"rope__scaling__yarn_ext_factor": 1.0, "rope__scaling__yarn_attn_factor": 1.0}
    made = {"query_pre_attn_scalar": 12, "layer_types": ["full_attention"] * 3, "rope_parameters": ropes}
    monkeypatch.setitem(CASES, "gemma3", ("gemma3", told, made))
    with case("gemma3", tmp_path) as (original, read):
        truth_of_folder(original, [tokens()]).check_whole([logits(read)])


@pytest.mark.parametrize(
    ("name", "metadata", "expected"),
    [
        ("qwen3", {"rope__scaling__factor": 4.0}, ("linear", 4.0, 1.0)),
        ("qwen3", _YARN, ("yarn", 4.0, 1.138629)),
        ("qwen3", _YARN | {"rope__scaling__yarn_attn_factor": 0.8782489}, ("yarn", 4.0, 1.0)),
        ("qwen3", _YARN | {"rope__scaling__attn_factor": 2.0}, ("yarn", 4.0, 2.277259)),
        ("phi3", {"rope__scaling__attn_factor": 1.25}, ("longrope", 256 / 192, 1.25)),
    ],
)
def test_how_far_a_rope_is_stretched_is_read_from_every_key(
    name: str, metadata: dict[str, Any], expected: tuple[str, float, float], tmp_path: Path
) -> None:
    with case(name, tmp_path, **metadata) as (_, read):
        (rope,) = ModelConfig.from_folder(read).style.ropes
    assert rope.kind == expected[0]
    assert (rope.factor, rope.magnitude) == pytest.approx(expected[1:], rel=1e-6)


_TYPES = [
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
]


@pytest.mark.parametrize("kind", _TYPES)
def test_weights_of_every_type_are_expanded_as_the_gguf_package_does(kind: str, tmp_path: Path) -> None:
    """Experts, too, which lie in one tensor and are read one by one. Any bytes are blocks; these have finite scales."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4}
    original = make_family("mixtral", tmp_path / "model", **sizes)
    written: dict[str, np.ndarray] = {}
    type_of = gguf.GGMLQuantizationType[kind]
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[type_of]

    def stored(name: str, values: np.ndarray) -> np.ndarray:
        width = values.shape[-1] // per_block * block_bytes
        written[name] = np.random.default_rng(len(name)).integers(0, 0x3C, (*values.shape[:-1], width), np.uint8)
        return written[name]

    path = write_gguf(original, tmp_path / "q.gguf", "llama", quantised=(type_of, stored))
    read = {tensor.name: tensor.load() for tensor in read_tensors(path)}
    for name, part in (("attn_output", "self_attn.o_proj"), ("attn_v", "self_attn.v_proj")):
        expected = gguf.dequantize(written[f"blk.0.{name}.weight"], type_of)
        np.testing.assert_array_equal(read[f"model.layers.0.{part}.weight"], expected)
    for name, part in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        expected = gguf.dequantize(written[f"blk.0.ffn_{name}_exps.weight"], type_of)
        for expert in range(5):
            got = read[f"model.layers.0.block_sparse_moe.experts.{expert}.{part}.weight"]
            assert np.abs(got).max() > 0
            np.testing.assert_array_equal(got, expected[expert])


@pytest.mark.parametrize("kind", ["F64", "Q8_1", "Q8_K", "I8"])
def test_a_type_that_the_gguf_package_does_not_expand_is_named(kind: str, tmp_path: Path) -> None:
    """Before any weight is read."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    original, type_of = make_family("mixtral", tmp_path / "model", **sizes), gguf.GGMLQuantizationType[kind]
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[type_of]

    def stored(name: str, values: np.ndarray) -> np.ndarray:
        return np.zeros((*values.shape[:-1], values.shape[-1] // per_block * block_bytes), np.uint8)

    path = write_gguf(original, tmp_path / "model.gguf", "llama", quantised=(type_of, stored))
    with pytest.raises(GGUFError, match=f"^tensor '.*weight' is of type {kind}, which is not read$"):
        next(read_tensors(path))


def test_a_chat_ends_with_its_turn(tmp_path: Path) -> None:
    with case("qwen2", tmp_path, token_ids={"eos": 260, "eot": 261}) as (_, read):
        # And with the marks among its tokens, for which there may be no key.
        assert ModelConfig.from_folder(read).eos_token_ids == (260, 261, 256, 258)


@pytest.mark.parametrize(
    ("name", "metadata", "why"),
    [
        ("qwen2", {"expert_shared_count": 1}, "qwen2.expert_shared_count is 1; such a model cannot be converted"),
        ("qwen2", {"/split.count": 3, "/split.no": 1}, "this is part 2 of 3: join them into one file first"),
        ("qwen3", {"rope__scaling__type": "spiral"}, "qwen3.rope.scaling.type is 'spiral'; such a model cannot"),
        ("qwen3", {"rope__dimension_count": 8}, "rotary embedding over a part of each head cannot be converted"),
        ("qwen3", {"attention__sliding_window": 8}, "qwen3.attention.sliding_window is 8; such a model cannot"),
        ("qwen3", {"final_logit_softcapping": 30.0}, "qwen3.final_logit_softcapping is 30.0; such a model cannot"),
        ("qwen3", {"rope__scaling__attn_factor": 1.5}, "qwen3.rope.scaling.attn_factor is 1.5; such a model cannot"),
        ("qwen3", _YARN | {"rope__scaling__yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5; such a model cannot"),
        ("qwen3", _YARN | {"rope__scaling__yarn_attn_factor": 1.5}, "yarn_attn_factor is 1.5; such a model cannot"),
        ("llama-gelu", {"rope__scaling__factor": 8.0}, "llama.rope.scaling.factor is 8.0; such a model cannot"),
        ("mixtral", {"expert_gating_func": 2}, "llama.expert_gating_func is 2; such a model cannot be converted"),
        ("qwen3-moe", {"expert_weights_norm": False}, "qwen3moe.expert_weights_norm is False; such a model cannot"),
        ("qwen2", {"attention__key_length": 10, "attention__value_length": 8}, "keys and values of different sizes"),
        ("gpt2", {"feed_forward_length": 7}, r"tensor 'blk.0.ffn_up.bias' has shape \(131,\), not \(7,\)"),
        ("bloom", {"block_count": 4}, "the file lacks 12 tensors, 'blk.3.attn_norm.bias' among them"),
        ("bloom", {"block_count": 2}, "tensor 'blk.2.attn_norm.bias' is not part of a plain BloomForCausalLM"),
        ("bloom", {"block_count": 100_000}, "bloom.block_count is 100000, and the file has 41 tensors"),
        ("gemma3", {"block_count": 2**31, "attention__sliding_window": 0}, "gemma3.block_count is 2147483648, and the"),
        ("gemma2", {"block_count": 0}, r"gemma2\.block_count is 0, not one positive number for all layers"),
        ("qwen2", {"rope__freq_base": "abc"}, "qwen2.rope.freq_base is 'abc', not a number"),
        ("qwen2", {"rope__freq_base": [1.0]}, r"qwen2.rope.freq_base is \[1.0\], not a number"),
        ("qwen2", {"attention__layer_norm_rms_epsilon": math.nan}, "layer_norm_rms_epsilon is nan, not a number"),
        ("qwen2", {"rope__scaling__factor": "x"}, "qwen2.rope.scaling.factor is 'x', not a number"),
        ("qwen2", {"rope__scaling__type": 3}, "qwen2.rope.scaling.type is 3, not a text"),
        ("qwen2", {"block_count": True}, "qwen2.block_count is True, not one positive number"),
        ("qwen2", {"/split.count": "abc"}, "split.count is 'abc', not a whole number"),
        ("gemma2", {"attention__sliding_window": "x"}, "sliding_window is 'x', not a whole number"),
        ("qwen2", {"/tokenizer.chat_template": 5}, "tokenizer.chat_template is 5, not a text"),
        ("qwen2", {"/tokenizer.chat_template": ["a"]}, "tokenizer.chat_template is .'a'., not a text"),
        ("qwen2", {"/tokenizer.ggml.eot_token_id": [1]}, "eot_token_id is .1., not the id of one of [0-9]+ tokens"),
    ],
)
def test_what_cannot_be_converted_is_said_in_one_line(
    name: str, metadata: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises((ModelError, GGUFError), match=why) as caught:
        with case(name, tmp_path, **metadata):
            list(read_tensors(tmp_path / f"{name}.gguf"))
    assert "\n" not in str(caught.value)


def test_an_error_while_weights_are_opened_names_the_file_itself(tmp_path: Path) -> None:
    """And not the folder that stands for it while it is read, which is gone when somebody looks for it."""
    with pytest.raises(ModelError) as caught:
        with case("bloom", tmp_path, block_count=4) as (_, read):
            load_model(read, ModelConfig.from_folder(read), "cpu")
    assert str(caught.value).startswith(f"{tmp_path / 'bloom.gguf'}: the file lacks 12 tensors")
