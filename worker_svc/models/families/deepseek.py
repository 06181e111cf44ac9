"""DeepSeek-V2 and V3, and what is written as one."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from worker_svc.models.families.llama_style import accept_only, llama_style
from worker_svc.models.families.sizes import Sizes, read_sizes
from worker_svc.models.latent.latent_config import latent_scale, read_experts, read_latent
from worker_svc.models.raw_config import RawConfig
from worker_svc.models.rope import read_rope
from worker_svc.models.style import DecoderStyle, LatentStyle


def deepseek_v2(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """Latent attention, and experts by groups beside shared ones."""
    # Code of the model's own and of `transformers` do not agree on what it means.
    accept_only(raw, "norm_topk_prob", False)
    accept_only(raw, "mlp_bias", False)
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
    return sizes, replace(style, num_extra_layers=raw.count("num_nextn_predict_layers"))


def _deepseek(
    raw: RawConfig, latent: LatentStyle, scores: Literal["softmax", "sigmoid"], method: str
) -> tuple[Sizes, DecoderStyle]:
    """What both share. To the cache they have one key/value head, of what it holds of a token."""
    sizes = replace(read_sizes(raw), num_kv_heads=1, head_size=latent.cached_size)
    rope, bias = read_rope(raw, latent.rotary_size), raw.flag("attention_bias")
    return sizes, llama_style(
        raw,
        sizes,
        latent=latent,
        qkv_bias=bias,
        attention_out_bias=bias,
        ropes=(rope,),
        attention_scale=latent_scale(raw, latent, rope),
        experts=read_experts(raw, sizes.num_layers, scores, method),
    )
