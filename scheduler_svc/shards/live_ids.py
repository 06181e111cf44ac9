"""Request ids of one scheduler, whichever frontend took the request and whichever shard runs it. For one thread."""

from __future__ import annotations


class LiveIds:
    """Which ids are live, a tenant at a time. A holder is whatever its claims end with."""

    def __init__(self) -> None:
        self._numbers: dict[object, dict[int, tuple[str, str]]] = {}
        self._taken: set[tuple[str, str]] = set()

    def __len__(self) -> int:
        return len(self._taken)

    def claim(self, holder: object, number: int, tenant: str, request_id: str) -> bool:
        """Takes an id under a number of the holder's; False: it is live."""
        key = tenant, request_id
        if key in self._taken:
            return False
        self._taken.add(key)
        self._numbers.setdefault(holder, {})[number] = key
        return True

    def release(self, holder: object, number: int) -> None:
        """Does nothing for a claim that was refused."""
        key = self._numbers.get(holder, {}).pop(number, None)
        if key is not None:
            self._taken.remove(key)

    def release_all(self, holder: object) -> list[int]:
        """Everything that this holder has claimed is free; the numbers of its claims."""
        claims = self._numbers.pop(holder, {})
        self._taken.difference_update(claims.values())
        return list(claims)
