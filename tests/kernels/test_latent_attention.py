"""Latent attention on both devices against the oracle in float64, and its promise that a token depends on nothing
beside it; caches hold NaN wherever no key is. As in test_paged_attention, most tests have short segments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import triton.language as tl

from kernels import cpu
from kernels.gpu.attention import decode, segment, work
from kernels.gpu.attention import scratch as attention_scratch
from kernels.gpu.attention.scratch import new_scratch
from kernels.gpu.attention.work import PIECE
from kernels.gpu.latent import latent_and_cache as cache_module
from kernels.gpu.latent import latent_attention as module
from kernels.gpu.latent import pieces, rows, whole
from kernels.oracles import reference
from tests.kernels.cards import pretend
from tests.kernels.cases import PagedCase
from tests.kernels.device import DEVICE, IS_INTERPRETED

Attend = Callable[..., None]
# Of one rounding of the result, and of weights in half precision: 2^-11 and 2^-8 relative.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
SEGMENT, SPAN = (64, 2) if IS_INTERPRETED else (attention_scratch.SEGMENT, attention_scratch.SPAN)
ON_GPU: Attend = module.latent_attention
ON_CPU: Attend = cpu.latent_attention


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """See test_paged_attention."""
    if not IS_INTERPRETED:
        return
    for name, number in (("SEGMENT", SEGMENT), ("SPAN", SPAN)):
        for place in (decode, pieces, rows, segment, whole, work):
            monkeypatch.setattr(place, name, tl.constexpr(number), raising=False)
        monkeypatch.setattr(attention_scratch, name, number)


@pytest.fixture
def even_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's products come from a BLAS that sums a row differently where it lies in another place of a tile.
    Here each row is summed as any other, as matrix units do."""
    if IS_INTERPRETED:
        monkeypatch.setattr(numpy, "matmul", lambda a, b, dtype: numpy.einsum("mk,kn->mn", a, b, dtype=dtype))


class LatentCase:
    """Arguments of `latent_attention`, on a device, with NaN in every slot that holds no key of a sequence."""

    def __init__(
        self,
        query_lens: list[int],
        context_lens: list[int],
        *,
        num_heads: int = 5,
        latent_size: int = 24,
        rotary_size: int = 10,
        device: str = DEVICE,
        **options: Any,
    ) -> None:
        sizes = {"num_heads": num_heads, "num_kv_heads": 1, "head_size": latent_size + rotary_size, "block_size": 16}
        case = PagedCase(query_lens, context_lens, **{**sizes, **options})
        self.latent_size, self.options = latent_size, case.options
        size = case.key_cache.shape[2]
        used = torch.zeros(case.key_cache.shape[0] * size, dtype=torch.bool)
        for sequence, seq_len in enumerate(case.seq_lens.tolist()):
            positions = torch.arange(seq_len)
            used[case.block_tables[sequence, positions // size].long() * size + positions % size] = True
        case.key_cache.transpose(1, 2)[~used.view(-1, size)] = float("nan")
        self.query, self.cache = case.query.to(device), case.key_cache.to(device)
        self.of_step = [x.to(device) for x in (case.block_tables, case.seq_lens, case.query_starts)]

    def attend(self, attend: Attend, **options: Any) -> torch.Tensor:
        out = self.query.new_full((*self.query.shape[:2], self.latent_size), float("nan"))
        attend(out, self.query, self.cache, *self.of_step, **self.options | options)
        return out

    def some(self, attend: Attend, first: int, last: int, context_len: int = 0) -> torch.Tensor:
        """Of a case of one sequence, these tokens of it, by themselves."""
        query, device = self.query[first:last], self.query.device
        out = query.new_empty(last - first, query.shape[1], self.latent_size)
        starts = torch.tensor([0, last - first], dtype=torch.int32, device=device)
        lens = torch.tensor([context_len + last], dtype=torch.int32, device=device)
        attend(out, query, self.cache, self.of_step[0], lens, starts, **self.options | {"max_query_len": last - first})
        return out

    def check(self, attend: Attend) -> None:
        self.check_found(self.attend(attend))

    def check_found(self, found: torch.Tensor) -> None:
        expected = self.query.new_empty((*self.query.shape[:2], self.latent_size), dtype=torch.float64)
        reference.latent_attention(expected, self.query.double(), self.cache.double(), *self.of_step, **self.options)
        tolerance = TOLERANCE[self.query.dtype]
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def test_the_oracle_is_attention_to_products_of_the_latents() -> None:
    """With keys and values made of the latents, as the model is defined: heads of 7 and 4 turned, values of 6."""
    case = LatentCase([3, 1], [5, 9], dtype=torch.float64, device="cpu")
    key_up, value_up = torch.randn(5, 7, 24, dtype=torch.float64), torch.randn(5, 6, 24, dtype=torch.float64)
    plain, turned = torch.randn(4, 5, 7, dtype=torch.float64), case.query[..., 24:]
    case.query = torch.cat((torch.einsum("thp,hpl->thl", plain, key_up), turned), dim=-1)
    found = case.attend(reference.latent_attention)
    tables, seq_lens, starts = case.of_step
    for sequence, seq_len in enumerate(seq_lens.tolist()):
        lines = case.cache[tables[sequence, : -(-seq_len // 16)].long(), 0].flatten(0, 1)[:seq_len]
        keys = torch.cat((torch.einsum("jl,hpl->hjp", lines[:, :24], key_up), lines[:, 24:].expand(5, -1, -1)), dim=-1)
        values = torch.einsum("jl,hvl->hjv", lines[:, :24], value_up)
        begin, end = starts[sequence : sequence + 2].tolist()
        for token in range(begin, end):
            seen = seq_len - (end - token) + 1
            query = torch.cat((plain[token], turned[token]), dim=-1)
            weights = (case.options["scale"] * torch.einsum("hp,hjp->hj", query, keys[:, :seen])).softmax(-1)
            expected = torch.einsum("hj,hjv->hv", weights, values[:, :seen])
            torch.testing.assert_close(torch.einsum("hl,hvl->hv", found[token], value_up), expected)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_any_mix_of_rows_on_a_gpu(dtype: torch.dtype) -> None:
    LatentCase([1, 21, 1, 5, 1], [0, 0, 100, 130, 3], dtype=dtype).check(ON_GPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_mix_of_rows_on_a_cpu(dtype: torch.dtype) -> None:
    LatentCase([1, 21, 1, 5, 1], [0, 0, 100, 130, 3], dtype=dtype, device="cpu").check(ON_CPU)
    LatentCase([1, 3], [70, 20], num_heads=16, latent_size=512, rotary_size=64, device="cpu").check(ON_CPU)


@pytest.mark.parametrize(("num_heads", "latent_size", "rotary_size"), [(16, 512, 64), (71, 32, 16), (1, 40, 8)])
def test_sizes_of_models(num_heads: int, latent_size: int, rotary_size: int) -> None:
    sizes: dict[str, Any] = {
        "num_heads": num_heads,
        "latent_size": latent_size,
        "rotary_size": rotary_size,
        "block_size": 8,
    }
    LatentCase([1, 3, 1], [0, 40, 70], **sizes, dtype=torch.float16).check(ON_GPU)


@pytest.mark.usefixtures("short_segments")
def test_contexts_of_many_segments() -> None:
    contexts = [15, 63, SEGMENT, 2 * SEGMENT - 2, 2 * SEGMENT - 1, 2 * SEGMENT, 5 * SEGMENT + 76]
    for query_len in (1, 5):
        LatentCase([query_len] * len(contexts), contexts, num_heads=2).check(ON_GPU)


@pytest.mark.usefixtures("short_segments", "even_sums")
@pytest.mark.parametrize(("attend", "device"), [(ON_GPU, DEVICE), (ON_CPU, "cpu")], ids=["gpu", "cpu"])
def test_a_token_is_the_same_in_a_prompt_in_chunks_and_computed_alone(attend: Attend, device: str) -> None:
    num = SEGMENT + 21
    case = LatentCase([num], [0], num_heads=3, device=device)
    case.options["is_batch_invariant"] = True
    expected = case.attend(attend)
    alone = [(p, p + 1) for p in (0, 15, SEGMENT - 1, SEGMENT, num - 1)]
    for first, last in [*alone, (0, 7), (7, 40), (num - 20, num)]:
        assert torch.equal(case.some(attend, first, last), expected[first:last]), (first, last)


@pytest.mark.usefixtures("short_segments", "even_sums")
@pytest.mark.parametrize("capability", [90, 120])
def test_a_token_is_the_same_in_segments_in_spans_and_whole(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With segments joined in the loop over tiles, and, as on Blackwell, around it."""
    if IS_INTERPRETED:
        pretend(monkeypatch, module, capability=capability)
    query_len, context_len = 11, 2 * SPAN * SEGMENT + 30
    case = LatentCase([query_len], [context_len], num_heads=3, dtype=torch.float16)
    case.options["is_batch_invariant"] = True
    found = {}
    for name, lines in (("whole", 0), ("spans", 3 * query_len), ("segments", 6 * query_len)):
        shared = new_scratch(1, query_len + context_len, 3, 24, 200, case.query.device, lines).new_pass()
        found[name] = case.attend(ON_GPU, shared=shared)
        ((_, columns),) = shared.plans.items()
        if IS_INTERPRETED and name != "segments":
            assert columns[PIECE.value].tolist() == [{"whole": 0, "spans": SPAN}[name]]
    for name, out in found.items():
        assert torch.equal(out, found["whole"]), name
    case.check_found(found["whole"])
    for token in (0, 5, query_len - 1):
        assert torch.equal(case.some(ON_GPU, token, token + 1, context_len)[0], found["whole"][token]), token


def test_padding_gets_zeros() -> None:
    case = LatentCase([1, 1], [20, 5])
    case.of_step[1][1] = 0
    assert not case.attend(ON_GPU)[1].any() and case.attend(ON_GPU)[0].any()


def test_what_does_not_fit_is_refused() -> None:
    case = LatentCase([1], [20])
    for name, value, message in (
        ("latent_size", 34, "latents of 34 are not a part of keys of 34"),
        ("cache", case.cache[..., :20], "does not fit a cache"),
        ("cache", case.cache.expand(-1, 2, -1, -1), "does not fit a cache"),
        ("query", case.query.double(), "does not fit query"),
        ("query", case.query.half(), "have no place beside queries"),
    ):
        other = LatentCase([1], [20])
        setattr(other, name, value)
        with pytest.raises(ValueError, match=message):
            other.attend(ON_GPU)


@pytest.mark.parametrize("are_pairs", [True, False])
@pytest.mark.parametrize(
    ("operation", "device"),
    [(cache_module.latent_and_cache, DEVICE), (cpu.latent_and_cache, "cpu")],
    ids=["gpu", "cpu"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_tokens_leave_in_the_cache(
    operation: Callable[..., None], device: str, are_pairs: bool, dtype: torch.dtype
) -> None:
    """Of more heads than a program turns, with a token that is padding; a row's bits are its own."""
    generator = torch.Generator().manual_seed(3)
    num_tokens, num_heads, latent_size, rotary_size = 5, 130, 24, 20
    wide = torch.randn(num_tokens, num_heads, 7 + rotary_size, generator=generator).to(device, dtype)
    new = torch.randn(num_tokens, latent_size + rotary_size, generator=generator).to(device, dtype)
    norm = torch.randn(latent_size, generator=generator).to(device, dtype)
    cos_sin = torch.randn(50, rotary_size, generator=generator).to(device)
    positions = torch.tensor([3, 49, 0, 7, 7], device=device)
    slots = torch.tensor([5, 23, -1, 0, 9], device=device)

    def run(operation: Callable[..., None], rows: slice, compute: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        query = torch.zeros(num_tokens, num_heads, latent_size + rotary_size, dtype=compute, device=device)
        cache = torch.zeros(3, 1, 8, latent_size + rotary_size, dtype=compute, device=device)
        of_tokens = query[rows, :, latent_size:], wide[rows, :, 7:].to(compute), new[rows].to(compute)
        table = cos_sin.to(torch.promote_types(compute, torch.float32))
        operation(
            *of_tokens,
            norm.to(compute),
            positions[rows],
            table,
            cache,
            slots[rows],
            norm_eps=1e-3,
            are_pairs=are_pairs,
        )
        return query, cache

    found = run(operation, slice(None), dtype)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]  # of two roundings of numbers up to four
    for ours, exact in zip(found, run(reference.latent_and_cache, slice(None), torch.float64), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=tolerance, atol=tolerance)
    for token in range(num_tokens):
        query, cache = run(operation, slice(token, token + 1), dtype)
        assert torch.equal(query[token], found[0][token])
        if (slot := int(slots[token])) >= 0:
            assert torch.equal(cache.view(24, -1)[slot], found[1].view(24, -1)[slot])
