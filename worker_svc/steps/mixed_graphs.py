"""Steps that are no decode, captured as graphs of a few numbers of tokens: prompts, chunks, and decodes beside them.

What `decode_graphs` says of addresses, pads and memory holds here, too. A step of T tokens of S sequences is padded to
the next number of tokens, and to as many sequences as there can be:

    device     token_ids positions slots       [tokens]       pads have slot -1, and belong to no sequence
               seq_lens logits_rows            [sequences]    pads have length 0; their logits are nobody's
               query_starts                    [sequences + 1]  pads have no token: all begin where the last one ends
               block_tables, logits            `GraphBuffers`, as those of the decode graphs

Attention's grids do not depend on lengths, so that a pass is captured whole. Products and norms compute pads like other
rows, attention and the cache pass over them. Where a row's bits do not depend on its company, as with
`--batch-invariant`, a replayed step has those of the step itself.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch

from worker_svc.host.graph_backend import Graph, GraphBackend
from worker_svc.host.uploads import upload
from worker_svc.models.attention import AttentionMetadata
from worker_svc.sampling.last_tokens import LastTokens
from worker_svc.steps.decode_graphs import Forward
from worker_svc.steps.graph_buffers import GraphBuffers
from worker_svc.steps.graph_captures import capture_within
from worker_svc.steps.graph_inputs import GraphInputs, fill
from worker_svc.steps.input_batch import InputArrays

_LEAST_TOKENS = 16
# A step of more computes for longer than its launches take: 20 ms or so of 8 B parameters, 3 ms of 0.6 B.
_MOST_TOKENS = 2048


def token_counts(max_num_batched_tokens: int) -> list[int]:
    """Tokens that graphs are captured for, ascending: 16, 24, 32, 48, 64, 96, ..., and the largest step's.

    Less than a third of a replayed step's tokens are pads, but for steps of a few tokens.
    """
    most = min(max_num_batched_tokens, _MOST_TOKENS)
    counts, count = [], _LEAST_TOKENS
    while count < most:
        counts += [count, count + count // 2]
        count *= 2
    return [count for count in counts if count < most] + [most]


@dataclass(frozen=True, slots=True)
class _CapturedStep:
    """A step of `num_tokens` tokens, and the inputs that it reads."""

    num_tokens: int
    inputs: torch.Tensor  # u8, what one copy fills
    graph: Graph


class MixedGraphs:
    """Graphs of one model over one cache, beside its decode graphs, with which they share `buffers`."""

    def __init__(
        self,
        forward: Forward,
        backend: GraphBackend,
        last_tokens: LastTokens,
        buffers: GraphBuffers,
        *,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        """`capture` has to follow, after that of decode graphs."""
        self._forward, self._backend, self._last_tokens = forward, backend, last_tokens
        self._counts, self._max_model_len = token_counts(max_num_batched_tokens), max_model_len
        self._device, self._buffers = last_tokens.device, buffers
        self._inputs = GraphInputs(self._device, self._padded(None, self._counts[-1]))
        self._steps: list[_CapturedStep] = []  # rising

    @property
    def sizes(self) -> list[int]:
        """Tokens of the steps that have been captured, ascending."""
        return [step.num_tokens for step in self._steps]

    @torch.inference_mode()
    def capture(self, most_bytes: int, *, is_alone: bool = True) -> None:
        """Captures as many numbers of tokens as `most_bytes` of the device's memory, less what the decode graphs have
        taken of them, suffice for: the largest first, so that the others find theirs in its memory."""
        falling = capture_within(
            most_bytes, self._backend, self._counts[::-1], self._capture, "mixed step", is_alone=is_alone
        )
        self._steps = falling[::-1]

    def keep(self, sizes: Collection[int]) -> None:
        """Gives up the graphs of other numbers of tokens."""
        self._steps = [step for step in self._steps if step.num_tokens in sizes]

    def suits(self, arrays: InputArrays) -> bool:
        """Whether there is a graph of as many tokens, or of not many more."""
        return self._step_of(arrays) is not None

    def run(self, arrays: InputArrays) -> torch.Tensor:
        """Logits of a step that `suits`, f32[L, vocab]; they hold until the next run of any pass."""
        step = self._step_of(arrays)
        assert step is not None, "it suits"
        num_rows, num_columns = arrays.block_tables.shape
        fill(step.inputs, self._padded(arrays, step.num_tokens))
        (tables,) = upload(self._device, arrays.block_tables)
        self._buffers.block_tables[:num_rows, :num_columns].copy_(tables)
        step.graph.replay()
        return self._buffers.logits[: arrays.logits_rows.size]

    def _step_of(self, arrays: InputArrays) -> _CapturedStep | None:
        num_tokens = arrays.token_ids.size
        step = next((step for step in self._steps if step.num_tokens >= num_tokens), None)
        # Where graphs between are missing, the next one may compute for longer than all launches take.
        return None if step is None or step.num_tokens > max(2 * num_tokens, _LEAST_TOKENS) else step

    def _capture(self, num_tokens: int) -> _CapturedStep:
        inputs, parts = self._inputs.of(self._padded(None, num_tokens))
        token_ids, positions, slot_mapping, seq_lens, query_starts, logits_rows = parts
        num_seqs = seq_lens.shape[0]
        attention = AttentionMetadata(
            slot_mapping=slot_mapping,
            query_starts=query_starts,
            seq_lens=seq_lens,
            block_tables=self._buffers.block_tables[:num_seqs],
            max_query_len=num_tokens,
            max_seq_len=self._max_model_len,
            scratch=self._buffers.scratch,
        )

        def work() -> None:
            known = self._last_tokens.fill_in(token_ids)
            self._forward(known, positions, attention, logits_rows, self._buffers.logits[:num_seqs])

        return _CapturedStep(num_tokens, inputs, self._backend.capture(work))

    def _padded(self, arrays: InputArrays | None, num_tokens: int) -> tuple[np.ndarray, ...]:
        """token_ids, positions, slot_mapping i64[num_tokens], seq_lens i32[S], query_starts i32[S + 1], logits_rows
        i64[S]; None: pads alone."""
        num_seqs = min(num_tokens, self._buffers.max_num_seqs)
        token_ids, positions = np.zeros(num_tokens, np.int64), np.zeros(num_tokens, np.int64)
        slot_mapping, seq_lens = np.full(num_tokens, -1), np.zeros(num_seqs, np.int32)
        query_starts, logits_rows = np.zeros(num_seqs + 1, np.int32), np.zeros(num_seqs, np.int64)
        if arrays is not None:
            num_used, num_rows = arrays.token_ids.size, arrays.seq_lens.size
            token_ids[:num_used], positions[:num_used] = arrays.token_ids, arrays.positions
            slot_mapping[:num_used], seq_lens[:num_rows] = arrays.slot_mapping, arrays.seq_lens
            query_starts[: num_rows + 1], query_starts[num_rows + 1 :] = arrays.query_starts, num_used
            logits_rows[: arrays.logits_rows.size] = arrays.logits_rows
        return token_ids, positions, slot_mapping, seq_lens, query_starts, logits_rows
