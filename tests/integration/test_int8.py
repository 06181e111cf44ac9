"""`quantization="int8"` through the whole service: the same tokens in any batch, and what is said of the model."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from octavo import LLM, SamplingParams
from octavo.models.resolve import resolve_model
from octavo.shared.options import OptionError
from tests.tiny_models import make_tiny_llama
from tests.worker.model_cases import Stepper
from worker_svc.models.config import ModelConfig
from worker_svc.models.loader import load_model

pytestmark = pytest.mark.usefixtures("forked_workers")

SIZES = {"max_model_len": 256, "kv_cache_memory": 0.02}
TEXT = Path(__file__).parents[2] / "benchmarks" / "texts" / "alice.txt"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("OCTAVO_CACHE", str(folder))
    return folder / "quantized"


def test_tokens_are_the_same_alone_together_in_chunks_and_after_a_restart(tmp_path: Path, cache: Path) -> None:
    folder = make_tiny_llama(tmp_path / "model")
    numbers = random.Random(1)
    prompts = [numbers.choices(range(1000), k=length) for length in (1, 30, 90, 5)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    found = []
    for options in ({"num_threads": 2}, {"max_num_batched_tokens": 16, "max_num_seqs": 3, "num_threads": 1}):
        with LLM(str(folder), quantization="int8", **SIZES, **options) as llm:
            outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
            (alone,) = llm.generate(prompt_token_ids=prompts[2], sampling_params=params, use_tqdm=False)
            assert alone.outputs[0].token_ids == outputs[2].outputs[0].token_ids
            found.append([output.outputs[0].token_ids for output in outputs])
            assert llm._embedded.model.quantization == "int8"
        assert len(list(cache.iterdir())) == 1
    assert found[0] == found[1]


def test_what_cannot_be_quantised_says_so_in_a_line(tmp_path: Path, cache: Path) -> None:
    folder = make_tiny_llama(tmp_path / "model")
    with pytest.raises(OptionError, match="quantization: got 'int3'; 'int8' and 'int4' are for CPUs"):
        LLM(str(folder), quantization="int3")
    with pytest.raises(RuntimeError, match="int8 is for the families that Octavo computes itself"):
        LLM(str(folder), quantization="int8", model_impl="transformers", **SIZES)


@pytest.mark.smollm2
def test_perplexity_of_smollm2_rises_by_less_than_a_fiftieth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over 511 tokens, and nearly all of the most likely ones stay what they were."""
    folder = resolve_model("smollm2-135m-instruct")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    from tokenizers import Tokenizer

    token_ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT.read_text()).ids[:512]
    logits = []
    for quantization in ("", "int8"):
        config = ModelConfig.from_folder(folder, "float32", quantization=quantization)
        logits.append(Stepper(load_model(folder, config, "cpu"), [token_ids]).step({0: (0, 512)})[0])
    losses = [functional.cross_entropy(each[:-1], torch.tensor(token_ids[1:])) for each in logits]
    ratio = float((losses[1] - losses[0]).exp())
    assert 0.98 < ratio < 1.02 and ratio != 1
    assert float((logits[0].argmax(-1) == logits[1].argmax(-1)).float().mean()) > 0.92
