"""Families older than Llama: GPT-2, OPT and BLOOM, each with keys of its own."""

from __future__ import annotations

from dataclasses import replace

from worker_svc.models import names
from worker_svc.models.families.llama_style import accept_only, read_activation
from worker_svc.models.families.sizes import Sizes, head_size_of
from worker_svc.models.raw_config import RawConfig
from worker_svc.models.style import DecoderStyle


def gpt2(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """Positions that were learnt, layer norms, and linear layers stored transposed."""
    hidden, num_heads = raw.integer("n_embd", 768), raw.integer("n_head", 12)
    sizes = Sizes(
        hidden_size=hidden,
        intermediate_size=raw.integer("n_inner", 4 * hidden),
        num_layers=raw.integer("n_layer", 12),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=head_size_of(raw, hidden, num_heads),
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
        activation=read_activation(raw, "activation_function", "gelu_new"),
        is_gated=False,
        positions="learned",
        attention_scale=None if raw.flag("scale_attn_weights", True) else 1.0,
        is_scaled_by_layer=raw.flag("scale_attn_by_inverse_layer_idx"),
    )


def opt(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """Positions that were learnt; its 350M norms behind the sums and embeds in fewer dimensions. Raises ModelError."""
    hidden, num_heads = raw.integer("hidden_size", 768), raw.integer("num_attention_heads", 12)
    accept_only(raw, "layer_norm_elementwise_affine", True)
    is_before, embedding_size = raw.flag("do_layer_norm_before", True), raw.integer("word_embed_proj_dim", hidden)
    has_final_norm = is_before and not raw.flag("_remove_final_layer_norm")
    sizes = Sizes(
        hidden_size=hidden,
        intermediate_size=raw.integer("ffn_dim", 3072),
        num_layers=raw.integer("num_hidden_layers", 12),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=head_size_of(raw, hidden, num_heads),
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
        activation=read_activation(raw, "activation_function", "relu"),
        is_gated=False,
        positions="learned",
        learned_offset=2,
        embedding_size=embedding_size if embedding_size != hidden else 0,
    )


def bloom(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """ALiBi in place of positions, and a norm behind the embedding."""
    hidden = raw.integer("n_embed", raw.integer("hidden_size", 64))
    num_heads = raw.integer("n_head", raw.integer("num_attention_heads", 8))
    accept_only(raw, "apply_residual_connection_post_layernorm", False)
    sizes = Sizes(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_layers=raw.integer("n_layer", raw.integer("num_hidden_layers", 2)),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=head_size_of(raw, hidden, num_heads),
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
