"""State of all sequences that run on one worker, in arrays by slot: the only copy of what they hold.

A slot is a row of the worker's persistent batch. `Sequence` reads through these arrays while it has a slot, and a step
reads and writes them as whole columns, so that a decode step costs the same few array operations however many sequences
take part. Knows nothing of queues, blocks' owners or the wire.

One sequence's tokens, in half-open intervals of positions:

    0            num_computed                 num_tokens              num_tokens + num_placeholders
    |--in cache--|--known, not yet computed---|--drawn by steps in flight, value not yet here------|
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
TokenIds = npt.NDArray[np.int32]


class SequenceColumns:
    """Arrays over `max_num_seqs` slots.

    Attributes (shape [slots] unless noted):
        token_ids: [slots, max_model_len], prompt and generated tokens.
        num_tokens: tokens whose value is known here.
        num_computed_tokens: tokens whose K and V are in the cache once every step sent so far has run.
        num_placeholders: tokens that steps in flight will draw.
        num_known_tokens: tokens that the worker was told; beyond them its own last draw is the next input.
        max_num_tokens: a sequence is never scheduled to draw beyond this length.
        block_tables: [slots, max_blocks], ids of device blocks; `num_blocks` entries of a row count.
        num_published: leading blocks of the table that went to the prefix cache.
        may_publish: whether more of them may go there: not while it is in doubt what they were computed upon.
        shares_tail: whether the last block may be another sequence's too, so that writing into it needs a look.
        is_held: no decode although the next token is known here or in flight: a beam that waits to be ranked, or a
            sequence whose group is not all computed yet.
        generation: rises whenever the slot is taken or released; names one tenancy of the slot.
        eos_token_id: ends the sequence when drawn; -1 for none.
        has_stop_token_ids: whether the group names more stop tokens (looked up in the object).
        wants_logprobs: whether its draws are to come with their logprobs.
        is_traced: whether steps with the slot are of interest to the trace of its request.
        tenant: a number for the share that the group counts under.
        last_token_ns: when its last token arrived; 0 before the first.
        owner: the Sequence in the slot, or None.
        ones: 1 everywhere, not to be changed: a column of a decode step.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.block_size = block_size
        max_blocks = -(-max_model_len // block_size)
        self.token_ids: TokenIds = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.block_tables: npt.NDArray[np.int32] = np.zeros((max_num_seqs, max_blocks), np.int32)
        self.num_tokens: Ints = np.zeros(max_num_seqs, np.int64)
        self.num_computed_tokens: Ints = np.zeros(max_num_seqs, np.int64)
        self.num_placeholders: Ints = np.zeros(max_num_seqs, np.int64)
        self.num_known_tokens: Ints = np.zeros(max_num_seqs, np.int64)
        self.max_num_tokens: Ints = np.zeros(max_num_seqs, np.int64)
        self.num_blocks: Ints = np.zeros(max_num_seqs, np.int64)
        self.num_published: Ints = np.zeros(max_num_seqs, np.int64)
        self.may_publish: npt.NDArray[np.bool_] = np.ones(max_num_seqs, np.bool_)
        self.shares_tail: npt.NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)
        self.is_held: npt.NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)
        self.generation: Ints = np.zeros(max_num_seqs, np.int64)
        self.eos_token_id: Ints = np.full(max_num_seqs, -1, np.int64)
        self.has_stop_token_ids: npt.NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)
        self.wants_logprobs: npt.NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)
        self.is_traced: npt.NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)
        self.tenant: Ints = np.zeros(max_num_seqs, np.int64)
        self.last_token_ns: Ints = np.zeros(max_num_seqs, np.int64)
        self.occupied: npt.NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)
        self.ones: Ints = np.ones(max_num_seqs, np.int64)
        self.ones.flags.writeable = False
        self.owner: npt.NDArray[np.object_] = np.full(max_num_seqs, None, object)
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    @property
    def num_free_slots(self) -> int:
        """As many sequences can still be seated."""
        return len(self._free_slots)

    def take_slot(
        self,
        owner: object,
        token_ids: TokenIds,
        *,
        max_num_tokens: int,
        eos_token_id: int | None,
        has_stop_token_ids: bool,
        wants_logprobs: bool,
        last_token_ns: int,
        is_traced: bool = False,
    ) -> int:
        """Seats a sequence, none of whose tokens is computed yet; the caller asked `num_free_slots` before."""
        slot = self._free_slots.pop()
        self.token_ids[slot, : len(token_ids)] = token_ids
        self.num_tokens[slot] = self.num_known_tokens[slot] = len(token_ids)
        self.num_computed_tokens[slot] = 0
        self.num_placeholders[slot] = 0
        self.max_num_tokens[slot] = max_num_tokens
        self.num_blocks[slot] = self.num_published[slot] = 0
        self.shares_tail[slot] = self.is_held[slot] = False
        self.generation[slot] += 1
        self.eos_token_id[slot] = -1 if eos_token_id is None else eos_token_id
        self.has_stop_token_ids[slot] = has_stop_token_ids
        self.wants_logprobs[slot] = wants_logprobs
        self.is_traced[slot] = is_traced
        self.last_token_ns[slot] = last_token_ns
        self.occupied[slot] = True
        self.owner[slot] = owner
        return slot

    def fork_slot(self, parent: int, owner: object) -> int:
        """Seats a sequence that stands where another one stands; the block table is its manager's to share."""
        slot = self._free_slots.pop()
        num_tokens = int(self.num_tokens[parent])
        self.token_ids[slot, :num_tokens] = self.token_ids[parent, :num_tokens]
        for column in (
            self.num_tokens,
            self.num_computed_tokens,
            self.num_placeholders,
            self.num_known_tokens,
            self.max_num_tokens,
            self.eos_token_id,
            self.has_stop_token_ids,
            self.wants_logprobs,
            self.is_held,
            self.may_publish,
            self.is_traced,
            self.tenant,
            self.last_token_ns,
        ):
            column[slot] = column[parent]
        self.num_blocks[slot] = self.num_published[slot] = 0
        self.shares_tail[slot] = False
        self.generation[slot] += 1
        self.occupied[slot] = True
        self.owner[slot] = owner
        return slot

    def some_want_logprobs(self, slots: Ints) -> bool:
        """Whether one of `slots` does; quick where nobody at all does, as in most steps."""
        return bool(self.wants_logprobs.any() and self.wants_logprobs[slots].any())

    def release_slot(self, slot: int) -> None:
        """Frees the row; its generation rises, so that late answers for it are told apart."""
        self.generation[slot] += 1
        self.occupied[slot] = False
        self.wants_logprobs[slot] = self.is_traced[slot] = False
        self.may_publish[slot] = True
        self.owner[slot] = None
        self.num_blocks[slot] = 0
        self._free_slots.append(slot)

    def decodable_slots(self) -> Ints:
        """Slots, ascending, whose next token is one decode away: everything but the last draw is computed."""
        reach = self.num_tokens + self.num_placeholders
        ready = (reach == self.num_computed_tokens + 1) & self.occupied & (reach < self.max_num_tokens)
        ready &= (self.num_computed_tokens >= self.num_known_tokens) & ~self.is_held
        slots: Ints = ready.nonzero()[0]
        return slots

    def check_integrity(self) -> None:
        """Raises AssertionError when columns contradict one another. Cheap enough to run in production when idle."""
        free = np.zeros(self.max_num_seqs, np.bool_)
        free[self._free_slots] = True
        assert int(free.sum()) == len(self._free_slots), "a slot is twice in the free list"
        assert bool((free ^ self.occupied).all()), "a slot is neither free nor occupied, or both"
        held = np.flatnonzero(self.occupied)
        reach = self.num_tokens[held] + self.num_placeholders[held]
        assert bool((self.num_placeholders[held] >= 0).all()), "negative placeholders"
        assert bool((reach <= self.max_num_tokens[held]).all()), "a sequence reaches beyond its limit"
        assert bool((self.num_computed_tokens[held] <= reach).all()), "computed beyond what exists"
        room = self.num_blocks[held] * self.block_size
        assert bool((self.num_computed_tokens[held] <= room).all()), "computed tokens without a block"
        assert bool((self.num_published[held] <= self.num_blocks[held]).all()), "published more blocks than it has"
        for slot in held:
            assert self.owner[slot].slot == slot, "slot and owner disagree"
