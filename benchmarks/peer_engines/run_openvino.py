"""OpenVINO GenAI with continuous batching and prefix caching: a folder that `optimum-cli export openvino` made."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import numpy as np
import openvino as ov
import openvino_genai as genai
from line_protocol import Request, serve


def main() -> None:
    """Answers workloads over this process's pipes; rows and cache of the types that it prefers on this processor."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--float32", action="store_true", help="products and cache")
    arguments = parser.parse_args()
    if os.environ.get("OV_CPU_MAX_ISA") and tuple(map(int, ov.__version__.split(".")[:2])) < (2026, 4):
        raise SystemExit("OpenVINO before 2026.4 can limit its products to a set of instructions, not its own kernels")
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2  # GiB: holds all of W3, and leaves memory for the other engines
    scheduler.max_num_seqs = 64
    scheduler.enable_prefix_caching = True
    # Without the hint it computes in bfloat16 where the CPU can, and keeps the cache in 8 bits.
    properties = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"} if arguments.float32 else {}
    pipeline = genai.ContinuousBatchingPipeline(arguments.model, scheduler, "CPU", properties)

    def config(num_tokens: int) -> genai.GenerationConfig:
        found = genai.GenerationConfig()
        found.max_new_tokens, found.ignore_eos, found.do_sample = num_tokens, True, False
        return found

    def generate(requests: Sequence[Request]) -> list[list[int]]:
        prompts = [ov.Tensor(np.array([prompt], np.int64)) for prompt, _ in requests]
        answers = pipeline.generate(prompts, [config(count) for _, count in requests])
        return [answer.m_generation_ids[0] for answer in answers]

    serve(f"openvino-genai {genai.__version__}", generate)


if __name__ == "__main__":
    main()
