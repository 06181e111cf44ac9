"""Sampling kernels against their oracles: penalties, maxima, filters, draws, logprobs, where it is easy to be wrong.

Weights are exponentials, so a sum may round otherwise than the oracle's: what is drawn or kept must be what the oracle
says for a number, or a `top_p`, that differs from the given one by no more than `TOLERANCE` of the implementation.
"""

from __future__ import annotations

import math
import os
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import scipy
import torch

from kernels import cpu
from kernels.cpu.library import library
from kernels.gpu import operations as gpu
from kernels.oracles import reference
from kernels.oracles.reference import CHUNK_SIZE
from kernels.oracles.reference_sampling import philox4x32
from tests.kernels.device import DEVICE, IS_INTERPRETED

IMPLEMENTATIONS = [pytest.param((cpu, "cpu"), id="cpu"), pytest.param((gpu, DEVICE), id="triton")]
TOLERANCE = {cpu: 1e-12, gpu: 3e-6}
VOCAB_SIZE = 389  # prime, and more than one chunk


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> tuple[ModuleType, str]:
    """The operations, and the device that they run on."""
    return request.param


def is_slow(kernels: ModuleType) -> bool:
    """Whether a row takes some hundredths of a second: such tests have fewer of each kind."""
    return kernels is gpu and IS_INTERPRETED


def logits_of(num_rows: int, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> torch.Tensor:
    """Normal ones, with ties, with -inf, one row of a single token, one of equal ones."""
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    logits[1] = (logits[1] * 2).round() / 2
    logits[2, ::3] = -torch.inf
    logits[3, 1:] = -torch.inf
    logits[4] = -7.25
    return logits


class Rows:
    """Logits with everything that the kernels of a step want to know of them; off, unless given by row."""

    def __init__(self, logits: torch.Tensor, device: str, **given: Any) -> None:
        num_rows, vocab_size = logits.shape
        self.device, self.logits = device, logits
        self.maxima = torch.empty(num_rows, -(-vocab_size // CHUNK_SIZE))
        reference.chunk_maxima(self.maxima, logits)
        self.largest = self.maxima.amax(dim=-1)
        filled = {"temperature": 1.0, "min_p": 0.0, "top_k": 0, "top_p": 1.0} | given
        self.filters = [
            torch.as_tensor(filled[name], dtype=torch.int64 if name == "top_k" else torch.float32)
            .expand(num_rows)
            .contiguous()
            for name in filled
        ]

    @property
    def temperature(self) -> torch.Tensor:
        return self.filters[0]

    def smallest(self, kernels: ModuleType) -> torch.Tensor:
        """What `kept_range` says."""
        out = torch.full_like(self.largest, torch.nan)
        return run(kernels.kept_range, self.device, [out], self.logits, self.maxima, self.largest, *self.filters)[0]

    def draw(self, kernels: ModuleType, smallest: torch.Tensor, rows: Any, *counters: Any) -> torch.Tensor:
        """Tokens of samples with these seeds, indices and positions."""
        columns = [torch.as_tensor(column, dtype=torch.int64) for column in (rows, *counters)]
        of_rows = (self.logits, self.maxima, self.largest, smallest, self.temperature)
        out = torch.full_like(columns[0], -1)
        return run(kernels.draw_tokens, self.device, [out], *of_rows, *columns)[0]


def run(kernel: Any, device: str, out: list[torch.Tensor], *inputs: torch.Tensor) -> list[torch.Tensor]:
    """`kernel` on copies of everything on its device; what it leaves in `out`. Inputs must stay as they are."""
    there = [tensor.to(device).clone() for tensor in out]
    given = [tensor.to(device).clone() for tensor in inputs]
    kernel(*there, *given)
    for tensor, before in zip(given, inputs, strict=True):
        torch.testing.assert_close(tensor.cpu(), before, rtol=0, atol=0, equal_nan=True)
    return [tensor.cpu() for tensor in there]


def counters(num: int, seed: int = 0) -> list[np.ndarray]:
    """Seeds of all 64 bits, indices, positions."""
    numbers = np.random.default_rng(seed)
    return [numbers.integers(-(2**63), 2**63 - 1, num), numbers.integers(0, 9, num), numbers.integers(0, 1 << 40, num)]


# ---- Random numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known-answer test of Random123 (kat_vectors), philox4x32 10
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: Any, key: Any, expected: Any) -> None:
    assert philox4x32(counter, key) == expected


def test_uniforms_are_those_of_the_oracle(implementation: tuple[ModuleType, str]) -> None:
    kernels, device = implementation
    columns = [torch.from_numpy(column) for column in counters(101)]
    found = kernels.uniforms(*(column.to(device) for column in columns))
    assert found.cpu().tolist() == reference.uniforms(*columns).tolist()


def test_uniforms_are_uniform_and_independent_of_their_neighbours() -> None:
    seeds = np.arange(20) - 2**62
    seed, position = (torch.from_numpy(grid.ravel()) for grid in np.meshgrid(seeds, np.arange(2000)))
    numbers = cpu.uniforms(seed, torch.zeros_like(seed), position).numpy()
    assert numbers.min() >= 0 and numbers.max() < 1
    assert scipy.stats.kstest(numbers, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(numbers.reshape(2000, 20), rowvar=False) - np.eye(20)).max() < 0.1


# ---- Penalties ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [7, VOCAB_SIZE])
def test_penalties_of_some_rows(implementation: tuple[ModuleType, str], vocab_size: int) -> None:
    kernels, device = implementation
    logits = logits_of(6, vocab_size)
    counts = torch.randint(0, 6, (5, vocab_size), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    rows, count_rows = torch.tensor([5, 2, 0]), torch.tensor([1, 4, 4])
    penalties = [torch.tensor(each) for each in ([1.3, 0.7, 1.0], [0.4, 0.0, -0.3], [0.0, -1.1, 0.6])]
    expected = logits.clone()
    reference.penalize(expected, rows, counts, count_rows, *penalties)
    (found,) = run(kernels.penalize, device, [logits], rows, counts, count_rows, *penalties)
    assert torch.equal(found, expected) and torch.equal(found[[1, 3, 4]], logits[[1, 3, 4]])


# ---- Maxima ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [1, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, VOCAB_SIZE, 5003])
def test_maxima_of_chunks(implementation: tuple[ModuleType, str], vocab_size: int) -> None:
    kernels, device = implementation
    logits = logits_of(8, vocab_size)
    logits[5, vocab_size // 2] = torch.nan
    logits[6, -1], logits[7, 0] = torch.nan, torch.inf
    expected = torch.empty(8, -(-vocab_size // CHUNK_SIZE))
    reference.chunk_maxima(expected, logits)
    (found,) = run(kernels.chunk_maxima, device, [torch.full_like(expected, 9e9)], logits)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("vocab_size", [1, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, VOCAB_SIZE, 5003])
@pytest.mark.parametrize("num_rows", [1, 9])
def test_the_most_likely_token_is_the_first_of_the_largest_logits(
    implementation: tuple[ModuleType, str], vocab_size: int, num_rows: int
) -> None:
    """As its own loop finds it; what has no finite maximum is 0, wherever in the row that shows."""
    kernels, device = implementation
    logits = logits_of(9, vocab_size)
    logits[5, vocab_size // 2] = torch.nan
    logits[6, -1], logits[7, 0], logits[8] = torch.nan, torch.inf, -torch.inf
    for first in range(0, 9, num_rows):
        rows = logits[first : first + num_rows]
        out = [torch.full((num_rows,), 99), torch.full((num_rows,), 9e9)]
        token_ids, largest = run(kernels.most_likely, device, out, rows)
        torch.testing.assert_close(largest, rows.amax(dim=1), rtol=0, atol=0, equal_nan=True)
        finite = [row.tolist() if row.max().isfinite() else [0.0] for row in rows]
        assert token_ids.tolist() == [row.index(max(row)) for row in finite]


def test_the_last_token_of_a_short_chunk_can_be_the_most_likely(implementation: tuple[ModuleType, str]) -> None:
    kernels, device = implementation
    logits = torch.zeros(2, CHUNK_SIZE + 3)
    logits[0, -1], logits[1, -3:] = 1.0, 2.0
    token_ids, largest = run(kernels.most_likely, device, [torch.zeros(2, dtype=torch.int64), torch.zeros(2)], logits)
    assert (token_ids.tolist(), largest.tolist()) == ([CHUNK_SIZE + 2, CHUNK_SIZE], [1.0, 2.0])


# ---- Filters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("min_p", [1.0, 0.1, 1e-9])
def test_min_p(implementation: tuple[ModuleType, str], temperature: float, min_p: float) -> None:
    kernels, device = implementation
    rows = Rows(logits_of(6), device, temperature=temperature, min_p=min_p)
    assert torch.equal(rows.smallest(kernels), rows.smallest(reference))


@pytest.mark.parametrize("vocab_size", [5, VOCAB_SIZE, 2053])
def test_top_k(implementation: tuple[ModuleType, str], vocab_size: int) -> None:
    kernels, device = implementation
    all_k = [1, 2, 5, 6, 7, 33, 64, 65, 200, 388, 389, 390, 2052, 2**40]
    if is_slow(kernels):
        all_k = [1, 5, 33, 64, 65, vocab_size - 1, vocab_size, 2**40]
    rows = Rows(logits_of(len(all_k), vocab_size), device, top_k=all_k)
    assert torch.equal(rows.smallest(kernels), rows.smallest(reference))
    backwards = Rows(logits_of(len(all_k), vocab_size, seed=1).sort().values, device, top_k=all_k[::-1])
    assert torch.equal(backwards.smallest(kernels), backwards.smallest(reference))


def is_top_p(logits: torch.Tensor, found: float, temperature: float, bound: float, top_p: float, most: float) -> bool:
    """Whether `found` is what keeps a weight of `top_p`, or of another that differs by `most` at the most."""
    x = logits.double()
    weights = ((x - x.max()) / float(np.float32(temperature))).exp().masked_fill(logits < bound, 0)
    total = float(weights.sum())
    before, below = float(weights[logits > found].sum()) / total, float(weights[logits >= found].sum()) / total
    is_last = found == float(logits[weights > 0].min())
    return before < top_p + most and (is_last or below >= top_p - most) and found in logits.tolist()


@pytest.mark.parametrize("temperature", [0.4, 1.0, 30.0])
def test_top_p(implementation: tuple[ModuleType, str], temperature: float) -> None:
    kernels, device = implementation
    tolerance = TOLERANCE[kernels]
    every_p: tuple[float, ...] = (0.0, 1e-30, 0.01, 0.3, 0.5, 0.8, 0.9, 0.99, 0.999999)
    if is_slow(kernels):
        every_p = (0.0, 0.5) if temperature == 1 else (0.5, 0.9)
    all_p = [float(np.float32(p)) for p in every_p]
    logits = logits_of(5).repeat_interleave(len(all_p), dim=0)
    rows = Rows(logits, device, temperature=temperature, top_p=all_p * 5)
    for row, (found, top_p) in enumerate(zip(rows.smallest(kernels).tolist(), all_p * 5, strict=True)):
        assert is_top_p(logits[row], found, temperature, -math.inf, top_p, tolerance), (row, top_p)


def test_top_p_of_flat_distributions(implementation: tuple[ModuleType, str]) -> None:
    """Where most tokens matter: equal ones, narrow ones, and such as lie at whole nats but for rounding."""
    kernels, device = implementation
    vocab_size, temperature, top_p = 9001, 0.7, float(np.float32(0.85))
    numbers = torch.Generator().manual_seed(8)
    logits = torch.randn(6, vocab_size, generator=numbers) * torch.tensor([[0.0], [0.01], [0.5], [1.0], [2.0], [3.0]])
    logits[5] = -torch.randint(0, 12, (vocab_size,), generator=numbers) * temperature
    logits[5, ::2] = logits[5, ::2].nextafter(torch.tensor(-torch.inf))
    rows = Rows(logits, device, temperature=temperature, top_p=top_p)
    for row, found in enumerate(rows.smallest(kernels).tolist()):
        assert is_top_p(logits[row], found, temperature, -math.inf, top_p, TOLERANCE[kernels]), row


def test_all_filters_and_rows_that_need_none(implementation: tuple[ModuleType, str]) -> None:
    kernels, device = implementation
    numbers = torch.Generator().manual_seed(3)
    size = 24 if is_slow(kernels) else 60
    given: dict[str, torch.Tensor] = {
        "temperature": torch.rand(size, generator=numbers) + 0.3,
        "min_p": torch.rand(size, generator=numbers) * 0.05 * (torch.rand(size, generator=numbers) < 0.5),
        "top_k": torch.randint(1, 500, (size,), generator=numbers) * (torch.rand(size, generator=numbers) < 0.6),
        "top_p": (torch.rand(size, generator=numbers) * 2).clamp_max(1),
    }
    logits = logits_of(size, seed=5)
    given["temperature"][10], logits[11, 3], logits[12, 300], logits[13] = 0.0, torch.nan, torch.inf, -torch.inf
    rows = Rows(logits, device, **given)
    expected, found = rows.smallest(reference), rows.smallest(kernels)
    assert torch.equal(found, expected)
    assert found[10:14].isneginf().all() and found.isfinite().sum() > size // 2
    for part in (slice(0, 1), slice(20, 27)):  # alone and in another batch
        fewer = Rows(logits[part], device, **{name: values[part] for name, values in given.items()})
        assert torch.equal(fewer.smallest(kernels), found[part])


def test_ties_with_the_last_kept_token_are_kept(implementation: tuple[ModuleType, str]) -> None:
    kernels, device = implementation
    logits = torch.tensor([[1.0, 3.0, 1.0, 1.0, -9.0]])
    assert Rows(logits, device, top_k=2).smallest(kernels).tolist() == [1.0]
    assert Rows(logits, device, top_p=0.8).smallest(kernels).tolist() == [1.0]
    assert Rows(logits, device, top_k=2, top_p=0.95).smallest(kernels).tolist() == [1.0]
    assert Rows(logits, device, top_k=2, top_p=0.7).smallest(kernels).tolist() == [3.0]


def test_threads_change_nothing() -> None:
    """So many logits that rows are divided among threads."""
    size, vocab_size = 90, 1500
    numbers = torch.Generator().manual_seed(9)
    logits = torch.randn(size, vocab_size, generator=numbers) * 3
    rows = Rows(logits, "cpu", top_k=[*range(size)], top_p=torch.rand(size, generator=numbers), min_p=0.001)
    before, found = torch.get_num_threads(), []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        smallest, of_rows = rows.smallest(cpu), np.arange(size).repeat(2)
        found.append([smallest, rows.draw(cpu, smallest, of_rows, *counters(2 * size))])
    torch.set_num_threads(before)
    assert all(torch.equal(alone, together) for alone, together in zip(*found, strict=True))


# ---- Draws ----------------------------------------------------------------------------------------------------------


def assert_drawn(rows: Rows, smallest: torch.Tensor, drawn: torch.Tensor, of: Any, columns: Any, most: float) -> None:
    """Every token is the one of its number, or of one that differs by `most` at the most, and is kept."""
    numbers = reference.uniforms(*(torch.as_tensor(column) for column in columns))
    for token_id, row, number in zip(drawn.tolist(), of, numbers.tolist(), strict=True):
        x = rows.logits[row]
        weights = ((x.double() - rows.largest[row]) / rows.temperature[row].double()).exp()
        sums = weights.masked_fill_(x < smallest[row], 0).cumsum(0)
        assert weights[token_id] > 0
        above, below = (
            float(sums[token_id]) / float(sums[-1]),
            float(sums[token_id] - weights[token_id]) / float(sums[-1]),
        )
        assert below - most <= number < above + most


@pytest.mark.parametrize("vocab_size", [6, CHUNK_SIZE, VOCAB_SIZE])
def test_draws_invert_the_distribution(implementation: tuple[ModuleType, str], vocab_size: int) -> None:
    kernels, device = implementation
    logits = logits_of(9, vocab_size)
    rows = Rows(logits, device, temperature=[1.0, 0.5, 2.0, 1.0, 1.0, 1e-3, 30.0, 0.9, 1.1])
    smallest = torch.full((9,), -torch.inf)
    smallest[7:] = logits[7:].sort(descending=True).values[:, 3]
    num_draws = 4 if is_slow(kernels) else 7
    of = np.arange(9).repeat(num_draws)
    columns = counters(of.size)
    drawn = rows.draw(kernels, smallest, of, *columns)
    assert_drawn(rows, smallest, drawn, of, columns, TOLERANCE[kernels])
    alone = Rows(logits[6:7], device, temperature=30.0)
    part = slice(6 * num_draws, 7 * num_draws)
    of_row = [column[part] for column in columns]
    assert torch.equal(alone.draw(kernels, smallest[6:7], np.zeros(num_draws, np.int64), *of_row), drawn[part])


def test_greedy_draws_and_rows_without_a_finite_maximum(implementation: tuple[ModuleType, str]) -> None:
    kernels, device = implementation
    logits = logits_of(9)
    logits[5] = -torch.inf
    logits[5, [130, 131, 388]] = -3.0  # ties: the lowest
    logits[6, 200], logits[7, 5], logits[8] = torch.nan, torch.inf, -torch.inf
    rows = Rows(logits, device, temperature=[0.0] * 8 + [1.0])
    drawn = rows.draw(kernels, torch.full((9,), -torch.inf), np.arange(9), *counters(9))
    assert drawn.tolist() == [*logits[:5].argmax(dim=-1).tolist(), 130, 0, 0, 0]


def test_draws_follow_the_distribution(implementation: tuple[ModuleType, str]) -> None:
    kernels, device = implementation
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5, -torch.inf, 1.5, -3.0]])
    size = 120 if is_slow(kernels) else 20_000
    rows = Rows(logits, device, temperature=0.7)
    drawn = rows.draw(kernels, torch.tensor([-2.0]), np.zeros(size, np.int64), *counters(size))
    expected = torch.softmax((logits[0] / 0.7).double().masked_fill(logits[0] < -2, -torch.inf), dim=-1).numpy() * size
    observed = np.bincount(drawn.numpy(), minlength=8)
    assert observed[expected == 0].sum() == 0
    assert scipy.stats.chisquare(observed[expected > 0], expected[expected > 0]).pvalue > 1e-3


# ---- Logprobs -------------------------------------------------------------------------------------------------------


def test_logprobs_and_ranks_of_given_tokens(implementation: tuple[ModuleType, str]) -> None:
    kernels, device = implementation
    logits = logits_of(8)
    logits[5, 17], logits[6] = torch.nan, -torch.inf
    logits[7] += 1e4
    rows = torch.tensor([7, 0, 0, 1, 2, 3, 4, 5, 6])
    token_ids = torch.tensor([388, 0, 64, 128, 1, 0, 200, 3, 3])
    largest = Rows(logits, device).largest
    inputs = (logits, largest, rows, token_ids)
    out = [torch.full((9,), 7.0), torch.full((9,), -1), torch.full((9,), 7.0)]
    expected = run(reference.token_logprobs, "cpu", out, *inputs)
    logprobs, ranks, log_sums = run(kernels.token_logprobs, device, out, *inputs)
    assert ranks.tolist() == expected[1].tolist() and max(ranks.tolist()) > 100
    torch.testing.assert_close(logprobs, expected[0], rtol=0, atol=2e-6, equal_nan=True)
    torch.testing.assert_close(log_sums, expected[2], rtol=0, atol=2e-6, equal_nan=True)
    exact = torch.log_softmax(logits[rows].double(), dim=-1).gather(1, token_ids[:, None])[:, 0]
    torch.testing.assert_close(logprobs[:7], exact[:7].float(), rtol=1e-6, atol=2e-6)
    assert logprobs[7:].isnan().all() and ranks[7:].tolist() == [1, 1]


@pytest.mark.parametrize("k", [1, 2, 5, 20, 127, VOCAB_SIZE])
def test_top_logits_in_order_ties_by_token_id(implementation: tuple[ModuleType, str], k: int) -> None:
    kernels, device = implementation
    logits = logits_of(7)
    logits[5, 9] = torch.nan
    of = torch.tensor([4, 1, 2] if is_slow(kernels) and k == 127 else [6, 0, 1, 2, 2, 3, 4, 5])
    out = [torch.full((of.numel(), k), -1), torch.full((of.numel(), k), 9e9)]
    inputs = (logits, Rows(logits, device).maxima, of)
    expected = run(reference.top_logits, "cpu", out, *inputs)
    token_ids, values = run(kernels.top_logits, device, out, *inputs)
    assert torch.equal(token_ids, expected[0])
    torch.testing.assert_close(values, expected[1], rtol=0, atol=0, equal_nan=True)


def test_no_top_logits_are_had_without_a_look_at_any() -> None:
    """In a child: it would end where it reads."""
    of_zero = [0] * 5 + [2, 0, 1000, 1]  # nothing is where the addresses say; two samples
    library().top_logits(*of_zero[:5], 0, *of_zero[6:])  # loaded, and right for none
    if (child := os.fork()) == 0:
        library().top_logits(*of_zero)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_what_does_not_fit_is_refused() -> None:
    """By the CPU's kernels, which would read and write what lies there; those for GPUs: test_sampling_chain.py."""
    logits, maxima, column = torch.zeros(2, 100), torch.zeros(2, 2), torch.zeros(2)
    rows = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"contiguous torch.float32 \(2, 2\) here, not torch.float32 \(2, 1\)"):
        cpu.chunk_maxima(torch.zeros(2, 1), logits)
    with pytest.raises(ValueError, match=r"contiguous torch.float32 \(2, 100\) here, .* with strides \(1, 2\)"):
        cpu.most_likely(rows[:2], column, torch.zeros(100, 2).T)
    with pytest.raises(ValueError, match=r"contiguous torch.int64 \(2,\) here, not torch.int64 \(3,\)"):
        cpu.kept_range(column, logits, maxima, column, column, column, rows, column)
    with pytest.raises(ValueError, match=r"contiguous torch\.int64 \(3,\) here, not torch\.int32"):
        cpu.draw_tokens(rows, logits, maxima, column, column, column, rows, rows.int(), rows, rows)
    with pytest.raises(ValueError, match="101 tokens asked for, of a vocabulary of 100"):
        cpu.top_logits(torch.zeros(3, 101, dtype=torch.int64), torch.zeros(3, 101), logits, maxima, rows)
