"""What a worker without mathematics answers for the rows of a step, in the real columns."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from protos import worker_pb2
from tests.scheduler.fake_language import VOCAB_SIZE, logprobs_after, most_likely, next_token
from worker_svc.mirror.sampling_columns import WHOLE_VOCABULARY
from worker_svc.mirror.sequence_states import AppliedRows, SequenceStates
from worker_svc.sampling.sampled import Logprobs, Sampled
from worker_svc.sampling.sequence_outputs import pack_outputs

History = npt.NDArray[np.int32]  # [num_tokens]
NOTHING_TO_DRAW = "nothing to draw"  # the error of a row whose parameters forbid every token


class Language(Protocol):
    """What follows a history, whose last position has this content in the cache."""

    def next_token(self, history: History, content: int, index: int) -> int:
        """What the sequence of that index in its group draws."""

    def logprobs(self, history: History, content: int) -> npt.NDArray[np.float32]:
        """Over the vocabulary; candidates of beams are the most likely of them."""


class ContentLanguage:
    """Everything follows from the content."""

    def __init__(self, vocab_size: int = VOCAB_SIZE) -> None:
        self._vocab_size = vocab_size

    def next_token(self, history: History, content: int, index: int) -> int:
        return next_token(content, index, self._vocab_size)

    def logprobs(self, history: History, content: int) -> npt.NDArray[np.float32]:
        return logprobs_after(content, self._vocab_size)


def answer(
    states: SequenceStates, rows: AppliedRows, contents: list[int], language: Language, errors: dict[int, str]
) -> worker_pb2.SequenceOutputs:
    """Takes a token for every sample, records it in `states`, and packs the answer.

    contents [N]: of the last position of each sample's row. errors: rows that answer a message and no token.
    """
    samples = _Samples(states, rows, contents, language)
    token_ids = samples.token_ids()
    is_bad = np.isin(rows.sample_rows, list(errors))
    logprobs = samples.logprobs(token_ids, is_bad)
    token_ids[is_bad] = 0
    states.record_samples(rows, token_ids)
    sampling_rows = np.flatnonzero(rows.num_samples)
    bad_rows = np.searchsorted(sampling_rows, np.array(sorted(errors), np.int64))
    outputs = pack_outputs(rows, Sampled(token_ids, bad_rows, logprobs))
    for error in outputs.row_errors:
        error.message = errors[error.row]
        if error.message == NOTHING_TO_DRAW:
            error.kind = worker_pb2.ROW_ERROR_KIND_SAMPLING
    return outputs


class _Samples:
    """The samples of one step. A sample's history is that of its row's slot, which its children share."""

    def __init__(self, states: SequenceStates, rows: AppliedRows, contents: list[int], language: Language) -> None:
        self._states, self._rows, self._contents, self._language = states, rows, contents, language
        self._last_row, self._logprobs_of_last_row = -1, np.zeros(0, np.float32)  # candidates of a beam share them

    def token_ids(self) -> npt.NDArray[np.int64]:
        rows = self._rows
        tokens: list[int] = []
        indices, are_candidates = rows.sample_indices.tolist(), rows.is_candidate.tolist()
        while (sample := len(tokens)) < len(self._contents):
            if are_candidates[sample]:
                count = int(rows.num_samples[rows.sample_rows[sample]])
                tokens += most_likely(self._logprobs_of(sample), count).tolist()
            else:
                tokens.append(self._language.next_token(*self._past(sample), indices[sample]))
        return np.array(tokens, np.int64)

    def logprobs(self, token_ids: npt.NDArray[np.int64], is_bad: npt.NDArray[np.bool_]) -> Logprobs | None:
        """None: nobody asked."""
        rows, sampling = self._rows, self._states.sampling
        asks = sampling.wants_logprobs[rows.sample_slots] | rows.is_candidate
        if not asks.any():
            return None
        drawn, ranks = np.zeros(len(token_ids), np.float32), np.zeros(len(token_ids), np.int64)
        top_counts = np.zeros(len(token_ids), np.int64)
        top_token_ids, top_logprobs = [np.zeros(0, np.int64)], [np.zeros(0, np.float32)]
        for sample in np.flatnonzero(asks & ~is_bad).tolist():
            logprobs = self._logprobs_of(sample)
            drawn[sample] = logprobs[token_ids[sample]]
            ranks[sample] = 1 + (logprobs > drawn[sample]).sum()
            if not rows.is_candidate[sample]:
                count = int(sampling.num_logprobs[rows.sample_slots[sample]])
                best = most_likely(logprobs, len(logprobs) if count == WHOLE_VOCABULARY else count)
                top_counts[sample] = len(best)
                top_token_ids.append(best)
                top_logprobs.append(logprobs[best])
        return Logprobs(drawn, ranks, top_counts, np.concatenate(top_token_ids), np.concatenate(top_logprobs))

    def _logprobs_of(self, sample: int) -> npt.NDArray[np.float32]:
        row = int(self._rows.sample_rows[sample])
        if row != self._last_row or not self._rows.is_candidate[sample]:
            self._last_row, self._logprobs_of_last_row = row, self._language.logprobs(*self._past(sample))
        return self._logprobs_of_last_row

    def _past(self, sample: int) -> tuple[History, int]:
        slot = int(self._rows.sample_slots[sample])
        return self._states.token_ids[slot, : self._rows.sample_positions[sample]], self._contents[sample]
