"""Greedy tokens of every family over a served worker, prompts in chunks beside decodes: those of transformers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from tests.oracle import GreedyOracle
from tests.tiny_models import IM_END
from tests.worker.families import VOCAB_SIZE, make_family
from tests.worker.gguf_files import write_gguf

pytestmark = pytest.mark.usefixtures("forked_workers")

# One of each kind of step: experts, windows beside whole attention, learned positions, slopes, norms behind, latents.
# Llama is what all other tests serve; tests/worker/test_families.py has the logits of every family, also in chunks.
SERVED = ["mixtral", "gpt-oss", "gemma3", "gpt2", "bloom", "opt-behind", "deepseek-v3"]
MAX_TOKENS = 20


@pytest.mark.parametrize("name", SERVED)
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = make_family(name, tmp_path / "model")
    oracle, numbers = GreedyOracle(folder), random.Random(7)
    prompts = [numbers.choices(range(VOCAB_SIZE), k=length) for length in (1, 5, 40, 90, 150)]
    with LLM(model=str(folder), max_num_batched_tokens=32, max_num_seqs=8) as llm:
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
        (again,) = llm.generate(prompt_token_ids=prompts[-1:], sampling_params=params, use_tqdm=False)
    assert again.num_cached_tokens > 100 and again.outputs[0].token_ids == outputs[-1].outputs[0].token_ids
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = oracle.generate(prompt, MAX_TOKENS)
        oracle.check(prompt, expected, list(output.outputs[0].token_ids), f"{name}, prompt of {len(prompt)} tokens")
    print(f"{name}: {oracle.num_near_ties} of {len(prompts)} outputs left the oracle at a near-tie")


def test_a_gguf_file_gives_the_tokens_of_the_model_that_it_was_made_of(tmp_path: Path) -> None:
    folder = make_family("qwen3", tmp_path / "model")
    path = write_gguf(folder, tmp_path / "Tiny-Qwen3.gguf", "qwen3", token_ids={"eos": IM_END})
    oracle, numbers = GreedyOracle(folder), random.Random(7)
    prompts = [numbers.choices(range(256), k=length) for length in (1, 40, 90)]
    with LLM(model=str(path), max_num_batched_tokens=32, max_num_seqs=8) as llm:
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
        text = llm.generate("the quick fox", params, use_tqdm=False)[0]
        tokenizer = llm.get_tokenizer()
    for prompt, output in zip(prompts, outputs, strict=True):
        oracle.check(prompt, oracle.generate(prompt, MAX_TOKENS), list(output.outputs[0].token_ids), f"{len(prompt)}")
    assert text.outputs[0].text == tokenizer.decode(text.outputs[0].token_ids) and outputs[0].model == "tiny-qwen3"
