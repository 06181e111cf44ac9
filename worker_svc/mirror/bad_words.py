"""The words that a request's outputs must not contain, as token ids: which tokens would complete one of them now.

A word is forbidden at its last token, where the tokens before it, its begin, are the last ones of the history. Words
with the same begin are kept together, under a polynomial hash of the begin taken modulo 2^64:

    hash(t_1 ... t_n) = sum of (t_i + 1) * BASE^(n - i)

so that one running sum over the end of a history, from its last token back, is the hash of each of its ends. Those
that are found are compared token by token: equal hashes cost time and no correctness. Memory is 4 bytes a token and
about 300 a word; a look costs as much as the longest begin has tokens, however many words there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from worker_svc.mirror.step_columns import Ints, ragged_offsets

BASE = np.uint64(0x9E3779B97F4A7C15)
Tokens = npt.NDArray[np.uint32]


class BadWords:
    """Never changes, so that forked sequences share it."""

    def __init__(self, words: Iterable[Sequence[int] | Tokens]) -> None:
        """Words without tokens forbid nothing."""
        ends_of: dict[bytes, list[int]] = {}  # by begin
        for word in words:
            if len(word):
                tokens = np.asarray(word, np.uint32)
                ends_of.setdefault(tokens[:-1].tobytes(), []).append(int(tokens[-1]))
        self._always: Ints = np.unique(np.array(ends_of.pop(b"", []), np.int64))
        begins = [np.frombuffer(begin, np.uint32) for begin in ends_of]
        lengths = np.array([len(begin) for begin in begins], np.int64)
        hashes = np.zeros(len(begins), np.uint64)
        if begins:
            tokens = np.concatenate(begins)
            from_end = np.repeat(lengths, lengths) - 1 - ragged_offsets(lengths)
            starts = np.cumsum(lengths) - lengths
            hashes = np.add.reduceat(_terms(tokens, from_end), starts)
        order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[order]
        self._begins = [begins[entry] for entry in order.tolist()]
        ends = list(ends_of.values())
        self._ends = [np.array(sorted(set(ends[entry])), np.int64) for entry in order.tolist()]
        self._lengths: Ints = np.unique(lengths)  # of begins, rising

    def __bool__(self) -> bool:
        return bool(self._always.size or self._begins)

    @property
    def needs_history(self) -> bool:
        """Whether any word has more than one token."""
        return bool(self._begins)

    def ends(self, history: npt.NDArray[np.int32]) -> Ints:
        """The tokens, maybe repeated, that would complete a word after `history` i32[n], every token of it known."""
        lengths = self._lengths[: np.searchsorted(self._lengths, len(history), side="right")]
        if not lengths.size:
            return self._always
        last = history[len(history) - lengths[-1] :].astype(np.uint32)
        sums = np.cumsum(_terms(last[::-1], np.arange(len(last))))
        hashes = sums[lengths - 1]
        firsts = np.searchsorted(self._hashes, hashes)
        is_found = self._hashes[np.minimum(firsts, len(self._hashes) - 1)] == hashes
        found = [self._always]
        for hash_, entry in zip(hashes[is_found], firsts[is_found].tolist(), strict=True):
            while entry < len(self._begins) and self._hashes[entry] == hash_:
                begin = self._begins[entry]
                if len(begin) <= len(last) and np.array_equal(last[len(last) - len(begin) :], begin):
                    found.append(self._ends[entry])
                entry += 1
        return np.concatenate(found) if len(found) > 1 else self._always


def _terms(tokens: Tokens, exponents: Ints) -> npt.NDArray[np.uint64]:
    return (tokens.astype(np.uint64) + np.uint64(1)) * _powers(int(exponents.max()) + 1)[exponents]


def _powers(count: int) -> npt.NDArray[np.uint64]:
    """BASE^0 ... BASE^(count - 1), modulo 2^64."""
    powers = np.full(count, BASE, np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)
