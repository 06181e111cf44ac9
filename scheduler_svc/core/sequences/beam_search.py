"""Beam search of one group: which continuations live on, which hypotheses are kept, and when nothing better can come.

Ranks as `transformers` 5 does (`GenerationMixin._beam_search`, do_sample=False, one prompt), in float32 like it:

    score of a live beam    = sum of its tokens' logprobs
    score of a hypothesis   = that sum / number of generated tokens ** length_penalty
    a step                  = all beams' candidates, best sum first: a stop token among the first `width` ends a
                              hypothesis, one after them is dropped; the first `width` others are the new live beams
    the search is over      = max_num_tokens reached, or `width` hypotheses held and, by early_stopping,
                              YES: at once; NO: the best live beam, ended here and now, would not beat the worst held;
                              NEVER: nor would it at max_num_tokens, where length_penalty > 0 makes that its best case

Ties go to the better parent, then to the earlier candidate. Knows nothing of workers, slots and blocks: a group that
was preempted or moved goes on with the live beams that are held here.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from protos import inference_pb2
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.token_lines import NO_TOKEN, TokenLines

_FLOAT32 = np.finfo(np.float32)


class EarlyStopping(enum.IntEnum):
    """Numbered as in the proto. For `transformers` these are False, True and "never"."""

    NO = inference_pb2.EARLY_STOPPING_NO
    YES = inference_pb2.EARLY_STOPPING_YES
    NEVER = inference_pb2.EARLY_STOPPING_NEVER


class Candidates(NamedTuple):
    """What one live beam's row answered: its most likely next tokens, best first."""

    token_ids: npt.NDArray[np.int32]  # [num_candidates]
    logprobs: npt.NDArray[np.float32]  # [num_candidates]


class Continuation(NamedTuple):
    """A new live beam: beam `parent` of those before the step, with one more token."""

    parent: int
    token_id: int


@dataclass(frozen=True, slots=True)
class BeamHypothesis:
    """A finished output; its last token is the stop token where that ended it."""

    token_ids: list[int]  # generated ones
    score: float
    cumulative_logprob: float
    finish_reason: FinishReason  # STOP or LENGTH
    logprobs: list[float]  # one a token
    ranks: list[int] = field(default_factory=list)  # one a token: 1 was the model's most likely there


class _Finished(NamedTuple):
    beam: int  # its line, see `TokenLines`
    score: np.float32
    cumulative_logprob: np.float32
    reason: FinishReason


class BeamSearch:
    """The live beams of a group and the best hypotheses that it has finished.

    Starts with one live beam, the prompt. Each step wants `num_candidates` of every live beam: with fewer, stop tokens
    could leave less than `width` to live on. So the vocabulary must have at least that many tokens.

    Args:
        width: live beams and hypotheses held (`best_of`).
        num_returned: hypotheses that the client wants (`n`), at most width.
        max_num_tokens: prompt and generated tokens at which a beam ends with LENGTH.
        stop_token_ids: all that end a beam with STOP, the model's own end tokens included.
    """

    def __init__(
        self,
        width: int,
        *,
        num_returned: int,
        num_prompt_tokens: int,
        max_num_tokens: int,
        stop_token_ids: frozenset[int] = frozenset(),
        length_penalty: float = 1.0,
        early_stopping: int = EarlyStopping.NO,
    ) -> None:
        assert 1 <= num_returned <= width and num_prompt_tokens < max_num_tokens
        self.width = width
        self.num_candidates = width + len(stop_token_ids)
        self.is_done = False
        self._num_returned = num_returned
        self._max_generated = max_num_tokens - num_prompt_tokens
        self._stop_token_ids = np.array(sorted(stop_token_ids), np.int64)
        self._length_penalty = length_penalty
        self._early_stopping = EarlyStopping(early_stopping)
        self._num_generated = 0  # tokens of each live beam
        self._lines = TokenLines()
        self._live = [NO_TOKEN]  # lines of beams, best first; now the bare prompt
        self._live_scores = np.zeros(1, np.float32)  # [len(_live)], while the search goes on
        self._finished: list[_Finished] = []  # best first, at most width

    @property
    def num_live(self) -> int:
        """Beams whose candidates the next step wants; none once the search is over."""
        return len(self._live)

    def description(self) -> dict[str, float]:
        """What it was made with, but for the tokens that stop it, of which only the number is told."""
        return {
            "width": self.width,
            "num_returned": self._num_returned,
            "num_stop_token_ids": len(self._stop_token_ids),
            "length_penalty": self._length_penalty,
            "early_stopping": int(self._early_stopping),
        }

    def is_stop(self, token_ids: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Which of these tokens end a beam."""
        return np.isin(token_ids, self._stop_token_ids)

    def live_token_ids(self, beam: int) -> list[int]:
        """The tokens that a live beam has generated."""
        return self._lines.line(self._live[beam]).token_ids

    def advance(self, candidates: AbstractSequence[tuple[npt.ArrayLike, npt.ArrayLike]]) -> list[Continuation]:
        """Takes one step's answers, `Candidates` a live beam in their order; returns the new live beams, best first.

        Nothing is returned when the search is over. A parent without a child among them has ended.
        """
        assert not self.is_done and len(candidates) == len(self._live)
        token_ids = np.concatenate([np.asarray(ids) for ids, _ in candidates])
        logprobs = np.concatenate([np.asarray(values, np.float32) for _, values in candidates])
        counts = [len(np.asarray(ids)) for ids, _ in candidates]
        parents = np.repeat(np.arange(len(candidates)), counts)
        ranks = np.concatenate([np.arange(1, count + 1) for count in counts])
        sums = self._live_scores[parents] + logprobs
        best_first = np.argsort(-sums, kind="stable")
        self._num_generated += 1
        stops = np.isin(token_ids[best_first], self._stop_token_ids)
        ends = stops | (self._num_generated == self._max_generated)  # of a length that no beam may pass

        def extended(entries: npt.NDArray[np.intp]) -> list[int]:
            values = (token_ids[entries], logprobs[entries], ranks[entries])
            return self._lines.extend(
                [self._live[parent] for parent in parents[entries]], *(each.tolist() for each in values)
            )

        ended = np.flatnonzero(ends[: self.width])
        for rank, beam in zip(ended, extended(best_first[ended]), strict=True):
            self._finish(beam, sums[best_first[rank]], FinishReason.STOP if stops[rank] else FinishReason.LENGTH)
        going_on = best_first[~ends][: self.width]
        self._live, self._live_scores = extended(going_on), sums[going_on]
        if self._is_over():
            self.is_done = True
            self._live = []
            return []
        return [Continuation(int(parents[entry]), int(token_ids[entry])) for entry in going_on]

    def hypotheses(self) -> list[BeamHypothesis]:
        """The `num_returned` best, best first. Only when the search is over."""
        assert self.is_done
        return [self._hypothesis(finished) for finished in self._finished[: self._num_returned]]

    def _hypothesis(self, finished: _Finished) -> BeamHypothesis:
        line = self._lines.line(finished.beam)
        return BeamHypothesis(
            token_ids=line.token_ids,
            score=float(finished.score),
            cumulative_logprob=float(finished.cumulative_logprob),
            finish_reason=finished.reason,
            logprobs=line.logprobs,
            ranks=line.ranks,
        )

    def _finish(self, beam: int, cumulative_logprob: np.float32, reason: FinishReason) -> None:
        score = self._normalised(cumulative_logprob, self._num_generated)
        self._finished.append(_Finished(beam, score, cumulative_logprob, reason))
        self._finished.sort(key=lambda finished: -finished.score)  # stable: of equals the earlier one stays ahead
        del self._finished[self.width :]

    def _is_over(self) -> bool:
        if not self._live:
            return True
        if len(self._finished) < self.width:
            return False
        if self._early_stopping is EarlyStopping.YES:
            return True
        reaches_the_end = self._early_stopping is EarlyStopping.NEVER and self._length_penalty > 0
        length = self._max_generated if reaches_the_end else self._num_generated
        return not self._normalised(self._live_scores[0], length) > self._finished[-1].score

    def _normalised(self, cumulative_logprob: np.float32, num_generated: int) -> np.float32:
        try:
            penalty = float(num_generated) ** self._length_penalty
        except OverflowError:
            penalty = float(_FLOAT32.max)
        divisor = np.float32(min(max(penalty, float(_FLOAT32.tiny)), float(_FLOAT32.max)))
        with np.errstate(over="ignore"):  # a score beyond float32 is -inf: the worst, and still ranked
            return cumulative_logprob / divisor
