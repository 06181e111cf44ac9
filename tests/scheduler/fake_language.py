"""A language without a model: what follows a history is a function of one number that stands for all of it.

The number is the *content* of the history's last position: a hash of every token up to it, below 2**61 - 1. A cache
that holds contents in place of keys and values therefore knows of each place whose history was computed there.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

VOCAB_SIZE, EOS = 97, 3

START = 0x0C7A70
_PRIME = (1 << 61) - 1
_FACTOR, _OFFSET = 0x1D8AF066_61D41B9D, 0x9E3779B9
_64_BITS = (1 << 64) - 1
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def start_of(adapter: str = "", generation: int = 1) -> int:
    """What stands before the first token: adapters compute other keys and values from the same tokens."""
    return START + (zlib.crc32(f"{adapter} {generation}".encode()) if adapter else 0)


def extended(content: int, token: int) -> int:
    """The content of a position from that of the one before it and its own token."""
    return (content * _FACTOR + token + _OFFSET) % _PRIME


def content_of(token_ids: Iterable[int], start: int = START) -> int:
    """The content of the last position of a history."""
    content = start
    for token in token_ids:
        content = extended(content, token)
    return content


def next_token(content: int, index: int = 0, vocab_size: int = VOCAB_SIZE) -> int:
    """What the sequence of that index in its group draws after a history."""
    mixed = (content + (index + 1) * _GOLDEN) & _64_BITS
    mixed = ((mixed ^ (mixed >> 30)) * _MIX_1) & _64_BITS
    mixed = ((mixed ^ (mixed >> 27)) * _MIX_2) & _64_BITS
    return (mixed ^ (mixed >> 31)) % vocab_size


def expected_tokens(
    prompt: Iterable[int],
    index: int,
    max_num_tokens: int,
    eos: int | None = EOS,
    *,
    vocab_size: int = VOCAB_SIZE,
    start: int = START,
) -> list[int]:
    """Prompt and output of a request's sequence `index`, whatever happens around it; the output may end with `eos`."""
    tokens = list(prompt)
    content = content_of(tokens, start)
    while len(tokens) < max_num_tokens:
        tokens.append(next_token(content, index, vocab_size))
        if tokens[-1] == eos:
            break
        content = extended(content, tokens[-1])
    return tokens


def logprobs_after(content: int, vocab_size: int = VOCAB_SIZE) -> npt.NDArray[np.float32]:
    """Log-softmax over the vocabulary after a history, f32[vocab_size]: for candidates and for logprobs of draws."""
    mixed = np.uint64(content) + np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_MIX_1)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_MIX_2)
    logits = ((mixed >> np.uint64(40)).astype(np.float32)) * np.float32(6 / (1 << 24))  # evenly over [0, 6)
    logits -= logits.max()
    return logits - np.log(np.exp(logits).sum())


def most_likely(logprobs: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    """The `count` most likely tokens, best first, ties by token id."""
    return np.argsort(-logprobs, kind="stable")[:count]
