"""Runs a workload over `LLM`: the scheduler core in this process, a worker beside it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from octavo.bench.figures import Figures, measure
from octavo.bench.workloads import Workload
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.llm import LLM


def run(llm: LLM, workload: Workload) -> tuple[Figures, list[list[int]]]:
    """One timed run on an empty prefix cache, everything submitted at once: figures, and each request's token ids.

    Raises RuntimeError where a request got another number of tokens than it wanted.
    """
    params = [
        SamplingParams(temperature=0, ignore_eos=True, max_tokens=request.max_tokens) for request in workload.requests
    ]
    prompts = [list(request.prompt_token_ids) for request in workload.requests]
    llm.reset_prefix_cache()
    started_ns = time.monotonic_ns()
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    wall_ns = time.monotonic_ns() - started_ns
    token_ids = [list(output.outputs[0].token_ids) for output in outputs]
    num_tokens = sum(map(len, token_ids))
    if num_tokens != workload.num_output_tokens:
        raise RuntimeError(f"{num_tokens} tokens came back, {workload.num_output_tokens} were asked for")
    metrics = [output.metrics for output in outputs]
    return measure(workload.name, "LLM", workload.num_prompt_tokens, num_tokens, wall_ns, metrics), token_ids
