"""Many prompts through a model in this process, without a server: python examples/offline_batch.py [MODEL]"""

from __future__ import annotations

import sys

from octavo import LLM, SamplingParams

PROMPTS = ["The sea is", "Once upon a time", "The capital of France is", "A tide is"]


def main(model: str = "smollm2-135m-instruct") -> None:
    """Prints what the model makes of each prompt, and how many tokens that took."""
    with LLM(model=model, seed=0) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95, max_tokens=32))
    for output in outputs:
        written = output.outputs[0]
        print(f"{output.prompt!r} -> {written.text!r} ({len(written.token_ids)} tokens, {written.finish_reason})")


if __name__ == "__main__":
    main(*sys.argv[1:])
