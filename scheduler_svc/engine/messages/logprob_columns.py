"""The logprob columns of one answer, read by the entry of a token among its token ids."""

from __future__ import annotations

from collections.abc import Callable

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

    def at(self, entry: int, num_top: int, token_text: Callable[[int], str]) -> pb.TokenLogprobs:
        """The drawn token and at most `num_top` of the most likely ones, WHOLE_VOCABULARY for all there are."""
        first, last = int(self._top_ends[entry - 1]) if entry else 0, int(self._top_ends[entry])
        if num_top != WHOLE_VOCABULARY:
            last = min(last, first + num_top)

        def logprob(token_id: np.integer, value: np.floating, rank: int | np.integer) -> pb.Logprob:
            text = token_text(int(token_id))
            return pb.Logprob(token_id=int(token_id), logprob=float(value), rank=int(rank), text=text)

        return pb.TokenLogprobs(
            token=logprob(self._token_ids[entry], self._logprobs[entry], self._ranks[entry]),
            top=[logprob(self._top_token_ids[i], self._top_logprobs[i], i - first + 1) for i in range(first, last)],
        )
