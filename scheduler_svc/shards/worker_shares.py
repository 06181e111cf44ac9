"""Which shard has which worker: as many one as another, and as few moves as that takes.

The parent decides for all, so two shards never want one worker; that a worker obeys one at a time is its own lease.
Knows neither processes nor addresses beyond their names.
"""

from __future__ import annotations

from collections.abc import Iterable


class WorkerShares:
    """Owners of addresses. A shard that is lost, or has not come yet, keeps its workers for `patience_s`."""

    def __init__(self, num_shards: int, patience_s: float, now_s: float) -> None:
        self._num_shards = num_shards
        self._patience_s = patience_s
        self._owners: dict[str, int] = {}
        self._lost_s = dict.fromkeys(range(num_shards), now_s)  # shards that do not run, and since when

    def shard_came(self, shard: int) -> None:
        """It has its workers, and keeps them."""
        self._lost_s.pop(shard, None)

    def shard_went(self, shard: int, now_s: float) -> None:
        """Its patience begins; for one that is lost already nothing changes."""
        self._lost_s.setdefault(shard, now_s)

    def owner(self, address: str) -> int | None:
        """None for a worker that no shard has."""
        return self._owners.get(address)

    def divide(self, addresses: Iterable[str], now_s: float) -> dict[int, list[str]]:
        """The addresses of each shard that runs, or may be back; those of one that stays away go to others.

        An address stays where it is, unless its shard has two more than another one.
        """
        wanted = list(dict.fromkeys(addresses))
        present = [shard for shard in range(self._num_shards) if not self._is_away(shard, now_s)]
        shares: dict[int, list[str]] = {shard: [] for shard in present}
        homeless = []
        for address in wanted:
            owner = self._owners.get(address)
            if owner in shares:
                shares[owner].append(address)
            else:
                homeless.append(address)
        if present:
            for address in homeless:
                _smallest(shares).append(address)
            while len(largest := max(shares.values(), key=len)) > len(smallest := _smallest(shares)) + 1:
                smallest.append(largest.pop())
        self._owners = {address: shard for shard, share in shares.items() for address in share}
        return shares

    def _is_away(self, shard: int, now_s: float) -> bool:
        lost_s = self._lost_s.get(shard)
        return lost_s is not None and now_s - lost_s >= self._patience_s


def _smallest(shares: dict[int, list[str]]) -> list[str]:
    return min(shares.values(), key=len)
