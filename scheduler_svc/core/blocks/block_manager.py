"""Which blocks hold which tokens: block tables by slot over a device pool, host tables of swapped sequences beside it.

Policy asks (`can_allocate`, `num_blocks_missing`, `slots_to_copy`), this module acts (`grow`, `fork`, `copy_on_write`,
`swap_out`, `free`). Decides nothing itself. Blocks are shared in three ways:

    fork            a child shares all of its parent's blocks; whoever writes into a shared last block copies it first
    prefix cache    full blocks only, which nobody writes again: found by hash when a sequence begins
    group's own     the same, with prefix caching off: what a group publishes only its own sequences find
"""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt

from protos import worker_pb2
from scheduler_svc.core.blocks.block_allocator import BlockAllocator
from scheduler_svc.core.blocks.cache_news import NO_NEWS, CacheNews
from scheduler_svc.core.blocks.prefix_cache import PrefixCache
from scheduler_svc.core.blocks.prefix_finder import PrefixFinder
from scheduler_svc.core.sequences.block_hashes import HASH_BYTES, BlockIds, root_hash
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.sequences.sequence_columns import Ints, SequenceColumns

NO_PARENT: BlockIds = np.array([-1], np.int32)  # of the first block of a prefix


class AllocStatus(enum.Enum):
    """Whether there are blocks for a group."""

    OK = "ok"
    LATER = "later"  # not now
    NEVER = "never"  # more than the whole cache


class BlockSpaceManager:
    """Blocks of one worker's sequences.

    Args:
        watermark: share of all blocks that admission leaves free, so that running sequences can grow for a while before
            one of them has to be preempted.
        enable_prefix_caching: whether content is found by other groups, and after its last use.
    """

    def __init__(
        self,
        columns: SequenceColumns,
        num_device_blocks: int,
        num_host_blocks: int = 0,
        *,
        watermark: float = 0.01,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.columns = columns
        self.block_size = columns.block_size
        self.cache = PrefixCache(num_device_blocks)
        self._finder = PrefixFinder(self.cache, self.block_size)
        self.allocator = BlockAllocator(num_device_blocks, self.cache, keeps_idle=enable_prefix_caching)
        self.host_allocator = BlockAllocator(num_host_blocks)
        self.watermark_blocks = int(watermark * num_device_blocks)
        self.enable_prefix_caching = enable_prefix_caching
        self._published: list[int] = []  # since `take_published`
        self._forgotten: list[int] = []  # since `take_news`
        self._has_forgotten_all = False

    @property
    def num_free_blocks(self) -> int:
        """Of the device, idle ones included."""
        return self.allocator.num_free

    def num_blocks_for(self, num_tokens: int) -> int:
        """Rounded up: the last block may be half full."""
        return -(-num_tokens // self.block_size)

    # ---- Room -------------------------------------------------------------------------------------------------------

    def can_allocate(self, num_blocks: int, reserved: int, is_idle: bool) -> AllocStatus:
        """Whether so many blocks can be had beside `reserved`, which others were promised; idle: to the last one."""
        if num_blocks > self.allocator.num_usable:
            return AllocStatus.NEVER
        kept = 0 if is_idle else self.watermark_blocks
        return AllocStatus.OK if num_blocks + reserved + kept <= self.num_free_blocks else AllocStatus.LATER

    def num_blocks_missing(self, slot: int, num_tokens: int) -> int:
        """Blocks that the slot lacks to hold `num_tokens` tokens."""
        return max(0, self.num_blocks_for(num_tokens) - int(self.columns.num_blocks[slot]))

    def num_blocks_of(self, group: SequenceGroup) -> int:
        """Blocks that hold all known tokens of the group when nothing of them is cached; what is shared counts once."""
        return group.num_distinct_blocks(self.block_size)

    def num_blocks_to_take(self, group: SequenceGroup) -> int:
        """Of `num_blocks_of`, those that are not in use already under the same hashes."""
        blocks = self._finder.find_distinct(group)
        return self.num_blocks_of(group) - self.allocator.num_in_use(blocks)

    # ---- The way forward --------------------------------------------------------------------------------------------

    def grow(self, slot: int, num_tokens: int) -> BlockIds:
        """Extends the slot's table to hold `num_tokens` tokens and gives the new blocks."""
        held = int(self.columns.num_blocks[slot])
        blocks = self.allocator.allocate(self.num_blocks_missing(slot, num_tokens))
        self.columns.block_tables[slot, held : held + len(blocks)] = blocks
        self.columns.num_blocks[slot] += len(blocks)
        return blocks

    def slots_at_border(self, slots: Ints) -> Ints:
        """Those of `slots` whose next token needs a new block."""
        is_full = self.columns.num_computed_tokens[slots] == self.columns.num_blocks[slots] * self.block_size
        at_border: Ints = slots[is_full]
        return at_border

    def grow_by_one(self, slots: Ints) -> BlockIds:
        """Extends each slot's table by one block; entry i of the result went to slots[i]."""
        blocks = self.allocator.allocate(len(slots))
        self.columns.block_tables[slots, self.columns.num_blocks[slots]] = blocks
        self.columns.num_blocks[slots] += 1
        return blocks

    def free(self, slot: int) -> None:
        """Gives all blocks of the slot up; those that nobody shares are free, and idle where they can be found."""
        held = int(self.columns.num_blocks[slot])
        self.allocator.free(self.columns.block_tables[slot, :held])
        self.columns.num_blocks[slot] = 0

    # ---- Fork and copy on write -------------------------------------------------------------------------------------

    def fork(self, parent: int, child: int) -> None:
        """The child's slot gets the parent's table."""
        columns = self.columns
        held = int(columns.num_blocks[parent])
        blocks = columns.block_tables[parent, :held]
        self.allocator.share(blocks)
        columns.block_tables[child, :held] = blocks
        columns.num_blocks[child] = held
        columns.num_published[child] = columns.num_published[parent]
        columns.shares_tail[[parent, child]] = True

    def slots_to_copy(self, slots: Ints) -> Ints:
        """Those of `slots`, about to write into their last block, that share it: all but one of those that do.

        The one that is left writes in place, once the others have copied.
        """
        columns = self.columns
        slots = slots[columns.shares_tail[slots]]
        if not len(slots):
            return slots
        written = columns.num_computed_tokens[slots] // self.block_size  # index of the block that is written next
        slots, written = slots[written < columns.num_blocks[slots]], written[written < columns.num_blocks[slots]]
        tails = columns.block_tables[slots, written]
        ref_counts = self.allocator.ref_counts[tails]
        columns.shares_tail[slots[ref_counts == 1]] = False
        num_writers: dict[int, int] = {}
        copies = []
        for slot, tail, ref_count in zip(slots.tolist(), tails.tolist(), ref_counts.tolist(), strict=True):
            num_writers[tail] = num_writers.get(tail, 0) + 1
            if num_writers[tail] < ref_count:
                copies.append(slot)
        return np.array(copies, np.int64)

    def copy_on_write(self, slots: Ints) -> list[tuple[int, int]]:
        """Gives each slot a block of its own to write into; (source, destination) of the copies to make."""
        columns = self.columns
        written = columns.num_computed_tokens[slots] // self.block_size
        sources = columns.block_tables[slots, written]
        destinations = self.allocator.allocate(len(slots))
        for entry in range(len(slots)):  # one at a time: siblings name the same block
            self.allocator.free(sources[entry : entry + 1])
        columns.block_tables[slots, written] = destinations
        columns.shares_tail[slots] = False
        return list(zip(sources.tolist(), destinations.tolist(), strict=True))

    # ---- Sharing by content -----------------------------------------------------------------------------------------

    def make_private(self, group: SequenceGroup) -> None:
        """With prefix caching off a group's hashes are its own."""
        if not self.enable_prefix_caching:
            group.use_hash_root(root_hash("group", str(group.order)))

    def find(self, sequence: Sequence) -> BlockIds:
        """See `PrefixFinder.find`."""
        return self._finder.find(sequence)

    def find_all(self, sequence: Sequence) -> list[int]:
        """All cached blocks of a sequence's tokens, also those behind one that is not cached any more."""
        hashes = sequence.hashes(0, sequence.num_tokens // self.block_size, self.block_size)
        return [block for digest in hashes for block in self.cache.find([digest])]

    def begin(self, sequence: Sequence) -> int:
        """Gives a slot without blocks the longest cached prefix of its tokens; how many tokens that is."""
        columns, slot = self.columns, sequence.slot
        blocks = self.find(sequence)
        if len(blocks):
            self.allocator.share(blocks)
            columns.block_tables[slot, : len(blocks)] = blocks
        columns.num_blocks[slot] = columns.num_published[slot] = len(blocks)
        columns.num_computed_tokens[slot] = len(blocks) * self.block_size
        return len(blocks) * self.block_size

    def publish(self, slots: Ints) -> None:
        """Lets blocks be found that are full of known tokens, computed by a step that was sent or is being filled."""
        columns = self.columns
        num_full = np.minimum(columns.num_tokens[slots], columns.num_computed_tokens[slots]) // self.block_size
        lacks = num_full - columns.num_published[slots]
        is_one = (lacks == 1) & columns.may_publish[slots]
        if not self.enable_prefix_caching:
            is_one[[len(owner.group.sequences) < 2 for owner in columns.owner[slots]]] = False
        ones = slots[is_one]
        if len(ones):
            self._publish_next(ones, num_full[is_one] - 1)
        if len(ones) < len(slots):
            for slot in slots[~is_one & (lacks > 0)].tolist():
                self.publish_all_of(slot)

    def publish_all_of(self, slot: int) -> None:
        """The same for one slot, however many blocks of it have become full."""
        columns, size = self.columns, self.block_size
        first = int(columns.num_published[slot])
        last = min(int(columns.num_tokens[slot]), int(columns.num_computed_tokens[slot])) // size
        if last <= first or not columns.may_publish[slot]:
            return
        columns.num_published[slot] = last
        owner: Sequence = columns.owner[slot]
        if not self.enable_prefix_caching and len(owner.group.sequences) < 2:
            return
        hashes, table = owner.hashes(first, last, size), columns.block_tables[slot]
        parents = np.concatenate([table[first - 1 : first] if first else NO_PARENT, table[first : last - 1]])
        self._published += self.cache.publish(hashes, table[first:last], parents, owner.group.number)

    def _publish_next(self, slots: Ints, indices: Ints) -> None:
        """The block of that index of each slot's table: what decode steps do, without a look at other blocks."""
        columns, size = self.columns, self.block_size
        columns.num_published[slots] = indices + 1
        blocks, parents = columns.block_tables[slots, indices], columns.block_tables[slots, indices - 1]
        parents[indices == 0] = NO_PARENT
        owners: list[Sequence] = columns.owner[slots].tolist()
        hashes = []
        for owner, slot, index in zip(owners, slots.tolist(), indices.tolist(), strict=True):
            token_ids = columns.token_ids[slot, index * size : (index + 1) * size]
            hashes.append(owner.hash_of_next(index, token_ids.tobytes(), size))
        publishers = [owner.group.number for owner in owners]
        self._published += self.cache.publish(hashes, blocks, parents, publishers)

    def take_published(self) -> list[int]:
        """Blocks that were published since the last call."""
        published, self._published = self._published, []
        return published

    def adopt(self, cached: worker_pb2.CachedBlocks) -> None:
        """Finds what the worker still holds of earlier leases, which `check_cached` has looked at; before any use."""
        if not self.enable_prefix_caching:
            return
        blocks = np.frombuffer(cached.block_ids_u32, "<u4").astype(np.int32)
        size = HASH_BYTES
        hashes = [cached.hashes[start : start + size] for start in range(0, len(cached.hashes), size)]
        if len(hashes) == len(blocks):  # or they are of a scheduler of another kind
            self.allocator.adopt(hashes, blocks)

    def take_news(self, published: list[int]) -> CacheNews:
        """What the worker is told with a step of which blocks may be found under another lease, and which no more."""
        news = NO_NEWS
        if self.enable_prefix_caching and (published or self._forgotten or self._has_forgotten_all):
            found = zip(published, self.cache.hashes_of(published), strict=True)
            hashes = {block: digest for block, digest in found if digest is not None}
            news = CacheNews(list(hashes), b"".join(hashes.values()), self._forgotten, self._has_forgotten_all)
        self._forgotten, self._has_forgotten_all = [], False
        return news

    def flush(self) -> int:
        """Forgets all content, here and at the worker; how many blocks could be found before."""
        self.forget_all_told()
        return self.allocator.flush()

    def forget_all_told(self) -> None:
        """The worker is to forget whatever it was told of blocks."""
        self._has_forgotten_all = True

    def withdraw(self, blocks: list[int]) -> list[int]:
        """Blocks that hold something else than was promised can no longer be found, nor what was computed upon them."""
        withdrawn = self.allocator.withdraw(np.array(blocks, np.int32)) if blocks else []
        self._forgotten += withdrawn
        if withdrawn:
            is_wrong = np.zeros(self.allocator.num_blocks, np.bool_)
            is_wrong[withdrawn] = True
            for slot in np.flatnonzero(self.columns.occupied):
                count = int(self.columns.num_published[slot])
                wrong = is_wrong[self.columns.block_tables[slot, :count]]
                self.columns.num_published[slot] = int(wrong.argmax()) if wrong.any() else count
        return withdrawn

    def distrust(self, blocks: list[int]) -> None:
        """Whoever holds one of these blocks publishes neither it nor what is built upon it, until it has drawn well."""
        is_wrong = np.zeros(self.allocator.num_blocks, np.bool_)
        is_wrong[blocks] = True
        for slot in np.flatnonzero(self.columns.occupied):
            if is_wrong[self.columns.block_tables[slot, : self.columns.num_blocks[slot]]].any():
                self.columns.may_publish[slot] = False

    # ---- Swapping ---------------------------------------------------------------------------------------------------

    def blocks_held(self, group: SequenceGroup) -> BlockIds:
        """Distinct device blocks in the tables of a group's sequences."""
        tables = [sequence.block_table for sequence in group.sequences if sequence.slot >= 0]
        return np.unique(np.concatenate(tables)) if tables else np.zeros(0, np.int32)

    def host_blocks_held(self, group: SequenceGroup) -> BlockIds:
        """Distinct host blocks in the tables of a group's swapped sequences."""
        return np.unique(np.concatenate([sequence.host_table for sequence in group.sequences]))

    def swap_out(self, group: SequenceGroup) -> list[tuple[int, int]]:
        """Moves what the group's slots hold to host blocks, sharing kept; (device, host) of the copies to make.

        The device blocks stay with the slots: the caller frees those next.
        """
        device_blocks = self.blocks_held(group)
        host_blocks = self.host_allocator.allocate(len(device_blocks))
        is_dealt = np.zeros(len(host_blocks), np.bool_)
        for sequence in group.sequences:
            if sequence.slot >= 0:
                entries = np.searchsorted(device_blocks, sequence.block_table)
                sequence.host_table = _deal(self.host_allocator, host_blocks, entries, is_dealt)
        return list(zip(device_blocks.tolist(), host_blocks.tolist(), strict=True))

    def swap_in(self, group: SequenceGroup) -> list[tuple[int, int]]:
        """Fills the tables of the group's new slots from its host blocks; (host, device) of the copies to make.

        The host blocks are free afterwards, but no target of a swap-out in the same step.
        """
        columns = self.columns
        host_blocks = self.host_blocks_held(group)
        device_blocks = self.allocator.allocate(len(host_blocks))
        is_dealt = np.zeros(len(host_blocks), np.bool_)
        for sequence in group.sequences:
            if sequence.slot < 0:
                continue
            slot, entries = sequence.slot, np.searchsorted(host_blocks, sequence.host_table)
            blocks = _deal(self.allocator, device_blocks, entries, is_dealt)
            columns.block_tables[slot, : len(blocks)] = blocks
            columns.num_blocks[slot] = len(blocks)
            columns.shares_tail[slot] = True
            columns.may_publish[slot] = False  # what it once found may have been withdrawn since: it has to draw first
            columns.num_computed_tokens[slot] = sequence.num_swapped_tokens
            self.free_host(sequence)
        return list(zip(host_blocks.tolist(), device_blocks.tolist(), strict=True))

    def free_host(self, sequence: Sequence) -> None:
        """Gives up what a swapped sequence has in host blocks."""
        self.host_allocator.free(sequence.host_table)
        sequence.host_table = sequence.host_table[:0]
        sequence.num_swapped_tokens = 0

    def check_integrity(self, groups: set[SequenceGroup], part: slice = slice(None)) -> None:
        """Raises AssertionError unless reference counts are exactly what the tables of `groups` hold.

        `part`: see `BlockAllocator.check_integrity`.
        """
        self.allocator.check_integrity(part)
        self.host_allocator.check_integrity()
        held = np.zeros(self.allocator.num_blocks, np.int32)
        for slot in np.flatnonzero(self.columns.occupied):
            np.add.at(held, self.columns.block_tables[slot, : self.columns.num_blocks[slot]], 1)
        assert bool((held == self.allocator.ref_counts).all()), "block tables and reference counts disagree"
        on_host = np.zeros(self.host_allocator.num_blocks, np.int32)
        for group in groups:
            for sequence in group.sequences:
                np.add.at(on_host, sequence.host_table, 1)
        assert bool((on_host == self.host_allocator.ref_counts).all()), "host tables and reference counts disagree"


def _deal(allocator: BlockAllocator, blocks: BlockIds, entries: Ints, is_dealt: npt.NDArray[np.bool_]) -> BlockIds:
    """A table of `blocks[entries]`; a block that an earlier table got as well gets one more reference."""
    table = blocks[entries]
    allocator.share(table[is_dealt[entries]])
    is_dealt[entries] = True
    return table
