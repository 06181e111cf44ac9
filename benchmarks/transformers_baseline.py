"""The same token ids through `transformers`: float32, greedy, one static batch padded on the left.

The batch runs until its longest output is done, as static batches do; only tokens within each output's length count.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria

from octavo.bench.figures import Figures, measure
from octavo.bench.workloads import Workload
from octavo.outputs import RequestMetrics


class _StepClock(StoppingCriteria):  # type: ignore[misc]  # the library is not read, see pyproject.toml
    """Stops nothing; notes when each step of the batch has its tokens."""

    def __init__(self) -> None:
        self.times_ns: list[int] = []

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        self.times_ns.append(time.monotonic_ns())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)  # type: ignore[return-value]  # a BoolTensor


class TransformersBaseline:
    """A loaded model; `run` measures one workload."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None  # lengths are forced
        self._model.generation_config.pad_token_id = 0

    def run(self, workload: Workload) -> tuple[Figures, list[list[int]]]:
        """Figures of one run, and the token ids of each request in order."""
        prompts = [request.prompt_token_ids for request in workload.requests]
        lengths = [request.max_tokens for request in workload.requests]
        width = max(map(len, prompts))
        input_ids = torch.zeros(len(prompts), width, dtype=torch.long)  # [requests, longest prompt]
        mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(prompts):
            input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        clock = _StepClock()
        started_ns = time.monotonic_ns()
        with torch.inference_mode():
            output = self._model.generate(
                input_ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=max(lengths),
                stopping_criteria=[clock],
            )
        wall_ns = time.monotonic_ns() - started_ns
        token_ids = [output[row, width : width + length].tolist() for row, length in enumerate(lengths)]
        metrics = [
            RequestMetrics(
                arrival_ns=started_ns, first_token_ns=clock.times_ns[0], token_times_ns=clock.times_ns[:length]
            )
            for length in lengths
        ]
        num_tokens = sum(lengths)
        figures = measure(workload.name, "transformers", workload.num_prompt_tokens, num_tokens, wall_ns, metrics)
        return figures, token_ids
