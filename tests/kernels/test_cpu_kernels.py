"""Compiled CPU kernels against the oracles in float64, and their promise that a row depends on nothing beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kernels import cpu
from kernels.cpu.library import num_threads
from kernels.oracles import reference
from tests.kernels.cases import PagedCase

FEW_NUMBERS = 1 << 16  # that one thread writes alone (native/threads.h)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
paged_attention: Callable[..., None] = cpu.paged_attention
exact_attention: Callable[..., None] = reference.paged_attention

DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


@pytest.fixture(autouse=True, params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def attend(case: PagedCase, **options: Any) -> torch.Tensor:
    out = torch.full_like(case.query, float("nan"))
    paged_attention(out, *case.arguments, **case.options, **options)
    return out


def check_attention(case: PagedCase, **options: Any) -> None:
    check_found(case, attend(case, **options), options)


def check_found(case: PagedCase, found: torch.Tensor, options: dict[str, Any]) -> None:
    exact = torch.empty_like(case.query, dtype=torch.float64)
    query, keys, values, *rest = case.arguments
    exact_attention(exact, query.double(), keys.double(), values.double(), *rest, **case.options, **options)
    tolerance = TOLERANCE[case.query.dtype]
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)


@DTYPES
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "block_size"),
    [(6, 2, 10, 4), (9, 3, 64, 16), (5, 5, 80, 8), (8, 1, 128, 32), (1, 1, 2, 1), (7, 1, 96, 16)],
)
def test_attention_of_any_mix_of_rows(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_size: int, block_size: int
) -> None:
    check_attention(
        PagedCase(
            query_lens=[1, 37, 1, 16, 5, 1, 64],
            context_lens=[0, 0, 200, 63, 130, 64, 1],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            block_size=block_size,
            dtype=dtype,
        )
    )


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16], ids=str)
def test_a_cache_of_another_type_is_read_and_written_as_rounded(stored: torch.dtype) -> None:
    case = PagedCase([1, 37, 5], [70, 0, 130], head_size=10, block_size=8)
    case.key_cache, case.value_cache = case.key_cache.to(stored), case.value_cache.to(stored)
    check_attention(case)
    key, value = torch.randn(3, 2, 10), torch.randn(3, 2, 10)
    key[0, 0, :4] = torch.tensor([0.0, -1e-6, 3e-8, 60000.0])  # two are below float16's normal numbers
    slots = torch.tensor([9, 0, 23])
    cpu.reshape_and_cache(key, value, case.key_cache, case.value_cache, slots)
    for cache, new in ((case.key_cache, key), (case.value_cache, value)):
        assert torch.equal(cache[slots // 8, :, slots % 8], new.to(stored))
    check_attention(case)


@pytest.mark.parametrize("window", [1, 7, 64, 100])
def test_sliding_window(window: int) -> None:
    check_attention(PagedCase([1, 40, 90], [170, 90, 0]), sliding_window=window)


def test_alibi_and_soft_cap() -> None:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.1, 0.2, 0.3])
    check_attention(PagedCase([1, 40], [170, 60]), alibi_slopes=slopes)
    check_attention(PagedCase([1, 40], [170, 60]), alibi_slopes=slopes, logit_soft_cap=0.7, sliding_window=50)


def test_a_sink_takes_its_share_of_every_rows_weights() -> None:
    sinks = torch.tensor([0.5, -2.0, 3.0, 0.0, 9.0, -30.0])
    check_attention(PagedCase([1, 12, 1], [90, 40, 0]), sinks=sinks)
    check_attention(PagedCase([1, 12], [90, 40]), sinks=sinks, sliding_window=17)


@pytest.mark.parametrize("name", ["alibi_slopes", "sinks"])
def test_numbers_of_heads_that_do_not_lie_in_a_row_are_refused(name: str) -> None:
    case = PagedCase([1], [9])
    options = case.options | {name: torch.ones(12)[::2]}
    with pytest.raises(ValueError, match="are not 6 float32 in a row"):
        paged_attention(torch.empty_like(case.query), *case.arguments, **options)


def test_padding_gets_zeros() -> None:
    """A sequence without keys, with one query and with two, beside others."""
    case = PagedCase([1, 5, 2], [0, 70, 3])
    alone = attend(case)
    case.seq_lens[0] = case.seq_lens[2] = 0
    sinks = torch.linspace(-2, 2, case.query.shape[1])
    for options in ({}, {"sliding_window": 3}, {"sinks": sinks}):
        out = attend(case, **options)
        assert not out[:1].any() and not out[6:].any() and out[1:6].any(), options
    assert torch.equal(attend(case)[1:6], alone[1:6])


def test_scores_so_large_that_a_softmax_without_maximum_overflows() -> None:
    case = PagedCase([1, 20], [150, 60])
    case.query *= 200
    exact = torch.empty_like(case.query, dtype=torch.float64)
    query, keys, values, *rest = case.arguments
    exact_attention(exact, query.double(), keys.double(), values.double(), *rest, **case.options)
    torch.testing.assert_close(attend(case).double(), exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("block_size", [4, 16])
def test_a_broken_key_breaks_what_attends_to_it_as_in_the_oracle_and_nothing_else(
    broken: float, block_size: int
) -> None:
    """Of the first sequence, in the third tile of keys: the first of three tokens does not see it yet."""
    case = PagedCase([3, 1, 40], [148, 150, 0], head_size=16, block_size=block_size)
    whole = attend(case)
    case.key_cache[case.block_tables[0, 149 // block_size], :, 149 % block_size] = broken
    exact = torch.empty_like(whole)
    exact_attention(exact, *case.arguments, **case.options)
    out = attend(case)
    assert torch.equal(out.isnan(), exact.isnan()) and out.isnan().any()
    torch.testing.assert_close(out[:1], whole[:1], rtol=0, atol=0)
    torch.testing.assert_close(out[3:], whole[3:], rtol=0, atol=0)


@pytest.mark.parametrize("sign", [1, -1])
def test_scores_that_all_overflow_give_nan(sign: int) -> None:
    case = PagedCase([2, 1], [0, 70], head_size=16, block_size=16)
    whole = attend(case)
    case.query[:2], case.key_cache[case.block_tables[0, 0]] = 1e30, sign * 1e30
    out = attend(case)
    assert out[:2].isnan().all() and torch.equal(out[2], whole[2])


def test_query_and_out_may_be_parts_of_wider_rows() -> None:
    case = PagedCase([3, 1], [4, 20])
    wide = torch.randn(4, 6 * 10 + 40)
    case.query, expected = wide[:, :60].unflatten(1, (6, 10)), PagedCase([3, 1], [4, 20])
    expected.query = case.query.contiguous()
    out = torch.zeros(4, 77)
    paged_attention(out[:, :60].unflatten(1, (6, 10)), *case.arguments, **case.options)
    assert torch.equal(out[:, :60].reshape(4, 6, 10), attend(expected))
    assert not out[:, 60:].any()


def test_a_cache_beyond_32_bit_offsets() -> None:
    """Five billion elements, of which four blocks are touched: memory that is never written costs nothing."""
    blocks = [0, 2_299_999, 1_150_000, 2_250_001]
    case = PagedCase([5], [55], num_heads=2, num_kv_heads=2, head_size=64, block_size=16, dtype=torch.bfloat16)
    far = {name: torch.empty(2_300_000, 2, 16, 64, dtype=torch.bfloat16) for name in ("key_cache", "value_cache")}
    expected = attend(case)
    near = case.block_tables[0, :4].tolist()
    for name, store in far.items():
        for here, there in zip(near, blocks, strict=True):
            store[there] = getattr(case, name)[here]
        setattr(case, name, store)
    case.block_tables[0, :4] = torch.tensor(blocks)
    assert torch.equal(attend(case), expected)


@DTYPES
def test_a_token_is_the_same_alone_beside_others_in_a_prompt_and_in_chunks(dtype: torch.dtype) -> None:
    """Bit for bit: 150 tokens at once, against each computed as a decode row, in chunks, and beside other sequences."""
    case = PagedCase([150, 33], [0, 90], num_heads=9, num_kv_heads=3, head_size=64, block_size=16, dtype=dtype)
    whole = attend(case)
    caches = (case.key_cache, case.value_cache)
    table = case.block_tables[:1]
    for first, last in [(p, p + 1) for p in (0, 1, 15, 16, 63, 64, 100, 149)] + [(0, 7), (7, 71), (71, 150)]:
        out = torch.empty(last - first, 9, 64, dtype=dtype)
        starts = torch.tensor([0, last - first], dtype=torch.int32)
        lens = torch.tensor([last], dtype=torch.int32)
        paged_attention(out, case.query[first:last], *caches, table, lens, starts, **case.options)
        assert torch.equal(out, whole[first:last]), (first, last)


@DTYPES
@pytest.mark.parametrize(("head_size", "block_size"), [(10, 4), (64, 16), (16, 128)])
def test_sequences_over_a_common_prefix_are_the_same_alone(dtype: torch.dtype, head_size: int, block_size: int) -> None:
    """Bit for bit, however much of the prefix is shared: by many, by two, to the last key, or by a prompt between."""
    lens = [150, 300, 129, 128, 257, *[200] * 20, 190, 64, 40, 260]
    query_lens = [1] * len(lens)
    query_lens[7] = 9
    contexts = [seq_len - query_len for seq_len, query_len in zip(lens, query_lens, strict=True)]
    case = PagedCase(query_lens, contexts, head_size=head_size, block_size=block_size, dtype=dtype)
    for sequence, shared in enumerate([128, 128, 128, 128, 64, 128, 65, 128, *[192] * 16, 190, 190, 64, 40, 256]):
        blocks = shared // block_size
        case.block_tables[sequence, :blocks] = case.block_tables[1, :blocks]
    check_attention(case)
    together, caches = attend(case), (case.key_cache, case.value_cache)
    for sequence in range(len(lens)):
        first, last = case.query_starts[sequence : sequence + 2].tolist()
        out, starts = torch.empty_like(together[first:last]), torch.tensor([0, last - first], dtype=torch.int32)
        table, length = case.block_tables[sequence : sequence + 1], case.seq_lens[sequence : sequence + 1]
        paged_attention(out, case.query[first:last], *caches, table, length, starts, **case.options)
        assert torch.equal(out, together[first:last]), sequence


def test_a_common_prefix_with_alibi_and_with_windows() -> None:
    case = PagedCase([1] * 5, [140, 200, 150, 128, 170], block_size=16)
    case.block_tables[:, :8] = case.block_tables[0, :8].clone()
    check_attention(case, alibi_slopes=torch.tensor([0.5, 0.25, 0.125, 0.1, 0.2, 0.3]))
    check_attention(case, sliding_window=100)


@DTYPES
@pytest.mark.parametrize("options", [{}, {"sliding_window": 2500}], ids=["all keys", "window"])
def test_a_token_with_many_keys_is_the_same_alone_in_a_prompt_and_over_a_shared_prefix(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Bit for bit, where threads share its keys, 2,048 each, as where one meets all. A segment ends in the prompt."""
    case = PagedCase([1, 70, 1, 1, 1], [4300, 4060, 2048, 4500, 2047], head_size=16, block_size=16, dtype=dtype)
    case.block_tables[3, :264] = case.block_tables[2, :264] = case.block_tables[0, :264]
    check_attention(case, **options)
    together, caches = attend(case, **options), (case.key_cache, case.value_cache)

    def alone(sequence: int, first: int, last: int, length: int) -> torch.Tensor:
        out, starts = torch.empty_like(together[first:last]), torch.tensor([0, last - first], dtype=torch.int32)
        table, lens = case.block_tables[sequence : sequence + 1], torch.tensor([length], dtype=torch.int32)
        asked = {**case.options, **options}
        paged_attention(out, case.query[first:last], *caches, table, lens, starts, **asked)
        return out

    for sequence, length in enumerate(case.seq_lens.tolist()):
        first, last = case.query_starts[sequence : sequence + 2].tolist()
        assert torch.equal(alone(sequence, first, last, length), together[first:last]), sequence
        for row in (first, (first + last) // 2, last - 1):
            assert torch.equal(alone(sequence, row, row + 1, length - (last - 1 - row)), together[row : row + 1])


def test_what_lies_behind_the_last_key_is_never_used() -> None:
    case = PagedCase([1, 3, 20], [63, 14, 101], num_heads=4, num_kv_heads=2, head_size=32, block_size=16)
    expected = attend(case)
    for cache in (case.key_cache, case.value_cache):
        used = torch.zeros(cache.shape[0], 16, dtype=torch.bool)
        for table, seq_len in zip(case.block_tables, case.seq_lens.tolist(), strict=True):
            for position in range(seq_len):
                used[table[position // 16], position % 16] = True
        cache.transpose(1, 2)[~used] = float("nan")
    assert torch.equal(attend(case), expected)


@DTYPES
def test_reshape_and_cache(dtype: torch.dtype) -> None:
    fused = torch.randn(7, 50).to(dtype)
    key, value = fused[:, :20].unflatten(1, (2, 10)), fused[:, 20:40].unflatten(1, (2, 10))
    slots = torch.tensor([3, 39, -1, 0, 17, -1, 16])
    stores = [torch.zeros(5, 2, 8, 10, dtype=dtype) for _ in range(4)]
    cpu.reshape_and_cache(key, value, stores[0], stores[1], slots)
    reference.reshape_and_cache(key, value, stores[2], stores[3], slots)
    assert torch.equal(stores[0], stores[2]) and torch.equal(stores[1], stores[3])


@DTYPES
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(dtype: torch.dtype, with_residual: bool) -> None:
    x, weight = torch.randn(5, 61).to(dtype), torch.randn(61).to(dtype)
    residual = torch.randn(5, 61).to(dtype) if with_residual else None
    exact = torch.empty(5, 61, dtype=torch.float64)
    total = None if residual is None else (residual + x).double() - x.double()  # the sum as it is rounded
    reference.rms_norm(exact, x.double(), weight.double(), eps=1e-5, residual=total)
    out = torch.empty_like(x)
    cpu.rms_norm(out, x, weight, eps=1e-5, residual=residual)
    torch.testing.assert_close(out.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    if residual is not None and total is not None:
        assert torch.equal(residual.double(), total)


@DTYPES
def test_rms_norm_with_an_offset_in_place(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 61).to(dtype), torch.randn(61).to(dtype)
    exact = torch.empty(5, 61, dtype=torch.float64)
    reference.rms_norm(exact, x.double(), weight.double(), eps=1e-5, weight_offset=1.0)
    cpu.rms_norm(x, x, weight, eps=1e-5, weight_offset=1.0)
    torch.testing.assert_close(x.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@DTYPES
def test_layer_norm_takes_each_row_alone(dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(9, 61).to(dtype), torch.randn(61).to(dtype), torch.randn(61).to(dtype)
    out, alone = torch.empty_like(x), torch.empty_like(x)
    cpu.layer_norm(out, x, weight, bias, eps=1e-5)
    for row in range(9):
        cpu.layer_norm(alone[row : row + 1], x[row : row + 1], weight, bias, eps=1e-5)
    assert torch.equal(out, alone)


@DTYPES
def test_rotary_of_a_part_of_each_head(dtype: torch.dtype) -> None:
    query, key = torch.randn(5, 3, 10).to(dtype), torch.randn(5, 1, 10).to(dtype)
    positions, table = torch.tensor([0, 3, 30, 3, 7]), torch.randn(31, 6)
    exact_query, exact_key, rest = query.double(), key.double(), query[..., 6:].clone()
    reference.rotary(exact_query, exact_key, positions, table.double())
    cpu.rotary(query, key, positions, table)
    for got, exact in ((query, exact_query), (key, exact_key)):
        torch.testing.assert_close(got.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(query[..., 6:], rest)


@pytest.mark.parametrize("position", [-1, 31])
def test_a_position_without_angles_is_refused(position: int) -> None:
    with pytest.raises(IndexError, match="not within those that have angles"):
        cpu.rotary(torch.randn(2, 3, 10), torch.randn(2, 1, 10), torch.tensor([0, position]), torch.randn(31, 10))


@DTYPES
@pytest.mark.parametrize("is_approximate", [False, True])
def test_gelu_alone_and_as_a_gate(dtype: torch.dtype, is_approximate: bool) -> None:
    x = torch.cat(
        (torch.tensor([0.0, -1e4, 1e4, -1e36, -3e38, -9.0, 9.0, -1e-9]).repeat(5, 1), torch.randn(5, 98)), 1
    ).to(dtype)
    exact, out = torch.empty(5, 106, dtype=torch.float64), torch.empty(5, 106, dtype=dtype)
    reference.gelu(exact, x.double(), is_approximate=is_approximate)
    cpu.gelu(out, x, is_approximate=is_approximate)
    torch.testing.assert_close(out.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    exact, out = torch.empty(5, 53, dtype=torch.float64), torch.empty(5, 53, dtype=dtype)
    reference.gelu_and_mul(exact, x.double(), is_approximate=is_approximate)
    cpu.gelu_and_mul(out, x, is_approximate=is_approximate)
    torch.testing.assert_close(out.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@DTYPES
def test_rotary(dtype: torch.dtype) -> None:
    fused = torch.randn(5, 100).to(dtype)
    query, key = fused[:, :60].unflatten(1, (6, 10)), fused[:, 60:80].unflatten(1, (2, 10))
    positions, table = torch.tensor([0, 3, 30, 3, 7]), torch.randn(31, 10)
    exact_query, exact_key, untouched = query.double(), key.double(), fused[:, 80:].clone()
    reference.rotary(exact_query, exact_key, positions, table.double())
    cpu.rotary(query, key, positions, table)
    for got, exact in ((query, exact_query), (key, exact_key)):
        torch.testing.assert_close(got.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(fused[:, 80:], untouched)


@DTYPES
def test_silu_and_mul(dtype: torch.dtype) -> None:
    x = torch.cat(
        (torch.tensor([0.0, -1e4, 1e4, -1e36, -3e38, -88.5, 90.0, -1e-9]).repeat(5, 1), torch.randn(5, 98)), 1
    ).to(dtype)
    exact, out = torch.empty(5, 53, dtype=torch.float64), torch.empty(5, 53, dtype=dtype)
    reference.silu_and_mul(exact, x.double())
    cpu.silu_and_mul(out, x)
    torch.testing.assert_close(out.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@DTYPES
def test_clamped_swiglu(dtype: torch.dtype) -> None:
    """Gates and ups beyond the limit, far enough for exponentials to overflow, and NaN, which no limit hides."""
    edges = torch.tensor([0.0, -1e4, 1e4, -1e36, -3e38, -88.5, 90.0, -1e-9, torch.nan])
    x = torch.cat((edges.repeat(5, 1), 4 * torch.randn(5, 94), edges.roll(3).repeat(5, 1)), 1).to(dtype)
    exact, out = torch.empty(5, 56, dtype=torch.float64), torch.empty(5, 56, dtype=dtype)
    reference.clamped_swiglu(exact, x.double(), alpha=1.702, limit=7.0)
    cpu.clamped_swiglu(out, x, alpha=1.702, limit=7.0)
    torch.testing.assert_close(out.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True)
    assert exact.isnan().sum() == 10 and exact.nan_to_num().max() > 40  # of 56: some are limited on both sides


@DTYPES
def test_a_row_is_the_same_among_few_and_among_so_many_that_threads_share_them(dtype: torch.dtype) -> None:
    rows = FEW_NUMBERS // 50
    x, weight = torch.randn(rows, 106).to(dtype), torch.randn(106).to(dtype)
    positions, table = torch.arange(rows) % 31, torch.randn(31, 10)

    def results(first: int, last: int) -> list[torch.Tensor]:
        part = x[first:last].contiguous()
        gated, normed, residual = torch.empty(last - first, 53, dtype=dtype), torch.empty_like(part), part.clone()
        clamped = torch.empty_like(gated)
        cpu.silu_and_mul(gated, part)
        cpu.clamped_swiglu(clamped, part, alpha=1.702, limit=1.0)
        cpu.rms_norm(normed, part, weight, eps=1e-5, residual=residual)
        turned = part.clone()
        query, key = turned[:, :60].unflatten(1, (6, 10)), turned[:, 60:80].unflatten(1, (2, 10))
        cpu.rotary(query, key, positions[first:last], table)
        return [gated, clamped, normed, residual, turned]

    for together, few in zip(results(0, rows), results(700, 717), strict=True):
        assert torch.equal(together[700:717], few)


def test_other_dtypes_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="float16"):
        cpu.silu_and_mul(torch.empty(1, 2, dtype=torch.float16), torch.empty(1, 4, dtype=torch.float16))
    case = PagedCase([1], [5])
    case.key_cache = case.key_cache.to(torch.float16)
    with pytest.raises(TypeError, match=r"not torch\.float16, torch\.float32"):
        attend(case)


def test_kernels_leave_torchs_number_of_threads_alone() -> None:
    before = torch.get_num_threads()
    attend(PagedCase([1], [5]))
    assert num_threads() == before == torch.get_num_threads()
