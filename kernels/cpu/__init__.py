"""Compiled kernels for CPUs, behind the signatures of `kernels.reference`; float32 and bfloat16.

Each file holds one operation: a launcher that passes addresses and strides on, and the numba code that does the work
without the interpreter's lock. Results of a row depend on that row (and its sequence's cache) alone.
"""

from __future__ import annotations

from kernels.cpu.activation import silu_and_mul
from kernels.cpu.attention import paged_attention
from kernels.cpu.cache import reshape_and_cache, rotary_and_cache
from kernels.cpu.chunk_maxima import chunk_maxima
from kernels.cpu.draw_tokens import draw_tokens
from kernels.cpu.gelu import gelu, gelu_and_mul
from kernels.cpu.int4_linear import int4_linear
from kernels.cpu.int8_linear import int8_linear
from kernels.cpu.kept_range import kept_range
from kernels.cpu.most_likely import most_likely
from kernels.cpu.norm import rms_norm
from kernels.cpu.penalties import penalize
from kernels.cpu.random_bits import uniforms
from kernels.cpu.rotary import rotary
from kernels.cpu.token_logprobs import token_logprobs
from kernels.cpu.top_logits import top_logits

# What torch does well already: its indexing moves whole blocks at the speed of memory, its norm takes each row alone.
from kernels.reference import copy_blocks, layer_norm

__all__ = [
    "chunk_maxima",
    "copy_blocks",
    "draw_tokens",
    "gelu",
    "gelu_and_mul",
    "int4_linear",
    "int8_linear",
    "kept_range",
    "layer_norm",
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
