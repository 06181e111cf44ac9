"""gpt-oss."""

from __future__ import annotations

from worker_svc.models import names
from worker_svc.models.families.llama_style import accept_only, llama_style
from worker_svc.models.families.sizes import Sizes, read_sizes
from worker_svc.models.families.windows import alternating_windows
from worker_svc.models.raw_config import RawConfig
from worker_svc.models.rope import read_rope, rope_parameters
from worker_svc.models.style import DecoderStyle, ExpertStyle

_GPT_OSS_ROPE = {  # where a file says nothing of it
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def gpt_oss(raw: RawConfig) -> tuple[Sizes, DecoderStyle]:
    """Sinks, a window on every other layer, biases, and in every layer experts with a gate that is cut off."""
    accept_only(raw, "hidden_act", "silu")
    if not rope_parameters(raw):
        raw = raw.merged(rope_parameters=_GPT_OSS_ROPE)
    raw = raw.merged(head_dim=64, num_key_value_heads=8, sliding_window=128, rms_norm_eps=1e-5)
    sizes, bias = read_sizes(raw), raw.flag("attention_bias", True)
    experts = ExpertStyle(
        num_experts=raw.integer("num_local_experts", raw.get("num_experts", 128)),
        num_chosen=raw.integer("num_experts_per_tok", 4),
        intermediate_size=sizes.intermediate_size,
        is_normalized=True,
        is_sparse=(True,) * sizes.num_layers,
        are_biased=True,
    )
    return sizes, llama_style(
        raw,
        sizes,
        names=names.GPT_OSS,
        qkv_bias=bias,
        attention_out_bias=bias,
        activation="clamped_swiglu",
        swiglu_alpha=raw.number("swiglu_alpha", 1.702),
        swiglu_limit=raw.number("swiglu_limit", 7.0),
        experts=experts,
        windows=alternating_windows(raw, sizes, pattern=2),
        ropes=(read_rope(raw, sizes.head_size, theta=150000.0),),
    )
