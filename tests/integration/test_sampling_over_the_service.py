"""Draws and logprobs from client to sampler and back: seeds decide, neighbours do not, and chances are right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy
import torch

from octavo import LLM, SamplingParams
from octavo.models.resolve import resolve_model
from tests.many import trials, without_end
from tests.oracle import GreedyOracle
from tests.tiny_models import make_tiny_llama

pytestmark = pytest.mark.usefixtures("forked_workers")

PROMPT = list(b"The tide ")


@dataclass
class Served:
    llm: LLM
    oracle: GreedyOracle

    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
        outputs = self.llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def serve(folder: Path) -> Iterator[Served]:
    with LLM(model=str(folder), max_model_len=512) as llm:
        yield Served(llm, GreedyOracle(folder))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(make_tiny_llama(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Served]:
    yield from serve(resolve_model("smollm2-135m-instruct"))


@pytest.fixture(params=["tiny", pytest.param("smollm2", marks=pytest.mark.smollm2)])
def served(request: pytest.FixtureRequest) -> Served:
    return request.getfixturevalue(request.param)


def varied_params(count: int, max_tokens: int) -> list[SamplingParams]:
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7},
        {"top_k": 20},
        {"top_p": 0.9},
        {"min_p": 0.02},
        {"top_k": 50, "top_p": 0.8},
    ]
    return [
        SamplingParams(seed=number, max_tokens=max_tokens, ignore_eos=True, **kinds[number % len(kinds)])
        for number in range(count)
    ]


def test_seeded_requests_draw_the_same_alone_and_in_a_full_batch(served):
    params = varied_params(24, max_tokens=6)
    prompts = [PROMPT[: 1 + number % len(PROMPT)] * (1 + number % 5) for number in range(24)]
    together = served.generate(prompts, params)
    for number in range(0, 24, 7):
        assert served.generate([prompts[number]], [params[number]]) == [together[number]]
    assert served.generate(prompts[::-1], params[::-1]) == together[::-1]
    assert len({tuple(tokens) for tokens in together}) > 20, "seeds were meant to make a difference"


def test_a_request_without_a_seed_reports_one_that_repeats_it(tiny):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    first, second = tiny.llm.generate(prompt_token_ids=[PROMPT, PROMPT], sampling_params=params, use_tqdm=False)
    assert first.seed != second.seed and first.outputs[0].token_ids != second.outputs[0].token_ids
    again = SamplingParams(max_tokens=12, ignore_eos=True, seed=first.seed)
    assert tiny.generate([PROMPT], [again]) == [first.outputs[0].token_ids]


@without_end
@pytest.mark.parametrize("filters", [{}, {"temperature": 0.6}, {"top_k": 7}, {"top_p": 0.6}, {"min_p": 0.05}])
def test_draws_follow_the_distribution(tiny, filters):
    """Chi-squared over 1,000 seeds against probabilities from float64 logits of transformers."""
    count = trials(1000)
    params = [SamplingParams(seed=seed, max_tokens=1, **filters) for seed in range(count)]
    drawn = np.array(tiny.generate([PROMPT] * count, params))[:, 0]
    chances = expected_chances(tiny.oracle.logprobs(PROMPT)[-1].double(), **filters)
    assert not set(drawn) & set(np.flatnonzero(chances == 0)), "a token was drawn that the filters forbid"
    common = np.flatnonzero(chances * count >= 8)
    observed = np.array([*(np.sum(drawn == token) for token in common), 0])
    expected = np.array([*(chances[common] * count), 0])
    observed[-1], expected[-1] = count - observed.sum(), count - expected.sum()
    if expected[-1] < 8:
        observed, expected = observed[:-1], expected[:-1] * observed[:-1].sum() / expected[:-1].sum()
    assert len(common) > 4
    assert scipy.stats.chisquare(observed, expected).pvalue > 1e-4


def expected_chances(
    logprobs: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """One filter at a time, written down as its definition reads."""
    chances = torch.softmax(logprobs / temperature, -1)
    kept = chances >= min_p * chances.max()
    order = chances.argsort(descending=True)
    if top_k:
        kept[order[top_k:]] = False
    before = chances[order].cumsum(0) - chances[order]  # of all more likely tokens together
    kept[order[before >= top_p]] = False
    chances = torch.where(kept, chances, 0.0)
    return (chances / chances.sum()).numpy()


def test_logprobs_are_those_of_the_model(served):
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=8, logprobs=5, ignore_eos=True)
    (output,) = served.llm.generate(prompt_token_ids=[PROMPT], sampling_params=params, use_tqdm=False)
    completion = output.outputs[0]
    assert completion.logprobs is not None and len(completion.logprobs) == 8
    reference = served.oracle.logprobs([*PROMPT, *completion.token_ids])
    total = 0.0
    for position, (token_id, found) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        expected = reference[len(PROMPT) - 1 + position]
        drawn = found[token_id]
        assert next(iter(found)) == token_id
        assert drawn.logprob == pytest.approx(float(expected[token_id]), abs=1e-3)
        assert drawn.rank == 1 + int((expected > expected[token_id]).sum())
        best = expected.topk(5)
        ranked = sorted(found.items(), key=lambda item: item[1].rank)[:5]
        assert [top_id for top_id, _ in ranked] == best.indices.tolist()
        assert [entry.logprob for _, entry in ranked] == pytest.approx(best.values.tolist(), abs=1e-3)
        assert [entry.rank for _, entry in ranked] == [1, 2, 3, 4, 5]
        total += drawn.logprob
    assert completion.cumulative_logprob == pytest.approx(total)
