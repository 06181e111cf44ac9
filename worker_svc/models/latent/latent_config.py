"""What the `config.json` of DeepSeek's models, and of others like Kimi-K2, says of latent attention and of experts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch

from worker_svc.models.errors import ModelError
from worker_svc.models.raw_config import RawConfig
from worker_svc.models.rope import Rope, rope_parameters
from worker_svc.models.style import DecoderStyle, ExpertStyle, GroupedChoice, LatentStyle


def read_latent(raw: RawConfig, *, are_pairs: bool) -> LatentStyle:
    """Sizes that a file leaves out are those of the published models."""
    return LatentStyle(
        latent_size=raw.integer("kv_lora_rank", 512),
        rotary_size=raw.integer("qk_rope_head_dim", 64),
        plain_size=raw.integer("qk_nope_head_dim", 128),
        value_size=raw.integer("v_head_dim", 128),
        query_latent_size=raw.optional_integer("q_lora_rank", 1536) or 0,
        are_pairs=are_pairs,
    )


def check_cache_type(
    style: DecoderStyle, dtype: torch.dtype, cache_dtype: torch.dtype | None, device: torch.device
) -> None:
    """Raises ModelError where latents cannot be kept in a type: 8 bits, or, on a GPU, more than the model's `dtype`
    has, for which its tiles have no place. None: the model's."""
    if style.latent is None or cache_dtype is None:
        return
    if cache_dtype.itemsize == 1:
        raise ModelError("kv_cache_dtype fp8: a cache of latents is kept in 16 or 32 bits a number")
    if device.type == "cuda" and cache_dtype.itemsize > dtype.itemsize:
        said, most = (str(each).removeprefix("torch.") for each in (cache_dtype, dtype))
        raise ModelError(f"kv_cache_dtype {said}: on a GPU latents have no more bits than dtype {most}")


def latent_scale(raw: RawConfig, latent: LatentStyle, rope: Rope) -> float:
    """Of logits: a stretched rotation makes attention sharper by the square of `mscale_all_dim`'s logarithm."""
    scale = 1.0 / math.sqrt(latent.query_size)
    stretch = rope_parameters(raw).number("mscale_all_dim", 0.0)
    if rope.kind != "default" and stretch and rope.factor > 1:
        scale *= (0.1 * stretch * math.log(rope.factor) + 1.0) ** 2
    return scale


def read_experts(
    raw: RawConfig, num_layers: int, scores: Literal["softmax", "sigmoid"], method: str
) -> ExpertStyle | None:
    """None where all layers have an MLP. `scores` and `method` are the family's own; raises ModelError for others."""
    if "n_routed_experts" not in raw:
        return None
    if (other := raw.get("scoring_func") or scores) != scores:
        raise raw.error(f"scoring_func {other!r} is not supported, only {scores!r}")
    method = raw.get("topk_method") or method
    known = ("greedy", "group_limited_greedy") if scores == "softmax" else ("noaux_tc",)
    if method not in known:
        raise raw.error(f"topk_method {method!r} is not supported, only {' and '.join(known)}")
    first, step = raw.count("first_k_dense_replace"), raw.integer("moe_layer_freq", 1)
    choice = GroupedChoice(scores, is_biased=method == "noaux_tc", scale=raw.number("routed_scaling_factor", 1.0))
    num_experts, num_chosen = raw.integer("n_routed_experts"), raw.integer("num_experts_per_tok")
    if method != "greedy":
        choice = _grouped(raw, choice, num_experts, num_chosen)
    return ExpertStyle(
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=raw.integer("moe_intermediate_size"),
        is_normalized=raw.flag("norm_topk_prob"),
        is_sparse=tuple(layer >= first and layer % step == 0 for layer in range(num_layers)),
        num_shared=raw.count("n_shared_experts"),
        choice=choice,
    )


def _grouped(raw: RawConfig, choice: GroupedChoice, num_experts: int, num_chosen: int) -> GroupedChoice:
    num_groups, num_chosen_groups = raw.integer("n_group"), raw.integer("topk_group")
    size, least = num_experts // num_groups, 2 if choice.is_biased else 1
    if num_experts % num_groups or num_chosen_groups > num_groups or size < least:
        raise raw.error(f"{num_experts} experts are not {num_groups} groups, of which {num_chosen_groups} are chosen")
    if num_chosen > num_chosen_groups * size:
        raise raw.error(f"{num_chosen} experts cannot be chosen among {num_chosen_groups} groups of {size}")
    return replace(choice, num_groups=num_groups, num_chosen_groups=num_chosen_groups)
