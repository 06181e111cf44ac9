"""The same tokens for the same requests, whatever the schedule: steps in flight, chunks, caches, both preemptions.

Greedy outputs and beams are those of `transformers`; drawn ones are compared with each other, since a draw is a
function of the logits, the seed, the output's index and the position alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.models.resolve import resolve_model
from octavo.outputs import CompletionOutput
from scheduler_svc.core.worker_groups import WorkerGroups
from tests.oracle import GreedyOracle
from tests.tiny_models import make_tiny_llama

pytestmark = pytest.mark.usefixtures("forked_workers")

GIB = 1 << 30
TOLERANCE = 1e-4
MAX_MODEL_LEN = 256
BLOCK_BYTES = 2 * 3 * 2 * 10 * 16 * 4  # keys and values, layers, heads, head size, tokens, float32
SMALL_CACHE = {"kv_cache_memory": 28.5 * BLOCK_BYTES / GIB}
HOST = {"swap_space": 256.5 * BLOCK_BYTES / GIB}

SYSTEM = list(b"You are a lighthouse keeper who answers in as few words as the weather allows. ")
QUESTIONS = [b"Who rowed the boat?", b"Which letter came first?", b"What was wrong with the clock?", b"Is there bread?"]
MODES: dict[str, dict[str, Any]] = {
    "lock-step, nothing cached": {"steps_in_flight": 1, "enable_prefix_caching": False},
    "whole prompts": {"enable_chunked_prefill": False},
    "small chunks": {"max_num_batched_tokens": 24, "max_num_seqs": 16},
    "swap": {"preemption_mode": "swap", **SMALL_CACHE, **HOST},
    "swap, lock-step, nothing cached": {
        "preemption_mode": "swap", "steps_in_flight": 1, "enable_prefix_caching": False, **SMALL_CACHE, **HOST
    },
    "two stages": {"pipeline_parallel_size": 2},
    "two stages of two ranks": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "three stages, small chunks": {"pipeline_parallel_size": 3, "max_num_batched_tokens": 24, "max_num_seqs": 16},
    "recompute": {"preemption_mode": "recompute", **SMALL_CACHE},
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """Prompts, and how each is sampled."""

    prompts: list[list[int]]
    params: list[SamplingParams]

    def run(self, folder: Path, **options: Any) -> list[list[CompletionOutput]]:
        with LLM(str(folder), **{"max_model_len": MAX_MODEL_LEN, "swap_space": 0.0, **options}) as llm:
            outputs = llm.generate(prompt_token_ids=self.prompts, sampling_params=self.params, use_tqdm=False)
        return [output.outputs for output in outputs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), intermediate_size=158)  # for two ranks


@pytest.fixture(scope="module")
def work() -> Work:
    """Each question greedily, drawn, and drawn three times; beams of width 2 and 4; one long prompt of no relation."""
    prompts, params = [], []
    for seed, question in enumerate(QUESTIONS):
        for sampling in (
            SamplingParams(temperature=0, max_tokens=40),
            SamplingParams(
                temperature=0.9, top_p=0.95, seed=seed, max_tokens=40, repetition_penalty=1.2, presence_penalty=0.5
            ),
            SamplingParams(temperature=1, n=3, seed=100 + seed, max_tokens=40),
        ):
            prompts.append(SYSTEM + list(question))
            params.append(sampling)
    for width, question in zip((2, 4), QUESTIONS, strict=False):
        prompts.append(SYSTEM + list(question))
        params.append(beams(width))
    prompts.append([index * 37 % 256 for index in range(200)])
    params.append(SamplingParams(temperature=0.8, n=2, best_of=3, seed=5, max_tokens=30))
    return Work(prompts, params)


def beams(width: int, max_tokens: int = 24) -> SamplingParams:
    return SamplingParams(temperature=0, use_beam_search=True, n=width, best_of=width, max_tokens=max_tokens)


@pytest.fixture(scope="module")
def expected(folder: Path, work: Work) -> list[list[CompletionOutput]]:
    return work.run(folder)


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts groups of the core, which is in this process, by the way they went."""
    counts: Counter[str] = Counter()

    def counting(name: str, method: Callable[..., None]) -> Callable[..., None]:
        def counted(groups: WorkerGroups, group: Any, *arguments: Any, **options: Any) -> None:
            counts[name] += 1
            counts[f"{name}, several sequences"] += len(group.sequences) > 1
            counts["beams"] += group.uses_beam_search
            method(groups, group, *arguments, **options)

        return counted

    for name, method in (("swap", WorkerGroups.swap_out_group), ("recompute", WorkerGroups.recompute_later)):
        monkeypatch.setattr(WorkerGroups, method.__name__, counting(name, method))
    return counts


def assert_same(got: list[list[CompletionOutput]], expected: list[list[CompletionOutput]], work: Work) -> None:
    for number, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        what = f"request {number}: {work.params[number]}"
        assert [output.token_ids for output in ours] == [output.token_ids for output in theirs], what
        assert [output.finish_reason for output in ours] == [output.finish_reason for output in theirs], what
        assert [output.text for output in ours] == [output.text for output in theirs], what
        if work.params[number].use_beam_search:
            scores = [output.score for output in theirs]
            assert [output.score for output in ours] == pytest.approx(scores, abs=TOLERANCE), what


@pytest.mark.parametrize("mode", MODES)
def test_every_schedule_gives_the_same_tokens(folder, work, expected, preempted, mode):
    assert_same(work.run(folder, **MODES[mode]), expected, work)
    print(dict(preempted))
    way = MODES[mode].get("preemption_mode")
    if way is not None:
        assert preempted[way] and preempted[f"{way}, several sequences"], "the cache was meant to be too small"
        assert preempted["beams"], "the cache was meant to be too small for beams, too"


def test_greedy_outputs_and_beams_are_those_of_transformers(folder, work, expected):
    oracle = GreedyOracle(folder)
    num_beams = 0
    for prompt, params, outputs in zip(work.prompts, work.params, expected, strict=True):
        if params.use_beam_search:
            assert_beams_of_transformers(oracle, prompt, params, outputs)
            num_beams += 1
        elif params.temperature == 0:
            wanted = oracle.generate(prompt, params.max_tokens)
            oracle.check(prompt, wanted, outputs[0].token_ids, "greedy")
    assert num_beams == 2 and oracle.num_near_ties <= 1


def test_drawn_outputs_differ_from_one_another(work, expected):
    """Otherwise their equality over schedules would show little."""
    for params, outputs in zip(work.params, expected, strict=True):
        assert len(outputs) == params.n
        assert len({tuple(output.token_ids) for output in outputs}) == params.n


def assert_beams_of_transformers(
    oracle: GreedyOracle, prompt: list[int], params: SamplingParams, outputs: list[CompletionOutput]
) -> None:
    """Ranks, sequences, end tokens included, and scores."""
    with torch.inference_mode():
        answer = oracle._model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=params.best_of,
            num_return_sequences=params.n,
            max_new_tokens=params.max_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
    config = oracle._model.generation_config
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    rows = answer.sequences[:, len(prompt) :].tolist()
    wanted = [row[: next((i + 1 for i, token_id in enumerate(row) if token_id in ends), len(row))] for row in rows]
    assert [output.score for output in outputs] == pytest.approx(answer.sequences_scores.tolist(), abs=TOLERANCE)
    assert [list(output.token_ids) for output in outputs] == wanted


@pytest.mark.smollm2
def test_smollm2_gives_the_same_tokens_over_schedules_and_the_beams_of_transformers():
    folder = resolve_model("smollm2-135m-instruct")
    prompts = [list(range(1000, 1040)), [*range(1000, 1032), 77, 78, 79]]
    drawn = SamplingParams(temperature=0.7, n=3, seed=11, max_tokens=8)
    work = Work([*prompts, prompts[0]], [SamplingParams(temperature=0, max_tokens=8), drawn, beams(4, 8)])
    got = work.run(folder)
    again = work.run(folder, steps_in_flight=1, enable_prefix_caching=False, max_num_batched_tokens=64, max_num_seqs=16)
    assert_same(again, got, work)
    assert_beams_of_transformers(GreedyOracle(folder), prompts[0], work.params[2], got[2])
