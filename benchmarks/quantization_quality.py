"""What weights of few bits cost in quality: `python -m benchmarks.quantization_quality`.

Over `LLM`, in the checkpoint's type and with each quantization, one after the other:

- perplexity of texts, in pieces of 512 tokens: `texts/alice.txt` (L. Carroll, "Alice's Adventures in Wonderland", 1865,
  the beginning) and the README of the repository, or others that are named;
- how often both find the same token the most likely one, over the same texts;
- how often the quantised model would choose the token that the other has chosen greedily for the prompts of W2, given
  the same tokens before it; and how far both get on their own before their outputs part.

SmolLM2-135M was quantised to four bits once, and int4 keeps such weights as they are, which says nothing of others. So
the same is measured of a model whose numbers of four bits are spread over what may have been rounded to them: uniform
within half a step to both sides. It is a worse model than the one that was quantised, but its weights need all their
bits.

`--gguf FILE` measures a file that has few bits itself: rows as they are, and rounded (int8), by the same weights.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import itertools
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file

from kernels.cpu.products.four_bits import find_four_bits
from kernels.cpu.products.records import GROUP, PANEL
from octavo import LLM, SamplingParams
from octavo.bench import machine, workloads
from octavo.models.resolve import resolve_model

T = TypeVar("T")
HERE = Path(__file__).parent
RESULTS = HERE / "results"
TEXTS = [HERE / "texts" / "alice.txt", HERE.parent / "README.md"]
PIECE_TOKENS = 512
ONE_MORE = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, ignore_eos=True)
QUANTIZATIONS = {"as it is": ["int8"], "spread": ["int8", "int4", "int4-128"]}


def main() -> int:
    """Prints perplexities and agreements; keeps them in benchmarks/results/."""
    parser = argparse.ArgumentParser(description="Measures what weights of few bits cost in quality.")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name or folder (default: %(default)s)")
    parser.add_argument("--text", type=Path, nargs="+", default=TEXTS, metavar="FILE")
    parser.add_argument("--weights", choices=list(QUANTIZATIONS), nargs="*", default=list(QUANTIZATIONS))
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="of few bits: also with rows as they are and rounded")
    parser.add_argument("--no-results", action="store_true", help="print only")
    arguments = parser.parse_args()
    facts, rows = machine.describe(), []
    with tempfile.TemporaryDirectory() as folder:
        for kind in arguments.weights:
            model = resolve_model(arguments.model)
            if kind == "spread":
                model = spread(model, Path(folder) / "spread")
            rows += measure(model, kind, QUANTIZATIONS[kind], arguments.text)
    if arguments.gguf:
        rows += measure(arguments.gguf, arguments.gguf.name, ["int8"], arguments.text)
    _print(rows)
    if not arguments.no_results:
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        texts = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in arguments.text}
        found = {"date": date, "machine": facts, "model": arguments.model, "sha256": texts, "rows": rows}
        path = RESULTS / f"{date[:10]}-quantization-quality-{machine.slug(facts)}.json"
        path.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def measure(model: Path, kind: str, quantizations: list[str], texts: list[Path]) -> list[dict[str, Any]]:
    """One model in its own type, and then quantised: a row of figures each."""
    with LLM(model=str(model)) as llm:
        tokenizer = llm.get_tokenizer()
        pieces = {path.name: _pieces(tokenizer.encode(path.read_text(encoding="utf-8"))) for path in texts}
        workload = workloads.make("W2", tokenizer.vocab_size)
        plain = {name: read(llm, same) for name, same in pieces.items()}
        plain_outputs = generate(llm, workload)
    rows = []
    for quantization in quantizations:
        with LLM(model=str(model), quantization=quantization) as llm:
            found = {name: read(llm, same) for name, same in pieces.items()}
            outputs = generate(llm, workload)
            chosen = choices(llm, workload, plain_outputs)
        row: dict[str, Any] = {"weights": kind, "quantization": quantization, "texts": {}}
        for name, (before, top_before) in plain.items():
            after, top_after = found[name]
            row["texts"][name] = {
                "tokens": len(top_before),
                "perplexity": before,
                "perplexity_quantised": after,
                "same_most_likely_token": _share_equal(top_before, top_after),
            }
        row["greedy_w2"] = {
            "tokens": sum(map(len, plain_outputs)),
            "same_token_given_the_same_before": _share_equal(_joined(plain_outputs), _joined(chosen)),
            "equal_from_the_start": sum(map(_equal_from_the_start, plain_outputs, outputs)),
            "equal_outputs": sum(map(list.__eq__, plain_outputs, outputs)),
            "outputs": len(outputs),
        }
        rows.append(row)
    return rows


def spread(model: Path, folder: Path) -> Path:
    """A copy of a model whose numbers of four bits are spread over what is rounded to them."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    generator = torch.Generator().manual_seed(0)
    for path in model.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            weight = find_four_bits(tensor) if tensor.ndim == 2 else None
            if weight is None:
                continue
            records = weight.packed.view(len(weight.packed), tensor.shape[1] // GROUP, -1)
            steps = records[:, :, : 2 * PANEL].contiguous().view(torch.float16).float().abs()  # [panels, groups, 48]
            steps = steps.transpose(1, 2).flatten(0, 1)[: len(tensor)].repeat_interleave(GROUP, dim=1)
            tensors[name] = tensor + steps * (torch.rand(tensor.shape, generator=generator) - 0.5)
        save_file(tensors, folder / path.name)
    return folder


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


def _print(rows: list[dict[str, Any]]) -> None:
    print("| weights | quantization | text | tokens | perplexity | quantised | change | same most likely token |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        for name, text in row["texts"].items():
            change = text["perplexity_quantised"] / text["perplexity"] - 1
            perplexities = f"{text['perplexity']:.3f} | {text['perplexity_quantised']:.3f} | {change:+.2%}"
            same = f"{text['same_most_likely_token']:.1%}"
            cells = row["weights"], row["quantization"], name, f"{text['tokens']:,}", perplexities, same
            print(f"| {' | '.join(cells)} |")
    for row in rows:
        greedy = row["greedy_w2"]
        print(
            f"\nW2, greedy, {row['weights']}, {row['quantization']}: "
            f"{greedy['same_token_given_the_same_before']:.1%} of {greedy['tokens']:,} tokens are chosen after "
            f"the same tokens; on its own it goes along for {greedy['equal_from_the_start']:,} of them, and gives "
            f"{greedy['equal_outputs']} of {greedy['outputs']} whole outputs"
        )


if __name__ == "__main__":
    sys.exit(main())
