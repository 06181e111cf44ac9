"""Log probabilities of given tokens, and of the most likely ones beside them, from the model's own logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from worker_svc.sampled import Logprobs
from worker_svc.sampling_columns import WHOLE_VOCABULARY
from worker_svc.top_tokens import top_tokens


def token_logprobs(
    logits: torch.Tensor, token_ids: npt.NDArray[np.int64], num_top: npt.NDArray[np.integer]
) -> Logprobs:
    """Log-softmax in float32 of token_ids[r] in row r of `logits` f32[R, vocab], with its rank and the top num_top[r].

    num_top may be WHOLE_VOCABULARY, or more than there is. A row that is not finite gives NaN, rank 1 and no others.
    """
    vocab_size = logits.shape[-1]
    is_bad = ~torch.isfinite(logits.max(dim=-1).values).numpy()
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    of_given = logprobs.gather(1, torch.from_numpy(token_ids)[:, None])
    ranks = 1 + (logprobs > of_given).sum(dim=-1).numpy()
    counts = np.where(num_top == WHOLE_VOCABULARY, vocab_size, np.minimum(num_top.astype(np.int64), vocab_size))
    counts[is_bad] = 0
    return Logprobs(of_given[:, 0].numpy(), ranks, counts, *top_tokens(logprobs, counts))
