"""Sampling of steps whose logits a graph has written, captured as graphs of a few numbers of rows.

A draw with filters is nine kernels of a few microseconds, after which the tokens are put where the next step finds
them. Their shapes are fixed where each row draws one token and tells no logprobs, which most steps do:

    device     GraphBuffers.logits [rows, vocab]      what a decode graph or a mixed one has written
               slots                                  all take the largest logit
               slots, columns of `draw_columns`       others; temperature 0 among them
               token_ids, largest [rows]              copied before the next replay, which writes there

A pad has temperature 0 and the slot of nobody. Beam search, logprobs and several samples of one row have shapes that
follow the step, and are launched kernel by kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from worker_svc.host.graph_backend import Graph, GraphBackend
from worker_svc.mirror.sampling_columns import SamplingColumns
from worker_svc.mirror.sequence_states import AppliedRows
from worker_svc.sampling.last_tokens import LastTokens
from worker_svc.sampling.row_maxima import RowMaxima
from worker_svc.sampling.row_samples import RowSamples
from worker_svc.sampling.sampler import NO_SAMPLES, Drawn, Draws, draw_columns, draw_tokens, find_largest
from worker_svc.steps.graph_buffers import GraphBuffers
from worker_svc.steps.graph_captures import capture_within
from worker_svc.steps.graph_inputs import GraphInputs, fill

_NO_SLOTS = np.zeros(0, np.int64)
_NO_COLUMNS = draw_columns(SamplingColumns(0).take(_NO_SLOTS), Draws(_NO_SLOTS, _NO_SLOTS, _NO_SLOTS))


def row_counts(max_num_seqs: int) -> list[int]:
    """Rows that graphs are captured for, ascending: 1, 2, 4, ..., and the largest possible. A pad costs little: a pass
    over logits for the largest one."""
    return [1 << power for power in range((max_num_seqs - 1).bit_length())] + [max_num_seqs]


@dataclass(frozen=True, slots=True)
class _CapturedSampling:
    """Of `num_rows` rows, and the inputs that it reads."""

    num_rows: int
    draws: bool  # or takes the largest
    inputs: torch.Tensor  # u8, what one copy fills
    graph: Graph


class SamplingGraphs:
    """Graphs over the logits in `buffers`."""

    def __init__(self, backend: GraphBackend, last_tokens: LastTokens, buffers: GraphBuffers) -> None:
        """`capture` has to follow."""
        self._backend, self._last_tokens, self._buffers = backend, last_tokens, buffers
        self._device, most = last_tokens.device, buffers.max_num_seqs
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=self._device)
        self._largest = torch.zeros(most, device=self._device)
        self._rows = torch.arange(most, device=self._device)
        self._inputs = GraphInputs(self._device, self._padded(most, _NO_SLOTS, _NO_COLUMNS))
        self._of_largest: list[_CapturedSampling] = []  # rising
        self._of_draws: list[_CapturedSampling] = []  # likewise

    @torch.inference_mode()
    def capture(self, most_bytes: int) -> None:
        """Captures as many numbers of rows as `most_bytes` of the device's memory suffice for: the largest first, so
        that the others find theirs in its memory."""
        sizes = row_counts(self._buffers.max_num_seqs)[::-1]
        of_largest = capture_within(most_bytes, self._backend, sizes, self._capture_largest, "greedy draw")
        of_draws = capture_within(most_bytes, self._backend, sizes, self._capture_draws, "draw")
        self._of_largest, self._of_draws = of_largest[::-1], of_draws[::-1]

    def suits(self, logits: torch.Tensor, sampling: SamplingColumns, rows: AppliedRows) -> bool:
        """Whether `logits` [L, vocab] lie where a graph has written them, each of the L rows draws one token and tells
        nothing else, and there is a graph of as many rows."""
        num_rows = len(logits)
        return (
            logits.data_ptr() == self._buffers.logits.data_ptr()
            and rows.sample_rows.size == num_rows
            and not rows.is_candidate.any()
            and not sampling.wants_logprobs[rows.slots[rows.sample_rows]].any()
            and self._step_of(sampling, rows) is not None
        )

    def run(self, sampling: SamplingColumns, rows: AppliedRows) -> RowSamples:
        """Draws for `rows`, which `suits`, and puts the tokens into the last tokens."""
        step = self._step_of(sampling, rows)
        assert step is not None, "it suits"
        num_rows, slots = rows.sample_rows.size, rows.slots[rows.sample_rows]
        columns: tuple[npt.NDArray[Any], ...] = ()
        if step.draws:
            draws = Draws(np.arange(num_rows), rows.sample_indices, rows.sample_positions)
            columns = draw_columns(sampling.take(slots), draws)
        fill(step.inputs, self._padded(step.num_rows, rows.sample_slots, columns))
        step.graph.replay()
        token_ids, largest = self._token_ids[:num_rows].clone(), self._largest[:num_rows].clone()
        nobody = np.zeros(num_rows, np.bool_)
        drawn = Drawn(token_ids, largest, np.arange(num_rows), None, NO_SAMPLES)
        return RowSamples(drawn, None, nobody, sampling.adjusts_logits[slots], rows.is_candidate, self._device)

    def _step_of(self, sampling: SamplingColumns, rows: AppliedRows) -> _CapturedSampling | None:
        takes_largest = sampling.takes_largest[rows.slots[rows.sample_rows]].all()
        steps = self._of_largest if takes_largest else self._of_draws
        return next((step for step in steps if step.num_rows >= rows.sample_rows.size), None)

    def _capture_largest(self, num_rows: int) -> _CapturedSampling:
        inputs, (slots,) = self._inputs.of(self._padded(num_rows, _NO_SLOTS, ()))

        def work() -> None:
            token_ids, largest = self._token_ids[:num_rows], self._largest[:num_rows]
            find_largest(token_ids, largest, self._buffers.logits[:num_rows])
            self._last_tokens.put(slots, token_ids)

        return _CapturedSampling(num_rows, False, inputs, self._backend.capture(work))

    def _capture_draws(self, num_rows: int) -> _CapturedSampling:
        inputs, (slots, *columns) = self._inputs.of(self._padded(num_rows, _NO_SLOTS, _NO_COLUMNS))

        def work() -> None:
            logits = self._buffers.logits[:num_rows]
            maxima = RowMaxima.of(logits)
            token_ids = draw_tokens(logits, maxima, self._rows[:num_rows], *columns, is_filtered=True)
            self._token_ids[:num_rows].copy_(token_ids)
            self._largest[:num_rows].copy_(maxima.largest)
            self._last_tokens.put(slots, token_ids)

        return _CapturedSampling(num_rows, True, inputs, self._backend.capture(work))

    def _padded(
        self, num_rows: int, slots: npt.NDArray[np.int64], columns: tuple[npt.NDArray[Any], ...]
    ) -> tuple[npt.NDArray[Any], ...]:
        """Each with `num_rows` entries."""
        padded = np.full(num_rows, self._last_tokens.nobody), *(np.zeros(num_rows, column.dtype) for column in columns)
        for entries, used in zip(padded, (slots, *columns), strict=True):
            entries[: used.size] = used
        return padded
