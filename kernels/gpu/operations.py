"""Triton kernels for GPUs, behind the signatures of `kernels.oracles.reference`.

Each operation is a file of its own: formula, memory layout, kernel and launcher. A row's result depends on that row
(and its sequence's cache) alone, but for products with `may_expand`, which many rows take another way through, and for
attention without `is_batch_invariant`: of latents, and of large Blackwells. Importing this needs Triton.
"""

from __future__ import annotations

from kernels.gpu.attention.paged_attention import attention_scratch, attention_scratch_bytes, paged_attention
from kernels.gpu.cache.copy_blocks import copy_blocks
from kernels.gpu.cache.reshape_and_cache import reshape_and_cache
from kernels.gpu.cache.rotary_and_cache import rotary_and_cache
from kernels.gpu.experts.combine_experts import combine_experts
from kernels.gpu.experts.grouped_matmul import grouped_matmul
from kernels.gpu.experts.route_experts import route_experts
from kernels.gpu.experts.score_experts import score_experts
from kernels.gpu.latent.latent_and_cache import latent_and_cache
from kernels.gpu.latent.latent_attention import latent_attention
from kernels.gpu.lora import lora_expand, lora_shrink
from kernels.gpu.matmul import matmul
from kernels.gpu.quantized.choice import quantized_product
from kernels.gpu.quantized.grouped_product import grouped_quantized_matmul
from kernels.gpu.quantized.packed_codes import pack_experts
from kernels.gpu.quantized.rounded_rms_norm import rounded_rms_norm
from kernels.gpu.quantized.rounded_silu_and_mul import rounded_silu_and_mul
from kernels.gpu.rows.clamped_swiglu import clamped_swiglu
from kernels.gpu.rows.gelu import gelu, gelu_and_mul
from kernels.gpu.rows.layer_norm import layer_norm
from kernels.gpu.rows.rms_norm import rms_norm
from kernels.gpu.rows.rotary import rotary
from kernels.gpu.rows.silu_and_mul import silu_and_mul
from kernels.gpu.sampling.chunk_maxima import chunk_maxima
from kernels.gpu.sampling.draw_tokens import draw_tokens
from kernels.gpu.sampling.kept_range import kept_range
from kernels.gpu.sampling.penalties import penalize
from kernels.gpu.sampling.random_bits import uniforms
from kernels.gpu.sampling.token_logprobs import token_logprobs
from kernels.gpu.sampling.top_logits import top_logits

# What torch does well already: no sampling follows that could use the maxima of chunks.
from kernels.oracles.reference import most_likely

__all__ = [
    "attention_scratch",
    "attention_scratch_bytes",
    "chunk_maxima",
    "clamped_swiglu",
    "combine_experts",
    "copy_blocks",
    "draw_tokens",
    "gelu",
    "gelu_and_mul",
    "grouped_matmul",
    "grouped_quantized_matmul",
    "kept_range",
    "latent_and_cache",
    "latent_attention",
    "layer_norm",
    "lora_expand",
    "lora_shrink",
    "matmul",
    "most_likely",
    "pack_experts",
    "paged_attention",
    "penalize",
    "quantized_product",
    "reshape_and_cache",
    "rms_norm",
    "rotary",
    "rotary_and_cache",
    "rounded_rms_norm",
    "rounded_silu_and_mul",
    "route_experts",
    "score_experts",
    "silu_and_mul",
    "token_logprobs",
    "top_logits",
    "uniforms",
]
