"""What is sent: requests of random lengths, of the fixed workloads, of ShareGPT-style conversations or of a trace.

The same seed gives the same requests on every machine. The number of a run changes tokens that a run before may have
left in a prefix cache, not how many they are.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from octavo.bench.load.lengths import Lengths
from octavo.bench.workloads import BenchRequest

CHARACTERS_PER_TOKEN = 4  # of English, about: how long a ShareGPT answer is taken to be
_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A prompt, as ids or as text, how many tokens are asked for, and when (None: when a stream is free)."""

    max_tokens: int
    prompt_token_ids: tuple[int, ...] = ()
    text: str = ""
    at_s: float | None = None

    def as_text(self) -> str:
        """The prompt for servers that take text alone: about one word of a token each."""
        return self.text or " ".join(_WORDS[token_id % len(_WORDS)] for token_id in self.prompt_token_ids)


def random_lengths(
    count: int, prompt: Lengths, output: Lengths, *, shared: int, vocab_size: int, seed: int, run: int = 0
) -> list[PlannedRequest]:
    """`shared` tokens stand in front of every prompt, beside those that `prompt` says."""
    sizes, tokens = random.Random(f"lengths/{seed}"), random.Random(f"tokens/{seed}/{run}")
    prefix = _tokens(tokens, shared, vocab_size)
    return [
        PlannedRequest(
            prompt_token_ids=prefix + _tokens(tokens, prompt.draw(sizes), vocab_size), max_tokens=output.draw(sizes)
        )
        for _ in range(count)
    ]


def of_workload(requests: Sequence[BenchRequest], count: int | None = None) -> list[PlannedRequest]:
    """In their order, from the first again where `count` asks for more."""
    chosen = itertools.islice(itertools.cycle(requests), len(requests) if count is None else count)
    return [PlannedRequest(each.max_tokens, each.prompt_token_ids) for each in chosen]


def share_gpt(path: Path, count: int | None, output: Lengths | None, seed: int) -> list[PlannedRequest]:
    """First turns of conversations, `[{"conversations": [{"from": "human", "value": "..."}, ...]}]`, shuffled.

    An answer is as long as the one in the file, by `CHARACTERS_PER_TOKEN`, unless `output` says. Conversations that do
    not begin with a question and its answer are left out. Raises ValueError naming the file, OSError.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no JSON: {error}") from None
    if not isinstance(entries, list):
        raise ValueError(f"{path}: no list of conversations")
    pairs = [pair for number, entry in enumerate(entries) if (pair := _first_pair(path, number, entry))]
    if not pairs:
        raise ValueError(f"{path}: no conversation begins with a question and its answer")
    rng = random.Random(f"sharegpt/{seed}")
    rng.shuffle(pairs)
    return [
        PlannedRequest(output.draw(rng) if output else -(-len(answer) // CHARACTERS_PER_TOKEN), text=question)
        for question, answer in itertools.islice(itertools.cycle(pairs), count or len(pairs))
    ]


def trace(
    path: Path, count: int | None, speedup: float, *, vocab_size: int, seed: int, run: int = 0
) -> list[PlannedRequest]:
    """A trace as `octavo.bench.fleet.traces` reads it; equal hash ids are equal tokens. Raises ValueError, OSError."""
    from octavo.bench.fleet import traces

    return [
        PlannedRequest(
            request.num_output_tokens,
            tuple(
                itertools.chain.from_iterable(
                    _tokens(random.Random(f"trace/{seed}/{run}/{text}"), length, vocab_size)
                    for text, length in request.content
                )
            ),
            at_s=request.at_ns / 1e9,
        )
        for request in traces.read(path, count, speedup)
    ]


def at_times(requests: Iterable[PlannedRequest], times: Iterable[float]) -> list[PlannedRequest]:
    """The same requests, each with its time."""
    return [replace(request, at_s=at_s) for request, at_s in zip(requests, times, strict=True)]


def _tokens(rng: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    lowest = min(1000, vocab_size // 10)  # control tokens are mostly below
    return tuple(lowest + int(rng.random() * (vocab_size - lowest)) for _ in range(count))


def _first_pair(path: Path, number: int, entry: Any) -> tuple[str, str] | None:
    try:
        turns = [(str(turn["from"]), turn["value"]) for turn in entry["conversations"][:2]]
    except (KeyError, TypeError, IndexError):
        raise ValueError(f"{path}, entry {number}: no conversation of turns with `from` and `value`") from None
    if not all(isinstance(text, str) for _, text in turns):
        raise ValueError(f"{path}, entry {number}: a turn's `value` is no text")
    if [who for who, _ in turns] not in (["human", "gpt"], ["user", "assistant"]) or not all(text for _, text in turns):
        return None
    return turns[0][1], turns[1][1]
