"""Logprobs of prompts are those of transformers, however the prompt is computed, and whoever is served beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, RequestOutput, SamplingParams
from tests.oracle import GreedyOracle
from tests.tiny_models import make_tiny_llama

pytestmark = pytest.mark.usefixtures("forked_workers")

TOLERANCE = 1e-3
TEXT = list(
    b"The tide comes in twice a day, and whoever builds on the sand below its line builds twice a day as well. "
)
PROMPTS = [(TEXT[start:] + TEXT)[:length] for start, length in ((0, 100), (0, 33), (7, 32), (3, 2), (5, 1), (11, 90))]
BLOCK_BYTES = 2 * 3 * 2 * 10 * 16 * 4  # of the tiny model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> GreedyOracle:
    return GreedyOracle(folder)


def generate(llm: LLM, params: SamplingParams, prompts: list[list[int]] = PROMPTS) -> list[RequestOutput]:
    return llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)


def check(oracle: GreedyOracle, output: RequestOutput, prompt: list[int], num_top: int) -> None:
    found = output.prompt_logprobs
    assert found is not None and len(found) == len(prompt) and found[0] is None
    reference = oracle.logprobs(prompt)
    for token_id, entry, expected in zip(prompt[1:], found[1:], reference, strict=False):
        assert entry is not None and next(iter(entry)) == token_id
        assert entry[token_id].logprob == pytest.approx(float(expected[token_id]), abs=TOLERANCE)
        _check_rank(entry[token_id].rank, expected, token_id)
        best = sorted(entry, key=lambda each: entry[each].rank)[:num_top]
        assert len(entry) - num_top in (0, 1) and [entry[each].rank for each in best] == list(range(1, num_top + 1))
        values = torch.tensor([entry[each].logprob for each in best])
        assert torch.allclose(values, expected[best], atol=TOLERANCE)
        assert torch.allclose(values, expected.topk(num_top).values, atol=TOLERANCE), "others are more likely"


def _check_rank(rank: int, expected: torch.Tensor, token_id: int) -> None:
    """Tokens that are as likely but for rounding may come before it or after it."""
    value = expected[token_id]
    surely, perhaps = int((expected > value + TOLERANCE).sum()), int((expected > value - TOLERANCE).sum())
    assert surely < rank <= perhaps


SCHEDULES: dict[str, dict[str, Any]] = {
    "whole prompts": {"enable_chunked_prefill": False},
    "chunks of three": {"max_num_batched_tokens": 3, "max_num_seqs": 2},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_gives_those_of_the_model(folder, oracle, schedule):
    with LLM(model=str(folder), max_model_len=200, **SCHEDULES[schedule]) as llm:
        plain = generate(llm, SamplingParams(temperature=0, max_tokens=4))
        for repetition in range(2):  # once with what others left in the prefix cache, once with all of it
            outputs = generate(llm, SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=repetition * 3))
            for prompt, output, without in zip(PROMPTS, outputs, plain, strict=True):
                check(oracle, output, prompt, num_top=repetition * 3)
                assert output.outputs[0].token_ids == without.outputs[0].token_ids and without.prompt_logprobs is None
                assert output.metrics.num_cached_tokens == 0


def test_what_is_computed_for_them_can_be_found_by_others(folder):
    with LLM(model=str(folder), max_model_len=200) as llm:
        (first,) = generate(llm, SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0), PROMPTS[:1])
        (second,) = generate(llm, SamplingParams(temperature=0, max_tokens=4), PROMPTS[:1])
    assert second.metrics.num_cached_tokens > 0
    assert second.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_they_come_once_where_groups_are_preempted(folder, oracle, mode):
    """Between those who asked and those who did not, in a cache for two of the long ones."""
    options = {"kv_cache_memory": 20 * BLOCK_BYTES / 2**30, "preemption_mode": mode, "max_num_batched_tokens": 24}
    if mode == "swap":
        options["swap_space"] = 64 * BLOCK_BYTES / 2**30
    params = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, prompt_logprobs=n % 3) for n in range(6)]
    params += [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)] * 6
    with LLM(model=str(folder), max_model_len=200, max_num_seqs=8, **options) as llm:
        outputs = llm.generate(prompt_token_ids=PROMPTS * 2, sampling_params=params, use_tqdm=False)
        assert llm.statistics()["num_preempted"] > 0, "the cache was meant to be too small"
    for number, prompt in enumerate(PROMPTS):
        check(oracle, outputs[number], prompt, num_top=number % 3)
        assert outputs[number].outputs[0].token_ids == outputs[number + 6].outputs[0].token_ids
        assert outputs[number + 6].prompt_logprobs is None


def test_several_outputs_and_beams_have_one_prompt(folder, oracle):
    with LLM(model=str(folder), max_model_len=200, max_num_batched_tokens=24, max_num_seqs=8) as llm:
        kinds = [
            SamplingParams(n=3, seed=1, max_tokens=4, prompt_logprobs=2),
            SamplingParams(n=1, best_of=3, seed=1, max_tokens=4, prompt_logprobs=2),
            SamplingParams(n=2, best_of=2, use_beam_search=True, temperature=0, max_tokens=4, prompt_logprobs=2),
        ]
        for params in kinds:
            for prompt, output in zip(PROMPTS, generate(llm, params), strict=True):
                check(oracle, output, prompt, num_top=2)
                assert len(output.outputs) == params.n


def test_the_whole_vocabulary_where_the_server_allows_it(folder, oracle):
    vocab_size = oracle.logprobs(TEXT[:1]).shape[-1]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)
    with LLM(model=str(folder), max_model_len=200, max_logprobs=-1) as llm:
        for prompt, output in zip(PROMPTS, generate(llm, params), strict=True):
            check(oracle, output, prompt, num_top=vocab_size)
            drawn = output.outputs[0]
            expected = oracle.logprobs([*prompt, *drawn.token_ids])[len(prompt) - 1 : -1]
            assert drawn.logprobs is not None and len(drawn.logprobs) == 2
            for entry, logprobs in zip(drawn.logprobs, expected, strict=True):
                assert sorted(entry) == list(range(vocab_size))
                values = torch.tensor([each.logprob for each in entry.values()])
                assert torch.allclose(values, logprobs[list(entry)], atol=TOLERANCE)
