"""The engine under the caller's control, a step a call: python examples/engine_loop.py [MODEL]"""

from __future__ import annotations

import sys

from octavo import LLMEngine, SamplingParams

PROMPTS = ["The sea is", "Once upon a time", "A tide is", "The capital of France is"]


def main(model: str = "smollm2-135m-instruct") -> None:
    """Adds a request every fourth step, so that each joins while others run, and prints what every step finished."""
    with LLMEngine(model=model, seed=0) as engine:
        waiting, step = list(PROMPTS), 0
        while waiting or engine.has_unfinished_requests():
            if waiting and step % 4 == 0:
                prompt = waiting.pop(0)
                engine.add_request(prompt, prompt, SamplingParams(temperature=0, max_tokens=12))
            step += 1
            for output in engine.step():
                if output.finished:
                    print(f"step {step}: {output.request_id!r} -> {output.outputs[0].text!r}")
        print(f"{step} steps for {len(PROMPTS)} requests")


if __name__ == "__main__":
    main(*sys.argv[1:])
