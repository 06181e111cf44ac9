"""What every kernel must compute, in plain torch: the oracles of tests, with the launchers' own signatures.

Written to be read, not to be fast. Each computes in its inputs' type, but at least in float32, so that a test can pass
float64 and have the truth. Shapes: T new tokens of S sequences; a cache is `[num_blocks, num_kv_heads, block_size,
head_size]`. Results are written to `out` or in place, as named.
"""

from __future__ import annotations

import torch

from kernels.int8_weight import GROUP, unpack_int8
from kernels.oracles.reference_experts import combine_experts as combine_experts
from kernels.oracles.reference_experts import route_experts as route_experts
from kernels.oracles.reference_experts import score_experts as score_experts
from kernels.oracles.reference_latent import latent_and_cache as latent_and_cache
from kernels.oracles.reference_latent import latent_attention as latent_attention
from kernels.oracles.reference_sampling import CHUNK_SIZE as CHUNK_SIZE
from kernels.oracles.reference_sampling import chunk_maxima as chunk_maxima
from kernels.oracles.reference_sampling import draw_tokens as draw_tokens
from kernels.oracles.reference_sampling import kept_range as kept_range
from kernels.oracles.reference_sampling import most_likely as most_likely
from kernels.oracles.reference_sampling import penalize as penalize
from kernels.oracles.reference_sampling import token_logprobs as token_logprobs
from kernels.oracles.reference_sampling import top_logits as top_logits
from kernels.oracles.reference_sampling import uniforms as uniforms


def paged_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    alibi_slopes: torch.Tensor | None = None,
    sliding_window: int = 0,
    logit_soft_cap: float = 0.0,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    is_batch_invariant: bool = False,
) -> None:
    """Causal attention of new tokens over a paged cache that already holds their own keys and values.

        out[t, h] = sum_j softmax_j(bias(cap(scale * query[t, h] . key[j, h // group]))) value[j, h // group]

    where `j` runs over positions `0..p` of the token's sequence and `p` is its own; with a sliding window of `w > 0`
    over the last `w` of them. `cap(x) = c tanh(x / c)`; the bias of ALiBi is `slope[h] * (j - p)`.

    out, query [T, num_heads, head_size]; block_tables i32[S, max_blocks]; seq_lens i32[S]; query_starts i32[S + 1];
    alibi_slopes f32[num_heads]. The last `query_starts[s + 1] - query_starts[s]` positions of sequence `s` are its
    queries; where a sequence has none at all (`seq_len` 0: padding), zeros are written for them. `max_query_len` and
    `max_seq_len` bound both lengths, for kernels that size a grid by them. With key_scale, value_scale
    f32[num_kv_heads] the caches hold keys and values divided by them. With sinks f32[num_heads] a head's softmax has
    one more score, its own number, whose share no value gets: weights then sum to less than 1 (gpt-oss, 2025,
    arXiv:2508.10925). With `is_batch_invariant` a token's bits depend on nothing beside it.
    """
    _, num_heads, head_size = query.shape
    num_kv_heads, block_size = key_cache.shape[1:3]
    compute = _compute_dtype(query)
    for sequence in range(seq_lens.numel()):
        start, end = int(query_starts[sequence]), int(query_starts[sequence + 1])
        seq_len = int(seq_lens[sequence])
        if seq_len == 0:
            out[start:end] = 0
            continue
        blocks = block_tables[sequence, : -(-seq_len // block_size)].long()

        def gather(
            cache: torch.Tensor, scales: torch.Tensor | None, blocks: torch.Tensor = blocks, seq_len: int = seq_len
        ) -> torch.Tensor:
            tokens = cache[blocks].to(compute).transpose(0, 1).reshape(num_kv_heads, -1, head_size)[:, :seq_len]
            if scales is not None:
                tokens = tokens * scales[:, None, None].to(compute)
            return tokens.repeat_interleave(num_heads // num_kv_heads, dim=0)

        keys = gather(key_cache, key_scale)
        scores = scale * query[start:end].to(compute).transpose(0, 1) @ keys.transpose(1, 2)
        if logit_soft_cap > 0:
            scores = logit_soft_cap * torch.tanh(scores / logit_soft_cap)
        # Key position minus query position, [query_len, seq_len].
        positions = torch.arange(seq_len, device=query.device)
        distance = positions[None, :] - positions[seq_len - (end - start) :, None]
        if alibi_slopes is not None:
            scores = scores + alibi_slopes.to(compute)[:, None, None] * distance
        visible = distance <= 0
        if sliding_window > 0:
            visible &= distance > -sliding_window
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            sink = sinks.to(compute)[:, None, None].expand(-1, end - start, 1)
            scores = torch.cat((scores, sink), dim=-1)
        weights = scores.softmax(dim=-1)[:, :, :seq_len]
        out[start:end] = (weights @ gather(value_cache, value_scale)).transpose(0, 1).to(out.dtype)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """Write key and value [T, num_kv_heads, head_size] of new tokens to their slots, `block_id * block_size + offset`.

    slot_mapping i64[T]; a token with a negative slot is padding and is not written. In caches of float8_e4m3fn what is
    too large becomes the largest number; they hold keys and values divided by key_scale, value_scale f32[num_kv_heads].
    """
    block_size = key_cache.shape[2]
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    blocks, offsets = slots // block_size, slots % block_size
    for x, cache, scale in ((key[kept], key_cache, key_scale), (value[kept], value_cache, value_scale)):
        if cache.dtype == torch.float8_e4m3fn:
            x = x.to(_compute_dtype(x)) / (1 if scale is None else scale[:, None])
            x = x.clamp(-torch.finfo(cache.dtype).max, torch.finfo(cache.dtype).max)
        cache[blocks, :, offsets] = x.to(cache.dtype)


def rotary_and_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    norm_weight_offset: float = 0.0,
) -> None:
    """`rotary` and then `reshape_and_cache`, but that what is left in `key` is nobody's business.

    Rotated keys are rounded to their own type before they are scaled and stored, as if they had been written back. With
    query_norm and key_norm [head_size], both or neither, each head goes through `rms_norm` with that weight first, and
    is rounded likewise.
    """
    for heads, weight in ((query, query_norm), (key, key_norm)):
        if weight is not None:
            rms_norm(heads, heads, weight, eps=norm_eps, weight_offset=norm_weight_offset)
    rotary(query, key, positions, cos_sin)
    reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, key_scale=key_scale, value_scale=value_scale)


def copy_blocks(source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy whole blocks in every layer: pairs i64[n, 2] of (block of `source`, block of `destination`).

    Both stores are [num_layers, parts, num_blocks, num_kv_heads, block_size, head_size], on one device or two, or are
    the same, as no block is source and destination at once.
    """
    if pairs.numel():
        blocks = source[:, :, pairs[:, 0].to(source.device)]
        destination[:, :, pairs[:, 1].to(destination.device)] = blocks.to(destination.device)


def rms_norm(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
) -> None:
    """out = y / sqrt(mean(y^2) + eps) * (weight + weight_offset) over the last dimension (Zhang and Sennrich 2019,
    arXiv:1910.07467).

    `y` is `x`, or `x + residual`, which then also replaces `residual`. out, x, residual [T, n]; weight [n]. `out` may
    be `x`. Without an offset the norm is rounded to the type of `out` before it is weighted, with one after: as Llama
    and Gemma were trained.
    """
    if residual is not None:
        residual += x
        x = residual
    y = x.to(_compute_dtype(x))
    y = y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + eps)
    out.copy_(y * (weight.to(y.dtype) + weight_offset) if weight_offset else y.to(out.dtype) * weight)


def layer_norm(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
) -> None:
    """out = (y - mean(y)) / sqrt(var(y) + eps) * weight + bias over the last dimension (Ba et al. 2016,
    arXiv:1607.06450).

    `y` is `x`, or `x + residual`, which then also replaces `residual`. out, x, residual [T, n]; weight, bias [n].
    """
    if residual is not None:
        residual += x
        x = residual
    out.copy_(torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps))


def rotary(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Rotate query and key in place by their positions (Su et al. 2021, arXiv:2104.09864; halves, not pairs).

        x1, x2 = first and second half of a head;  (x1, x2) <- (x1 cos - x2 sin, x2 cos + x1 sin)

    query [T, num_heads, head_size]; key [T, num_kv_heads, head_size]; positions i64[T]; cos_sin [max positions,
    rotary_size], the cosines of a position's angles and then their sines. Only the first `rotary_size` elements of a
    head are turned: it is their halves that are meant.
    """
    cos, sin = (part[:, None, :] for part in cos_sin[positions].chunk(2, dim=-1))
    for x in (query, key):
        turned = x[..., : cos_sin.shape[1]]
        compute = torch.promote_types(_compute_dtype(x), cos_sin.dtype)
        x1, x2 = (half.to(compute) for half in turned.chunk(2, dim=-1))
        turned.copy_(torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1))


def matmul(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """out = x weight^T + bias: x [T, n], weight [m, n], bias [m], out [T, m]."""
    compute = _compute_dtype(x)
    out.copy_(torch.nn.functional.linear(x.to(compute), weight.to(compute), None if bias is None else bias.to(compute)))


def grouped_matmul(
    out: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor,
    starts: torch.Tensor,
    rows: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """out[i] = weights[e] x[rows[i]] + bias[e] for each expert e and its starts[e] <= i < starts[e + 1]: a mixture's
    products.

    x [T, n]; weights [num_experts, m, n]; starts i32[num_experts + 1], from 0 to R in ascending order; rows i64[R],
    None: rows of x are in the experts' order already; bias [num_experts, m] or None; out [R, m].
    """
    compute = _compute_dtype(x)
    for expert, weight in enumerate(weights):
        of_expert = slice(int(starts[expert]), int(starts[expert + 1]))
        chosen = x[of_expert] if rows is None else x[rows[of_expert]]
        product = chosen.to(compute) @ weight.to(compute).T
        out[of_expert] = (product if bias is None else product + bias[expert].to(compute)).to(out.dtype)


def lora_shrink(between: torch.Tensor, x: torch.Tensor, a: torch.Tensor, adapters: torch.Tensor) -> None:
    """between[:, t] = a[e] x[t] where e = adapters[t] >= 0 (Hu et al. 2021, arXiv:2106.09685).

    Rows without an adapter are not written. x [T, n]; a [num_adapters, rank, n]; adapters i32[T]; between [segments, T,
    rank], of whose first dimension the sum is meant: a kernel may leave parts of it there.
    """
    for row, adapter in enumerate(adapters.tolist()):
        if adapter >= 0:
            between[:, row] = 0
            between[0, row] = a[adapter].to(between.dtype) @ x[row].to(between.dtype)


def lora_expand(
    out: torch.Tensor, between: torch.Tensor, b: torch.Tensor, adapters: torch.Tensor, scales: torch.Tensor
) -> None:
    """out[t] += scales[e] * b[e] sum(between[:, t]) where e = adapters[t] >= 0.

    out [T, m]; between [segments, T, rank] of `lora_shrink`; b [num_adapters, m, rank]; scales f32[num_adapters].
    """
    for row, adapter in enumerate(adapters.tolist()):
        if adapter >= 0:
            low = between[:, row].sum(0)
            out[row] += (scales[adapter] * (b[adapter].to(low.dtype) @ low)).to(out.dtype)


def silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    """out = silu(gate) * up where x [T, 2 n] holds gate and then up; out [T, n] (Shazeer 2020, arXiv:2002.05202)."""
    gate, up = (half.to(_compute_dtype(x)) for half in x.chunk(2, dim=-1))
    out.copy_(gate * torch.sigmoid(gate) * up)


def clamped_swiglu(out: torch.Tensor, x: torch.Tensor, *, alpha: float, limit: float) -> None:
    """out = (u + 1) * g * sigmoid(alpha * g),  g = min(gate, limit),  u = up within +-limit.

    x [T, 2 n] holds gate and then up; out [T, n] (gpt-oss's model card, 2025, arXiv:2508.10925).
    """
    gate, up = (half.to(_compute_dtype(x)) for half in x.chunk(2, dim=-1))
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    out.copy_((up + 1) * gate * torch.sigmoid(alpha * gate))


def gelu_and_mul(out: torch.Tensor, x: torch.Tensor, *, is_approximate: bool) -> None:
    """out = gelu(gate) * up where x [T, 2 n] holds gate and then up; out [T, n] (Shazeer 2020, arXiv:2002.05202)."""
    gate, up = (half.to(_compute_dtype(x)) for half in x.chunk(2, dim=-1))
    out.copy_(_gelu(gate, is_approximate) * up)


def gelu(out: torch.Tensor, x: torch.Tensor, *, is_approximate: bool) -> None:
    """out = x (1 + erf(x / sqrt(2))) / 2 of each element of x [T, n] (Hendrycks and Gimpel 2016, arXiv:1606.08415).

    Approximately: x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, what most models were trained with.
    """
    out.copy_(_gelu(x.to(_compute_dtype(x)), is_approximate))


def int8_linear(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """out = x W^T + bias with W[o, i] = scale[o] * q[o, i] of eight bits, and x quantised row by row to eight, too.

        out[t, o] = scale[o] * sum_g step[t, g] * (sum_{i in g} p[t, i] q[o, i]) + bias[o]
        step[t, g] = max_{i in g} |x[t, i]| / 127,   p[t, i] = round(x[t, i] * (127 / max_{i in g} |x[t, i]|))

    where group g is the inputs 32 g to 32 g + 31 (Dettmers et al. 2022, arXiv:2208.07339, with finer steps). A group
    below 1e-30 counts as zeros; a row that holds NaN or an infinity becomes NaN. x [T, in]; out [T, out]; weight as
    `kernels.int8_weight` packs q; scale and bias f32[out]. p is made in float32, the rest is summed in float64.
    """
    num_out, num_in = scale.shape[0], x.shape[1]
    product = rounded_rows(x) @ (unpack_int8(weight, num_out, num_in).double() * scale.double()[:, None]).T
    out.copy_(product if bias is None else product + bias.double())


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """f64[T, in]: step * p of `int8_linear`, what is left of rows [T, in] when they are quantised."""
    num_in = x.shape[1]
    groups = torch.nn.functional.pad(x.float(), (0, -num_in % GROUP)).unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(dim=2, keepdim=True)
    is_zero = largest < 1e-30
    inverse = torch.full_like(largest, 127) / largest  # a division, where 127 / largest would be two operations
    quantized = (groups * inverse).masked_fill(is_zero, 0).round()
    step = (largest / 127).masked_fill(is_zero, 0).masked_fill(largest.isinf(), torch.nan)
    rounded: torch.Tensor = (quantized.double() * step.double()).flatten(1)[:, :num_in]
    return rounded


def _gelu(x: torch.Tensor, is_approximate: bool) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh" if is_approximate else "none")


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
