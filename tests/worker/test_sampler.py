"""Draws: known answers of the generator, distributions, independence of the batch; filters and logprobs by oracles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kernels import cpu
from kernels.cpu import kept_range, top_logits
from worker_svc.mirror.sampling_columns import SamplingRows
from worker_svc.sampling.row_maxima import RowMaxima
from worker_svc.sampling.sampled import Sampled
from worker_svc.sampling.sampler import Draws, sample

OFF: dict[str, Any] = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, logprobs=None)


def params_of(rows: list[dict[str, Any]]) -> SamplingRows:
    filled = [{**OFF, **row} for row in rows]

    def column(name: str, dtype: Any) -> Any:
        return np.array([row[name] for row in filled], dtype)

    return SamplingRows(
        temperature=column("temperature", np.float32),
        top_k=column("top_k", np.int64),
        top_p=column("top_p", np.float32),
        min_p=column("min_p", np.float32),
        seed=column("seed", np.uint64),
        wants_logprobs=np.array([row["logprobs"] is not None for row in filled]),
        num_logprobs=np.array([row["logprobs"] or 0 for row in filled], np.int32),
    )


def draws_of(positions: Any, rows: Any = None, index: Any = None) -> Draws:
    positions = np.asarray(positions, np.int64)
    return Draws(
        rows=np.arange(positions.size) if rows is None else np.asarray(rows),
        sequence_index=np.zeros(positions.size, np.int64) if index is None else np.asarray(index),
        position=positions,
    )


def sample_one(logits: torch.Tensor, position: int = 0, **params: Any) -> Sampled:
    return sample(logits[None], params_of([params]), draws_of([position]))


# ---- Draws ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -torch.inf, 1.5])
    num_draws = 20_000
    params = params_of([dict(temperature=temperature, seed=5)])
    drawn = sample(logits[None], params, draws_of(np.arange(num_draws), rows=np.zeros(num_draws, np.int64))).token_ids
    expected = torch.softmax(logits.double() / temperature, dim=-1).numpy() * num_draws
    observed = np.bincount(drawn, minlength=7)
    possible = expected > 0
    assert observed[~possible].sum() == 0
    assert scipy.stats.chisquare(observed[possible], expected[possible]).pvalue > 1e-3


def test_draw_is_the_same_alone_and_in_a_full_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(256, 1031, generator=generator) * 3
    random = np.random.default_rng(0)
    rows = [
        dict(
            temperature=float(random.choice([0.0, 0.5, 1.0, 1.7])),
            top_k=int(random.choice([0, 1, 40, 5000])),
            top_p=float(random.choice([1.0, 0.9, 0.3])),
            min_p=float(random.choice([0.0, 0.05])),
            seed=int(random.integers(2**63)),
            logprobs=[None, 0, 3][random.integers(3)],
        )
        for _ in range(256)
    ]
    positions, index = random.integers(0, 8192, 256), random.integers(0, 8, 256)
    together = sample(logits, params_of(rows), draws_of(positions, index=index))
    order = random.permutation(256)
    shuffled = sample(
        logits[order], params_of([rows[i] for i in order]), draws_of(positions[order], index=index[order])
    )
    assert (shuffled.token_ids == together.token_ids[order]).all()
    for row in range(256):
        draws = draws_of(positions[row : row + 1], index=index[row : row + 1])
        alone = sample(logits[row : row + 1], params_of(rows[row : row + 1]), draws)
        assert alone.token_ids[0] == together.token_ids[row]
        if alone.logprobs is not None and rows[row]["logprobs"] is not None:
            assert together.logprobs is not None
            assert alone.logprobs.drawn[0] == together.logprobs.drawn[row]
            assert alone.logprobs.ranks[0] == together.logprobs.ranks[row]


def test_several_samples_of_one_row_are_those_of_one_row_each() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    rows: list[dict[str, Any]] = [dict(seed=1), dict(seed=2), dict(temperature=0.0)]
    several = sample(logits, params_of(rows), draws_of([7, 9, 9, 9, 4], rows=[0, 1, 1, 1, 2], index=[0, 0, 1, 2, 0]))
    single = [
        sample(logits[row : row + 1], params_of([rows[row]]), draws_of([position], index=[index])).token_ids[0]
        for row, position, index in [(0, 7, 0), (1, 9, 0), (1, 9, 1), (1, 9, 2), (2, 4, 0)]
    ]
    assert several.token_ids.tolist() == single


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    logits = torch.tensor([[0.0, 4.0, 4.0, 1.0], [7.0, 7.0, 7.0, 7.0], [-torch.inf, -3.0, -torch.inf, -3.0]])
    drawn = sample(logits, params_of([dict(temperature=0.0)] * 3), draws_of([0, 0, 0]))
    assert drawn.token_ids.tolist() == [1, 0, 1]
    assert drawn.logprobs is None and drawn.bad_rows.size == 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_without_finite_maximum_touches_no_other(bad: float, temperature: float) -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(2))
    rows = [dict(temperature=temperature, seed=seed, top_p=0.9, logprobs=2) for seed in range(3)]
    good = sample(logits, params_of(rows), draws_of([1, 2, 3]))
    logits[1, 7] = bad
    mixed = sample(logits, params_of(rows), draws_of([1, 2, 3]))
    assert mixed.bad_rows.tolist() == [1]
    assert mixed.token_ids[[0, 2]].tolist() == good.token_ids[[0, 2]].tolist()
    assert mixed.logprobs is not None and good.logprobs is not None
    assert mixed.logprobs.top_counts.tolist() == [2, 0, 2]
    assert mixed.logprobs.drawn[[0, 2]].tolist() == good.logprobs.drawn[[0, 2]].tolist()
    logits[1] = -torch.inf
    assert sample(logits, params_of(rows), draws_of([1, 2, 3])).bad_rows.tolist() == [1]


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_row_whose_own_logits_are_not_finite_where_none_is_drawn_has_no_logprobs_to_tell(bad: float) -> None:
    raw = torch.randn(3, 40, generator=torch.Generator().manual_seed(2))
    raw[1, 7] = bad
    adjusted = raw.clone()
    adjusted[1, 7] = -torch.inf  # a token that the request forbids
    rows = [dict(temperature=0.8, seed=seed, logprobs=asked) for seed, asked in enumerate([2, 2, None])]
    sampled = sample(adjusted, params_of(rows), draws_of([1, 2, 3]), raw)
    assert sampled.bad_rows.tolist() == [1] and not sampled.emptied_rows.size
    assert sampled.logprobs is not None and sampled.logprobs.top_counts.tolist() == [2, 0, 0]
    assert np.isfinite(sampled.logprobs.drawn[[0, 2]]).all()


# ---- Filters --------------------------------------------------------------------------------------------------------


def kept_by_octavo(logits: torch.Tensor, **params: Any) -> torch.Tensor:
    rows, maxima = params_of([params] * len(logits)), RowMaxima.of(logits)
    smallest = torch.empty(len(logits))
    columns = (torch.from_numpy(column) for column in (rows.temperature, rows.min_p, rows.top_k, rows.top_p))
    kept_range(smallest, logits, maxima.of_chunks, maxima.largest, *columns)
    return logits >= smallest[:, None]


def kept_by_transformers(logits: torch.Tensor, *processors: Any) -> torch.Tensor:
    for processor in processors:
        logits = processor(torch.zeros(len(logits), 1, dtype=torch.long), logits)
    return logits > -torch.inf


@pytest.mark.parametrize(
    ("params", "processors"),
    [
        (dict(top_k=1), [TopKLogitsWarper(1)]),
        (dict(top_k=17), [TopKLogitsWarper(17)]),
        (dict(top_p=0.01), [TopPLogitsWarper(0.01)]),
        (dict(top_p=0.6), [TopPLogitsWarper(0.6)]),
        (dict(top_p=0.99), [TopPLogitsWarper(0.99)]),
        (dict(min_p=0.03), [MinPLogitsWarper(0.03)]),
        (dict(min_p=1.0), [MinPLogitsWarper(1.0)]),
        (dict(temperature=0.4, min_p=0.1), [TemperatureLogitsWarper(0.4), MinPLogitsWarper(0.1)]),
        (dict(temperature=1.8, top_p=0.8), [TemperatureLogitsWarper(1.8), TopPLogitsWarper(0.8)]),
        (
            dict(temperature=1.5, min_p=0.01, top_k=30, top_p=0.7),
            [TemperatureLogitsWarper(1.5), MinPLogitsWarper(0.01), TopKLogitsWarper(30), TopPLogitsWarper(0.7)],
        ),
    ],
)
def test_filters_keep_what_transformers_keeps(params: dict[str, Any], processors: list[Any]) -> None:
    # float64 for the oracle, so that sums near a border round as ours do.
    logits = torch.randn(40, 1031, generator=torch.Generator().manual_seed(3)) * 2.5
    assert torch.equal(kept_by_octavo(logits, **params), kept_by_transformers(logits.double(), *processors))


def test_filtered_draws_follow_the_renormalised_distribution() -> None:
    logits = torch.tensor([3.0, 2.5, 2.0, 1.0, 0.0, -1.0, -2.0])
    num_draws = 20_000
    params = params_of([dict(temperature=1.2, top_k=5, top_p=0.9, min_p=0.02, seed=9)])
    drawn = sample(logits[None], params, draws_of(np.arange(num_draws), rows=np.zeros(num_draws, np.int64))).token_ids
    processors = [TemperatureLogitsWarper(1.2), MinPLogitsWarper(0.02), TopKLogitsWarper(5), TopPLogitsWarper(0.9)]
    scores = logits[None].double()
    for processor in processors:
        scores = processor(torch.zeros(1, 1, dtype=torch.long), scores)
    expected = torch.softmax(scores[0], dim=-1).numpy() * num_draws
    observed = np.bincount(drawn, minlength=7)
    assert observed[expected == 0].sum() == 0 and (expected > 0).sum() > 1
    assert scipy.stats.chisquare(observed[expected > 0], expected[expected > 0]).pvalue > 1e-3


def test_ties_with_the_last_kept_token_are_kept() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 1.0, -9.0]])
    assert kept_by_octavo(logits, top_k=2).tolist() == [[True, True, True, True, False]]
    assert kept_by_octavo(logits, top_p=0.8).tolist() == [[True, True, True, True, False]]


# ---- Logprobs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_logprobs_are_those_of_the_raw_logits(temperature: float) -> None:
    logits = torch.randn(7, 1031, generator=torch.Generator().manual_seed(4)) * 4
    rows = [
        dict(temperature=temperature, top_k=3, seed=row, logprobs=asked)
        for row, asked in enumerate([5, 0, None, 20, -1, 65, 3])
    ]
    sampled = sample(logits, params_of(rows), draws_of(range(7)))
    found = sampled.logprobs
    assert found is not None
    assert found.top_counts.tolist() == [5, 0, 0, 20, 1031, 65, 3]
    exact = torch.log_softmax(logits.double(), dim=-1).numpy()
    start = 0
    for row, count in enumerate(found.top_counts.tolist()):
        if rows[row]["logprobs"] is None:
            assert found.drawn[row] == 0 and found.ranks[row] == 0
            continue
        token = sampled.token_ids[row]
        assert abs(found.drawn[row] - exact[row, token]) < 1e-5
        assert found.ranks[row] == 1 + (exact[row] > exact[row, token]).sum()
        best = np.argsort(-exact[row], kind="stable")[:count]
        assert found.top_token_ids[start : start + count].tolist() == best.tolist()
        assert np.abs(found.top_logprobs[start : start + count] - exact[row, best]).max(initial=0) < 1e-5
        start += count


def test_who_asks_for_the_whole_vocabulary_has_nobody_else_wait_for_more_than_it_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes: list[tuple[int, ...]] = []

    def noted(token_ids: torch.Tensor, *arguments: torch.Tensor) -> None:
        shapes.append(tuple(token_ids.shape))
        top_logits(token_ids, *arguments)

    monkeypatch.setattr(cpu, "top_logits", noted)
    logits = torch.randn(32, 500, generator=torch.Generator().manual_seed(4))
    rows = [dict(temperature=0.0, seed=1, logprobs=-1 if row == 7 else 1) for row in range(32)]
    sampled = sample(logits, params_of(rows), draws_of(range(32)))
    assert sampled.logprobs is not None and sampled.logprobs.top_counts.sum() == 531
    assert shapes == [(31, 1), (1, 500)]


def test_top_logprobs_name_equal_tokens_by_id() -> None:
    logits = torch.tensor([2.0, 5.0, 5.0, 2.0, 5.0, 2.0])
    sampled = sample_one(logits, temperature=0.0, logprobs=4)
    assert sampled.logprobs is not None
    assert sampled.token_ids.tolist() == [1] and sampled.logprobs.ranks.tolist() == [1]
    assert sampled.logprobs.top_token_ids.tolist() == [1, 2, 4, 0]
