"""What sampling answers for the rows of a step, as numpy arrays. Knows nothing of logits' tensors or of messages."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-softmax of the raw logits in float32, of the samples that asked; zeros for those that did not."""

    drawn: npt.NDArray[np.float32]  # [N]
    ranks: npt.NDArray[np.int64]  # [N], 1 is the most likely
    top_counts: npt.NDArray[np.int64]  # [N]
    top_token_ids: npt.NDArray[np.int64]  # ragged by top_counts, the most likely first, ties by token id
    top_logprobs: npt.NDArray[np.float32]  # likewise


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was drawn."""

    token_ids: npt.NDArray[np.int64]  # [N]; 0 where the row is bad
    bad_rows: npt.NDArray[np.int64]  # rows of the logits without a finite maximum; nothing can be drawn from them
    logprobs: Logprobs | None  # None: no request wants them
    emptied_rows: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """The `bad_rows` whose logits were finite, but whose parameters forbade every token."""
