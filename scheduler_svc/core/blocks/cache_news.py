"""What a worker is to remember of its blocks."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CacheNews:
    """What the worker is to remember of its blocks for a later lease.

    Attributes:
        blocks, hashes: full blocks whose content is known once the step has gone well, and the hash of each.
        forgotten: blocks of which it was told and that do not hold what they were to hold.
        forgets_all: of whichever it was told.
    """

    blocks: list[int] = field(default_factory=list)
    hashes: bytes = b""
    forgotten: list[int] = field(default_factory=list)
    forgets_all: bool = False


NO_NEWS = CacheNews()
