"""The families that Octavo knows: for each architecture, how its `config.json` tells sizes and style.

A function reads one family; what is absent in a file has the default that `transformers` gives it. Adding a family is
described in docs/adding-a-model.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from worker_svc.models import names
from worker_svc.models.latent.latent_config import latent_scale, read_experts, read_latent
from worker_svc.models.raw_config import RawConfig
from worker_svc.models.rope import read_rope, rope_from
from worker_svc.models.style import Activation, DecoderStyle, ExpertStyle, LatentStyle

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

_GPT_OSS_ROPE = {  # where a file says nothing of it
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """What every decoder has."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_positions: int  # tokens in a sequence
    tie_word_embeddings: bool


Read = Callable[[RawConfig], tuple[Sizes, DecoderStyle]]


def llama(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """Llama and what is written as one: SmolLM, TinyLlama, Yi."""
    sizes = _sizes(raw)
    bias = raw.flag("attention_bias")
    style = _style(raw, sizes, qkv_bias=bias, attention_out_bias=bias, mlp_bias=raw.flag("mlp_bias"))
    return sizes, style


def mistral(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """Llama with a window over all layers, 4,096 tokens where the file says nothing."""
    sizes = _sizes(raw.merged(num_key_value_heads=8))
    return sizes, _style(raw, sizes, windows=_same_windows(raw, sizes, 4096))


def qwen2(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """Llama with biases of query, key and value, and windows from some layer on."""
    sizes = _sizes(raw)
    return sizes, _style(raw, sizes, qkv_bias=True, windows=_qwen_windows(raw, sizes))


def qwen3(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """Llama with norms of each head's query and key; heads of 128 where the file says nothing."""
    sizes = _sizes(raw.merged(head_dim=128))
    bias = raw.flag("attention_bias")
    style = _style(raw, sizes, qkv_bias=bias, attention_out_bias=bias, has_head_norms=True)
    return sizes, replace(style, windows=_qwen_windows(raw, sizes))


def qwen3_moe(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """Qwen3 with experts in place of the MLP, in all layers or every n-th."""
    sizes = _sizes(raw.merged(num_key_value_heads=4))
    bias, step, dense = raw.flag("attention_bias"), raw.integer("decoder_sparse_step", 1), raw.get("mlp_only_layers")
    experts = ExpertStyle(
        num_experts=raw.integer("num_experts", raw.get("num_local_experts", 128)),
        num_chosen=raw.integer("num_experts_per_tok", 8),
        intermediate_size=raw.integer("moe_intermediate_size", 768),
        is_normalized=raw.flag("norm_topk_prob"),
        is_sparse=tuple(i not in (dense or ()) and (i + 1) % step == 0 for i in range(sizes.num_layers)),
    )
    style = _style(raw, sizes, qkv_bias=bias, attention_out_bias=bias, has_head_norms=True, experts=experts)
    windows = _same_windows(raw, sizes, 4096) if raw.flag("use_sliding_window") else ()
    return sizes, replace(style, windows=windows)


def mixtral(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """Mistral with experts in every layer, under names of its own."""
    raw = raw.merged(num_key_value_heads=8, rms_norm_eps=1e-5)
    sizes = _sizes(raw)
    experts = ExpertStyle(
        num_experts=raw.integer("num_local_experts", 8),
        num_chosen=raw.integer("num_experts_per_tok", 2),
        intermediate_size=sizes.intermediate_size,
        is_normalized=True,
        is_sparse=(True,) * sizes.num_layers,
    )
    rope = read_rope(raw, sizes.head_size, theta=1e6)
    windows = _same_windows(raw, sizes, None)
    return sizes, _style(raw, sizes, names=names.MIXTRAL, experts=experts, windows=windows, ropes=(rope,))


def gpt_oss(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """Sinks, a window on every other layer, biases, and in every layer experts with a gate that is cut off."""
    _only(raw, "hidden_act", "silu")
    if not (raw.part("rope_parameters") or raw.part("rope_scaling")):
        raw = raw.merged(rope_parameters=_GPT_OSS_ROPE)
    raw = raw.merged(head_dim=64, num_key_value_heads=8, sliding_window=128, rms_norm_eps=1e-5)
    sizes, bias = _sizes(raw), raw.flag("attention_bias", True)
    experts = ExpertStyle(
        num_experts=raw.integer("num_local_experts", raw.get("num_experts", 128)),
        num_chosen=raw.integer("num_experts_per_tok", 4),
        intermediate_size=sizes.intermediate_size,
        is_normalized=True,
        is_sparse=(True,) * sizes.num_layers,
        are_biased=True,
    )
    return sizes, _style(
        raw,
        sizes,
        names=names.GPT_OSS,
        qkv_bias=bias,
        attention_out_bias=bias,
        activation="clamped_swiglu",
        swiglu_alpha=raw.number("swiglu_alpha", 1.702),
        swiglu_limit=raw.number("swiglu_limit", 7.0),
        experts=experts,
        windows=_alternating_windows(raw, sizes, pattern=2),
        ropes=(read_rope(raw, sizes.head_size, theta=150000.0),),
    )


def phi3(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """Llama whose query, key and value are one tensor, and gate and up another; long contexts by LongRoPE."""
    raw = raw.merged(rms_norm_eps=1e-5)
    sizes = _sizes(raw)
    rope = read_rope(raw, sizes.head_size, kind_aliases={"su": "longrope", "yarn": "longrope"})
    return sizes, _style(raw, sizes, names=names.PHI3, windows=_same_windows(raw, sizes, None), ropes=(rope,))


def starcoder2(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """Biases everywhere, layer norms, and an MLP without a gate."""
    raw = raw.merged(num_key_value_heads=2, tie_word_embeddings=True, hidden_act="gelu_pytorch_tanh")
    sizes, bias = _sizes(raw), raw.flag("use_bias", True)
    style = _style(raw, sizes, names=names.STARCODER2, norm="layer", norm_eps=raw.number("norm_epsilon", 1e-5))
    return sizes, replace(
        style,
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bias,
        is_gated=False,
        windows=_same_windows(raw, sizes, None),
    )


def stablelm(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """Llama with layer norms, of which a quarter of each head is rotated; raises ModelError for parallel residuals."""
    _only(raw, "use_parallel_residual", False)
    _only(raw, "qk_layernorm", False)
    raw = raw.merged(num_key_value_heads=32, partial_rotary_factor=0.25)
    sizes, bias = _sizes(raw), raw.flag("use_qkv_bias")
    return sizes, _style(raw, sizes, norm="layer", norm_eps=raw.number("layer_norm_eps", 1e-5), qkv_bias=bias)


def gemma(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """The first Gemma: embeddings scaled, norms that add one to their weight."""
    return _gemma(raw, num_key_value_heads=16)


def gemma2(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """Gemma with norms on both sides, capped logits, and a window on every other layer."""
    sizes, style = _gemma(raw, num_key_value_heads=4)
    return sizes, replace(
        style,
        names=names.GEMMA2,
        attention_scale=raw.number("query_pre_attn_scalar", 256) ** -0.5,
        windows=_alternating_windows(raw, sizes, pattern=2),
        attention_soft_cap=raw.optional_number("attn_logit_softcapping", 50.0) or 0.0,
        logit_soft_cap=raw.optional_number("final_logit_softcapping", 30.0) or 0.0,
    )


def gemma3(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """Gemma 2 without caps, with norms of heads, and five layers with a window for one without."""
    _only(raw, "attn_logit_softcapping", None)  # `transformers` has it in the configuration, and no code for it
    sizes, style = _gemma(raw, num_key_value_heads=4)
    windows = _alternating_windows(raw, sizes, pattern=raw.integer("sliding_window_pattern", 6))
    new, old = raw.part("rope_parameters"), raw.part("rope_scaling")
    theta, local_theta = raw.number("rope_theta", 1e6), raw.number("rope_local_base_freq", 1e4)
    ropes = (
        rope_from(raw, new.part("full_attention") or old, sizes.head_size, theta),
        rope_from(raw, new.part("sliding_attention"), sizes.head_size, local_theta),
    )
    return sizes, replace(
        style,
        names=names.GEMMA2,
        has_head_norms=True,
        attention_scale=raw.number("query_pre_attn_scalar", 256) ** -0.5,
        windows=windows,
        ropes=ropes,
        rope_of_layer=tuple(int(window > 0) for window in windows),
        logit_soft_cap=raw.optional_number("final_logit_softcapping") or 0.0,
    )


def gpt2(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """Positions that were learnt, layer norms, and linear layers stored transposed."""
    hidden, num_heads = raw.integer("n_embd", 768), raw.integer("n_head", 12)
    sizes = Sizes(
        hidden_size=hidden,
        intermediate_size=raw.integer("n_inner", 4 * hidden),
        num_layers=raw.integer("n_layer", 12),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=_head_size(raw, hidden, num_heads),
        max_positions=raw.integer("n_positions", 1024),
        tie_word_embeddings=raw.flag("tie_word_embeddings", True),
    )
    return sizes, DecoderStyle(
        names=names.GPT2,
        norm="layer",
        norm_eps=raw.number("layer_norm_epsilon", 1e-5),
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        activation=_activation(raw, "activation_function", "gelu_new"),
        is_gated=False,
        positions="learned",
        attention_scale=None if raw.flag("scale_attn_weights", True) else 1.0,
        is_scaled_by_layer=raw.flag("scale_attn_by_inverse_layer_idx"),
    )


def opt(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """Positions that were learnt; its 350M norms behind the sums and embeds in fewer dimensions. Raises ModelError."""
    hidden, num_heads = raw.integer("hidden_size", 768), raw.integer("num_attention_heads", 12)
    _only(raw, "layer_norm_elementwise_affine", True)
    is_before, embedding_size = raw.flag("do_layer_norm_before", True), raw.integer("word_embed_proj_dim", hidden)
    has_final_norm = is_before and not raw.flag("_remove_final_layer_norm")
    sizes = Sizes(
        hidden_size=hidden,
        intermediate_size=raw.integer("ffn_dim", 3072),
        num_layers=raw.integer("num_hidden_layers", 12),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=_head_size(raw, hidden, num_heads),
        max_positions=raw.integer("max_position_embeddings", 2048),
        tie_word_embeddings=raw.flag("tie_word_embeddings", True),
    )
    bias = raw.flag("enable_bias", True)
    return sizes, DecoderStyle(
        names=names.OPT if has_final_norm else replace(names.OPT, final_norm=""),
        norm="layer",
        norm_eps=1e-5,
        are_norms_behind=not is_before,
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bias,
        activation=_activation(raw, "activation_function", "relu"),
        is_gated=False,
        positions="learned",
        learned_offset=2,
        embedding_size=embedding_size if embedding_size != hidden else 0,
    )


def bloom(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """ALiBi in place of positions, and a norm behind the embedding."""
    hidden = raw.integer("n_embed", raw.integer("hidden_size", 64))
    num_heads = raw.integer("n_head", raw.integer("num_attention_heads", 8))
    _only(raw, "apply_residual_connection_post_layernorm", False)
    sizes = Sizes(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_layers=raw.integer("n_layer", raw.integer("num_hidden_layers", 2)),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=_head_size(raw, hidden, num_heads),
        max_positions=raw.integer("seq_length", 2048),  # of training; ALiBi itself knows no end
        tie_word_embeddings=raw.flag("tie_word_embeddings", True),
    )
    return sizes, DecoderStyle(
        names=names.BLOOM,
        norm="layer",
        norm_eps=raw.number("layer_norm_epsilon", 1e-5),
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        activation="gelu_tanh",
        is_gated=False,
        positions="alibi",
    )


def deepseek_v2(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """Latent attention, and experts by groups beside shared ones."""
    _only(raw, "norm_topk_prob", False)  # code of the model's own and of `transformers` do not agree on what it means
    _only(raw, "mlp_bias", False)
    latent = read_latent(raw, are_pairs=True)
    raw = raw.merged(max_position_embeddings=2048, n_shared_experts=2, n_routed_experts=64, moe_intermediate_size=1407)
    return _deepseek(raw, latent, scores="softmax", method="greedy")


def deepseek_v3(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """DeepSeek-V2 whose experts are chosen by sigmoids and a bias; R1 and Kimi-K2 are written as one."""
    latent = read_latent(raw, are_pairs=raw.flag("rope_interleave", True))
    raw = raw.merged(
        max_position_embeddings=4096,
        n_shared_experts=1,
        n_routed_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        n_group=8,
        topk_group=4,
        first_k_dense_replace=3,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )
    sizes, style = _deepseek(raw, latent, scores="sigmoid", method="noaux_tc")
    return sizes, replace(style, num_extra_layers=raw.get("num_nextn_predict_layers") or 0)


FAMILIES: dict[str, Read] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "MixtralForCausalLM": mixtral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "GptOssForCausalLM": gpt_oss,
    "Phi3ForCausalLM": phi3,
    "Starcoder2ForCausalLM": starcoder2,
    "StableLmForCausalLM": stablelm,
    "GemmaForCausalLM": gemma,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "GPT2LMHeadModel": gpt2,
    "OPTForCausalLM": opt,
    "BloomForCausalLM": bloom,
    "DeepseekV2ForCausalLM": deepseek_v2,
    "DeepseekV3ForCausalLM": deepseek_v3,
}


def _sizes(raw: RawConfig) -> Sizes:
    """Under the keys that Llama and most after it use."""
    hidden, num_heads = raw.integer("hidden_size"), raw.integer("num_attention_heads")
    num_kv_heads = raw.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise raw.error(f"{num_heads} heads do not divide by {num_kv_heads} key/value heads")
    return Sizes(
        hidden_size=hidden,
        intermediate_size=raw.integer("intermediate_size"),
        num_layers=raw.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=raw.integer("head_dim", hidden // num_heads),
        max_positions=raw.integer("max_position_embeddings"),
        tie_word_embeddings=raw.flag("tie_word_embeddings"),
    )


def _style(raw: RawConfig, sizes: Sizes, **differences: Any) -> DecoderStyle:
    """Llama's, with what Llama's keys say."""
    values: dict[str, Any] = {
        "norm_eps": raw.number("rms_norm_eps", 1e-6),
        "activation": _activation(raw, "hidden_act", "silu"),
        "ropes": differences.get("ropes") or (read_rope(raw, sizes.head_size),),
    }
    return DecoderStyle(**values | differences)


def _gemma(raw: RawConfig, num_key_value_heads: int) -> tuple[Sizes, DecoderStyle]:
    """What all of them share; the first release writes gelu where it means the approximation."""
    _only(raw, "use_bidirectional_attention", False)
    raw = raw.merged(head_dim=256, num_key_value_heads=num_key_value_heads, tie_word_embeddings=True)
    sizes, bias = _sizes(raw), raw.flag("attention_bias")
    key = "hidden_activation" if "hidden_activation" in raw else "hidden_act"
    activation = _activation(raw, key, "gelu_pytorch_tanh")
    nested = raw.part("rope_parameters").part("full_attention")
    return sizes, DecoderStyle(
        norm_eps=raw.number("rms_norm_eps", 1e-6),
        norm_weight_offset=1.0,
        qkv_bias=bias,
        attention_out_bias=bias,
        activation="gelu_tanh" if activation == "gelu" else activation,
        ropes=() if nested else (read_rope(raw, sizes.head_size),),
        embedding_scale=math.sqrt(sizes.hidden_size),
    )


def _deepseek(
    raw: RawConfig, latent: LatentStyle, scores: Literal["softmax", "sigmoid"], method: str
) -> tuple[Sizes, DecoderStyle]:
    """What both share. To the cache they have one key/value head, of what it holds of a token."""
    sizes = replace(_sizes(raw), num_kv_heads=1, head_size=latent.cached_size)
    rope, bias = read_rope(raw, latent.rotary_size), raw.flag("attention_bias")
    return sizes, _style(
        raw,
        sizes,
        latent=latent,
        qkv_bias=bias,
        attention_out_bias=bias,
        ropes=(rope,),
        attention_scale=latent_scale(raw, latent, rope),
        experts=read_experts(raw, sizes.num_layers, scores, method),
    )


def _activation(raw: RawConfig, key: str, default: str) -> Activation:
    name = raw.get(key) or default
    if name not in _ACTIVATIONS:
        raise raw.error(f"{key} {name!r} is not supported; known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _head_size(raw: RawConfig, hidden: int, num_heads: int) -> int:
    if hidden % num_heads:
        raise raw.error(f"a hidden size of {hidden} does not divide by {num_heads} heads")
    return hidden // num_heads


def _only(raw: RawConfig, key: str, accepted: Any) -> None:
    if raw.get(key, accepted) not in (accepted, None):
        raise raw.error(f"{key} {raw.get(key)!r} is not supported, only {accepted!r}; try --model-impl transformers")


def _same_windows(raw: RawConfig, sizes: Sizes, default: int | None) -> tuple[int, ...]:
    window = raw.optional_integer("sliding_window", default)
    return () if window is None else (window,) * sizes.num_layers


def _qwen_windows(raw: RawConfig, sizes: Sizes) -> tuple[int, ...]:
    if not raw.flag("use_sliding_window"):
        return ()
    first = raw.get("max_window_layers", 28)
    return _typed_windows(raw, [i >= first for i in range(sizes.num_layers)])


def _alternating_windows(raw: RawConfig, sizes: Sizes, pattern: int) -> tuple[int, ...]:
    """Every `pattern`-th layer sees all."""
    return _typed_windows(raw, [(i + 1) % pattern != 0 for i in range(sizes.num_layers)])


def _typed_windows(raw: RawConfig, slides: list[bool]) -> tuple[int, ...]:
    """By layer, as `layer_types` says, or as `slides` where that is absent."""
    types = raw.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != len(slides):
            raise raw.error(f"layer_types must name a type for each of {len(slides)} layers")
        unknown = set(types) - {"sliding_attention", "full_attention"}
        if unknown:
            raise raw.error(f"layer_types: {min(map(str, unknown))!r} is not supported")
        slides = [each == "sliding_attention" for each in types]
    window = raw.optional_integer("sliding_window", 4096)
    return tuple((window or 0) if each else 0 for each in slides)
