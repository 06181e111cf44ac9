"""A request whose logits are no numbers ends with an error of its own; those beside it do not notice."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from tests.oracle import GreedyOracle
from tests.tiny_models import make_tiny_llama

pytestmark = pytest.mark.usefixtures("forked_workers")

POISON = 777  # a token whose embedding is NaN: every token behind it in a prompt is, and nothing else


def test_a_row_of_nan_ends_its_request_and_nobody_elses(tmp_path: Path) -> None:
    oracle, numbers = GreedyOracle(make_tiny_llama(tmp_path / "healthy")), random.Random(2)
    healthy = [numbers.choices(range(256), k=length) for length in (3, 40, 90)]
    expected = [oracle.generate(prompt, 12) for prompt in healthy]
    folder = make_tiny_llama(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, folder / "model.safetensors")
    poisoned = [[POISON], [*healthy[1][:32], POISON, 5], [*healthy[2], POISON]]
    prompts = [prompt for pair in zip(healthy, poisoned, strict=True) for prompt in pair]
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM(model=str(folder), max_num_batched_tokens=48, max_num_seqs=8, max_model_len=128) as llm:
        for _ in range(2):  # the second time healthy prompts find what was cached, and no block of a poisoned one
            outputs = [
                each.outputs[0]
                for each in llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
            ]
            for output in outputs[1::2]:
                assert (output.finish_reason, list(output.token_ids)) == ("error", [])
                assert output.error is not None and "finite" in output.error
            for prompt, wanted, output in zip(healthy, expected, outputs[::2], strict=True):
                assert output.finish_reason in ("length", "stop")
                oracle.check(prompt, wanted, list(output.token_ids), f"prompt of {len(prompt)} tokens")
