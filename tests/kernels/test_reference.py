"""The oracles themselves, against torch's own operators in float64: other code, other order of sums, same values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from kernels.oracles import reference
from tests.kernels.cases import PagedCase

CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


@pytest.mark.parametrize("window", [0, 3])
def test_paged_attention_is_attention_over_the_gathered_tokens(window: int) -> None:
    case = PagedCase(query_lens=[1, 4, 7], context_lens=[9, 0, 6], dtype=torch.float64)
    out = torch.empty_like(case.query)
    reference.paged_attention(out, *case.arguments, **case.options, sliding_window=window)
    for sequence, (key, value) in enumerate(case.gathered()):  # [num_heads, seq_len, head_size]
        start, end = case.query_starts[sequence : sequence + 2].tolist()
        query_len, seq_len = end - start, key.shape[1]
        distance = torch.arange(seq_len - query_len, seq_len)[:, None] - torch.arange(seq_len)
        mask = (distance >= 0) & (distance < (window or seq_len))
        query = case.query[start:end].transpose(0, 1)
        expected = functional.scaled_dot_product_attention(query, key, value, mask, scale=case.options["scale"])
        torch.testing.assert_close(out[start:end], expected.transpose(0, 1), **CLOSE)


def test_alibi_and_soft_cap_change_scores_as_their_formulas_say() -> None:
    case = PagedCase(query_lens=[3], context_lens=[2], dtype=torch.float64)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.1, 0.2, 0.3], dtype=torch.float64)
    out = torch.empty_like(case.query)
    reference.paged_attention(out, *case.arguments, **case.options, alibi_slopes=slopes, logit_soft_cap=1.5)
    key, value = case.gathered()[0]
    for token, head in ((0, 0), (1, 4), (2, 5)):
        position = 2 + token
        scores = [
            1.5 * torch.tanh(case.options["scale"] * case.query[token, head] @ key[head, j] / 1.5)
            + slopes[head] * (j - position)
            for j in range(position + 1)
        ]
        expected = torch.stack(scores).softmax(0) @ value[head, : position + 1]
        torch.testing.assert_close(out[token, head], expected, **CLOSE)


def test_a_sink_is_a_score_whose_share_no_value_gets() -> None:
    case = PagedCase(query_lens=[3], context_lens=[2], dtype=torch.float64)
    sinks = torch.tensor([0.5, -2.0, 3.0, 0.0, 9.0, -30.0], dtype=torch.float64)
    out, plain = torch.empty_like(case.query), torch.empty_like(case.query)
    reference.paged_attention(out, *case.arguments, **case.options, sinks=sinks)
    reference.paged_attention(plain, *case.arguments, **case.options)
    key, _ = case.gathered()[0]
    for token, head in ((0, 0), (1, 4), (2, 5)):
        scores = case.options["scale"] * key[head, : 3 + token] @ case.query[token, head]
        kept = scores.exp().sum() / (scores.exp().sum() + sinks[head].exp())
        torch.testing.assert_close(out[token, head], plain[token, head] * kept, **CLOSE)


def test_reshape_and_cache_writes_slots_and_skips_padding() -> None:
    key, value = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    key_cache, value_cache = torch.zeros(5, 2, 8, 4), torch.zeros(5, 2, 8, 4)
    reference.reshape_and_cache(key, value, key_cache, value_cache, torch.tensor([4 * 8 + 7, -1, 3]))
    assert torch.equal(key_cache[4, :, 7], key[0]) and torch.equal(value_cache[4, :, 7], value[0])
    assert torch.equal(key_cache[0, :, 3], key[2]) and torch.equal(value_cache[0, :, 3], value[2])
    assert key_cache.count_nonzero() == value_cache.count_nonzero() == 16


def test_rms_norm_is_torchs_and_replaces_the_residual() -> None:
    x, residual, weight = (torch.randn(shape, dtype=torch.float64) for shape in ((3, 7), (3, 7), (7,)))
    out, total = torch.empty_like(x), residual.clone()
    reference.rms_norm(out, x, weight, eps=1e-5, residual=total)
    torch.testing.assert_close(total, x + residual, **CLOSE)
    torch.testing.assert_close(out, functional.rms_norm(x + residual, (7,), weight, 1e-5), **CLOSE)


def test_rms_norm_adds_an_offset_to_its_weights() -> None:
    x, weight = torch.randn(3, 7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    out = torch.empty_like(x)
    reference.rms_norm(out, x, weight, eps=1e-5, weight_offset=1.0)
    torch.testing.assert_close(out, functional.rms_norm(x, (7,), weight + 1, 1e-5), **CLOSE)


def test_layer_norm_is_its_formula_and_replaces_the_residual() -> None:
    x, residual, weight, bias = (torch.randn(shape, dtype=torch.float64) for shape in ((3, 7), (3, 7), (7,), (7,)))
    out, total = torch.empty_like(x), residual.clone()
    reference.layer_norm(out, x, weight, bias, eps=1e-5, residual=total)
    torch.testing.assert_close(total, x + residual, **CLOSE)
    y = x + residual
    normed = (y - y.mean(1, keepdim=True)) / (y.var(1, keepdim=True, correction=0) + 1e-5).sqrt()
    torch.testing.assert_close(out, normed * weight + bias, **CLOSE)


def test_gelu_is_its_formula() -> None:
    x = torch.randn(3, 10, dtype=torch.float64)
    exact = 0.5 * x * (1 + torch.erf(x / 2**0.5))
    near = 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    for is_approximate, expected in ((False, exact), (True, near)):
        out = torch.empty_like(x)
        reference.gelu(out, x, is_approximate=is_approximate)
        torch.testing.assert_close(out, expected, **CLOSE)
        gated = torch.empty(3, 5, dtype=torch.float64)
        reference.gelu_and_mul(gated, x, is_approximate=is_approximate)
        torch.testing.assert_close(gated, expected[:, :5] * x[:, 5:], **CLOSE)


def test_rotary_turns_each_pair_as_a_complex_number() -> None:
    head_size, positions = 6, torch.tensor([0, 5, 2])
    angles = torch.rand(9, head_size // 2, dtype=torch.float64)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    query, key = torch.randn(3, 4, head_size, dtype=torch.float64), torch.randn(3, 2, head_size, dtype=torch.float64)
    turned_query, turned_key = query.clone(), key.clone()
    reference.rotary(turned_query, turned_key, positions, table)
    turn = torch.polar(torch.ones(3, 1, 3, dtype=torch.float64), angles[positions][:, None])
    for x, turned in ((query, turned_query), (key, turned_key)):
        product = torch.complex(x[..., :3], x[..., 3:]) * turn
        torch.testing.assert_close(turned, torch.cat((product.real, product.imag), dim=-1), **CLOSE)


def test_silu_and_mul_is_torchs() -> None:
    x = torch.randn(3, 10, dtype=torch.float64)
    out = torch.empty(3, 5, dtype=torch.float64)
    reference.silu_and_mul(out, x)
    torch.testing.assert_close(out, functional.silu(x[:, :5]) * x[:, 5:], **CLOSE)
