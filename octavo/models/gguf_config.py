"""config.json of the model in a GGUF file, from the file's metadata.

A key that changes what a model computes and that is not understood is refused by name: a model that loads and answers
nonsense is worse than an error. Where llama.cpp itself goes by a model's number of layers, so does this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from octavo.models.errors import GGUFError
from octavo.models.gguf_families import FAMILIES, MIXTRAL, GgufFamily

Values = Callable[[str], "np.ndarray[Any, Any] | None"]  # of a small tensor by its name, None where there is none

_NOT_UNDERSTOOD = (
    "attention.causal",
    "attention.clamp_kqv",
    "attention.key_length_swa",
    "attention.output_scale",
    "attention.scale",
    "attention.shared_kv_layers",
    "attention.temperature_length",
    "attention.temperature_scale",
    "embedding_scale",
    "expert_shared_count",
    "expert_group_count",
    "expert_group_scale",
    "expert_group_used_count",
    "expert_weights_scale",
    "interleave_moe_layer_step",
    "leading_dense_block_count",
    "logit_scale",
    "moe_every_n_layers",
    "residual_scale",
    "rope.dimension_count_swa",
    "rope.scale_linear",
    "rope.scaling.alpha",
    "rope.scaling.yarn_log_multiplier",
    "router_logit_softcapping",
    "use_parallel_residual",
)
# Keys that are understood only where they say what is so without them.
_UNDERSTOOD_AS: dict[str, float] = {
    "expert_gating_func": 1,  # softmax
    "expert_weights_norm": True,
    "rope.scaling.yarn_ext_factor": 1.0,
}
_SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_OF_SOME = {  # of which architectures they are understood
    **dict.fromkeys(_SOFT_CAPS, ("gemma2", "gemma3")),
    "rope.freq_base_swa": ("gemma3",),
}
# Layers of the one model of each family that divides by hidden size / heads and not by the size of a head.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}


class Metadata:
    """The keys of one architecture, without its name in front."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Raises GGUFError for an architecture that cannot be converted."""
        self._values = values
        self.name = str(values.get("general.architecture"))
        if self.name not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise GGUFError(f"architecture {self.name!r} cannot be converted; those that can: {known}")
        for key in _NOT_UNDERSTOOD:
            if key in self:
                raise self.refused(key)
        for key, usual in _UNDERSTOOD_AS.items():
            if key in self and self[key] != usual:
                raise self.refused(key)
        for key, names in _OF_SOME.items():
            if key in self and self.name not in names:
                raise self.refused(key)

    def refused(self, key: str) -> GGUFError:
        """Of a model that cannot be converted for what this key says."""
        return GGUFError(f"{self.name}.{key} is {self[key]!r}; such a model cannot be converted")

    def __contains__(self, key: str) -> bool:
        return f"{self.name}.{key}" in self._values

    def __getitem__(self, key: str) -> Any:
        if key not in self:
            raise GGUFError(f"the file lacks {f'{self.name}.{key}'!r}")
        return self._values[f"{self.name}.{key}"]

    def get(self, key: str, default: Any) -> Any:
        """The value of `ARCHITECTURE.key`, of whatever type the file gives it."""
        return self._values.get(f"{self.name}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        """At least 1. Raises GGUFError, also for a list by layer."""
        value = self[key] if default is None else self.get(key, default)
        if not isinstance(value, int) or value < 1:
            raise GGUFError(f"{self.name}.{key} is {value!r:.60}, not one positive number for all layers")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The shortest decimal that is the same float32: 9.999999747378752e-06 was written as 1e-05."""
        return float(str(np.float32(self[key] if default is None else self.get(key, default))))

    def token_id(self, key: str) -> int | None:
        """None where the file names no such token."""
        return self._values.get(f"tokenizer.ggml.{key}_token_id")

    def tokens(self) -> Iterator[tuple[str, int]]:
        """The vocabulary in its order: text and GGUF's type of each, where the file has types."""
        texts, kinds = (self._values.get(f"tokenizer.ggml.{key}") or [] for key in ("tokens", "token_type"))
        return zip(texts, kinds, strict=False)


def family_of(metadata: Metadata) -> GgufFamily:
    """Raises KeyError for an architecture that is not in FAMILIES. A "llama" with experts is a Mixtral."""
    return MIXTRAL if metadata.name == "llama" and metadata.get("expert_count", 0) else FAMILIES[metadata.name]


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
        **_rope(metadata, head_size, values),
    }


def _differences(metadata: Metadata, head_size: int) -> dict[str, Any]:
    window = metadata.get("attention.sliding_window", 0) or None
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
        return silu | {"sliding_window": window, "original_max_position_embeddings": _trained_length(metadata)}
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
    for key, cap in zip(_SOFT_CAPS, (50.0, 30.0), strict=True):
        default = cap if metadata.name == "gemma2" else None
        config[key] = metadata.number(key) if key in metadata else default
    if metadata.name == "gemma3":
        pattern = metadata.get("attention.sliding_window_pattern", 6)
        if not window:  # a model without, as llama.cpp has it, too
            pattern = [False] * metadata.integer("block_count")
        if isinstance(pattern, list):
            config["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
        else:
            config["sliding_window_pattern"] = pattern
    return config


def _trained_length(metadata: Metadata) -> int:
    return metadata.integer("rope.scaling.original_context_length", metadata.integer("context_length"))


def _rope(metadata: Metadata, head_size: int, values: Values) -> dict[str, Any]:
    """`rope_parameters`, and `partial_rotary_factor` where a part of each head is turned."""
    turned = metadata.integer("rope.dimension_count", head_size)
    parameters = {"rope_theta": metadata.number("rope.freq_base", 10000.0), **_scaling(metadata, turned, values)}
    if metadata.name == "gemma3":
        local = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", 10000.0)}
        return {"rope_parameters": {"full_attention": parameters, "sliding_attention": local}}
    if turned == head_size:
        return {"rope_parameters": parameters}
    if metadata.name != "phi3":
        raise GGUFError("rotary embedding over a part of each head cannot be converted")
    share = turned / head_size
    return {"partial_rotary_factor": share, "rope_parameters": parameters | {"partial_rotary_factor": share}}


def _scaling(metadata: Metadata, turned: int, values: Values) -> dict[str, Any]:
    # As in llama.cpp, a factor without a type divides all frequencies.
    kind = metadata.get("rope.scaling.type", "linear" if metadata.get("rope.scaling.factor", 0) else "none")
    short, long = values("rope_factors_short.weight"), values("rope_factors_long.weight")
    if short is not None and long is not None:
        parameters = _by_factors(short, long, _trained_length(metadata), turned)
        if (key := "rope.scaling.attn_factor") in metadata:
            parameters["attention_factor"] = metadata.number(key)
        return parameters
    if kind == "yarn" and values("rope_freqs.weight") is None:
        return _yarn(metadata)
    if metadata.number(key := "rope.scaling.attn_factor", 1.0) != 1:
        raise metadata.refused(key)
    if (factors := values("rope_freqs.weight")) is not None:
        if kind != "none":
            raise metadata.refused("rope.scaling.type" if "rope.scaling.type" in metadata else "rope.scaling.factor")
        # Frequencies that llama.cpp has divided already (Llama 3.1): the same at any length, and nothing is scaled.
        return _by_factors(factors, factors, metadata.integer("context_length"), turned) | {"attention_factor": 1.0}
    if kind == "none":
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": metadata.number("rope.scaling.factor")}
    raise metadata.refused("rope.scaling.type")


def _yarn(metadata: Metadata) -> dict[str, Any]:
    factor = metadata.number("rope.scaling.factor")
    parameters: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": _trained_length(metadata),
    }
    for name in ("beta_fast", "beta_slow"):
        if (key := f"rope.scaling.yarn_{name}") in metadata:
            parameters[name] = metadata.number(key)
    of_all, of_yarn = "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"
    if of_all in metadata or of_yarn in metadata:
        # llama.cpp's converter writes of_yarn for two keys of a config.json. One is a factor to the usual magnitude,
        # which published models use to cancel it; the other, from 1 on, stands in its place.
        if metadata.number(of_yarn, 1.0) > 1:
            raise metadata.refused(of_yarn)
        usual = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
        parameters["attention_factor"] = usual * metadata.number(of_all, 1.0) * metadata.number(of_yarn, 1.0)
    return parameters


def _by_factors(short: np.ndarray, long: np.ndarray, trained_length: int, turned: int) -> dict[str, Any]:
    for factors in (short, long):
        if factors.shape != (turned // 2,):
            raise GGUFError(f"rotary factors have shape {factors.shape}, not {(turned // 2,)}")
    return {
        "rope_type": "longrope",
        "short_factor": short.astype(float).tolist(),
        "long_factor": long.astype(float).tolist(),
        "original_max_position_embeddings": trained_length,
    }


_BODIES: dict[str, Callable[[Metadata, Values], dict[str, Any]]] = {"gpt2": _gpt2, "bloom": _bloom}
