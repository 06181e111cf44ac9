"""Latent attention on a CPU: formulas and arguments as in `kernels.oracles.reference_latent`.

Paged attention over keys that are their own values: what it adds up of the turned part, an eighth of the values of
published models, is not needed.
"""

from __future__ import annotations

import torch

from kernels.cpu.attention import paged_attention
from kernels.cpu.rows import reshape_and_cache, rms_norm, rotary


def latent_and_cache(
    turned: torch.Tensor,
    query: torch.Tensor,
    new: torch.Tensor,
    norm: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    norm_eps: float,
    are_pairs: bool,
) -> None:
    """See `reference_latent.latent_and_cache`; one after the other. Raises IndexError for a position without angles."""
    latent_size, rotary_size = norm.shape[0], cos_sin.shape[1]
    queries, keys = (_halves(x, are_pairs) for x in (query, new[:, None, latent_size:]))
    rotary(queries, keys, positions, cos_sin)
    turned.copy_(queries)
    latents = new[:, :latent_size].contiguous()
    rms_norm(latents, latents, norm, eps=norm_eps)
    line = torch.cat((latents, keys[:, 0]), dim=1).view(-1, 1, latent_size + rotary_size)
    reshape_and_cache(line, line, cache, cache, slot_mapping)


def _halves(x: torch.Tensor, are_pairs: bool) -> torch.Tensor:
    """A copy of x [T, heads, rotary] with what is turned together in its two halves."""
    if not are_pairs:
        return x.clone(memory_format=torch.contiguous_format)
    return torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)


def latent_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    is_batch_invariant: bool = False,
) -> None:
    """See `reference_latent.latent_attention`; types and strides as for `paged_attention`. A token's bits depend on
    nothing beside it in any case."""
    whole = torch.empty_like(query)
    paged_attention(
        whole,
        query,
        cache,
        cache,
        block_tables,
        seq_lens,
        query_starts,
        scale=scale,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
    )
    out.copy_(whole[..., : out.shape[-1]])
