"""Compiled kernels for CPUs, behind the signatures of `kernels.oracles`; float32 and bfloat16.

The code is C++ in `native`, which `library` compiles and loads; an operation here checks shapes and passes on
addresses and strides. Results of a row depend on that row (and its sequence's cache) alone.
"""

from __future__ import annotations

from kernels.cpu.attention import paged_attention
from kernels.cpu.latent import latent_and_cache, latent_attention
from kernels.cpu.lora import lora_expand, lora_shrink
from kernels.cpu.products.quantized_product import quantized_product
from kernels.cpu.rows import (
    clamped_swiglu,
    gelu,
    gelu_and_mul,
    reshape_and_cache,
    rms_norm,
    rotary,
    rotary_and_cache,
    silu_and_mul,
)
from kernels.cpu.sampling import (
    chunk_maxima,
    draw_tokens,
    kept_range,
    most_likely,
    penalize,
    token_logprobs,
    top_logits,
    uniforms,
)

# What torch does well already: its indexing moves whole blocks at the speed of memory, its norm takes each row alone,
# and so do the few operators that compare experts.
from kernels.oracles.reference import copy_blocks, layer_norm, score_experts

__all__ = [
    "chunk_maxima",
    "clamped_swiglu",
    "copy_blocks",
    "draw_tokens",
    "gelu",
    "gelu_and_mul",
    "kept_range",
    "latent_and_cache",
    "latent_attention",
    "layer_norm",
    "lora_expand",
    "lora_shrink",
    "most_likely",
    "paged_attention",
    "penalize",
    "quantized_product",
    "reshape_and_cache",
    "rms_norm",
    "rotary",
    "rotary_and_cache",
    "score_experts",
    "silu_and_mul",
    "token_logprobs",
    "top_logits",
    "uniforms",
]
