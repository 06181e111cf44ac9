"""transformers in float32 as the oracle of greedy output, and what to do at the rare near-tie.

Two correct float32 programs add in different orders, so logits differ in their last bits. Where the two best logits are
closer than that, either token is right: a difference is allowed only where a float64 forward pass shows a margin below
`NEAR_TIE`, it is counted, and nothing after it is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

NEAR_TIE = 1e-4  # in logits; float32 noise of a small model is some 1e-5


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
        margin = self._margin([*prompt, *expected[:first]], expected[first], got[first])
        assert margin < NEAR_TIE, f"{what}: token {first} is {got[first]}, expected {expected[first]}, margin {margin}"
        self.num_near_ties += 1

    def _margin(self, history: Sequence[int], best: int, other: int) -> float:
        if self._double is None:
            self._double = self._load(torch.float64)
        with torch.inference_mode():
            logits = self._double(torch.tensor([list(history)])).logits[0, -1]
        return float(logits.max() - torch.minimum(logits[best], logits[other]))

    def _load(self, dtype: torch.dtype) -> Any:
        from transformers import AutoModelForCausalLM

        # Experts in plain code: the grouped products that are the default need inner sizes that fit their alignment.
        return AutoModelForCausalLM.from_pretrained(self._folder, dtype=dtype, experts_implementation="eager").eval()
