"""Request ids of one scheduler, whichever frontend took the request and whichever shard runs it. For one thread."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Holder = TypeVar("Holder", bound=Hashable)


class LiveIds(Generic[Holder]):
    """Which ids are live, a tenant at a time. A holder is whatever its claims end with."""

    def __init__(self) -> None:
        self._numbers: dict[Holder, dict[int, tuple[str, str]]] = {}
        self._taken: dict[tuple[str, str], tuple[Holder, int]] = {}

    def __len__(self) -> int:
        return len(self._taken)

    def claim(self, holder: Holder, number: int, tenant: str, request_id: str) -> bool:
        """Takes an id under a number of the holder's; False: it is live."""
        key = tenant, request_id
        if key in self._taken:
            return False
        self._taken[key] = holder, number
        self._numbers.setdefault(holder, {})[number] = key
        return True

    def release(self, holder: Holder, number: int) -> None:
        """Does nothing for a claim that was refused."""
        key = self._numbers.get(holder, {}).pop(number, None)
        if key is not None:
            del self._taken[key]

    def release_all(self, holder: Holder) -> list[int]:
        """Everything that this holder has claimed is free; the numbers of its claims."""
        claims = self._numbers.pop(holder, {})
        for key in claims.values():
            del self._taken[key]
        return list(claims)

    def find(self, request_id: str, tenant: str | None) -> list[tuple[Holder, int]]:
        """Holder and number of each claim of this id, of one tenant or of all; the latter looks at every claim."""
        if tenant is not None:
            found = self._taken.get((tenant, request_id))
            return [] if found is None else [found]
        return [claim for (_, taken), claim in self._taken.items() if taken == request_id]
