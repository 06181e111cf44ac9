"""What a file has in place of names and contents: letters for names, numbers for the hashes of blocks.

A tenant, an adapter or a model has the same letters wherever it stands in the records of one process, and others in
those of the next: the key is drawn when the process begins, and kept nowhere. Hashes of blocks are numbered in the
order in which they are met: so a file shows which prompts begin alike, and a guess of what they say cannot be checked.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable

from scheduler_svc.core.preemption_modes import MODES

_KEY = secrets.token_bytes(32)  # of this process
_PUBLIC = frozenset(("", *MODES))


class Hidden:
    """Of one file."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}

    def name(self, text: str) -> str:
        """Twelve letters and digits for any text; for none, none."""
        return text if text in _PUBLIC else hmac.digest(_KEY, text.encode(errors="replace"), "sha256").hex()[:12]

    def number(self, digest: bytes) -> int:
        """Of the hash of a block: equal ones, and only these, have equal numbers."""
        return self._numbers.setdefault(digest, len(self._numbers) + 1)

    def numbers(self, digests: Iterable[bytes]) -> list[int]:
        """Of several."""
        return [self.number(digest) for digest in digests]


def digest_of(number: int) -> bytes:
    """What stands for the hash with that number when a file is played."""
    return number.to_bytes(32, "big")
