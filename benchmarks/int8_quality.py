"""What weights of eight bits cost in quality: `python -m benchmarks.int8_quality`.

Over `LLM`, in the checkpoint's type and with `quantization="int8"`, one after the other:

- perplexity of texts, in pieces of 512 tokens: `texts/alice.txt` (L. Carroll, "Alice's Adventures in Wonderland", 1865,
  the beginning) and the README of the repository, or others that are named;
- how often both find the same token the most likely one, over the same texts;
- how often int8 would choose the token that the other has chosen greedily for the prompts of W2, given the same tokens
  before it; and how far both get on their own before their outputs part.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import itertools
import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from octavo import LLM, SamplingParams
from octavo.bench import machine, workloads

T = TypeVar("T")
HERE = Path(__file__).parent
RESULTS = HERE / "results"
TEXTS = [HERE / "texts" / "alice.txt", HERE.parent / "README.md"]
PIECE_TOKENS = 512
ONE_MORE = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, ignore_eos=True)


def main() -> int:
    """Prints both perplexities and agreements; keeps them in benchmarks/results/."""
    parser = argparse.ArgumentParser(description="Measures what int8 costs in quality.")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name or folder (default: %(default)s)")
    parser.add_argument("--text", type=Path, nargs="+", default=TEXTS, metavar="FILE")
    parser.add_argument("--no-results", action="store_true", help="print only")
    arguments = parser.parse_args()
    facts = machine.describe()
    with LLM(model=arguments.model) as llm:
        tokenizer = llm.get_tokenizer()
        pieces = {path.name: _pieces(tokenizer.encode(path.read_text(encoding="utf-8"))) for path in arguments.text}
        workload = workloads.make("W2", tokenizer.vocab_size)
        plain = {name: read(llm, same) for name, same in pieces.items()}
        plain_outputs = generate(llm, workload)
    with LLM(model=arguments.model, quantization="int8") as llm:
        quantized = {name: read(llm, same) for name, same in pieces.items()}
        outputs = generate(llm, workload)
        chosen = choices(llm, workload, plain_outputs)
    row: dict[str, Any] = {"model": arguments.model, "texts": {}}
    for path in arguments.text:
        (before, top_before), (after, top_after) = plain[path.name], quantized[path.name]
        row["texts"][path.name] = {
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "tokens": len(top_before),
            "perplexity": before,
            "perplexity_int8": after,
            "same_most_likely_token": _share_equal(top_before, top_after),
        }
    row["greedy_w2"] = {
        "tokens": sum(map(len, plain_outputs)),
        "same_token_given_the_same_before": _share_equal(_joined(plain_outputs), _joined(chosen)),
        "equal_from_the_start": sum(map(_equal_from_the_start, plain_outputs, outputs)),
        "equal_outputs": sum(map(list.__eq__, plain_outputs, outputs)),
        "outputs": len(outputs),
    }
    _print(row)
    if not arguments.no_results:
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        path = RESULTS / f"{date[:10]}-int8-quality-{machine.slug(facts)}.json"
        path.write_text(json.dumps({"date": date, "machine": facts, **row}, indent=1) + "\n")
    return 0


def read(llm: LLM, pieces: list[list[int]]) -> tuple[float, list[int]]:
    """Perplexity of all tokens but each piece's first, and the most likely one in the place of each of them."""
    parts = _read(llm, pieces)
    logprobs = _joined(logprobs for logprobs, _ in parts)
    return math.exp(-sum(logprobs) / len(logprobs)), _joined(top for _, top in parts)


def generate(llm: LLM, workload: workloads.Workload) -> list[list[int]]:
    """Greedy outputs of a workload."""
    params = [
        SamplingParams(temperature=0, ignore_eos=True, max_tokens=request.max_tokens) for request in workload.requests
    ]
    prompts = [list(request.prompt_token_ids) for request in workload.requests]
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def choices(llm: LLM, workload: workloads.Workload, outputs: list[list[int]]) -> list[list[int]]:
    """The most likely token in the place of each token of `outputs`, after the prompt and the outputs before it."""
    prompts = [list(request.prompt_token_ids) for request in workload.requests]
    parts = _read(llm, [prompt + output for prompt, output in zip(prompts, outputs, strict=True)])
    return [top[len(prompt) - 1 :] for prompt, (_, top) in zip(prompts, parts, strict=True)]


def _read(llm: LLM, pieces: list[list[int]]) -> list[tuple[list[float], list[int]]]:
    """For each piece's tokens from the second on: their logprobs, and the most likely tokens in their places."""
    outputs = llm.generate(prompt_token_ids=pieces, sampling_params=ONE_MORE, use_tqdm=False)
    entries = [[entry for entry in output.prompt_logprobs or [] if entry is not None] for output in outputs]
    return [
        (
            [entry[token_id].logprob for token_id, entry in zip(piece[1:], each, strict=True)],
            [min(entry, key=lambda token_id: entry[token_id].rank) for entry in each],
        )
        for piece, each in zip(pieces, entries, strict=True)
    ]


def _pieces(token_ids: list[int]) -> list[list[int]]:
    pieces = [token_ids[start : start + PIECE_TOKENS] for start in range(0, len(token_ids), PIECE_TOKENS)]
    return [piece for piece in pieces if len(piece) > 1]


def _joined(parts: Iterable[list[T]]) -> list[T]:
    return list(itertools.chain.from_iterable(parts))


def _share_equal(one: list[int], other: list[int]) -> float:
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


def _equal_from_the_start(one: list[int], other: list[int]) -> int:
    """How many tokens come before the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def _print(row: dict[str, Any]) -> None:
    print("| text | tokens | perplexity | with int8 | change | same most likely token |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, text in row["texts"].items():
        change = text["perplexity_int8"] / text["perplexity"] - 1
        print(
            f"| {name} | {text['tokens']:,} | {text['perplexity']:.3f} | {text['perplexity_int8']:.3f} | "
            f"{change:+.2%} | {text['same_most_likely_token']:.1%} |"
        )
    greedy = row["greedy_w2"]
    print(
        f"\nW2, greedy: {greedy['same_token_given_the_same_before']:.1%} of {greedy['tokens']:,} tokens are chosen by "
        f"int8, too, after the same tokens; on its own it goes along for {greedy['equal_from_the_start']:,} of them, "
        f"and gives {greedy['equal_outputs']} of {greedy['outputs']} whole outputs"
    )


if __name__ == "__main__":
    sys.exit(main())
