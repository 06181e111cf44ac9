"""config.json of the model in a GGUF file, from the file's metadata.

Where llama.cpp itself goes by a model's number of layers, so does this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from octavo.models.errors import GGUFError
from octavo.models.gguf_families import FAMILIES, MIXTRAL, GgufFamily
from octavo.models.gguf_metadata import SOFT_CAPS, Metadata
from octavo.models.gguf_rope import Values, read_rope, trained_length

# Layers of the one model of each family that divides by hidden size / heads and not by the size of a head.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}


def family_of(metadata: Metadata) -> GgufFamily:
    """Raises KeyError for an architecture that is not in FAMILIES. A "llama" with experts is a Mixtral."""
    return MIXTRAL if metadata.name == "llama" and metadata.count("expert_count") else FAMILIES[metadata.name]


def lengths(config: Mapping[str, Any]) -> dict[str, int]:
    """The words of `Weight.shape` in numbers, from what `read_config` returned."""
    hidden = config.get("hidden_size") or config["n_embd"]
    heads = config.get("num_attention_heads") or config["n_head"]
    inner = config.get("intermediate_size") or config.get("n_inner") or 4 * hidden
    head = config.get("head_dim") or hidden // heads
    keys = config.get("num_key_value_heads", heads) * head
    return {
        "vocab": config["vocab_size"],
        "hidden": hidden,
        "inner": inner,
        "inner_twice": 2 * inner,
        "head": head,
        "queries": heads * head,
        "keys": keys,
        "queries_keys_values": heads * head + 2 * keys,
        "positions": config.get("n_positions", 0),
        "experts": config.get("num_local_experts") or config.get("num_experts") or 0,
        "expert_inner": config.get("moe_intermediate_size", inner),
    }


def read_config(metadata: Metadata, vocab_size: int, has_head: bool, values: Values) -> dict[str, Any]:
    """What `transformers` calls the model and its sizes. `has_head`: whether the head is no copy of the embedding.

    Raises GGUFError for what is missing or cannot be said.
    """
    family = family_of(metadata)
    special = {
        f"{name}_token_id": metadata.token_id(key) for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": vocab_size,
        "tie_word_embeddings": not has_head,
        **_BODIES.get(metadata.name, _rotary)(metadata, values),
        **special,
        "dtype": "float32",
    }


def _gpt2(metadata: Metadata, values: Values) -> dict[str, Any]:
    return {
        "n_embd": metadata.integer("embedding_length"),
        "n_inner": metadata.integer("feed_forward_length"),
        "n_layer": metadata.integer("block_count"),
        "n_head": metadata.integer("attention.head_count"),
        "n_positions": metadata.integer("context_length"),
        "layer_norm_epsilon": metadata.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def _bloom(metadata: Metadata, values: Values) -> dict[str, Any]:
    return {
        "hidden_size": metadata.integer("embedding_length"),
        "n_layer": metadata.integer("block_count"),
        "n_head": metadata.integer("attention.head_count"),
        "seq_length": metadata.integer("context_length"),
        "layer_norm_epsilon": metadata.number("attention.layer_norm_epsilon"),
    }


def _rotary(metadata: Metadata, values: Values) -> dict[str, Any]:
    """What all others share, with what sets each apart."""
    hidden, heads = metadata.integer("embedding_length"), metadata.integer("attention.head_count")
    head_size = metadata.integer("attention.key_length", hidden // heads)
    if metadata.integer("attention.value_length", head_size) != head_size:
        raise GGUFError("keys and values of different sizes cannot be converted")
    is_layer_norm = metadata.name == "starcoder2"
    eps = metadata.number("attention.layer_norm_epsilon" if is_layer_norm else "attention.layer_norm_rms_epsilon")
    return {
        "hidden_size": hidden,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": metadata.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", heads),
        "head_dim": head_size,
        "max_position_embeddings": metadata.integer("context_length"),
        "norm_epsilon" if is_layer_norm else "rms_norm_eps": eps,
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        **_differences(metadata, head_size),
        **read_rope(metadata, head_size, values),
    }


def _differences(metadata: Metadata, head_size: int) -> dict[str, Any]:
    window = metadata.count("attention.sliding_window") or None
    if metadata.name.startswith("gemma"):
        return _gemma(metadata, head_size, window)
    if metadata.name == "starcoder2":
        return {"hidden_act": "gelu_pytorch_tanh", "use_bias": True, "sliding_window": window}
    silu: dict[str, Any] = {"hidden_act": "silu"}
    if metadata.name == "qwen3moe":
        return silu | {
            "num_experts": metadata.integer("expert_count"),
            "num_experts_per_tok": metadata.integer("expert_used_count"),
            "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if family_of(metadata) is MIXTRAL:
        return silu | {
            "num_local_experts": metadata.integer("expert_count"),
            "num_experts_per_tok": metadata.integer("expert_used_count"),
            "sliding_window": window,
        }
    if metadata.name == "phi3":
        return silu | {"sliding_window": window, "original_max_position_embeddings": trained_length(metadata)}
    if window:
        raise metadata.refused("attention.sliding_window")
    return silu


def _gemma(metadata: Metadata, head_size: int, window: int | None) -> dict[str, Any]:
    config: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    if metadata.name == "gemma":
        return config
    is_27b = metadata.integer("block_count") == _LAYERS_OF_27B[metadata.name]
    by_heads = metadata.integer("embedding_length") // metadata.integer("attention.head_count")
    config |= {"query_pre_attn_scalar": by_heads if is_27b else head_size, "sliding_window": window or 4096}
    for key, cap in zip(SOFT_CAPS, (50.0, 30.0), strict=True):
        default = cap if metadata.name == "gemma2" else None
        config[key] = metadata.number(key) if key in metadata else default
    if metadata.name == "gemma3":
        pattern = metadata.get(key := "attention.sliding_window_pattern", 6)
        if not isinstance(pattern, list):
            pattern = metadata.integer(key, 6)
        if not window:  # a model without, as llama.cpp has it, too
            pattern = [False] * metadata.integer("block_count")
        if isinstance(pattern, list):
            config["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
        else:
            config["sliding_window_pattern"] = pattern
    return config


_BODIES: dict[str, Callable[[Metadata, Values], dict[str, Any]]] = {"gpt2": _gpt2, "bloom": _bloom}
