"""vLLM on a CPU, eager or compiled."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB: holds all of W3, and leaves memory for the other engines

import torch

# vLLM takes its kernels by what torch says of the processor, whatever limits ATen and oneDNN. Said here, as each of its
# processes imports this file.
if limit := os.environ.get("ONEDNN_MAX_CPU_ISA"):
    torch.cpu._is_avx512_supported = lambda: limit != "AVX2"
    torch.cpu._is_avx512_bf16_supported = torch.cpu._is_vnni_supported = lambda: limit == "AVX512_CORE_BF16"
    torch.cpu._is_amx_tile_supported = torch.cpu._is_amx_fp16_supported = lambda: False

import vllm
from line_protocol import Request, serve


def main() -> None:
    """Answers workloads over this process's pipes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--eager", action="store_true")
    arguments = parser.parse_args()
    llm = vllm.LLM(
        model=arguments.model,
        dtype=arguments.dtype,
        enforce_eager=arguments.eager,
        max_model_len=2048,
        max_num_seqs=64,
        enable_prefix_caching=True,
    )

    def generate(requests: Sequence[Request]) -> list[list[int]]:
        llm.reset_prefix_cache()
        # No text: the ids of a made-up model are more than its tokenizer knows.
        params = [
            vllm.SamplingParams(temperature=0, ignore_eos=True, max_tokens=count, detokenize=False)
            for _, count in requests
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]

    serve(f"vllm {vllm.__version__}", generate)


if __name__ == "__main__":
    main()
