"""The most likely tokens of rows of log probabilities, in an order that does not depend on luck."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def top_tokens(
    logprobs: torch.Tensor, counts: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """The counts[r] most likely tokens of every row of `logprobs` f32[R, vocab], and their logprobs, both ragged.

    The most likely come first, ties by token id, also among those that are the last to be named: `topk` alone would
    take any of them. counts [R], at most the vocabulary.
    """
    if counts.size == 0 or counts.max() == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.float32)
    largest = logprobs.topk(int(counts.max()), dim=-1).values
    smallest = largest.gather(1, torch.from_numpy(np.maximum(counts, 1) - 1)[:, None])
    rows, ids = (index.numpy() for index in (logprobs >= smallest).nonzero(as_tuple=True))
    values = logprobs.numpy()[rows, ids]
    order = np.lexsort((ids, -values, rows))
    rank = np.arange(rows.size) - np.searchsorted(rows, rows)
    order = order[rank < counts[rows]]
    return ids[order], values[order]
