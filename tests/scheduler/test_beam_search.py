"""`BeamSearch` against `transformers`' own beam search over the same tiny models, and by hand where that says nothing.

The rows that drive it are log-softmaxes of whole, uncached forward passes; `generate` uses its cache. So scores differ
in the last bits, and two hypotheses that are nearer than that may change places: `_assert_same` allows and counts it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from scheduler_svc.core.sequences.beam_search import BeamHypothesis, BeamSearch, Candidates, EarlyStopping
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.token_lines import NO_TOKEN, TokenLines
from tests.tiny_models import make_tiny_llama

TOLERANCE = 1e-4
NUM_GENERATED = 14
OF_TRANSFORMERS: dict[EarlyStopping, bool | str] = {
    EarlyStopping.NO: False,
    EarlyStopping.YES: True,
    EarlyStopping.NEVER: "never",
}


@dataclass(frozen=True)
class Case:
    """A model, a prompt, and token ids that the model likes to write there, most often first; some are end tokens."""

    model: Any
    prompt: list[int]
    liked_token_ids: list[int]
    num_ends: int

    @property
    def ends(self) -> list[int]:
        return self.liked_token_ids[2 : 2 + self.num_ends]


class Answer(NamedTuple):
    hypotheses: list[BeamHypothesis]
    num_steps: int


class Wanted(NamedTuple):
    """What `transformers` answers; tokens after an end token are cut off."""

    token_ids: list[list[int]]
    scores: list[float]
    num_steps: int


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    from transformers import LlamaForCausalLM

    torch.set_num_threads(1)
    found = []
    for seed in range(4):
        folder = make_tiny_llama(
            tmp_path_factory.mktemp(f"llama{seed}"), seed=seed, vocab_size=300, hidden_size=24, num_layers=1,
            num_heads=4, num_kv_heads=2, intermediate_size=40,
        )  # fmt: skip
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        prompt = np.random.default_rng(seed).integers(0, 256, 3 + 2 * seed).tolist()
        written = Counter(token_id for row in _transformers(model, prompt, 8).token_ids for token_id in row[2:])
        liked = [token_id for token_id, _ in written.most_common()]
        found.append(Case(model, prompt, liked, num_ends=1 if seed % 2 else 4))
    return found


def _search(
    model: Any,
    prompt: list[int],
    width: int,
    *,
    num_generated: int = NUM_GENERATED,
    num_returned: int | None = None,
    stop_token_ids: Iterable[int] = (),
    **settings: Any,
) -> Answer:
    search = BeamSearch(
        width,
        num_returned=num_returned or width,
        num_prompt_tokens=len(prompt),
        max_num_tokens=len(prompt) + num_generated,
        stop_token_ids=frozenset(stop_token_ids),
        **settings,
    )
    num_steps = 0
    while not search.is_done:
        assert num_steps < num_generated
        before = [search.live_token_ids(beam) for beam in range(search.num_live)]
        continuations = search.advance(_rows(model, prompt, search))
        after = [search.live_token_ids(beam) for beam in range(search.num_live)]
        assert after == [[*before[parent], token_id] for parent, token_id in continuations]
        assert len(after) == (0 if search.is_done else width)
        num_steps += 1
    return Answer(search.hypotheses(), num_steps)


def _rows(model: Any, prompt: list[int], search: BeamSearch) -> list[Candidates]:
    lines = torch.tensor([prompt + search.live_token_ids(beam) for beam in range(search.num_live)])
    with torch.no_grad():
        logits = model(lines, use_cache=False).logits[:, -1].float()
    best = torch.log_softmax(logits, -1).topk(search.num_candidates)
    return [Candidates(*row) for row in zip(best.indices.int().numpy(), best.values.numpy(), strict=True)]


def _transformers(
    model: Any,
    prompt: list[int],
    width: int,
    *,
    num_generated: int = NUM_GENERATED,
    num_returned: int | None = None,
    stop_token_ids: Iterable[int] = (),
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = EarlyStopping.NO,
) -> Wanted:
    from transformers import GenerationConfig

    ends = list(stop_token_ids)
    answer = model.generate(
        torch.tensor([prompt]),
        generation_config=GenerationConfig(
            num_beams=width,
            num_return_sequences=num_returned or width,
            max_new_tokens=num_generated,
            do_sample=False,
            length_penalty=length_penalty,
            early_stopping=OF_TRANSFORMERS[early_stopping],
            eos_token_id=ends or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        ),
    )
    rows = answer.sequences[:, len(prompt) :].tolist()
    return Wanted(
        [row[: next((i + 1 for i, token_id in enumerate(row) if token_id in ends), len(row))] for row in rows],
        answer.sequences_scores.tolist(),
        len(answer.scores),
    )


def _assert_same(got: Answer, wanted: Wanted) -> int:
    """How many hypotheses had changed places with one whose score is as good."""
    scores = [hypothesis.score for hypothesis in got.hypotheses]
    assert scores == pytest.approx(wanted.scores, abs=TOLERANCE, rel=1e-6)
    num_swapped = 0
    for rank, (hypothesis, token_ids) in enumerate(zip(got.hypotheses, wanted.token_ids, strict=True)):
        if hypothesis.token_ids != token_ids:
            margin = min((abs(score - scores[rank]) for i, score in enumerate(scores) if i != rank), default=math.inf)
            assert margin < TOLERANCE, f"rank {rank}: {hypothesis.token_ids} is not {token_ids}"
            num_swapped += 1
    assert got.num_steps == wanted.num_steps or num_swapped
    return num_swapped


def _check_cases(
    cases: list[Case], width: int, *, ends: Callable[[Case], list[int]] | None = None, **settings: Any
) -> None:
    """All cases both ways; few may have needed the tolerance of `_assert_same`."""
    num_swapped = num_compared = 0
    for case in cases:
        stop_token_ids = case.ends if ends is None else ends(case)
        got = _search(case.model, case.prompt, width, stop_token_ids=stop_token_ids, **settings)
        wanted = _transformers(case.model, case.prompt, width, stop_token_ids=stop_token_ids, **settings)
        num_swapped += _assert_same(got, wanted)
        num_compared += len(got.hypotheses)
    print(f"{num_swapped} of {num_compared} hypotheses had changed places with one as good")
    assert num_swapped <= 0.05 * num_compared


@pytest.mark.parametrize("length_penalty", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("early_stopping", EarlyStopping)
@pytest.mark.parametrize("width", [2, 4, 8])
def test_sequences_scores_and_steps_are_those_of_transformers(
    cases: list[Case], width: int, early_stopping: EarlyStopping, length_penalty: float
) -> None:
    _check_cases(cases, width, early_stopping=early_stopping, length_penalty=length_penalty)


def test_the_cases_tell_the_settings_apart(cases: list[Case]) -> None:
    """Otherwise the grid above would show nothing."""
    steps: dict[Any, list[int]] = {}
    best: dict[Any, list[list[int]]] = {}
    reasons: Counter[FinishReason] = Counter()
    for case in cases:
        for setting in [(way, 0.5) for way in EarlyStopping] + [(EarlyStopping.NO, 2.0)]:
            settings: dict[str, Any] = dict(zip(("early_stopping", "length_penalty"), setting, strict=True))
            got = _search(case.model, case.prompt, 8, stop_token_ids=case.ends, **settings)
            steps.setdefault(setting, []).append(got.num_steps)
            best.setdefault(setting, []).append(got.hypotheses[0].token_ids)
            reasons.update(hypothesis.finish_reason for hypothesis in got.hypotheses)
    assert len({tuple(counts) for counts in steps.values()}) == len(steps)
    assert best[EarlyStopping.NO, 0.5] != best[EarlyStopping.NO, 2.0]
    assert min(reasons[FinishReason.STOP], reasons[FinishReason.LENGTH]) > 0.2 * reasons.total()


@pytest.mark.parametrize("early_stopping", EarlyStopping)
@pytest.mark.parametrize("length_penalty", [0.0, -1.0])
def test_penalties_that_favour_short_outputs(
    cases: list[Case], length_penalty: float, early_stopping: EarlyStopping
) -> None:
    _check_cases(cases, 4, early_stopping=early_stopping, length_penalty=length_penalty)


@pytest.mark.parametrize("num_returned", [1, 3])
def test_fewer_outputs_than_beams(cases: list[Case], num_returned: int) -> None:
    _check_cases(cases, 4, num_returned=num_returned)


def test_no_token_ends_a_beam(cases: list[Case]) -> None:
    _check_cases(cases, 4, ends=lambda case: [])


@pytest.mark.parametrize("num_generated", [1, 2])
def test_hardly_any_room_left(cases: list[Case], num_generated: int) -> None:
    _check_cases(cases, 4, num_generated=num_generated)


@pytest.mark.parametrize("early_stopping", EarlyStopping)
@pytest.mark.parametrize("num_ends", [1, 4])
def test_the_first_token_ends_one_beam_or_all(cases: list[Case], num_ends: int, early_stopping: EarlyStopping) -> None:
    _check_cases(cases, 4, ends=lambda case: _likely_first(case, num_ends), early_stopping=early_stopping)


def _likely_first(case: Case, count: int) -> list[int]:
    with torch.no_grad():
        return case.model(torch.tensor([case.prompt])).logits[0, -1].topk(count).indices.tolist()


def test_a_hypothesis_carries_its_logprobs_and_what_ended_it(cases: list[Case]) -> None:
    case = cases[0]
    for hypothesis in _search(case.model, case.prompt, 8, stop_token_ids=case.ends, length_penalty=0.5).hypotheses:
        length = len(hypothesis.token_ids)
        with torch.no_grad():
            logits = case.model(torch.tensor([case.prompt + hypothesis.token_ids])).logits[0, -length - 1 : -1]
        logprobs = torch.log_softmax(logits, -1)[range(length), hypothesis.token_ids].tolist()
        assert hypothesis.logprobs == pytest.approx(logprobs, abs=TOLERANCE)
        ranks = [
            int((row > row[token_id]).sum()) + 1 for row, token_id in zip(logits, hypothesis.token_ids, strict=True)
        ]
        assert hypothesis.ranks == ranks
        assert hypothesis.cumulative_logprob == pytest.approx(sum(logprobs), abs=TOLERANCE)
        assert hypothesis.score == pytest.approx(sum(logprobs) / length**0.5, abs=TOLERANCE)
        assert not set(hypothesis.token_ids[:-1]) & set(case.ends)
        ends_with_a_stop_token = hypothesis.token_ids[-1] in case.ends
        assert hypothesis.finish_reason is (FinishReason.STOP if ends_with_a_stop_token else FinishReason.LENGTH)
        assert ends_with_a_stop_token or length == NUM_GENERATED


# ---- By hand --------------------------------------------------------------------------------------------------------


def _row(**logprobs_of_tokens: float) -> Candidates:
    """Candidates from `t7=-0.5`: token 7 with logprob -0.5."""
    token_ids = np.array([int(name[1:]) for name in logprobs_of_tokens], np.int32)
    return Candidates(token_ids, np.array(list(logprobs_of_tokens.values()), np.float32))


def _new_search(width: int = 2, num_generated: int = 10, ends: Iterable[int] = (0,), **settings: Any) -> BeamSearch:
    return BeamSearch(
        width,
        num_returned=width,
        num_prompt_tokens=5,
        max_num_tokens=5 + num_generated,
        stop_token_ids=frozenset(ends),
        **settings,
    )


def test_ties_go_to_the_better_parent_then_to_the_earlier_candidate() -> None:
    search = _new_search(width=3, ends=())
    assert search.advance([_row(t4=-1, t5=-1, t9=-1)]) == [(0, 4), (0, 5), (0, 9)]
    rows = [_row(t4=-2, t6=-2, t7=-2), _row(t1=-1, t2=-2, t3=-2), _row(t1=-1, t2=-2, t3=-2)]
    assert search.advance(rows) == [(1, 1), (2, 1), (0, 4)]
    assert [search.live_token_ids(beam) for beam in range(3)] == [[5, 1], [9, 1], [4, 4]]


def test_lines_share_tokens_and_each_is_read_whole() -> None:
    lines = TokenLines()
    (a,) = lines.extend([NO_TOKEN], [7], [-0.5], [1])
    b, c = lines.extend([a, a], [8, 9], [-0.25, -2.0], [1, 3])
    (d,) = lines.extend([b], [7], [-1.0], [2])
    assert lines.line(d) == ([7, 8, 7], [-0.5, -0.25, -1.0], [1, 1, 2])
    assert lines.line(c) == ([7, 9], [-0.5, -2.0], [1, 3])
    assert lines.line(NO_TOKEN) == ([], [], [])
    assert list(lines.before) == [NO_TOKEN, a, a, b]


def test_an_end_token_below_the_width_best_is_dropped() -> None:
    search = _new_search(num_generated=2)
    assert search.advance([_row(t3=-1, t4=-2, t0=-3)]) == [(0, 3), (0, 4)]
    assert search.advance([_row(t3=-1, t4=-2, t5=-3), _row(t0=-2.5, t3=-3, t4=-4)]) == []
    assert [hypothesis.token_ids for hypothesis in search.hypotheses()] == [[3, 3], [3, 4]]


def test_a_beam_that_ends_leaves_its_place_to_others_and_is_no_parent() -> None:
    search = _new_search()
    assert search.advance([_row(t0=-0.5, t3=-2, t4=-3)]) == [(0, 3), (0, 4)]
    assert search.advance([_row(t5=-1, t6=-1.5, t0=-9), _row(t5=-3, t6=-3, t7=-3)]) == [(0, 5), (0, 6)]
    assert not search.is_done


def test_everything_impossible_but_one_token_still_ends() -> None:
    search = _new_search(num_generated=3, ends=())
    search.advance([_row(t1=0, t2=-math.inf)])
    search.advance([_row(t1=0, t2=-math.inf)] * 2)
    assert search.advance([_row(t1=0, t2=-math.inf)] * 2) == []
    best, other = search.hypotheses()
    assert (best.token_ids, best.score) == ([1, 1, 1], 0) and other.score == -math.inf


@pytest.mark.parametrize("length_penalty", [1e30, -1e30, 3e38])
def test_penalties_beyond_float32_still_rank_and_end(length_penalty: float) -> None:
    search = _new_search(num_generated=3, length_penalty=length_penalty, early_stopping=EarlyStopping.NEVER)
    while not search.is_done:
        search.advance([_row(t1=0, t2=-2, t0=-2.5)] * search.num_live)
    best, other = (hypothesis.score for hypothesis in search.hypotheses())
    assert best == 0 >= other


@pytest.mark.parametrize("seed", range(40))
def test_more_candidates_than_asked_for_change_nothing(seed: int) -> None:
    """So `num_candidates` are enough: the whole vocabulary gives the same search."""
    numbers = np.random.default_rng(seed)
    width, vocab_size, num_ends = (int(numbers.integers(*bounds)) for bounds in ((2, 6), (12, 20), (0, 6)))
    settings: dict[str, Any] = {
        "ends": range(num_ends),
        "length_penalty": float(numbers.choice([0.5, 1.0, 2.0])),
        "early_stopping": int(numbers.integers(3)),
    }
    asked, whole = _new_search(width, **settings), _new_search(width, **settings)
    while not asked.is_done:
        logits = torch.tensor(numbers.normal(size=(asked.num_live, vocab_size)) * 2)
        logits[:, :num_ends] += 1.0
        best = torch.log_softmax(logits, -1).sort(descending=True)
        rows = [Candidates(*row) for row in zip(best.indices.numpy(), best.values.float().numpy(), strict=True)]
        few = [Candidates(ids[: asked.num_candidates], values[: asked.num_candidates]) for ids, values in rows]
        assert asked.advance(few) == whole.advance(rows)
        assert asked.is_done is whole.is_done
    assert asked.hypotheses() == whole.hypotheses()
