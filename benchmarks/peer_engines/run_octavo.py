"""Octavo over `LLM`, the way `octavo bench offline` runs it: scheduler core here, a worker beside it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from line_protocol import Request, serve

from octavo import LLM, SamplingParams


def main() -> None:
    """Answers workloads over this process's pipes; greedy, exactly as many tokens as asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--options", nargs="*", default=[], metavar="NAME=VALUE", help="of LLM")
    arguments = parser.parse_args()
    options = dict(option.split("=", 1) for option in arguments.options)
    with LLM(arguments.model, **options) as llm:

        def generate(requests: Sequence[Request]) -> list[list[int]]:
            params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=count) for _, count in requests]
            llm.reset_prefix_cache()
            prompts = [prompt for prompt, _ in requests]
            outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
            return [list(output.outputs[0].token_ids) for output in outputs]

        serve(f"octavo {' '.join(arguments.options)}", generate)


if __name__ == "__main__":
    main()
