"""Greedy output equals that of transformers, token for token, however requests are batched, chunked or preempted.

Each way of scheduling is compared with a tiny model over all prompts; a real one, over some, alone and in chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.models.resolve import resolve_model
from scheduler_svc.text.tokenizer import Tokenizer
from tests.oracle import GreedyOracle
from tests.prompts import token_ids
from tests.tiny_models import make_tiny_llama

pytestmark = pytest.mark.usefixtures("forked_workers")

GIB = 1 << 30


@dataclass
class Case:
    """A model, its prompts, and what transformers says to each of them."""

    folder: Path
    oracle: GreedyOracle
    prompts: list[list[int]]
    expected: list[list[int]]
    max_tokens: int
    max_model_len: int
    block_bytes: int

    def check(self, outputs: list[list[int]], what: str) -> None:
        before = self.oracle.num_near_ties
        assert len(outputs) == len(self.prompts)
        for prompt, expected, got in zip(self.prompts, self.expected, outputs, strict=True):
            self.oracle.check(prompt, expected, got, f"{what}, prompt of {len(prompt)} tokens")
        print(f"{what}: {self.oracle.num_near_ties - before} of {len(outputs)} outputs left the oracle at a near-tie")


def make_case(folder: Path, max_tokens: int, longest: int, block_bytes: int, each: int = 1) -> Case:
    """Of every `each`-th prompt, from the first and shortest to the longest."""
    oracle = GreedyOracle(folder)
    prompts = token_ids(Tokenizer.from_folder(folder).encode, longest)
    assert len(prompts) == 24 and len(prompts[-1]) == longest and min(map(len, prompts)) == 1
    prompts = [*prompts[:-1:each], prompts[-1]]
    expected = [oracle.generate(prompt, max_tokens) for prompt in prompts]
    return Case(folder, oracle, prompts, expected, max_tokens, longest + max_tokens, block_bytes)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = make_tiny_llama(tmp_path_factory.mktemp("tiny"))
    return make_case(folder, max_tokens=24, longest=700, block_bytes=2 * 3 * 2 * 10 * 16 * 4)


@pytest.fixture(scope="module")
def smollm2() -> Case:
    folder = resolve_model("smollm2-135m-instruct")
    return make_case(folder, max_tokens=8, longest=256, block_bytes=2 * 30 * 3 * 64 * 16 * 4, each=6)


def engine(case: Case, **options: object) -> LLM:
    return LLM(model=str(case.folder), max_model_len=case.max_model_len, **options)


def ids(case: Case, llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=case.max_tokens)
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(("steps_in_flight", "each"), [(1, 4), (2, 1)])
def test_each_alone(tiny, steps_in_flight, each):
    """In lock-step every fourth, from the longest: when a step is sent does not depend on how long its prompt is."""
    some = replace(tiny, prompts=tiny.prompts[::-each], expected=tiny.expected[::-each])
    with engine(tiny, steps_in_flight=steps_in_flight) as llm:
        some.check([ids(tiny, llm, [prompt])[0] for prompt in some.prompts], "alone")


def test_all_at_once(tiny):
    with engine(tiny) as llm:
        tiny.check(ids(tiny, llm, tiny.prompts), "all at once")


def test_in_small_chunks(tiny):
    """Prompts are computed 48 tokens a step, beside up to 24 decodes."""
    with engine(tiny, max_num_batched_tokens=48, max_num_seqs=24) as llm:
        tiny.check(ids(tiny, llm, tiny.prompts), "in small chunks")
        assert llm.statistics()["num_steps"] > sum(map(len, tiny.prompts)) / 48


def test_in_a_cache_so_small_that_groups_are_preempted(tiny):
    blocks = -(-tiny.max_model_len // 16) + 2
    with engine(tiny, kv_cache_memory=blocks * tiny.block_bytes / GIB) as llm:
        tiny.check(ids(tiny, llm, tiny.prompts), "preempted")
        assert llm.statistics()["num_preempted"] > 0, "the cache was meant to be too small"


@pytest.mark.smollm2
def test_a_real_model_alone_and_in_chunks_beside_others(smollm2):
    """By one engine, as it takes seconds to load: of the prompts that run alone the longest are cut into chunks."""
    with engine(
        smollm2, max_num_batched_tokens=100, max_num_seqs=24, num_threads=2, enable_prefix_caching=False
    ) as llm:
        smollm2.check(ids(smollm2, llm, smollm2.prompts), "in chunks")
        assert llm.statistics()["num_steps"] > sum(map(len, smollm2.prompts)) / 100
        smollm2.check([ids(smollm2, llm, [prompt])[0] for prompt in smollm2.prompts], "alone")
