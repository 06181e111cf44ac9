"""Decode steps of a few batch sizes, captured as graphs: a step of fewer rows is padded to the next of them.

A decode step of a small batch is hundreds of kernels of a few microseconds each, which a host cannot launch as fast as
a GPU runs them. A graph launches all of them at once, but always at the same addresses:

    host       token_ids positions slots seq_lens | pads     one pinned buffer, one copy
    device     token_ids positions slots seq_lens | pads     the first bytes of `inputs`, laid out as the graph has them
               block_tables [rows, blocks of the longest possible sequence], of which as many columns are filled as used
               logits [rows, vocab]                          of all graphs; read before the next pass is replayed

A pad has slot -1 and length 0: it is stored nowhere and attends to nothing. Large graphs share their memory: the
largest is captured first, so that the others find theirs in it. The small ones, which gain the most and take the least,
come before all others, which may use up what there is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import torch

from worker_svc.host.graph_backend import Graph, GraphBackend
from worker_svc.host.uploads import upload
from worker_svc.models.attention import AttentionMetadata
from worker_svc.sampling.last_tokens import LastTokens
from worker_svc.steps.graph_buffers import GraphBuffers
from worker_svc.steps.graph_captures import capture_within
from worker_svc.steps.graph_inputs import GraphInputs, fill
from worker_svc.steps.input_batch import InputArrays

Forward = Callable[[torch.Tensor, torch.Tensor, AttentionMetadata, torch.Tensor, torch.Tensor], object]
"""(token_ids, positions, attention, logits_rows, out), which writes logits to `out`: `Model.forward` over one cache."""

_SMALL = 8  # rows
_STEPS = ((64, 8), (256, 16), (1024, 64))  # up to so many rows, a graph every so many; beyond, every 256


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Rows that graphs are captured for, ascending: 1, 2, 4, 8, 16, 24, ..., and the largest possible.

    Fewer than half of a replayed step's rows are pads; beyond 64 fewer than a fifth.
    """
    sizes, size = [1, 2, 4], 8
    while size < max_num_seqs:
        sizes.append(size)
        size += next((step for most, step in _STEPS if size < most), 256)
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def capture_order(sizes: list[int]) -> tuple[list[int], list[int]]:
    """Small ones rising, then the others falling."""
    return [size for size in sizes if size <= _SMALL], [size for size in reversed(sizes) if size > _SMALL]


@dataclass(frozen=True, slots=True)
class _CapturedStep:
    """A decode step of `num_rows` rows, and the inputs that it reads."""

    num_rows: int
    inputs: torch.Tensor  # u8, what one copy fills
    graph: Graph


class DecodeGraphs:
    """Graphs of one model over one cache."""

    def __init__(
        self,
        forward: Forward,
        backend: GraphBackend,
        last_tokens: LastTokens,
        buffers: GraphBuffers,
        *,
        max_model_len: int,
    ) -> None:
        """`capture` has to follow."""
        self._forward, self._backend, self._last_tokens, self._buffers = forward, backend, last_tokens, buffers
        self._max_num_seqs, self._max_model_len = buffers.max_num_seqs, max_model_len
        device = self._device = last_tokens.device
        self._query_starts = torch.arange(self._max_num_seqs + 1, dtype=torch.int32, device=device)
        self._logits_rows = torch.arange(self._max_num_seqs, device=device)
        self._inputs = GraphInputs(device, _padded(None, self._max_num_seqs))
        self._steps: list[_CapturedStep] = []  # rising

    @property
    def sizes(self) -> list[int]:
        """Rows of the steps that have been captured, ascending."""
        return [step.num_rows for step in self._steps]

    @torch.inference_mode()
    def capture(self, most_bytes: int, *, is_alone: bool = True) -> None:
        """Captures as many batch sizes as `most_bytes` of the device's memory suffice for: the small ones, then the
        largest and those between."""
        for sizes in capture_order(batch_sizes(self._max_num_seqs)):
            kept = capture_within(most_bytes, self._backend, sizes, self._capture, "decode step", is_alone=is_alone)
            self._steps += kept
        self._steps.sort(key=lambda step: step.num_rows)

    def keep(self, sizes: Collection[int]) -> None:
        """Gives up the graphs of other batch sizes."""
        self._steps = [step for step in self._steps if step.num_rows in sizes]

    def suits(self, arrays: InputArrays) -> bool:
        """Whether this is a decode step, of no more rows than the largest graph, all of which sample."""
        num_rows = arrays.seq_lens.size
        is_decode = arrays.max_query_len == 1 and arrays.logits_rows.size == num_rows
        return is_decode and bool(self._steps) and num_rows <= self._steps[-1].num_rows

    def run(self, arrays: InputArrays) -> torch.Tensor:
        """Logits of a step that `suits`, f32[R, vocab]; they hold until the next run."""
        num_rows, num_columns = arrays.block_tables.shape
        step = next(step for step in self._steps if step.num_rows >= num_rows)
        fill(step.inputs, _padded(arrays, step.num_rows))
        (tables,) = upload(self._device, arrays.block_tables)
        self._buffers.block_tables[:num_rows, :num_columns].copy_(tables)
        step.graph.replay()
        return self._buffers.logits[:num_rows]

    def _capture(self, num_rows: int) -> _CapturedStep:
        inputs, (token_ids, positions, slot_mapping, seq_lens) = self._inputs.of(_padded(None, num_rows))
        attention = AttentionMetadata(
            slot_mapping=slot_mapping,
            query_starts=self._query_starts[: num_rows + 1],
            seq_lens=seq_lens,
            block_tables=self._buffers.block_tables[:num_rows],
            max_query_len=1,
            max_seq_len=self._max_model_len,
            scratch=self._buffers.scratch,
        )

        def work() -> None:
            known = self._last_tokens.fill_in(token_ids)
            self._forward(known, positions, attention, self._logits_rows[:num_rows], self._buffers.logits[:num_rows])

        return _CapturedStep(num_rows, inputs, self._backend.capture(work))


def _padded(arrays: InputArrays | None, num_rows: int) -> tuple[np.ndarray, ...]:
    """token_ids, positions, slot_mapping i64[num_rows], seq_lens i32[num_rows]; None: pads alone."""
    token_ids, positions = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
    slot_mapping, seq_lens = np.full(num_rows, -1), np.zeros(num_rows, np.int32)
    if arrays is not None:
        used = slice(0, arrays.seq_lens.size)
        token_ids[used], positions[used] = arrays.token_ids, arrays.positions
        slot_mapping[used], seq_lens[used] = arrays.slot_mapping, arrays.seq_lens
    return token_ids, positions, slot_mapping, seq_lens
