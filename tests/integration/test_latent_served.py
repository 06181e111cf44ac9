"""A model with latent attention over a served worker: greedy tokens where prompts share blocks of latents, and where
these are swapped out or computed again."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from tests.oracle import GreedyOracle
from tests.worker.families import VOCAB_SIZE, make_family

pytestmark = pytest.mark.usefixtures("forked_workers")

GIB = 1 << 30
BLOCK_BYTES = 16 * 3 * (24 + 10) * 4  # of 3 layers' latents of 24 and 10 turned elements, in float32
MAX_TOKENS = 30


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_sequences_and_shared_prefixes_go_on_as_transformers_has_them(mode: str, tmp_path: Path) -> None:
    folder = make_family("deepseek-v2", tmp_path / "model")
    oracle, numbers = GreedyOracle(folder), random.Random(11)
    shared = numbers.choices(range(VOCAB_SIZE), k=50)
    prompts = [shared + numbers.choices(range(VOCAB_SIZE), k=length) for length in (1, 9, 30, 41, 60, 77, 90)]
    memory = {"kv_cache_memory": 16.5 * BLOCK_BYTES / GIB, "swap_space": 64.5 * BLOCK_BYTES / GIB}
    options = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "preemption_mode": mode, **memory}
    with LLM(model=str(folder), **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
        assert llm.statistics()["num_preempted"] > 0, "the cache was meant to be too small"
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = oracle.generate(prompt, MAX_TOKENS, eos_token_id=None)
        oracle.check(prompt, expected, list(output.outputs[0].token_ids), f"{mode}, prompt of {len(prompt)} tokens")
    assert any(output.num_cached_tokens for output in outputs), "prefixes were meant to be shared"
