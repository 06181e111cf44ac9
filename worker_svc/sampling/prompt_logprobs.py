"""Logprobs of the prompt tokens that a step computes, for requests that want them.

The logits after position p say how likely the token at p + 1 was, so the first token of a prompt has none, and the last
token of a chunk brings that of the next one. Where nothing of a prompt was found in a cache, its chunks together bring
every token but the first. All of them are within the vocabulary: the mirror refuses a prompt with others at once.
"""

from __future__ import annotations

import numpy as np
import torch

from protos import worker_pb2
from worker_svc.host.uploads import upload
from worker_svc.mirror.sequence_states import AppliedRows, SequenceStates
from worker_svc.mirror.step_columns import ragged_offsets
from worker_svc.models.logit_reader import LogitReader
from worker_svc.sampling.sampled import Logprobs
from worker_svc.sampling.sequence_outputs import pack_logprobs
from worker_svc.sampling.token_logprobs import token_logprobs


class PromptLogprobs:
    """Prompt logprobs of one step: hand `reader` to the model, then `pack` what it has read."""

    def __init__(self, states: SequenceStates, rows: AppliedRows) -> None:
        """`states.apply_rows` has just resolved `rows`."""
        slots, context_lens = rows.slots, rows.context_lens
        last = np.minimum(context_lens + rows.query_lens, states.num_prompt_tokens[slots] - 1)
        counts = np.where(states.sampling.wants_prompt_logprobs[slots], np.maximum(last - context_lens, 0), 0)
        self._rows = np.flatnonzero(counts)
        self._counts = counts[self._rows]
        self._first_positions = context_lens[self._rows] + 1
        offsets = ragged_offsets(self._counts)
        positions = np.repeat(self._first_positions, self._counts) + offsets
        row_slots = np.repeat(slots[self._rows], self._counts)
        self._token_ids = states.token_ids[row_slots, positions].astype(np.int64)
        self._num_top = states.sampling.num_prompt_logprobs[row_slots]
        starts = np.cumsum(rows.query_lens) - rows.query_lens
        self._logits_rows = np.repeat(starts[self._rows], self._counts) + offsets
        self._parts: list[Logprobs] = []
        self._num_read = 0

    def reader(self, device: str | torch.device) -> LogitReader | None:
        """Reads what the step's requests want; None: nothing."""
        if not self._rows.size:
            return None
        (rows,) = upload(device, self._logits_rows)
        return LogitReader(rows, self._take)

    def _take(self, logits: torch.Tensor) -> None:
        which = slice(self._num_read, self._num_read + logits.shape[0])
        self._parts.append(token_logprobs(logits, self._token_ids[which], self._num_top[which]))
        self._num_read = which.stop

    def pack(self, outputs: worker_pb2.SequenceOutputs) -> None:
        """Adds an entry for each row that brings some."""
        if not self._rows.size:
            return
        read = Logprobs(
            np.concatenate([part.drawn for part in self._parts]),
            np.concatenate([part.ranks for part in self._parts]),
            np.concatenate([part.top_counts for part in self._parts]),
            np.concatenate([part.top_token_ids for part in self._parts]),
            np.concatenate([part.top_logprobs for part in self._parts]),
        )
        ends, top_ends = np.cumsum(self._counts), np.concatenate([[0], np.cumsum(read.top_counts)])
        for row, first_position, count, end in zip(self._rows, self._first_positions, self._counts, ends, strict=True):
            entry = outputs.prompt_logprobs.add(row=int(row), first_position=int(first_position))
            which = slice(end - count, end)
            top = slice(top_ends[which.start], top_ends[which.stop])
            entry.logprobs.token_ids_i32 = self._token_ids[which].astype("<i4").tobytes()
            of_row = Logprobs(
                read.drawn[which],
                read.ranks[which],
                read.top_counts[which],
                read.top_token_ids[top],
                read.top_logprobs[top],
            )
            pack_logprobs(entry.logprobs, of_row, slice(None))
