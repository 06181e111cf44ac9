"""Penalties, biases and forbidden words from client to sampler: greedy output equals that of `transformers`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from tests.oracle import GreedyOracle
from tests.tiny_models import IM_END, make_tiny_llama

pytestmark = pytest.mark.usefixtures("forked_workers")

PROMPTS = [list(b"The tide "), list(b"a"), list(b"one two one two one two ")]
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(model=str(folder), max_model_len=512) as llm:
        yield llm


@pytest.fixture(scope="module")
def oracle(folder: Path) -> GreedyOracle:
    return GreedyOracle(folder)


def generate(llm: LLM, **params: Any) -> list[list[int]]:
    params = {"temperature": 0, "max_tokens": MAX_TOKENS, **params}
    outputs = llm.generate(prompt_token_ids=PROMPTS, sampling_params=SamplingParams(**params), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_repetition_penalty(llm: LLM, oracle: GreedyOracle) -> None:
    ours = generate(llm, repetition_penalty=1.3)
    assert ours == [oracle.generate(prompt, MAX_TOKENS, repetition_penalty=1.3) for prompt in PROMPTS]
    assert ours != generate(llm)


def test_logit_bias_and_min_tokens(llm: LLM, oracle: GreedyOracle) -> None:
    """With a bias that makes the end token the best of all, only min_tokens holds it back."""
    bias = {IM_END: 30.0, 70: 2.0}
    options = {"sequence_bias": [[[token_id], value] for token_id, value in bias.items()]}
    for min_tokens in (0, 5):
        ours = generate(llm, logit_bias=bias, min_tokens=min_tokens)
        expected = [oracle.generate(prompt, MAX_TOKENS, min_new_tokens=min_tokens, **options) for prompt in PROMPTS]
        assert ours == expected and {len(tokens) for tokens in ours} == {min_tokens + 1}


def test_bad_words_of_one_and_of_several_tokens(llm: LLM, oracle: GreedyOracle) -> None:
    tokenizer = llm.get_tokenizer()
    plain = generate(llm)
    words = [text for tokens in plain if (text := tokenizer.decode(tokens[3:5])).isascii()]
    words += [text for token_id in plain[0][:8] if (text := tokenizer.decode([token_id])).isascii()]
    spellings = [*words, *(" " + word for word in words if not word[0].isspace())]
    word_ids = [tokenizer.encode(spelling, add_special_tokens=False) for spelling in dict.fromkeys(spellings)]
    ours = generate(llm, bad_words=words)
    assert ours == [oracle.generate(prompt, MAX_TOKENS, bad_words_ids=word_ids) for prompt in PROMPTS]
    assert ours != plain


def test_allowed_token_ids(llm: LLM) -> None:
    allowed = [65, 66, 200]
    assert {token_id for tokens in generate(llm, allowed_token_ids=allowed) for token_id in tokens} <= set(allowed)


def test_presence_and_frequency_penalties_are_of_what_was_generated(llm: LLM) -> None:
    """So large that no token comes twice, though the prompt's may."""
    for name in ("presence_penalty", "frequency_penalty"):
        ours = generate(llm, ignore_eos=True, **{name: 2.0})
        plain = generate(llm, ignore_eos=True)
        repeats = [len(tokens) - len(set(tokens)) for tokens in ours]
        assert sum(repeats) < sum(len(tokens) - len(set(tokens)) for tokens in plain)


def test_seeded_outputs_of_one_prompt_are_penalised_each_by_itself(llm: LLM) -> None:
    params: dict[str, Any] = {
        "temperature": 1.0,
        "seed": 4,
        "repetition_penalty": 1.5,
        "frequency_penalty": 1.0,
        "max_tokens": 24,
    }
    (together,) = llm.generate(
        prompt_token_ids=[PROMPTS[0]], sampling_params=SamplingParams(n=4, **params), use_tqdm=False
    )
    again = llm.generate(
        prompt_token_ids=[PROMPTS[0]] * 2, sampling_params=SamplingParams(n=4, **params), use_tqdm=False
    )
    for output in again:
        assert [one.token_ids for one in output.outputs] == [one.token_ids for one in together.outputs]
    (alone,) = llm.generate(prompt_token_ids=[PROMPTS[0]], sampling_params=SamplingParams(**params), use_tqdm=False)
    assert alone.outputs[0].token_ids == together.outputs[0].token_ids
    assert len({tuple(one.token_ids) for one in together.outputs}) == 4
