"""`transformers` in float32: one static batch padded on the left, or its continuous batching over a paged cache."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import transformers
from line_protocol import Generate, Request, serve
from transformers import AutoModelForCausalLM, GenerationConfig


def static_batch(model: transformers.PreTrainedModel) -> Generate:
    """One batch that runs until its longest output is done."""
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0

    @torch.inference_mode()
    def generate(requests: Sequence[Request]) -> list[list[int]]:
        width = max(len(prompt) for prompt, _ in requests)
        input_ids = torch.zeros(len(requests), width, dtype=torch.long)
        mask = torch.zeros_like(input_ids)
        for row, (prompt, _) in enumerate(requests):
            input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        longest = max(count for _, count in requests)
        output = model.generate(input_ids, attention_mask=mask, do_sample=False, max_new_tokens=longest)
        return [output[row, width : width + count].tolist() for row, (_, count) in enumerate(requests)]

    return generate


def continuous(model: transformers.PreTrainedModel) -> Generate:
    """`generate_batch`: all of them as long as the longest, since a length is the batch's; then cut."""

    def generate(requests: Sequence[Request]) -> list[list[int]]:
        longest = max(count for _, count in requests)
        config = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0)
        answers = model.generate_batch([prompt for prompt, _ in requests], generation_config=config, progress_bar=False)
        by_prompt = {tuple(answer.prompt_ids): answer.generated_tokens for answer in answers.values()}
        return [by_prompt[tuple(prompt)][:count] for prompt, count in requests]

    return generate


def main() -> None:
    """Answers workloads over this process's pipes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--continuous", action="store_true")
    arguments = parser.parse_args()
    attention = "paged|sdpa" if arguments.continuous else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.float32, attn_implementation=attention
    ).eval()
    how = continuous if arguments.continuous else static_batch
    serve(f"transformers {transformers.__version__}", how(model))


if __name__ == "__main__":
    main()
