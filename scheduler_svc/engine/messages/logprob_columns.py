"""The logprob columns of one answer, read by the entry of a token among its token ids."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.sampling_params import WHOLE_VOCABULARY
from protos import inference_pb2 as pb
from protos import worker_pb2


class LogprobColumns:
    """Columns that are absent have no entries: asking for one raises IndexError."""

    def __init__(self, outputs: worker_pb2.SequenceOutputs) -> None:
        self._token_ids = np.frombuffer(outputs.token_ids_i32, "<i4")
        self._logprobs = np.frombuffer(outputs.logprobs_f32, "<f4")
        self._ranks = np.frombuffer(outputs.ranks_u32, "<u4")
        counts = np.frombuffer(outputs.top_counts_u32, "<u4").astype(np.int64)
        self._top_ends = np.cumsum(counts) if len(counts) else np.zeros(len(self._token_ids), np.int64)
        self._top_token_ids = np.frombuffer(outputs.top_token_ids_i32, "<i4")
        self._top_logprobs = np.frombuffer(outputs.top_logprobs_f32, "<f4")

    def __len__(self) -> int:
        return len(self._token_ids)

    def select(self, entries: npt.NDArray[np.int64]) -> worker_pb2.SequenceOutputs:
        """The logprob columns of some entries, as an answer of their own."""
        ends = self._top_ends[entries]
        counts = ends - np.where(entries > 0, self._top_ends[entries - 1], 0)
        # Position i of the ragged columns stands at i, less what was selected before its entry, from the entry's begin.
        top = np.repeat(ends - np.cumsum(counts), counts) + np.arange(counts.sum())
        return worker_pb2.SequenceOutputs(
            token_ids_i32=self._token_ids[entries].tobytes(),
            logprobs_f32=self._logprobs[entries].tobytes(),
            ranks_u32=self._ranks[entries].tobytes(),
            top_counts_u32=counts.astype("<u4").tobytes(),
            top_token_ids_i32=self._top_token_ids[top].tobytes(),
            top_logprobs_f32=self._top_logprobs[top].tobytes(),
        )

    def logprob(self, entry: int) -> float:
        """Of the drawn token."""
        return float(self._logprobs[entry])

    def of(self, entry: int, num_top: int) -> LogprobsOfToken:
        """Those of the drawn token and of at most `num_top` of the most likely ones, WHOLE_VOCABULARY for all there
        are."""
        first, last = int(self._top_ends[entry - 1]) if entry else 0, int(self._top_ends[entry])
        if num_top != WHOLE_VOCABULARY:
            last = min(last, first + num_top)
        return LogprobsOfToken(
            int(self._token_ids[entry]),
            float(self._logprobs[entry]),
            int(self._ranks[entry]),
            self._top_token_ids[first:last].tobytes(),
            self._top_logprobs[first:last].tobytes(),
        )

    def at(self, entry: int, num_top: int, token_text: Callable[[int], str]) -> pb.TokenLogprobs:
        """`of`, as a message."""
        return self.of(entry, num_top).message(token_text)


class LogprobsOfToken(NamedTuple):
    """A drawn token and the most likely ones in its place, in a few bytes each: as a message they take ten times as
    much, and some 2 us each to make."""

    token_id: int
    logprob: float
    rank: int
    top_token_ids: bytes = b""  # i32
    top_logprobs: bytes = b""  # f32

    def message(self, token_text: Callable[[int], str]) -> pb.TokenLogprobs:
        """For a client; `token_text` of each token."""
        top = zip(
            np.frombuffer(self.top_token_ids, "<i4").tolist(),
            np.frombuffer(self.top_logprobs, "<f4").tolist(),
            itertools.count(1),
        )
        drawn = self.token_id, self.logprob, self.rank
        token, *others = (
            pb.Logprob(token_id=token_id, logprob=logprob, rank=rank, text=token_text(token_id))
            for token_id, logprob, rank in (drawn, *top)
        )
        return pb.TokenLogprobs(token=token, top=others)
