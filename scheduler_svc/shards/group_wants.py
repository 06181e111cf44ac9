"""What a prepared group asks of a worker, for the choice among shards."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from scheduler_svc.core.sequences.block_hashes import extend_hashes, root_hash
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.shards.cached_bits import Places, places
from scheduler_svc.shards.routing_table import Wanted

NOWHERE: Places = np.zeros(0, np.uint32)


def wanted_of(group: SequenceGroup, block_size: int, version: Callable[[int], str | None]) -> Wanted:
    """`version`: of the group's adapter in a shard, see `adapter_version`; None where it is not loaded."""
    return Wanted(
        model=group.model,
        num_prompt_tokens=group.num_prompt_tokens,
        max_num_tokens=group.max_num_tokens,
        num_cached_tokens=_num_cached_tokens(group, block_size),
        num_slots=group.num_slots,
        uses_adapter=bool(group.adapter),
        places=_Places(group, version),
    )


def _num_cached_tokens(group: SequenceGroup, block_size: int) -> int:
    """When all its sequences are as long as they may get and share the prompt's full blocks."""
    num_shared = group.num_prompt_tokens // block_size
    longest = -(-(group.max_num_tokens - 1) // block_size)  # nothing is computed from the token that is drawn last
    return (num_shared + group.best_of * max(0, longest - num_shared)) * block_size


class _Places:
    """Made once for each block size, and of an adapter for each shard, which has its own version of it."""

    def __init__(self, group: SequenceGroup, version: Callable[[int], str | None]) -> None:
        self._group = group
        self._version = version
        self._made: dict[tuple[int, int], Places] = {}

    def __call__(self, block_size: int, shard: int) -> Places:
        key = block_size, shard
        if key not in self._made:
            self._made[key] = self._make(block_size, shard)
        return self._made[key]

    def _make(self, block_size: int, shard: int) -> Places:
        group = self._group
        if group.awaits_prompt_logprobs:
            return NOWHERE
        version = self._version(shard) if group.adapter else ""
        if version is None:
            return NOWHERE
        root = root_hash(group.adapter, version, group.cache_salt)
        hashes: list[bytes] = []
        token_ids = group.sequences[0].token_ids[: group.num_prompt_tokens // block_size * block_size]
        extend_hashes(hashes, root, token_ids.tobytes(), 4 * block_size)
        return places(hashes)
