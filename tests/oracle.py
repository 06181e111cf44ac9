"""transformers in float32 as the oracle of greedy output, and what to do at the rare near-tie.

Two correct float32 programs add in different orders, so logits differ in their last bits. Where the two best logits are
closer than that, either token is right: a difference is allowed only where float64 shows a margin within what rounding
does to this model, which is measured on the same tokens. It is counted, and nothing after it is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.float64 import InFloat64
from tests.worker.exact_logits import FACTOR

# Of the worst error of transformers in float32 against float64: ours may be so many times as far from the truth
# (`tests/worker/exact_logits.py` holds it to that), and two logits of ours may be off in opposite directions.
NEAR_TIE = 2 * 2 * FACTOR


class GreedyOracle:
    """`generate` of transformers, one prompt at a time, on a model folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._model = self._load(torch.float32)
        self._double: Any = None
        self.num_near_ties = 0

    def generate(self, prompt: Sequence[int], max_tokens: int, **options: Any) -> list[int]:
        """The generated ids; the end token, where one was drawn, is the last of them. `options` are of `generate`."""
        with torch.inference_mode():
            output = self._model.generate(
                torch.tensor([list(prompt)]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=max_tokens,
                do_sample=False,
                **options,
            )
        return output[0, len(prompt) :].tolist()

    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """float32 [len, vocab], log-softmax of the logits after each token."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([list(token_ids)])).logits[0].float()
        return torch.log_softmax(logits, dim=-1)

    def check(self, prompt: Sequence[int], expected: Sequence[int], got: Sequence[int], what: str) -> None:
        """Fails unless `got` is `expected`, or leaves it at a near-tie."""
        if list(expected) == list(got):
            return
        first = next(
            (i for i, (ours, theirs) in enumerate(zip(got, expected, strict=False)) if ours != theirs),
            min(len(got), len(expected)),
        )
        assert first < len(got) and first < len(expected), f"{what}: {len(got)} tokens, expected {len(expected)}"
        margin, error = self._margin([*prompt, *expected[:first]], expected[first], got[first])
        assert margin < NEAR_TIE * error, (
            f"{what}: token {first} is {got[first]}, expected {expected[first]}, margin {margin}, rounding {error}"
        )
        self.num_near_ties += 1

    def _margin(self, history: Sequence[int], best: int, other: int) -> tuple[float, float]:
        """By how much one of two tokens is less likely than the most likely one, and the error of transformers in
        float32 after any of these tokens; in logits."""
        token_ids = torch.tensor([list(history)])
        with torch.inference_mode():
            rounded = self._model(token_ids).logits[0]
        with InFloat64(), torch.inference_mode():
            self._double = self._double or self._load(torch.float64)
            exact = self._double(token_ids).logits[0]
        margin = exact[-1].max() - torch.minimum(exact[-1, best], exact[-1, other])
        return float(margin), float((rounded - exact).abs().max())

    def _load(self, dtype: torch.dtype) -> Any:
        from transformers import AutoModelForCausalLM

        # Experts in plain code: the grouped products that are the default need inner sizes that fit their alignment.
        return AutoModelForCausalLM.from_pretrained(self._folder, dtype=dtype, experts_implementation="eager").eval()
