"""Sampling of a step, from its logits to its tokens, beside what can be built from PyTorch's sort and sums."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kernels.bench.case import Calls, Case, Goal, Setting
from kernels.bench.shapes import VOCAB_SIZE
from kernels.gpu.operations import chunk_maxima, draw_tokens, kept_range, penalize, token_logprobs, top_logits
from kernels.oracles.reference import CHUNK_SIZE

_ROWS = (1, 32, 256)
_GOAL_ROWS = 256
_SEEN_TOKENS = 300  # of a row's vocabulary, that penalties are for
_TOP_LOGITS = 5
_SCALE = 3.0  # standard deviation of logits


@dataclass(frozen=True, slots=True)
class _Kind:
    """What all rows of a batch ask for."""

    name: str
    top_k: int = 0
    top_p: float = 1.0
    temperature: float = 0.8
    is_penalised: bool = False
    wants_logprobs: bool = False
    has_goal: bool = False


_KINDS = (
    _Kind("greedy", temperature=0.0),
    _Kind("greedy, 5 logprobs", temperature=0.0, wants_logprobs=True),
    _Kind("temperature"),
    _Kind("top-p", top_p=0.9),
    _Kind("top-k, top-p, penalties", top_k=50, top_p=0.9, is_penalised=True, has_goal=True),
)


def cases(setting: Setting) -> Iterator[Case]:
    """Every kind of sampling by number of rows."""
    vocab_size = 203 if setting.is_tiny else VOCAB_SIZE
    for kind in _KINDS:
        for rows in (3,) if setting.is_tiny else _ROWS:
            yield Case(
                "sampling",
                shape=f"{rows} x {vocab_size:,}, {kind.name}",
                num_bytes=rows * vocab_size * (8 if kind.is_penalised else 4),
                build=functools.partial(_calls, setting, rows, vocab_size, kind),
                goal=Goal(300, is_us=True) if kind.has_goal and rows == _GOAL_ROWS else None,
            )


class _Batch:
    """Random logits, and columns in which every row asks for the same."""

    def __init__(self, setting: Setting, rows: int, vocab_size: int, kind: _Kind) -> None:
        device = setting.device

        def column(value: float) -> torch.Tensor:
            return torch.full((rows,), value, device=device)

        self.logits = torch.randn(rows, vocab_size, device=device) * _SCALE
        self.rows = torch.arange(rows, device=device)
        self.top_k = torch.full_like(self.rows, min(kind.top_k, vocab_size // 2))
        self.temperature, self.min_p, self.top_p = column(kind.temperature), column(0), column(kind.top_p)
        # Penalties of no effect take as long as others, and leave the logits as they are from call to call.
        self.repetition, self.frequency, self.presence = column(1), column(0), column(0)
        seen = torch.randint(0, vocab_size, (rows, min(_SEEN_TOKENS, vocab_size)), device=device)
        counts = torch.zeros(rows, vocab_size, dtype=torch.int32, device=device)
        self.counts = counts.scatter_(1, seen, 3)  # once in the prompt and once generated
        self.maxima = torch.empty(rows, -(-vocab_size // CHUNK_SIZE), device=device)
        self.token_ids, self.ranks = torch.empty_like(self.rows), torch.empty_like(self.rows)
        self.logprobs, self.log_sums = column(0), column(0)
        self.top_token_ids = self.rows.new_empty(rows, _TOP_LOGITS)
        self.top_logits = column(0).new_empty(rows, _TOP_LOGITS)


def _calls(setting: Setting, rows: int, vocab_size: int, kind: _Kind) -> Calls:
    batch = _Batch(setting, rows, vocab_size, kind)
    return Calls(functools.partial(_ours, batch, kind), {"sort, cumsum": functools.partial(_plain, batch, kind)})


def _ours(batch: _Batch, kind: _Kind) -> torch.Tensor | None:
    """Gives the smallest logits that were kept, or the greedy tokens; draws alone are not to be compared."""
    logits, maxima, rows = batch.logits, batch.maxima, batch.rows
    if kind.is_penalised:
        penalize(logits, rows, batch.counts, rows, batch.repetition, batch.frequency, batch.presence)
    chunk_maxima(maxima, logits)
    largest = maxima.amax(dim=-1)
    smallest = torch.full_like(largest, -torch.inf)
    if kind.top_k or kind.top_p < 1:
        kept_range(smallest, logits, maxima, largest, batch.temperature, batch.min_p, batch.top_k, batch.top_p)
    draw_tokens(batch.token_ids, logits, maxima, largest, smallest, batch.temperature, rows, rows, rows, rows)
    if kind.wants_logprobs:
        token_logprobs(batch.logprobs, batch.ranks, batch.log_sums, logits, largest, rows, batch.token_ids)
        top_logits(batch.top_token_ids, batch.top_logits, logits, maxima, rows)
    if kind.temperature == 0:
        return batch.token_ids
    return smallest if kind.top_k or kind.top_p < 1 else None


def _plain(batch: _Batch, kind: _Kind) -> torch.Tensor | None:
    """The same of the same."""
    x = batch.logits
    if kind.is_penalised:
        generated, repetition = batch.counts >> 1, batch.repetition[:, None]
        x = torch.where(batch.counts > 0, torch.where(x > 0, x / repetition, x * repetition), x)
        x = x - batch.frequency[:, None] * generated - batch.presence[:, None] * (generated > 0)
    if kind.wants_logprobs:
        logprobs = x.log_softmax(dim=-1)
        of_best = logprobs.gather(1, logprobs.argmax(dim=-1, keepdim=True))
        (logprobs > of_best).sum(dim=-1)
        logprobs.topk(_TOP_LOGITS, dim=-1)
    if kind.temperature == 0:
        return x.argmax(dim=-1)
    if kind.top_k or kind.top_p < 1:
        x, token_ids = x.sort(dim=-1, descending=True)
        if kind.top_k:
            is_cut = torch.arange(x.shape[1], device=x.device) >= batch.top_k[:, None]
            x = x.masked_fill(is_cut, -torch.inf)
        weights = (x / batch.temperature[:, None]).softmax(dim=-1)
        weights = weights.masked_fill(weights.cumsum(dim=-1) - weights >= batch.top_p[:, None], 0)
        drawn = (weights / torch.empty_like(weights).exponential_()).argmax(dim=-1, keepdim=True)
        token_ids.gather(1, drawn)
        return x.masked_fill(weights == 0, torch.inf).amin(dim=-1)
    weights = (x / batch.temperature[:, None]).softmax(dim=-1)
    (weights / torch.empty_like(weights).exponential_()).argmax(dim=-1)
    return None
