"""Gemma 1 to 3."""

from __future__ import annotations

import math
from dataclasses import replace

from worker_svc.models import names
from worker_svc.models.families.llama_style import accept_only, read_activation
from worker_svc.models.families.sizes import Sizes, read_sizes
from worker_svc.models.families.windows import alternating_windows
from worker_svc.models.raw_config import RawConfig
from worker_svc.models.rope import read_rope, rope_from, rope_parameters
from worker_svc.models.style import DecoderStyle


def gemma(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """The first Gemma: embeddings scaled, norms that add one to their weight. Its files write gelu where they mean the
    approximation."""
    sizes, style = _gemma(raw, num_key_value_heads=16, activation_key="hidden_act")
    return sizes, replace(style, activation="gelu_tanh") if style.activation == "gelu" else style


def gemma2(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """Gemma with norms on both sides, capped logits, and a window on every other layer."""
    sizes, style = _gemma(raw, num_key_value_heads=4)
    return sizes, replace(
        style,
        names=names.GEMMA2,
        attention_scale=raw.positive_number("query_pre_attn_scalar", 256) ** -0.5,
        windows=alternating_windows(raw, sizes, pattern=2),
        attention_soft_cap=raw.optional_number("attn_logit_softcapping", 50.0) or 0.0,
        logit_soft_cap=raw.optional_number("final_logit_softcapping", 30.0) or 0.0,
    )


def gemma3(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """Gemma 2 without caps, with norms of heads, and five layers with a window for one without."""
    accept_only(raw, "attn_logit_softcapping", None)  # `transformers` has it in the configuration, and no code for it
    sizes, style = _gemma(raw, num_key_value_heads=4)
    windows = alternating_windows(raw, sizes, pattern=raw.integer("sliding_window_pattern", 6))
    theta, local_theta = raw.number("rope_theta", 1e6), raw.number("rope_local_base_freq", 1e4)
    ropes = (
        rope_from(raw, rope_parameters(raw, "full_attention"), sizes.head_size, theta),
        rope_from(raw, raw.part("rope_parameters").part("sliding_attention"), sizes.head_size, local_theta),
    )
    return sizes, replace(
        style,
        names=names.GEMMA2,
        has_head_norms=True,
        attention_scale=raw.positive_number("query_pre_attn_scalar", 256) ** -0.5,
        windows=windows,
        ropes=ropes,
        rope_of_layer=tuple(int(window > 0) for window in windows),
        logit_soft_cap=raw.optional_number("final_logit_softcapping") or 0.0,
    )


def _gemma(
    raw: RawConfig, num_key_value_heads: int, activation_key: str = "hidden_activation"
) -> tuple[Sizes, DecoderStyle]:
    """What all of them share."""
    accept_only(raw, "use_bidirectional_attention", False)
    raw = raw.merged(head_dim=256, num_key_value_heads=num_key_value_heads, tie_word_embeddings=True)
    sizes, bias = read_sizes(raw), raw.flag("attention_bias")
    nested = raw.part("rope_parameters").part("full_attention")
    return sizes, DecoderStyle(
        norm_eps=raw.number("rms_norm_eps", 1e-6),
        norm_weight_offset=1.0,
        qkv_bias=bias,
        attention_out_bias=bias,
        activation=read_activation(raw, activation_key, "gelu_pytorch_tanh"),
        ropes=() if nested else (read_rope(raw, sizes.head_size),),
        embedding_scale=math.sqrt(sizes.hidden_size),
    )
