"""Configuration from a folder: both spellings of rope, defaults, and one-line errors that name what is wrong."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kernels.cpu.library import library
from worker_svc.models.config import ModelConfig, ModelError
from worker_svc.models.rope import Rope

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}


def write(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> Path:
    raw = {key: value for key, value in (BASE | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_defaults_of_absent_keys(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(write(tmp_path))
    assert (config.num_kv_heads, config.head_size, config.max_model_len) == (4, 12, 512)
    style = config.style
    assert (style.ropes, style.norm_eps, style.activation) == ((Rope(12, 10000.0),), 1e-6, "silu")
    assert not (config.tie_word_embeddings or style.qkv_bias or style.attention_out_bias or style.mlp_bias)
    assert (config.dtype, config.eos_token_ids, config.model_name) == (torch.float32, (), tmp_path.name)


@pytest.mark.parametrize(
    "written",
    [
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    ],
)
def test_rope_is_read_as_new_and_as_old_files_write_it(tmp_path: Path, written: dict[str, Any]) -> None:
    config = ModelConfig.from_folder(write(tmp_path, **written))
    assert config.style.ropes == (Rope(12, 5e5, "llama3", 8.0, 128, 1.0, 4.0),)


@pytest.mark.parametrize("scaling", [{"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2}])
def test_linear_rope(tmp_path: Path, scaling: dict[str, Any]) -> None:
    config = ModelConfig.from_folder(write(tmp_path, rope_scaling=scaling))
    assert config.style.ropes == (Rope(12, 10000.0, "linear", 2.0),)


def test_a_factor_to_the_magnitude_of_yarn_is_part_of_it(tmp_path: Path) -> None:
    """DeepSeek-R1-0528-Qwen3-8B cancels the usual one."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    for more, expected in (
        ({}, 1.138629),
        ({"attn_factor": 0.8782488562869419}, 1.0),
        ({"attn_factor": 0.5, "attention_factor": 1.5}, 1.5),
    ):
        (rope,) = ModelConfig.from_folder(write(tmp_path, rope_scaling=scaling | more)).style.ropes
        assert rope.magnitude == pytest.approx(expected, rel=1e-6)


def test_gemma3_has_two_ropes_written_new_or_old(tmp_path: Path) -> None:
    gemma3: dict[str, Any] = {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 6, "head_dim": 8}
    old = write(tmp_path, **gemma3, rope_theta=5e5, rope_scaling={"rope_type": "linear", "factor": 8.0})
    ropes = (Rope(8, 5e5, "linear", 8.0), Rope(8, 1e4))
    style = ModelConfig.from_folder(old).style
    assert (style.ropes, style.rope_of_layer, style.windows) == (ropes, (1,) * 5 + (0,), (4096,) * 5 + (0,))
    parameters = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert ModelConfig.from_folder(write(tmp_path, **gemma3, rope_parameters=parameters)).style == style


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"]}, (4096, 4096)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 7}, (7, 7)),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 7}, ()),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 1}, (0, 4096)),
        ({"architectures": ["Gemma2ForCausalLM"], "sliding_window": 7}, (7, 0)),
        (
            {"architectures": ["Gemma2ForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]},
            (0, 4096),
        ),
    ],
)
def test_windows_by_layer(tmp_path: Path, changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert ModelConfig.from_folder(write(tmp_path, num_key_value_heads=2, **changes)).style.windows == windows


def test_null_is_not_absent(tmp_path: Path) -> None:
    folder = write(tmp_path, architectures=["Gemma2ForCausalLM"])
    assert ModelConfig.from_folder(folder).style.logit_soft_cap == 30.0
    raw = BASE | {"architectures": ["Gemma2ForCausalLM"], "final_logit_softcapping": None, "sliding_window": None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    style = ModelConfig.from_folder(folder).style
    assert (style.logit_soft_cap, style.attention_soft_cap, style.windows) == (0.0, 50.0, (0, 0))


@pytest.mark.parametrize(
    ("raw", "generation", "expected"),
    [
        (7, None, (7,)),
        ([7, 9], None, (7, 9)),
        (7, {"eos_token_id": [2, 3]}, (2, 3)),
        (None, {"eos_token_id": 2}, (2,)),
        (7, {"eos_token_id": None}, (7,)),
    ],
)
def test_stop_tokens_come_from_the_generation_config_first(
    tmp_path: Path, raw: Any, generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    assert ModelConfig.from_folder(write(tmp_path, generation, eos_token_id=raw)).eos_token_ids == expected


@pytest.mark.parametrize(
    ("own", "asked", "device", "has_pairs", "expected"),
    [
        ("bfloat16", "auto", "cpu", True, torch.bfloat16),
        ("bfloat16", "auto", "cpu", False, torch.float32),
        ("bfloat16", "auto", "cuda", False, torch.bfloat16),
        ("float16", "auto", "cpu", True, torch.float32),
        ("float16", "auto", "cuda", False, torch.float16),
        ("float32", "auto", "cpu", True, torch.float32),
        ("float32", "bfloat16", "cpu", False, torch.bfloat16),
        ("bfloat16", "float32", "cpu", True, torch.float32),
    ],
)
def test_dtype(
    tmp_path: Path,
    own: str,
    asked: str,
    device: str,
    has_pairs: bool,
    expected: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`has_pairs`: whether the processor multiplies bfloat16."""
    monkeypatch.setattr(library(), "has_pairs", has_pairs)
    assert ModelConfig.from_folder(write(tmp_path, dtype=own), asked, device=device).dtype == expected
    assert ModelConfig.from_folder(write(tmp_path, torch_dtype=own), asked, device=device).dtype == expected


@pytest.mark.parametrize(("arch", "expected"), [("LlamaForCausalLM", "float16"), ("PhiForCausalLM", "bfloat16")])
def test_a_type_that_is_not_named_is_that_of_the_weights(tmp_path: Path, arch: str, expected: str) -> None:
    """The embedding's; of a model that `transformers` computes, which has other names, the first matrix's."""
    phi: dict[str, Any] = {"model_type": "phi"} if arch == "PhiForCausalLM" else {}
    folder = write(tmp_path, architectures=[arch], **phi)
    assert ModelConfig.from_folder(folder, device="cuda").dtype == torch.float32
    bfloat16, float16 = (torch.zeros(2, 2, dtype=dtype) for dtype in (torch.bfloat16, torch.float16))
    scale = torch.zeros(2, dtype=torch.float32)
    save_file({"model.layers.0.a.scale": scale, "model.layers.0.b": bfloat16}, folder / "model-1-of-2.safetensors")
    save_file({"model.embed_tokens.weight": float16}, folder / "model-2-of-2.safetensors")
    assert str(ModelConfig.from_folder(folder, device="cuda").dtype) == f"torch.{expected}"
    other = write(folder, architectures=[arch], torch_dtype="float8_e4m3fn", **phi)
    assert str(ModelConfig.from_folder(other, device="cuda").dtype) == f"torch.{expected}"
    assert ModelConfig.from_folder(write(folder, torch_dtype="float32"), device="cuda").dtype == torch.float32


def test_max_model_len_may_be_shortened_only(tmp_path: Path) -> None:
    folder = write(tmp_path)
    assert ModelConfig.from_folder(folder, max_model_len=100).max_model_len == 100
    with pytest.raises(ModelError, match="513 is not within 1 and 512"):
        ModelConfig.from_folder(folder, max_model_len=513)


def test_the_hash_follows_config_and_weights(tmp_path: Path) -> None:
    def hashed(**changes: Any) -> str:
        return ModelConfig.from_folder(write(tmp_path, **changes)).model_hash

    plain = hashed()
    assert hashed() == plain != hashed(vocab_size=100)
    save_file({"a": torch.zeros(3)}, tmp_path / "model.safetensors")
    with_weights = hashed()
    save_file({"b": torch.zeros(3)}, tmp_path / "model.safetensors")
    renamed = hashed()
    save_file({"b": torch.ones(3)}, tmp_path / "model.safetensors")
    assert len({plain, with_weights, renamed, hashed()}) == 4


def test_the_hash_of_a_damaged_file_does_not_read_all_of_it(tmp_path: Path) -> None:
    folder = write(tmp_path)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(b"\xff" * 8)  # the header's length
        file.truncate(400_000_000)
    tracemalloc.start()
    ModelConfig.from_folder(folder, "float32")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 150_000_000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BertModel"]}, "architecture BertModel is not supported: it is no decoder"),
        ({"architectures": None}, "architecture not given"),
        ({"hidden_size": None}, "hidden_size must be a positive integer, not None"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer, not 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, not 0"),
        ({"num_key_value_heads": 3}, "4 heads do not divide by 3 key/value heads"),
        ({"head_dim": 7}, "7 of a head's 7 elements are turned; rotary embedding needs pairs"),
        ({"hidden_act": "tanh"}, "hidden_act 'tanh' is not supported; known: silu"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2}}, "rope type 'spiral' is not supported; known: default"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope type linear lacks 'factor'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "low_freq_factor must be a number, not None"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 6}},
            "short_factor has 1 numbers, 6 are needed",
        ),
        ({"rope_scaling": 3}, "rope_scaling must be an object, not 3"),
        (
            {"architectures": ["OPTForCausalLM"], "layer_norm_elementwise_affine": False},
            "affine False is not supported",
        ),
        ({"architectures": ["GPT2LMHeadModel"], "n_embd": 50, "n_head": 3}, "50 does not divide by 3 heads"),
        ({"architectures": ["Gemma2ForCausalLM"], "layer_types": ["full_attention"]}, "a type for each of 2 layers"),
        ({"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "layer_types": ["x"] * 2}, "'x' is not"),
        ({"architectures": ["StableLmForCausalLM"], "qk_layernorm": True}, "only False; try --model-impl transformers"),
        ({"eos_token_id": "two"}, "eos_token_id must be a token id"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of str, not 'LlamaForCausalLM'"),
        ({"architectures": -1}, "architectures must be a list of str, not -1"),
        ({"hidden_act": ["silu"]}, "hidden_act must be a string, not ['silu']"),
        ({"num_hidden_layers": 2**31}, "num_hidden_layers is 2147483648, more than 10000"),
        ({"vocab_size": 2**63}, "vocab_size is larger than 9223372036854775807"),
        ({"rope_theta": math.nan}, "rope_theta must be a finite number, not nan"),
        ({"rope_theta": 10**400}, "rope_theta must be a finite number, not 1000"),
        ({"rope_theta": 1}, "rope_theta must be more than 1 and less than 1e15, not 1.0"),
        ({"partial_rotary_factor": math.inf}, "partial_rotary_factor must be a finite number, not inf"),
        ({"rope_scaling": {"rope_type": []}}, "rope_type must be a string, not []"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": math.inf}}, "factor must be a finite number, not inf"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 1e300}}, "factor must be more than 0 and less than 1e15"),
        ({"rope_scaling": {"rope_type": "yarn", "beta_fast": -1}}, "beta_fast must be more than 0 and less than 1e15"),
        (
            {"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 1}},
            "rope type longrope goes by a trained length, and original_max_position_embeddings is 1",
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "max_window_layers": "x"},
            "max_window_layers must be a positive integer, not 'x'",
        ),
        ({"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": -1}, "mlp_only_layers must be a list of int"),
        (
            {"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": 0},
            "query_pre_attn_scalar must be more than 0 and less than 1e15, not 0.0",
        ),
        (
            {"architectures": ["MixtralForCausalLM"], "num_key_value_heads": 2, "num_experts_per_tok": 9},
            "9 experts cannot be chosen among 8",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as raised:
        ModelConfig.from_folder(write(tmp_path, **changes))
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_octavos_own_code_alone_names_what_it_knows(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="architecture PhiForCausalLM; known: LlamaForCausalLM, Mistral"):
        ModelConfig.from_folder(write(tmp_path, architectures=["PhiForCausalLM"]), impl="octavo")


def test_a_folder_without_a_readable_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model folder .*nowhere does not exist"):
        ModelConfig.from_folder(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"has no config\.json: a model folder has that, a tokenizer and weights$"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "4-bit.gguf").touch()
    with pytest.raises(ModelError, match=rf"has no config\.json; name the file: {tmp_path}/4-bit\.gguf$"):
        ModelConfig.from_folder(tmp_path)
    for damaged in ("{", "[" * 100_000):
        (tmp_path / "config.json").write_text(damaged)
        with pytest.raises(ModelError, match=r"config.json is not JSON"):
            ModelConfig.from_folder(tmp_path)
    with pytest.raises(ModelError, match="dtype 'int8' is not supported"):
        ModelConfig.from_folder(write(tmp_path), "int8")
    with pytest.raises(ModelError, match="float16 is not computed on a CPU"):
        ModelConfig.from_folder(write(tmp_path), "float16")
