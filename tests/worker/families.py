"""A tiny model of each family, in the sizes where families differ: configurations of transformers, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.tiny_models import make_tiny_model

VOCAB_SIZE = 523

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 60,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 157,
    "max_position_embeddings": 256,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.2, 2.0],
    "long_factor": [1.0, 2.0, 3.0, 5.5, 8.0],
    "original_max_position_embeddings": 192,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
# The window is shorter than the prompts, and the limit cuts a few of the gates and ups.
_GPT_OSS = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "head_dim": 10,
    "sliding_window": 25,
    "swiglu_limit": 2.0,
    "rope_parameters": _YARN | {"rope_theta": 150000.0, "truncate": False},
}
_LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 10,
    "v_head_dim": 9,
    "moe_intermediate_size": 22,
    "num_experts_per_tok": 3,
    "n_routed_experts": 12,
    "first_k_dense_replace": 1,
}
_STRETCHED = {"rope_parameters": _YARN | {"mscale": 0.707, "mscale_all_dim": 1.1}}
_GROUPS = {"n_group": 4, "topk_group": 2}
_GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

# Name -> the configuration's class in transformers, and what it gets besides the sizes above.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-dynamic": ("LlamaConfig", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": _YARN}),
    "llama-yarn-plain": ("LlamaConfig", {"rope_parameters": _YARN | {"truncate": False, "beta_fast": 8.0}}),
    "llama-gelu": ("LlamaConfig", {"hidden_act": "gelu"}),
    "mistral": ("MistralConfig", {"sliding_window": 21, "head_dim": 14}),
    "mistral-all": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 30, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-one-head": ("Qwen3Config", {"head_dim": 16, "num_key_value_heads": 1}),
    "qwen3-biased": ("Qwen3Config", {"head_dim": 10, "attention_bias": True}),
    "phi3": ("Phi3Config", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 192}),
    "phi3-partial": (
        "Phi3Config",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.6}, "sliding_window": 40},
    ),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 25}),
    "stablelm": ("StableLmConfig", {"partial_rotary_factor": 0.4}),
    "stablelm-biased": ("StableLmConfig", {"use_qkv_bias": True, "num_key_value_heads": 6, "layer_norm_eps": 1e-2}),
    "gemma": ("GemmaConfig", {"head_dim": 16}),
    "gemma2": ("Gemma2Config", {"head_dim": 12, "sliding_window": 25, "query_pre_attn_scalar": 9}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 12,
            "sliding_window": 25,
            "sliding_window_pattern": 2,
            "rope_parameters": _GEMMA3_ROPES,
            "final_logit_softcapping": 20.0,
        },
    ),
    "gpt2": ("GPT2Config", {"n_inner": 131}),
    "gpt2-by-layer": ("GPT2Config", {"scale_attn_by_inverse_layer_idx": True, "activation_function": "gelu"}),
    "opt": ("OPTConfig", {"ffn_dim": 131}),
    "opt-behind": ("OPTConfig", {"ffn_dim": 131, "do_layer_norm_before": False, "word_embed_proj_dim": 34}),
    "opt-unnormed": ("OPTConfig", {"ffn_dim": 131, "_remove_final_layer_norm": True}),
    "opt-unbiased": ("OPTConfig", {"ffn_dim": 131, "enable_bias": False}),
    "bloom": ("BloomConfig", {}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 50}),
    "gpt-oss": ("GptOssConfig", _GPT_OSS),
    "gpt-oss-unbiased": ("GptOssConfig", _GPT_OSS | {"attention_bias": False, "layer_types": ["full_attention"] * 3}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 45, "head_dim": 10},
    ),
    "qwen3-moe-mixed": (
        "Qwen3MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 45,
            "head_dim": 10,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "deepseek-v2": (
        "DeepseekV2Config",
        _LATENT
        | _GROUPS
        | {
            "q_lora_rank": 17,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 3.0,
            "rms_norm_eps": 1e-2,  # which is not that of the latents' norms
        },
    ),
    "deepseek-v2-lite": ("DeepseekV2Config", _LATENT | _STRETCHED | {"q_lora_rank": None, "n_shared_experts": 1}),
    "deepseek-v3": ("DeepseekV3Config", _LATENT | _GROUPS | _STRETCHED | {"q_lora_rank": 17}),
    "deepseek-v3-plain": (
        "DeepseekV3Config",
        _LATENT
        | {
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
            "attention_bias": True,
            "norm_topk_prob": False,
        },
    ),
}


def make_family(name: str, folder: Path, seed: int = 5, **changes: Any) -> Path:
    """Writes the tiny model of that name to `folder`; `changes` of its configuration."""
    import transformers

    kind, differences = FAMILIES[name]
    config_class: Callable[..., Any] = getattr(transformers, kind)
    return make_tiny_model(folder, config_class(**_sizes_of(kind) | differences | changes), seed)


def _sizes_of(kind: str) -> dict[str, Any]:
    if kind == "GPT2Config":
        return {"vocab_size": VOCAB_SIZE, "n_embd": 60, "n_layer": 3, "n_head": 4, "n_positions": 256}
    if kind == "BloomConfig":  # 6 heads: no power of 2
        return {"vocab_size": VOCAB_SIZE, "hidden_size": 60, "n_layer": 3, "n_head": 6, "seq_length": 256}
    if kind == "OPTConfig":
        return {key: value for key, value in _SIZES.items() if "key_value" not in key and "intermediate" not in key}
    return _SIZES
