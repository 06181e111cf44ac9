"""What a request's parameters do to its logits before temperature: in the order of the public surface.

    allowed token ids, bad words, min_tokens, logit bias, repetition, frequency, presence

Each alone means what the processor of that name in `transformers` does; frequency and presence, which it does not
have, are logit - frequency * count - presence * (count > 0) over generated tokens. Whole batches are adjusted by
indexing and elementwise operations alone, so that a row's result does not depend on the batch it is in, and without
waiting for the device: what is forbidden is known on the host.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kernels.select import kernels_for
from worker_svc.host.uploads import upload
from worker_svc.mirror.sequence_states import UNKNOWN, SequenceStates
from worker_svc.mirror.step_columns import Ints
from worker_svc.sampling.last_tokens import LastTokens
from worker_svc.sampling.token_counts import TokenCounts

_NOTHING: Ints = np.zeros(0, np.int64)


class LogitAdjustments:
    """Keeps the counts that penalties need; everything else lies in the mirror's columns."""

    def __init__(self, vocab_size: int, last_tokens: LastTokens | None = None) -> None:
        """`last_tokens` None: every token is known on the host, which computes."""
        self._counts = TokenCounts(vocab_size, last_tokens)

    def waits_for_tokens(self, states: SequenceStates, slots: npt.NDArray[np.integer]) -> bool:
        """Whether `apply` would read tokens of `slots` [R] that are still on their way to the mirror.

        Bad words of several tokens are looked for on the host. Counts take the last token from the device.
        """
        slots = slots[states.token_ids[slots, states.num_tokens[slots] - 1] == UNKNOWN]
        sampling = states.sampling
        return bool(sampling.compares_words[slots].any()) or self._counts.waits_for_tokens(
            states, slots[sampling.is_penalised[slots]]
        )

    def apply(
        self,
        logits: torch.Tensor,
        states: SequenceStates,
        slots: npt.NDArray[np.integer],
        *,
        keeps_logits: bool = True,
    ) -> torch.Tensor:
        """`logits` f32[R, vocab] of the next token of each of `slots` [R], adjusted: in a copy where `keeps_logits`,
        else in place. The same tensor, untouched, where no request adjusts anything."""
        sampling = states.sampling
        if not sampling.adjusts_logits[slots].any():
            return logits
        logits = logits.clone() if keeps_logits else logits
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
            rows, columns, added = upload(logits.device, owners, token_ids.astype(np.int64), biases.astype(np.float32))
            logits[rows, columns] += added  # every token of a row is named once
        self._penalise(logits, states, slots)
        return logits

    def _penalise(self, logits: torch.Tensor, states: SequenceStates, slots: npt.NDArray[np.integer]) -> None:
        sampling = states.sampling
        rows = np.flatnonzero(sampling.is_penalised[slots])
        if not rows.size:
            return
        slots = slots[rows]
        penalties = sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty
        count_rows, where, *of_rows = self._counts.rows_of(
            states, slots, rows, *[column[slots] for column in penalties]
        )
        kernels_for(logits.device).penalize(logits, where, self._counts.counts, count_rows, *of_rows)


def _keep_allowed(logits: torch.Tensor, owners: Ints, token_ids: npt.NDArray[np.generic]) -> None:
    if owners.size:
        restricted, rows, columns = upload(logits.device, np.unique(owners), owners, token_ids.astype(np.int64))
        allowed = logits[rows, columns]
        logits.index_fill_(0, restricted, -torch.inf)
        logits[rows, columns] = allowed


def _forbid(logits: torch.Tensor, owners: Ints, token_ids: npt.NDArray[np.generic]) -> None:
    columns, vocab_size = token_ids.astype(np.int64), logits.shape[1]
    is_drawable = columns < vocab_size  # a tokenizer may have end tokens and words that the model has not
    if is_drawable.any():
        (places,) = upload(logits.device, (owners * vocab_size + columns)[is_drawable])
        # A number that is assigned to indexed places is copied to a GPU, which the host would wait for.
        logits.view(-1).index_fill_(0, places, -torch.inf)


def _ends_of_bad_words(states: SequenceStates, slots: npt.NDArray[np.integer]) -> tuple[Ints, Ints]:
    """Tokens that would complete a bad word of their sequence now: (which of `slots`, the token)."""
    owners, ends = [_NOTHING], [_NOTHING]
    for owner in np.flatnonzero(states.sampling.has_bad_words[slots]).tolist():
        slot = slots[owner]
        words = states.sampling.bad_words[slot]
        assert words is not None, "has_bad_words says so"
        found = words.ends(states.token_ids[slot, : states.num_tokens[slot]])
        owners.append(np.full(len(found), owner))
        ends.append(found)
    return np.concatenate(owners), np.concatenate(ends)
