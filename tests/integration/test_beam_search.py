"""`LLM.beam_search`: the sequences that `transformers` finds, in the shape that scripts written for vLLM read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, BeamSearchOutput, BeamSearchParams, SamplingParams, TextPrompt, TokensPrompt
from tests.oracle import GreedyOracle
from tests.tiny_models import IM_END, make_tiny_llama

pytestmark = pytest.mark.usefixtures("forked_workers")

ENDS = [IM_END, *range(7, 1024, 16)]  # so many that some sequences end and others do not
PROMPTS = [list(b"Who rowed the boat?"), list(b"Is there bread?")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_llama(tmp_path_factory.mktemp("tiny"))
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": ENDS}))
    return folder


@pytest.fixture(scope="module")
def oracle(folder: Path) -> GreedyOracle:
    return GreedyOracle(folder)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), max_model_len=256, kv_cache_memory=0.02) as it:
        yield it


def search_of_transformers(oracle: GreedyOracle, prompt: list[int], params: BeamSearchParams) -> list[list[int]]:
    """The prompt with what follows it, best first."""
    with torch.inference_mode():
        rows = oracle._model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            do_sample=False,
        ).tolist()
    ends = [next((i + 1 for i in range(len(prompt), len(row)) if row[i] in ENDS), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


def test_the_sequences_are_those_of_transformers(llm: LLM, oracle: GreedyOracle) -> None:
    reasons = set()
    for width, penalty in ((1, 1.0), (2, 1.0), (4, 1.0), (4, 0.0), (4, 2.0)):
        params = BeamSearchParams(beam_width=width, max_tokens=12, length_penalty=penalty)
        found = llm.beam_search([TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS], params)
        for prompt, output in zip(PROMPTS, found, strict=True):
            assert [each.tokens for each in output.sequences] == search_of_transformers(oracle, prompt, params)
            check_sums(output, len(prompt))
            reasons |= {each.finish_reason for each in output.sequences}
    assert reasons == {"stop", "length"}


def check_sums(output: BeamSearchOutput, num_prompt_tokens: int) -> None:
    for each in output.sequences:
        generated = each.tokens[num_prompt_tokens:]
        logprobs = [position[token].logprob for position, token in zip(each.logprobs, generated, strict=True)]
        assert each.cum_logprob == pytest.approx(sum(logprobs), abs=1e-4)


def test_its_text_is_that_of_the_prompt_and_of_what_follows(llm: LLM) -> None:
    (found,) = llm.beam_search(TextPrompt(prompt="Is there bread?"), BeamSearchParams(2, 8, ignore_eos=True))
    for each in found.sequences:
        assert each.text == llm.get_tokenizer().decode(each.tokens) and each.text.startswith("Is there bread?")
        assert len(each.tokens) == len("Is there bread?") + 8
    best = llm.generate("Is there bread?", BeamSearchParams(2, 8, ignore_eos=True).sampling_params(), use_tqdm=False)
    assert [list(each.token_ids) for each in best[0].outputs] == [each.tokens[-8:] for each in found.sequences]


def test_a_prompt_that_is_too_long_ends_alone(llm: LLM) -> None:
    short, long = llm.beam_search(["Is there bread?", "x" * 300], BeamSearchParams(beam_width=2, max_tokens=4))
    assert [each.error for each in short.sequences] == [None, None]
    assert [each.finish_reason for each in long.sequences] == ["length", "length"]
    assert all("300" in (each.error or "") for each in long.sequences)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": 0.7}, "temperature: got 0.7; accepted: 0: a beam search draws nothing"),
        ({"beam_width": 0}, "beam_width: got 0; accepted: 1 to 128"),
        ({"beam_width": 129}, "beam_width: got 129; accepted: 1 to 128"),
        ({"beam_width": True}, "beam_width: got True"),
        ({"max_tokens": 0}, "max_tokens: got 0; accepted: at least 1"),
        ({"length_penalty": 200.0}, "length_penalty: got 200.0"),
    ],
    ids=str,
)
def test_what_no_search_takes_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as raised:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **fields})
    assert str(raised.value).startswith(words)


def test_other_parameters_are_no_search(llm: LLM) -> None:
    params: Any = SamplingParams()
    with pytest.raises(ValueError, match=r"params is SamplingParams\(.*accepted: BeamSearchParams"):
        llm.beam_search("x", params)
