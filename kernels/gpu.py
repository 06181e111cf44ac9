"""Triton kernels for GPUs, behind the signatures of `kernels.reference`.

Each operation is a file of its own: formula, memory layout, kernel and launcher. A row's result depends on that row
(and its sequence's cache) alone. Importing this needs Triton.
"""

from __future__ import annotations

from kernels.chunk_maxima import chunk_maxima
from kernels.copy_blocks import copy_blocks
from kernels.draw_tokens import draw_tokens
from kernels.gelu import gelu, gelu_and_mul
from kernels.grouped_matmul import grouped_matmul
from kernels.kept_range import kept_range
from kernels.layer_norm import layer_norm
from kernels.lora import lora_expand, lora_shrink
from kernels.matmul import matmul
from kernels.paged_attention import paged_attention
from kernels.penalties import penalize
from kernels.random_bits import uniforms

# What torch does well already: no sampling follows that could use the maxima of chunks.
from kernels.reference import most_likely
from kernels.reshape_and_cache import reshape_and_cache
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from kernels.rotary_and_cache import rotary_and_cache
from kernels.silu_and_mul import silu_and_mul
from kernels.token_logprobs import token_logprobs
from kernels.top_logits import top_logits

__all__ = [
    "chunk_maxima",
    "copy_blocks",
    "draw_tokens",
    "gelu",
    "gelu_and_mul",
    "grouped_matmul",
    "kept_range",
    "layer_norm",
    "lora_expand",
    "lora_shrink",
    "matmul",
    "most_likely",
    "paged_attention",
    "penalize",
    "reshape_and_cache",
    "rms_norm",
    "rotary",
    "rotary_and_cache",
    "silu_and_mul",
    "token_logprobs",
    "top_logits",
    "uniforms",
]
