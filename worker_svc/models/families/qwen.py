"""Qwen2 and Qwen3, dense and with experts."""

from __future__ import annotations

from dataclasses import replace

from worker_svc.models.families.llama_style import llama_style
from worker_svc.models.families.sizes import Sizes, read_sizes
from worker_svc.models.families.windows import qwen_windows, same_windows
from worker_svc.models.raw_config import RawConfig
from worker_svc.models.style import DecoderStyle, ExpertStyle


def qwen2(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """Llama with biases of query, key and value, and windows from some layer on."""
    sizes = read_sizes(raw)
    return sizes, llama_style(raw, sizes, qkv_bias=True, windows=qwen_windows(raw, sizes))


def qwen3(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """Llama with norms of each head's query and key; heads of 128 where the file says nothing."""
    sizes = read_sizes(raw.merged(head_dim=128))
    bias = raw.flag("attention_bias")
    style = llama_style(raw, sizes, qkv_bias=bias, attention_out_bias=bias, has_head_norms=True)
    return sizes, replace(style, windows=qwen_windows(raw, sizes))


def qwen3_moe(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """Qwen3 with experts in place of the MLP, in all layers or every n-th."""
    sizes = read_sizes(raw.merged(num_key_value_heads=4))
    bias, step = raw.flag("attention_bias"), raw.integer("decoder_sparse_step", 1)
    dense = set(raw.list_of(int, "mlp_only_layers"))
    experts = ExpertStyle(
        num_experts=raw.integer("num_experts", raw.get("num_local_experts", 128)),
        num_chosen=raw.integer("num_experts_per_tok", 8),
        intermediate_size=raw.integer("moe_intermediate_size", 768),
        is_normalized=raw.flag("norm_topk_prob"),
        is_sparse=tuple(i not in dense and (i + 1) % step == 0 for i in range(sizes.num_layers)),
    )
    style = llama_style(raw, sizes, qkv_bias=bias, attention_out_bias=bias, has_head_norms=True, experts=experts)
    windows = same_windows(raw, sizes, 4096) if raw.flag("use_sliding_window") else ()
    return sizes, replace(style, windows=windows)
