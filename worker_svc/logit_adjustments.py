"""What a request's parameters do to its logits before temperature: in the order of the public surface.

    allowed token ids, bad words, min_tokens, logit bias, repetition, frequency, presence

Each alone means what the processor of that name in `transformers` does; frequency and presence, which it does not
have, are logit - frequency * count - presence * (count > 0) over generated tokens. Whole batches are adjusted by
indexing and elementwise operations alone, so that a row's result does not depend on the batch it is in.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from worker_svc.sequence_states import SequenceStates
from worker_svc.step_columns import Ints
from worker_svc.token_counts import TokenCounts

# Rows are adjusted in blocks of so many logits, so that temporaries are not fresh memory each time: penalties of 128
# rows of 128,256 took 500 to 670 ms in one block on one core, and 170 to 260 ms in blocks of 32 rows.
_NUMBERS_AT_ONCE = 1 << 22


class LogitAdjustments:
    """Keeps the counts that penalties need; everything else lies in the mirror's columns."""

    def __init__(self, vocab_size: int, device: str | torch.device = "cpu") -> None:
        self._counts = TokenCounts(vocab_size, device)

    def apply(self, logits: torch.Tensor, states: SequenceStates, slots: npt.NDArray[np.integer]) -> torch.Tensor:
        """`logits` f32[R, vocab] of the next token of each of `slots` [R], adjusted in a copy; as they are, and the
        same tensor, where nobody asks for anything."""
        sampling = states.sampling
        rows = np.flatnonzero(sampling.adjusts_logits[slots])
        if not rows.size:
            return logits
        adjusted = logits.clone()
        at_once = max(_NUMBERS_AT_ONCE // logits.shape[-1], 1)
        for first in range(0, rows.size, at_once):
            block = rows[first : first + at_once]
            where = torch.from_numpy(block)
            chosen = logits[where]
            self._adjust(chosen, states, slots[block])
            adjusted[where] = chosen
        return adjusted

    def _adjust(self, logits: torch.Tensor, states: SequenceStates, slots: npt.NDArray[np.integer]) -> None:
        sampling = states.sampling
        _keep_allowed(logits, *sampling.allowed_token_ids.take(slots))
        _forbid(logits, *_ends_of_bad_words(states, slots))
        num_generated = states.num_tokens[slots] - states.num_prompt_tokens[slots]
        is_too_short = num_generated < sampling.min_tokens[slots]
        if is_too_short.any():
            owners, stops = sampling.stop_token_ids.take(slots[is_too_short])
            _forbid(logits, np.flatnonzero(is_too_short)[owners], stops)
        owners, token_ids = sampling.bias_token_ids.take(slots)
        if owners.size:
            _, biases = sampling.biases.take(slots)
            where = (torch.from_numpy(owners), torch.from_numpy(token_ids))
            logits.index_put_(where, torch.from_numpy(biases.astype(np.float32)).to(logits), accumulate=True)
        self._penalise(logits, states, slots)

    def _penalise(self, logits: torch.Tensor, states: SequenceStates, slots: npt.NDArray[np.integer]) -> None:
        rows = np.flatnonzero(states.sampling.is_penalised[slots])
        if not rows.size:
            return
        slots, where = slots[rows], torch.from_numpy(rows)
        generated, is_in_prompt = self._counts.of(states, slots)
        chosen = logits[where]
        sampling = states.sampling
        repetition = _column(sampling.repetition_penalty[slots])
        repeated = torch.where(chosen > 0, chosen / repetition, chosen * repetition)
        chosen = torch.where(is_in_prompt | (generated > 0), repeated, chosen)
        chosen -= _column(sampling.frequency_penalty[slots]) * generated
        chosen -= _column(sampling.presence_penalty[slots]) * (generated > 0)
        logits[where] = chosen


def _keep_allowed(logits: torch.Tensor, owners: Ints, token_ids: npt.NDArray[np.generic]) -> None:
    if not owners.size:
        return
    rows, owners = np.unique(owners, return_inverse=True)
    is_allowed = torch.zeros(rows.size, logits.shape[1], dtype=torch.bool)
    is_allowed[torch.from_numpy(owners), torch.from_numpy(token_ids)] = True
    where = torch.from_numpy(rows)
    logits[where] = logits[where].masked_fill(~is_allowed, -torch.inf)


def _forbid(logits: torch.Tensor, owners: Ints, token_ids: npt.NDArray[np.generic]) -> None:
    if owners.size:
        logits[torch.from_numpy(owners), torch.from_numpy(token_ids)] = -torch.inf


def _ends_of_bad_words(states: SequenceStates, slots: npt.NDArray[np.integer]) -> tuple[Ints, npt.NDArray[np.int64]]:
    """Tokens that would complete a bad word of their sequence now: (which of `slots`, the token)."""
    owners, words = states.sampling.bad_words.take(slots)
    if not owners.size:
        return owners, words.astype(np.int64)
    begins, ends = states.sampling.bad_word_table.take(words)
    back = np.arange(begins.shape[1], 0, -1)
    positions = states.num_tokens[slots[owners]][:, None] - back
    stands = states.token_ids[slots[owners][:, None], np.maximum(positions, 0)]
    is_begun = ((begins < 0) | ((stands == begins) & (positions >= 0))).all(axis=1)
    return owners[is_begun], ends[is_begun]


def _column(values: npt.NDArray[np.float32]) -> torch.Tensor:
    return torch.from_numpy(values)[:, None]
