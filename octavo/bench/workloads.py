"""The workloads that every figure of Octavo comes from: token ids and output lengths from a fixed seed.

Pure data, the same on every machine and Python, so that other engines can be given the very same ids.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SEED = 20240


@dataclass(frozen=True)
class BenchRequest:
    """A prompt and how many tokens are generated for it, exactly (greedy, end tokens ignored)."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Workload:
    """Requests that are handed to an engine at once, known by their name in tables."""

    name: str
    description: str
    requests: tuple[BenchRequest, ...]

    @property
    def num_prompt_tokens(self) -> int:
        """Over all requests."""
        return sum(len(request.prompt_token_ids) for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        """Over all requests; each generates exactly as many as it asks for."""
        return sum(request.max_tokens for request in self.requests)


def make(name: str, vocab_size: int, seed: int = SEED) -> Workload:
    """The workload of that name (a key of `WORKLOADS`) for a model of `vocab_size` tokens."""
    rng = random.Random(f"{name}/{seed}")
    # Control tokens sit at the low end of most vocabularies; a prompt of ordinary text has none.
    lowest = min(1000, vocab_size // 10)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(lowest, vocab_size) for _ in range(count))

    description, build = WORKLOADS[name]
    return Workload(name, description, tuple(build(rng, draw)))


def warm_up(vocab_size: int) -> Workload:
    """A few short requests that touch everything once; their figures mean nothing."""
    prompt = tuple(token_id % vocab_size for token_id in range(1, 9))
    return Workload("warm-up", "4 short requests", (BenchRequest(prompt, 4),) * 4)


def read(path: Path) -> Workload:
    """A workload of one's own: a JSON object a line, `{"prompt_token_ids": [...], "max_tokens": n}`.

    Raises ValueError naming the line that is not one.
    """
    requests = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            entry = json.loads(line)
            request = BenchRequest(tuple(map(int, entry["prompt_token_ids"])), int(entry["max_tokens"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error!r}") from None
        if not request.prompt_token_ids or request.max_tokens < 1:
            raise ValueError(f"{path}, line {number}: a prompt and at least one token of output are wanted")
        requests.append(request)
    if not requests:
        raise ValueError(f"{path}: no requests in it")
    return Workload(path.stem, f"{len(requests)} requests of {path.name}", tuple(requests))


_Draw = Callable[[int], tuple[int, ...]]


def _one(rng: random.Random, draw: _Draw) -> list[BenchRequest]:
    return [BenchRequest(draw(128), 128)]


def _mixed(rng: random.Random, draw: _Draw) -> list[BenchRequest]:
    return [BenchRequest(draw(rng.randint(32, 256)), rng.randint(32, 128)) for _ in range(32)]


def _shared_prefix(rng: random.Random, draw: _Draw) -> list[BenchRequest]:
    prefix = draw(512)
    return [BenchRequest(prefix + draw(32), 32) for _ in range(64)]


WORKLOADS: dict[str, tuple[str, Callable[[random.Random, _Draw], list[BenchRequest]]]] = {
    "W1": ("1 request, 128 tokens in, 128 out", _one),
    "W2": ("32 requests, 32-256 tokens in, 32-128 out", _mixed),
    "W3": ("64 requests, 512 common + 32 own tokens in, 32 out", _shared_prefix),
}
