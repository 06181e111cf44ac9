"""The Triton attention against the oracle in float64, and its promise that a token depends on nothing beside it.

Caches hold NaN wherever no key is, and a sequence's table ids of no block after its last: reading either shows. The
interpreter takes milliseconds a tile of keys, so there most tests of several segments have shorter ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import triton.language as tl
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kernels.gpu.architectures import MAX_SHARED_BYTES, TENSOR_MEMORY
from kernels.gpu.attention import decode, prefill, rows, segment, work
from kernels.gpu.attention import paged_attention as module
from kernels.gpu.attention import scratch as attention_scratch
from kernels.gpu.attention.scratch import KEPT_ROWS, new_scratch
from kernels.gpu.attention.tiling import tiling
from kernels.gpu.attention.work import PIECE
from kernels.gpu.launch import Launch
from kernels.oracles import reference
from tests.kernels.cards import pretend
from tests.kernels.cases import PagedCase
from tests.kernels.device import DEVICE, IS_INTERPRETED

paged_attention: Callable[..., None] = module.paged_attention
exact_attention: Callable[..., None] = reference.paged_attention
# Of one rounding of the result, and of weights in half precision: 2^-11 and 2^-8 relative.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.1, 0.2, 0.3], device=DEVICE)
MIX = [1, 21, 1, 16, 5, 1, 34], [0, 0, 100, 63, 130, 63, 1]
# Of tests with short segments and spans.
SEGMENT, SPAN = (64, 2) if IS_INTERPRETED else (attention_scratch.SEGMENT, attention_scratch.SPAN)


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of SEGMENT keys, spans of SPAN of them: the interpreter reads the numbers at each launch, a compiled
    kernel has them for good."""
    if not IS_INTERPRETED:
        return
    for name, number in (("SEGMENT", SEGMENT), ("SPAN", SPAN)):
        for place in (decode, prefill, rows, segment, work):
            monkeypatch.setattr(place, name, tl.constexpr(number), raising=False)
        monkeypatch.setattr(attention_scratch, name, number)


class PoisonedCase(PagedCase):
    """On the device of the tests, with NaN in every slot that holds no key of a sequence."""

    def __init__(self, query_lens: list[int], context_lens: list[int], **options: Any) -> None:
        super().__init__(query_lens, context_lens, **{"head_size": 32, "block_size": 16, **options})
        used = torch.zeros(self.key_cache.shape[0] * self.key_cache.shape[2], dtype=torch.bool)
        size = self.key_cache.shape[2]
        for sequence, seq_len in enumerate(self.seq_lens.tolist()):
            positions = torch.arange(seq_len)
            used[self.block_tables[sequence, positions // size].long() * size + positions % size] = True
        for cache in (self.key_cache, self.value_cache):
            cache.transpose(1, 2)[~used.view(-1, size)] = float("nan")
        for name in ("query", "key_cache", "value_cache", "block_tables", "seq_lens", "query_starts"):
            setattr(self, name, getattr(self, name).to(DEVICE))


def attend(case: PagedCase, **options: Any) -> torch.Tensor:
    out, options = torch.full_like(case.query, float("nan")), case.options | options
    paged_attention(out, *case.arguments, **options)
    return out


def exact(case: PagedCase, **options: Any) -> torch.Tensor:
    query, keys, values, *rest = case.arguments
    out = torch.full_like(query, float("nan"), dtype=torch.float64)
    exact_attention(out, query.double(), keys.double(), values.double(), *rest, **case.options, **options)
    return out


def check(case: PagedCase, tolerance: float | None = None, **options: Any) -> None:
    tolerance = tolerance or TOLERANCE[case.query.dtype]
    torch.testing.assert_close(attend(case, **options).double(), exact(case, **options), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_any_mix_of_rows(dtype: torch.dtype) -> None:
    check(PoisonedCase(*MIX, dtype=dtype))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "block_size"),
    [(9, 3, 64, 8), (5, 5, 80, 16), (4, 1, 96, 256), (2, 2, 128, 32), (71, 1, 32, 64), (2, 1, 256, 16), (7, 1, 40, 24)],
)
def test_head_and_block_sizes(num_heads: int, num_kv_heads: int, head_size: int, block_size: int) -> None:
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": head_size, "block_size": block_size}
    check(PoisonedCase([1, 7, 1], [0, 70, 130], **sizes))


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_the_tiles_of_each_card(capability: int) -> None:
    case = PoisonedCase([1, 30], [90, 100], num_heads=2, num_kv_heads=1, head_size=80, dtype=torch.float16)
    out = attend(case, cut=tiling(80, 2, 2, capability, MAX_SHARED_BYTES[capability]))
    torch.testing.assert_close(out.double(), exact(case), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("group", [1, 8, 33, 71, 128, 200])
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_both_kernels_have_one_tile_where_bits_depend_on_it(head_size: int, group: int) -> None:
    """In float32 and with large heads on any card; on those with tensor memory where the option asks for equal bits."""
    for capability, shared_bytes in MAX_SHARED_BYTES.items():
        exact = tiling(head_size, 4, group, capability, shared_bytes)
        # Triton would multiply 64 rows by 8-bit keys in tensor memory, as TF32.
        assert exact.prefill_rows == exact.decode_rows < 64 and exact.prefill_warps == exact.decode_warps
        plain, invariant = (
            tiling(head_size, 2, group, capability, shared_bytes, is_batch_invariant=asked) for asked in (False, True)
        )
        if head_size > 128 or capability in TENSOR_MEMORY:
            assert invariant.prefill_rows == invariant.decode_rows
            assert invariant.prefill_warps == invariant.decode_warps
        else:
            assert invariant == plain
        assert max(plain.prefill_rows, invariant.prefill_rows) <= KEPT_ROWS


def test_prompts_have_the_tiles_of_decode_steps_where_the_option_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, module, capability=100)
    case = PoisonedCase([1, 30], [90, 100], dtype=torch.float16)
    found: list[int] = []

    def watched(kernel: Any, *arguments: Any, **constants: Any) -> Any:
        found.append(constants["ROWS"])
        return Launch(kernel, *arguments, **constants)

    monkeypatch.setattr(module, "Launch", watched)
    for is_batch_invariant in (False, True):
        out = attend(case, is_batch_invariant=is_batch_invariant)
        tolerance = TOLERANCE[torch.float16]
        torch.testing.assert_close(out.double(), exact(case), rtol=tolerance, atol=tolerance)
    assert found == [128, 64, 64, 64], "of prompts and of decode steps"


def test_contexts_of_several_segments() -> None:
    """One token and several, whose sequences end at the borders of segments as they are and beside them."""
    check(PoisonedCase([1, 1, 1, 1, 5], [510, 511, 512, 1030, 510], num_heads=2, num_kv_heads=1))


@pytest.mark.usefixtures("short_segments")
def test_contexts_of_many_segments() -> None:
    """And at those of blocks and tiles."""
    contexts = [15, 16, 63, SEGMENT, 2 * SEGMENT - 2, 2 * SEGMENT - 1, 2 * SEGMENT, 3 * SEGMENT + 76]
    for query_len in (1, 5):
        check(PoisonedCase([query_len] * len(contexts), contexts, num_heads=2, num_kv_heads=1))


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("window", [1, 7, 64, 100, SEGMENT + 8])
def test_sliding_window(window: int) -> None:
    check(PoisonedCase([1, 12, 50, 1], [170, 90, 0, SEGMENT + 88]), sliding_window=window)


def test_keys_before_the_window_are_not_read() -> None:
    case = PoisonedCase([1, 10], [90, 71], block_size=8)
    expected = attend(case, sliding_window=60)
    for sequence, first_key in ((0, 91 - 60), (1, 72 - 60)):
        blocks, offsets = zip(*(divmod(position, 8) for position in range(first_key)), strict=True)
        for cache in (case.key_cache, case.value_cache):
            cache[case.block_tables[sequence, list(blocks)].long(), :, list(offsets)] = float("nan")
    assert torch.equal(attend(case, sliding_window=60), expected)


@pytest.mark.usefixtures("short_segments")
def test_alibi_and_soft_cap() -> None:
    check(PoisonedCase([1, 12], [90, 40]), alibi_slopes=SLOPES)
    check(PoisonedCase([1, 12], [SEGMENT + 58, 60]), alibi_slopes=SLOPES, logit_soft_cap=0.7, sliding_window=70)
    check(PoisonedCase([1, 12], [90, 40]), logit_soft_cap=0.7)


@pytest.mark.usefixtures("short_segments")
def test_sinks() -> None:
    sinks = torch.tensor([0.5, -2.0, 3.0, 0.0, 9.0, -30.0], device=DEVICE)
    check(PoisonedCase([1, 12, 100, 1], [2 * SPAN * SEGMENT, 170, 0, 3]), sinks=sinks)
    check(PoisonedCase([1, 12], [SEGMENT + 58, 60]), sinks=sinks, sliding_window=70, logit_soft_cap=0.7)
    case = PoisonedCase([1], [5])
    case.seq_lens[0] = 0
    assert not attend(case, sinks=sinks).any(), "padding gets zeros"


def test_scores_so_large_that_a_softmax_without_maximum_overflows() -> None:
    case = PoisonedCase([1, 12], [90, 40])
    case.query *= 200
    check(case, tolerance=1e-3)


@pytest.mark.usefixtures("short_segments")
def test_caches_of_eight_bits_with_a_scale_for_each_head() -> None:
    case = PoisonedCase([1, 17, 1, 9], [70, 0, SEGMENT + 18, 2 * SEGMENT + 18])
    scales = {name: torch.tensor(pair, device=DEVICE) for name, pair in (("key", (0.5, 0.1)), ("value", (0.3, 2.0)))}
    for name, scale in scales.items():
        cache = getattr(case, f"{name}_cache") / scale[:, None, None]
        setattr(case, f"{name}_cache", cache.to(torch.float8_e4m3fn))
    check(case, key_scale=scales["key"], value_scale=scales["value"])


def test_blocks_that_sequences_share_and_blocks_that_come_twice() -> None:
    case = PoisonedCase([1, 3, 1], [47, 45, 95])
    case.block_tables[1, :3] = case.block_tables[0, :3]
    case.block_tables[2, :6] = case.block_tables[2, [5, 0, 0, 3, 5, 5]]
    check(case)


@pytest.mark.usefixtures("short_segments")
def test_padding_gets_zeros_and_what_is_beyond_the_last_token_is_left_alone() -> None:
    """A batch of a graph: rows without a sequence, a bound far above all lengths, more rows than tokens."""
    case = PoisonedCase([1, 1], [40, SEGMENT + 8])
    pads, wide = 3, PoisonedCase([1, 1], [40, SEGMENT + 8])
    wide.query = torch.cat((case.query, torch.full_like(case.query[:1], float("nan")).repeat(pads + 2, 1, 1)))
    wide.seq_lens = torch.cat((case.seq_lens, torch.zeros(pads, dtype=torch.int32, device=DEVICE)))
    wide.query_starts = torch.arange(3 + pads, dtype=torch.int32, device=DEVICE)
    wide.block_tables = torch.cat((case.block_tables, torch.full_like(case.block_tables[:1], 2**30).repeat(pads, 1)))
    out = attend(wide, max_seq_len=5000)
    assert torch.equal(out[:2], attend(case))
    assert not out[2:5].any() and out[5:].isnan().all()
    assert not exact(wide)[2:5].any()


def test_query_and_out_may_be_parts_of_wider_rows() -> None:
    case = PoisonedCase([3, 1], [4, 20])
    expected = attend(case)
    wide = torch.zeros(4, 6 * 32 + 48, device=DEVICE)
    wide[:, :192] = case.query.flatten(1)
    case.query = wide[:, :192].unflatten(1, (6, 32))
    out = torch.zeros(4, 208, device=DEVICE)
    paged_attention(out[:, :192].unflatten(1, (6, 32)), *case.arguments, **case.options)
    assert torch.equal(out[:, :192].reshape(4, 6, 32), expected) and not out[:, 192:].any()


@pytest.mark.usefixtures("short_segments")
def test_a_sequence_is_the_same_alone_and_on_any_number_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: however work is shared out, and whatever it is shared with."""
    options: dict[str, Any] = {"alibi_slopes": SLOPES, "sliding_window": SEGMENT + 18}
    case = PoisonedCase([1, 23, 1, 1], [SEGMENT + 28, 90, 10, 2 * SEGMENT + 60])
    alone = []
    for sequence in range(4):
        begin, end = case.query_starts[sequence : sequence + 2].tolist()
        out = torch.full_like(case.query[begin:end], float("nan"))
        starts = torch.tensor([0, end - begin], dtype=torch.int32, device=DEVICE)
        rows = slice(sequence, sequence + 1)
        caches = (case.key_cache, case.value_cache)
        tables = (case.block_tables[rows], case.seq_lens[rows], starts)
        paged_attention(out, case.query[begin:end], *caches, *tables, **case.options, **options)
        alone.append(out)
    for num_multiprocessors in (1, 7):
        pretend(monkeypatch, module, num_multiprocessors=num_multiprocessors)
        assert torch.equal(attend(case, **options), torch.cat(alone)), num_multiprocessors


@pytest.mark.usefixtures("short_segments")
def test_a_token_is_the_same_in_a_prompt_in_chunks_and_computed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: all tokens at once, against some as decode rows and some in chunks.

    The interpreter's products come from a BLAS that sums a row differently where it lies in another place of a tile.
    Here each row is summed as any other, as matrix units do.
    """
    if IS_INTERPRETED:
        monkeypatch.setattr(numpy, "matmul", lambda a, b, dtype: numpy.einsum("mk,kn->mn", a, b, dtype=dtype))
    num = SEGMENT + 92
    case = PoisonedCase([num], [0], num_heads=2, num_kv_heads=1)
    whole = attend(case)
    alone = [(p, p + 1) for p in (0, 15, 16, 63, SEGMENT - 1, SEGMENT, num - 1)]
    for first, last in [*alone, (0, 7), (7, 71), (num - 60, num)]:
        out = torch.empty_like(case.query[first:last])
        starts = torch.tensor([0, last - first], dtype=torch.int32, device=DEVICE)
        lens = torch.tensor([last], dtype=torch.int32, device=DEVICE)
        caches = (case.key_cache, case.value_cache)
        paged_attention(out, case.query[first:last], *caches, case.block_tables, lens, starts, **case.options)
        assert torch.equal(out, whole[first:last]), (first, last)


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize(("dtype", "window", "cap"), [(torch.float16, 0, 3.0), (torch.float32, SEGMENT + 18, 0.0)])
def test_a_token_is_the_same_in_segments_in_spans_and_whole(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, window: int, cap: float
) -> None:
    """Bit for bit: few tokens after a context, as prefix caching, chunks and speculation have them, against each alone
    and against the same without any line of scratch to be split into; in 16 bits as a card that multiplies out of
    registers has it, with segments that are joined in the loop over tiles and with a loop each."""
    if IS_INTERPRETED:
        monkeypatch.setattr(numpy, "matmul", lambda a, b, dtype: numpy.einsum("mk,kn->mn", a, b, dtype=dtype))
    pretend(monkeypatch, module, num_multiprocessors=7)
    query_len, context_len = 41, 2 * SPAN * SEGMENT + 30  # two tiles of 64 rows, the second one partly empty
    seq_len = query_len + context_len
    case = PoisonedCase([query_len], [context_len], num_heads=3, num_kv_heads=1, dtype=dtype)
    case.options |= {"sliding_window": window, "logit_soft_cap": cap}
    cut = tiling(32, dtype.itemsize, 3, 86, MAX_SHARED_BYTES[86])
    cut = dataclasses.replace(cut, key_tile=min(cut.key_tile, 32))  # several of a short segment
    case.options["cut"] = cut
    caches, found = (case.key_cache, case.value_cache), {}
    other = dataclasses.replace(cut, joins=not cut.joins)
    for name, lines in (("whole", 0), ("spans", 3 * query_len), ("segments", 6 * query_len), ("other", 0)):
        case.options["cut"] = other if name == "other" else cut
        scratch = new_scratch(1, seq_len, 3, 32, 200, case.query.device, lines)
        shared, out = scratch.new_pass(), torch.full_like(case.query, float("nan"))
        paged_attention(out, *case.arguments, **case.options, shared=shared)
        ((_, columns),) = shared.plans.items()
        found[name] = out
        if IS_INTERPRETED and not window:
            assert columns[PIECE.value].tolist() == [{"spans": SPAN, "segments": 1}.get(name, 0)]
    for name, out in found.items():
        assert torch.equal(out, found["whole"]), name
    for token in (0, 1, 20, 21, 22, query_len - 1):
        out = torch.empty_like(case.query[:1])
        lens = torch.tensor([context_len + token + 1], dtype=torch.int32, device=DEVICE)
        starts, options = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE), case.options | {"max_query_len": 1}
        of_step = (case.block_tables, lens, starts)
        paged_attention(out, case.query[token : token + 1], *caches, *of_step, **options)
        assert torch.equal(out[0], found["whole"][token]), token


@pytest.mark.usefixtures("short_segments")
def test_layers_share_a_plan_for_each_window_and_one_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    case = PoisonedCase([1, 9], [SEGMENT + 28, 90])
    shared = new_scratch(2, 200, 6, 32, 132, case.query.device).new_pass()
    for window in (0, 70, 0, 70):
        out = torch.full_like(case.query, float("nan"))
        paged_attention(out, *case.arguments, **case.options, sliding_window=window, shared=shared)
        assert torch.equal(out, attend(case, sliding_window=window))
    assert len(shared.plans) == 2
    for changed, message in (
        (new_scratch(2, 200, 6, 64, 132, case.query.device), "is not for 6 heads of 32"),
        (new_scratch(2, 200, 6, 32, 1, case.query.device), "is not for 3 multiprocessors"),
    ):
        if IS_INTERPRETED:
            with pytest.raises(ValueError, match=message):
                attend(case, shared=changed.new_pass())
    monkeypatch.setattr(attention_scratch, "FEW_LINES", 0)
    with pytest.raises(ValueError, match="these sequences may need 4"):
        small = new_scratch(1, 5, 6, 32, 132, case.query.device)
        attend(case, max_seq_len=3 * SPAN * SEGMENT // 2, shared=small.new_pass())


# No shrinking: hundreds of runs in the interpreter for an example that is small already.
@settings(
    max_examples=12,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # it is the same for all
)
@pytest.mark.usefixtures("short_segments")
@given(
    lens=st.lists(st.tuples(st.integers(1, 24), st.integers(0, 200)), min_size=1, max_size=3),
    group=st.sampled_from([1, 2, 3, 5]),
    num_kv_heads=st.integers(1, 2),
    block_size=st.sampled_from([8, 16, 48]),
    window=st.sampled_from([0, 0, 1, 5, 40, 64]),
    cap=st.sampled_from([0.0, 0.0, 0.5, 3.0]),
    has_slopes=st.booleans(),
    seed=st.integers(0, 99),
)
def test_masks_of_any_batch(
    lens: list[tuple[int, int]],
    group: int,
    num_kv_heads: int,
    block_size: int,
    window: int,
    cap: float,
    has_slopes: bool,
    seed: int,
) -> None:
    query_lens, context_lens = map(list, zip(*lens, strict=True))
    num_heads = group * num_kv_heads
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "block_size": block_size, "seed": seed}
    slopes = torch.rand(num_heads, generator=torch.Generator().manual_seed(seed)).to(DEVICE) if has_slopes else None
    case = PoisonedCase(query_lens, context_lens, **sizes)
    check(case, sliding_window=window, logit_soft_cap=cap, alibi_slopes=slopes)


def test_what_does_not_fit_is_refused() -> None:
    case = PoisonedCase([1], [5])
    for name, wrong, message in (
        ("query", case.query[..., :16], "does not fit"),
        ("value_cache", case.value_cache.half(), "no caches of"),
        ("value_cache", case.value_cache[:-1], "differ in shape"),
        ("seq_lens", case.seq_lens.long(), "seq_lens is torch.int64"),
        ("query_starts", case.query_starts[:1], "query_starts is torch.int32"),
    ):
        changed = PoisonedCase([1], [5])
        setattr(changed, name, wrong)
        with pytest.raises(ValueError, match=message):
            attend(changed)
    apart = [torch.zeros(len(cache), cache[0].numel() + 1) for cache in (case.key_cache, case.value_cache)]
    changed.key_cache, changed.value_cache = (
        lines.to(DEVICE)[:, :-1].unflatten(1, case.key_cache.shape[1:]) for lines in apart
    )
    changed.query_starts = case.query_starts
    with pytest.raises(ValueError, match="lines of 32 elements"):
        attend(changed)
    with pytest.raises(ValueError, match="heads of 264 elements are larger than 256"):
        attend(PoisonedCase([1], [5], head_size=264))
    with pytest.raises(ValueError, match="scale -1"):
        attend(case, scale=-1.0)
    with pytest.raises(ValueError, match="alibi_slopes"):
        attend(case, alibi_slopes=SLOPES[:5])


@pytest.mark.gpu
@pytest.mark.skipif(IS_INTERPRETED, reason="allocates 9 GB on a GPU")
def test_a_cache_beyond_32_bit_offsets() -> None:
    case = PoisonedCase([5, 1], [55, 40], num_heads=2, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    expected, num_blocks = attend(case), 1_100_000
    num_near = case.key_cache.shape[0]
    for name in ("key_cache", "value_cache"):
        far = torch.full((num_blocks, 2, 16, 64), float("nan"), dtype=torch.bfloat16, device=DEVICE)
        far[-num_near:] = getattr(case, name)
        setattr(case, name, far)
    case.block_tables += torch.where(case.block_tables < 2**30, num_blocks - num_near, 0).int()
    assert torch.equal(attend(case), expected)


@pytest.mark.gpu
@pytest.mark.skipif(IS_INTERPRETED, reason="captures a CUDA graph")
def test_a_captured_launch_follows_its_tensors() -> None:
    case = PoisonedCase([1] * 4, [900, 10, 33, 512], head_size=128, dtype=torch.bfloat16)
    longer = [case.seq_lens.clone(), torch.tensor([0, 11, 20, 3], dtype=torch.int32, device=DEVICE)]
    out = torch.full_like(case.query, float("nan"))
    options = {**case.options, "max_seq_len": 4096}
    paged_attention(out, *case.arguments, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention(out, *case.arguments, **options)
    for lens in longer:
        case.seq_lens.copy_(lens)
        out.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(out.double(), exact(case), rtol=1e-2, atol=1e-2)
