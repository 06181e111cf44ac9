"""Llama, and families that differ from it in a few lines."""

from __future__ import annotations

from dataclasses import replace

from worker_svc.models import names
from worker_svc.models.families.llama_style import accept_only, llama_style
from worker_svc.models.families.sizes import Sizes, read_sizes
from worker_svc.models.families.windows import same_windows
from worker_svc.models.raw_config import RawConfig
from worker_svc.models.rope import read_rope
from worker_svc.models.style import DecoderStyle, ExpertStyle


def llama(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """Llama and what is written as one: SmolLM, TinyLlama, Yi."""
    sizes = read_sizes(raw)
    bias = raw.flag("attention_bias")
    style = llama_style(raw, sizes, qkv_bias=bias, attention_out_bias=bias, mlp_bias=raw.flag("mlp_bias"))
    return sizes, style


def mistral(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """Llama with a window over all layers, 4,096 tokens where the file says nothing."""
    sizes = read_sizes(raw.merged(num_key_value_heads=8))
    return sizes, llama_style(raw, sizes, windows=same_windows(raw, sizes, 4096))


def mixtral(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """Mistral with experts in every layer, under names of its own."""
    raw = raw.merged(num_key_value_heads=8, rms_norm_eps=1e-5)
    sizes = read_sizes(raw)
    experts = ExpertStyle(
        num_experts=raw.integer("num_local_experts", 8),
        num_chosen=raw.integer("num_experts_per_tok", 2),
        intermediate_size=sizes.intermediate_size,
        is_normalized=True,
        is_sparse=(True,) * sizes.num_layers,
    )
    rope = read_rope(raw, sizes.head_size, theta=1e6)
    windows = same_windows(raw, sizes, None)
    return sizes, llama_style(raw, sizes, names=names.MIXTRAL, experts=experts, windows=windows, ropes=(rope,))


def phi3(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """Llama whose query, key and value are one tensor, and gate and up another; long contexts by LongRoPE."""
    raw = raw.merged(rms_norm_eps=1e-5)
    sizes = read_sizes(raw)
    rope = read_rope(raw, sizes.head_size, kind_aliases={"su": "longrope", "yarn": "longrope"})
    return sizes, llama_style(raw, sizes, names=names.PHI3, windows=same_windows(raw, sizes, None), ropes=(rope,))


def starcoder2(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """Biases everywhere, layer norms, and an MLP without a gate."""
    raw = raw.merged(num_key_value_heads=2, tie_word_embeddings=True, hidden_act="gelu_pytorch_tanh")
    sizes, bias = read_sizes(raw), raw.flag("use_bias", True)
    style = llama_style(raw, sizes, names=names.STARCODER2, norm="layer", norm_eps=raw.number("norm_epsilon", 1e-5))
    return sizes, replace(
        style,
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bias,
        is_gated=False,
        windows=same_windows(raw, sizes, None),
    )


def stablelm(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """Llama with layer norms, of which a quarter of each head is rotated; raises ModelError for parallel residuals."""
    accept_only(raw, "use_parallel_residual", False)
    accept_only(raw, "qk_layernorm", False)
    raw = raw.merged(num_key_value_heads=32, partial_rotary_factor=0.25)
    sizes, bias = read_sizes(raw), raw.flag("use_qkv_bias")
    return sizes, llama_style(raw, sizes, norm="layer", norm_eps=raw.number("layer_norm_eps", 1e-5), qkv_bias=bias)
