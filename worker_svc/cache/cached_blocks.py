"""Which device blocks still hold what a scheduler computed in them: what outlives its lease.

A step names the blocks that are full of known tokens once it has gone well, each with the hash of its content. They are
remembered until something writes to them, a step over them fails, or a scheduler drops them; the next one to take the
lease is told of them and need not compute them again. Not of those that were computed with an adapter: adapters end
with their lease, and what is loaded under the same name after it may hold other numbers. That a block is written to is
seen here, in what the step computes and moves, and not believed: a wrong entry would be wrong text. Knows what no hash
means.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from protos import worker_pb2
from worker_svc.errors import ProtocolError
from worker_svc.mirror.sequence_states import AppliedRows, SequenceStates
from worker_svc.mirror.step_columns import BlockOperations, Ints, check_below, ragged_offsets, read_column, read_slots

MAX_HASH_BYTES = 64
MAX_TOLD = 1 << 20  # blocks, those used last: 36 MiB of the 64 that a message may have


class CachedBlocks:
    """The known blocks of one cache. Lives on the model thread.

    `begin`, `compute` and `promise` follow a step on its way, in this order.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._is_known: npt.NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
        self._promised_in: Ints = np.zeros(num_blocks, np.int64)  # number of the step; rises over leases
        self._last_used: Ints = np.zeros(num_blocks, np.int64)
        self._is_adapted: npt.NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)  # computed with one, or maybe so
        self._num_steps = self._num_uses = 0
        self._bad_slots: set[int] = set()  # over whose blocks the model failed, until they are released

    def __len__(self) -> int:
        return len(self._block_of)

    # ---- a step -----------------------------------------------------------------------------------------------------

    def forget(self, step: worker_pb2.Step) -> None:
        """Forgets the blocks that the scheduler names, whether the step is run or not. Raises ProtocolError."""
        if step.forgets_all_blocks:
            self._forget(np.flatnonzero(self._is_known))
        elif step.forgotten_blocks_u32:
            blocks = read_column(step.forgotten_blocks_u32, "<u4", "forgotten_blocks")
            check_below(blocks, self._num_blocks, "forgotten_blocks")
            self._forget(blocks)

    def begin(self, step: worker_pb2.Step, states: SequenceStates, operations: BlockOperations) -> None:
        """Call it before the step's block operations; `states` are as they were before it. Raises ProtocolError, with
        nothing changed, for what cannot be promised: no rank of a parallel group may find that after computing."""
        self._read_promises(step)
        if step.released_slots_u16:
            for slot in read_slots(step.released_slots_u16, states.max_num_seqs, "released_slots").tolist():
                self.used(states.block_tables[slot, : states.num_blocks[slot]])
                self._bad_slots.discard(slot)
        swap_in, copies = operations.swap_in, operations.copies
        if swap_in.size:
            self._forget(swap_in[:, 1])
            self._is_adapted[swap_in[:, 1]] = bool(states.loaded_adapters)  # of what was swapped out it is not kept
        if copies.size:
            self._forget(copies[:, 1])
            self._is_adapted[copies[:, 1]] = self._is_adapted[copies[:, 0]]

    def compute(self, states: SequenceStates, rows: AppliedRows) -> None:
        """Call it before the step's rows write to the cache."""
        if not self._block_of and not states.loaded_adapters and not self._is_adapted.any():
            return
        first, last = rows.context_lens // states.block_size, (rows.seq_lens - 1) // states.block_size
        slots = rows.slots
        if (first != last).any():  # not so in a step of decodes
            counts = last - first + 1
            slots, first = np.repeat(slots, counts), np.repeat(first, counts) + ragged_offsets(counts)
        blocks = states.block_tables[slots, first]
        self._forget(blocks)
        self._is_adapted[blocks] = states.adapter_numbers[slots] >= 0

    def promise(self, step: worker_pb2.Step, states: SequenceStates) -> int:
        """Call it when the step is launched: what it names is known unless it fails. Returns a number for `failed`."""
        self._num_steps += 1
        blocks, hashes = self._read_promises(step)
        if not hashes:
            return self._num_steps
        self._forget(blocks)
        for block, digest in zip(blocks.tolist(), hashes, strict=True):
            if (other := self._block_of.get(digest)) is not None:  # which its scheduler has no use for any more
                self._drop(other)
            self._block_of[digest], self._hash_of[block] = block, digest
        self._is_known[blocks] = True
        self._promised_in[blocks] = self._num_steps
        self.used(blocks)
        for slot in self._bad_slots:
            self._forget(states.block_tables[slot, : states.num_blocks[slot]])
        return self._num_steps

    def failed(self, number: int) -> None:
        """The step of this number, and all after it, have failed."""
        self._forget(np.flatnonzero(self._is_known & (self._promised_in >= number)))

    def fail_over(self, states: SequenceStates, slots: Ints, is_last: bool = True) -> None:
        """The model failed over what these slots hold: none of it is passed on, nor what is added to it.

        `is_last`: no step has been launched since, which may have given the slots to others.
        """
        self._bad_slots.update(slots.tolist())
        if not is_last:
            self._forget(np.flatnonzero(self._is_known))
        for slot in slots.tolist():
            self._forget(states.block_tables[slot, : states.num_blocks[slot]])

    # ---- between leases ---------------------------------------------------------------------------------------------

    def used(self, table: npt.NDArray[np.integer]) -> None:
        """A sequence that held these blocks is done with them: of equals the last of a table goes first later on."""
        self._num_uses += len(table)
        self._last_used[table] = self._num_uses - np.arange(len(table))

    def told(self, states: SequenceStates | None = None) -> worker_pb2.CachedBlocks:
        """What the next scheduler is told, once every step has been answered. `states`: of the lease that has ended."""
        if states is not None:
            for slot in np.flatnonzero(states.occupied).tolist():
                self.used(states.block_tables[slot, : states.num_blocks[slot]])
            self._bad_slots.clear()
        self._forget(np.flatnonzero(self._is_adapted))
        known = np.flatnonzero(self._is_known)
        blocks = known[np.argsort(self._last_used[known], kind="stable")][-MAX_TOLD:]
        hashes = [self._hash_of[block] or b"" for block in blocks.tolist()]
        sizes = {len(digest) for digest in hashes}
        if len(sizes) > 1:  # of schedulers of different kinds: the last one's
            size = len(hashes[-1])
            blocks = blocks[[len(digest) == size for digest in hashes]]
            hashes = [digest for digest in hashes if len(digest) == size]
        return worker_pb2.CachedBlocks(block_ids_u32=blocks.astype("<u4").tobytes(), hashes=b"".join(hashes))

    def _read_promises(self, step: worker_pb2.Step) -> tuple[Ints, list[bytes]]:
        """The blocks that a step names, and their hashes. Raises ProtocolError."""
        blocks = read_column(step.cached_blocks.block_ids_u32, "<u4", "cached_blocks")
        if not blocks.size:
            return blocks, []
        check_below(blocks, self._num_blocks, "cached_blocks")
        all_hashes = step.cached_blocks.hashes
        num_bytes = len(all_hashes)
        size, rest = divmod(num_bytes, len(blocks))
        if rest or not 0 < size <= MAX_HASH_BYTES:
            raise ProtocolError(f"cached_blocks has {num_bytes} bytes of hashes for {len(blocks)} blocks")
        hashes = [all_hashes[at : at + size] for at in range(0, num_bytes, size)]
        if min(len(set(hashes)), len(set(blocks.tolist()))) < len(blocks):
            raise ProtocolError("cached_blocks names a block or a content twice")
        return blocks, hashes

    def _forget(self, blocks: npt.NDArray[np.integer]) -> None:
        for block in blocks[self._is_known[blocks]].tolist():
            if self._is_known[block]:  # a shared one may be named twice
                self._drop(block)

    def _drop(self, block: int) -> None:
        digest = self._hash_of[block]
        assert digest is not None, "a known block has a hash"
        del self._block_of[digest]
        self._hash_of[block] = None
        self._is_known[block] = False

    def check_integrity(self) -> None:
        """Raises AssertionError when what is known of blocks contradicts itself."""
        known = [(digest, block) for block, digest in enumerate(self._hash_of) if digest is not None]
        assert dict(known) == self._block_of, "a hash and its block disagree"
        assert sorted(self._block_of.values()) == np.flatnonzero(self._is_known).tolist(), "a block is half forgotten"
