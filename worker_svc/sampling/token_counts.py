"""How often each token stands in the sequences that are penalised for it: counts on the device, kept up to date.

A row of counts belongs to a slot for as long as one sequence has it. Before they are read, rows are brought up to the
mirror: mostly by the one token that was drawn last, of all rows at once, also where the device alone knows it; a row
that is new, forked or rolled back is counted again. So nobody has to report here what happens to a slot.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from worker_svc.host.uploads import upload
from worker_svc.mirror.sequence_states import UNKNOWN, SequenceStates
from worker_svc.mirror.step_columns import Ints
from worker_svc.sampling.last_tokens import LastTokens

_GENERATED, _IN_PROMPT = 2, 1  # what a token adds to its count


class TokenCounts:
    """Counts over one vocabulary. Memory: 4 bytes a token of the vocabulary for each row, of which there are at most
    twice as many as there were penalised slots at once."""

    def __init__(self, vocab_size: int, last_tokens: LastTokens | None = None) -> None:
        self._last_tokens = last_tokens or LastTokens("cpu")
        # i32[rows, vocab]: twice how often a token was generated, and 1 more where it stands in the prompt
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=self._last_tokens.device)
        self._states: SequenceStates | None = None  # whose slots and tenancies the rows belong to
        self._row_of: Ints = np.full(0, -1)  # by slot
        self._tenancy: Ints = np.full(0, -1)  # by row, of the slot's sequence that was counted
        self._num_counted: Ints = np.zeros(0, np.int64)  # by row, tokens with the prompt

    def waits_for_tokens(self, states: SequenceStates, slots: npt.NDArray[np.integer]) -> bool:
        """Whether `slots` [R], whose last tokens the mirror does not know yet, have others that are to be counted."""
        if not slots.size:
            return False
        if self._states is not states:
            return True
        rows = self._row_of[slots]  # -1: none
        is_counted = (rows >= 0) & (self._tenancy[rows] == states.tenancy[slots])
        return not bool((is_counted & (self._num_counted[rows] >= states.num_tokens[slots] - 1)).all())

    def rows_of(
        self, states: SequenceStates, slots: npt.NDArray[np.integer], *others: npt.NDArray[Any]
    ) -> tuple[torch.Tensor, ...]:
        """Brings `counts` up to date for `slots` [R], which are different; the row of each, i64[R], on the device, and
        what else is to be there, in the same copy."""
        self._give_rows(states, slots)
        rows: Ints = self._row_of[slots]
        num_tokens, tenancy = states.num_tokens[slots], states.tenancy[slots]
        is_same = self._tenancy[rows] == tenancy
        is_one_behind = is_same & (self._num_counted[rows] == num_tokens - 1)
        is_current = is_same & (self._num_counted[rows] == num_tokens)
        for entry in np.flatnonzero(~(is_one_behind | is_current)).tolist():
            self._count_anew(states, int(slots[entry]), int(rows[entry]))
        behind = slots[is_one_behind]
        last = states.token_ids[behind, num_tokens[is_one_behind] - 1].astype(np.int64)
        first_places, is_unknown = rows[is_one_behind] * self.counts.shape[1], last == UNKNOWN
        is_device_ahead = bool(
            is_unknown.all()
        )  # of all of them, as it is of sequences that decode one step after another
        last = behind.astype(np.int64) if is_device_ahead else np.where(is_unknown, -1 - behind, last)
        rows_there, places, last_there, *others_there = upload(self.counts.device, rows, first_places, last, *others)
        if behind.size:
            tokens = self._last_tokens.of(last_there) if is_device_ahead else self._last_tokens.fill_in(last_there)
            places = places + tokens
            self.counts.view(-1).index_add_(0, places, self.counts.new_full(places.shape, _GENERATED))
        self._tenancy[rows], self._num_counted[rows] = tenancy, num_tokens
        return rows_there, *others_there

    def _count_anew(self, states: SequenceStates, slot: int, row: int) -> None:
        (token_ids,) = upload(self.counts.device, states.token_ids[slot, : states.num_tokens[slot]].astype(np.int64))
        num_prompt = int(states.num_prompt_tokens[slot])
        counts = self.counts[row].zero_()
        counts.index_fill_(0, token_ids[:num_prompt], _IN_PROMPT)  # an assignment would wait for a GPU
        generated = token_ids[num_prompt:]
        counts.index_add_(0, generated, counts.new_full(generated.shape, _GENERATED))

    def _give_rows(self, states: SequenceStates, slots: npt.NDArray[np.integer]) -> None:
        if self._states is not states:  # of another lease: its tenancies count from the beginning
            self._states, self._row_of = states, np.full(states.max_num_seqs, -1)
            self.counts = self.counts[:0].clone()
            self._tenancy, self._num_counted = self._tenancy[:0], self._num_counted[:0]
        missing = slots[self._row_of[slots] < 0]
        if not missing.size:
            return
        used = np.flatnonzero(self._row_of >= 0)
        # Slots that came to have another sequence since.
        vacant = used[~states.sampling.is_penalised[used]][: missing.size]
        first, num_new = len(self._num_counted), missing.size - vacant.size
        if num_new:
            self._grow(num_new)  # before any slot has another row: memory may run out
        taken = self._row_of[vacant]
        self._row_of[vacant] = -1
        self._tenancy[taken] = -1  # another slot's sequence may have the same number as the one that was counted here
        self._row_of[missing] = np.concatenate([taken, np.arange(first, first + num_new)])

    def _grow(self, num_rows: int) -> None:
        has, wanted = len(self.counts), len(self._num_counted) + num_rows
        if wanted > has:  # a copy of all rows takes long where they are many, and every step waits for it
            assert self._states is not None
            more = min(max(wanted, 2 * has), self._states.max_num_seqs) - has
            self.counts = torch.cat([self.counts, self.counts.new_zeros(more, self.counts.shape[1])])
        self._tenancy = np.append(self._tenancy, np.full(num_rows, -1))
        self._num_counted = np.append(self._num_counted, np.zeros(num_rows, np.int64))
