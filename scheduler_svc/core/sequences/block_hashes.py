"""Hashes of full blocks of tokens, each chained on the one before it.

The hash of a block covers its own tokens and, through the hash before it, all tokens in front of them, and at
the root the adapter's generation and the request's `cache_salt`: equal hashes mean equal K and V.
"""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import numpy.typing as npt

BlockIds = npt.NDArray[np.int32]
HASH_BYTES = 32


def root_hash(*parts: str) -> bytes:
    """What the first block's hash is chained on. Parts are told apart by their lengths."""
    return sha256("".join(f"{len(part)}:{part}" for part in parts).encode()).digest()


def next_hash(parent: bytes, token_bytes: bytes) -> bytes:
    """Of a block of these tokens (int32 ids) behind the one with the hash `parent`, or the root's."""
    return sha256(parent + token_bytes).digest()


def extend_hashes(hashes: list[bytes], root: bytes, token_bytes: bytes, block_bytes: int) -> None:
    """Appends the hash of every block in `token_bytes` (int32 ids, whole blocks), which follow those of `hashes`."""
    parent = hashes[-1] if hashes else root
    for start in range(0, len(token_bytes), block_bytes):
        parent = next_hash(parent, token_bytes[start : start + block_bytes])
        hashes.append(parent)
