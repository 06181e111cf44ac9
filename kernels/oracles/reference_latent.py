"""What latent attention must compute, in plain torch; see `kernels.oracles.reference` and docs/latent-attention.md.

A cache is `[num_blocks, 1, block_size, latent + rotary]`: a token's latent, of which all heads' keys and values are
products, and then the part of their keys that is turned, the same for all heads.
"""

from __future__ import annotations

import torch


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
    """Turn queries by their positions, and write what new tokens leave in the cache: normed latents and turned keys.

        x1, x2 = first and second half;  (x1, x2) <- (x1 cos - x2 sin, x2 cos + x1 sin)

    where `are_pairs`, x1 are the even elements, x2 the odd ones; what is turned has x1 in its first half either way.
    turned, query [T, num_heads, rotary]; new [T, latent + rotary]; norm [latent] as `rms_norm` has it; positions
    i64[T]; cos_sin f32[max positions, rotary]; slot_mapping i64[T], as for `reshape_and_cache`.
    """
    latent_size, block_size = norm.shape[0], cache.shape[2]
    cos, sin = cos_sin[positions].chunk(2, dim=-1)

    def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        compute = torch.promote_types(x.dtype, cos.dtype)
        halves = (x[..., 0::2], x[..., 1::2]) if are_pairs else x.chunk(2, dim=-1)
        x1, x2 = (half.to(compute) for half in halves)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)

    turned.copy_(turn(query, cos[:, None], sin[:, None]))
    y = new[:, :latent_size].to(torch.promote_types(new.dtype, torch.float32))
    y = y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + norm_eps)
    latents, keys = y.to(new.dtype) * norm, turn(new[:, latent_size:], cos, sin)
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    cache[slots // block_size, 0, slots % block_size] = torch.cat((latents, keys), dim=-1)[kept].to(cache.dtype)


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
    """Causal attention of all heads to the one key that each token has in the cache, whose beginning is its value.

        out[t, h] = sum_j softmax_j(scale * query[t, h] . key[j]) key[j, :latent]

    out [T, num_heads, latent]; query [T, num_heads, latent + rotary]; all else as for `paged_attention`. With
    `is_batch_invariant` a token's bits depend on nothing beside it.
    """
    latent_size, block_size = out.shape[-1], cache.shape[2]
    compute = torch.promote_types(query.dtype, torch.float32)
    for sequence in range(seq_lens.numel()):
        start, end, seq_len = int(query_starts[sequence]), int(query_starts[sequence + 1]), int(seq_lens[sequence])
        if seq_len == 0:
            out[start:end] = 0
            continue
        blocks = block_tables[sequence, : -(-seq_len // block_size)].long()
        keys = cache[blocks, 0].flatten(0, 1)[:seq_len].to(compute)
        scores = scale * query[start:end].to(compute).transpose(0, 1) @ keys.T  # [num_heads, query_len, seq_len]
        positions = torch.arange(seq_len, device=query.device)
        scores = scores.masked_fill(positions > positions[seq_len - (end - start) :, None], float("-inf"))
        out[start:end] = (scores.softmax(dim=-1) @ keys[:, :latent_size]).transpose(0, 1).to(out.dtype)
