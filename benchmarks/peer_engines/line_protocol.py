"""How `benchmarks.peers` talks to an engine: a process of its own, in its own environment, JSON lines on its pipes.

    engine -> {"ready": "name and version"}                      once, when the model is loaded
    peers  -> {"requests": [[[token ids], max_tokens], ...]}     one workload
    engine -> {"wall_s": seconds, "token_ids": [[...], ...]}     or {"error": "what went wrong"}

Greedy, end tokens ignored, everything submitted at once. The end of standard input ends the engine. Imports nothing but
the standard library: it runs in the environments of others.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence

Request = tuple[list[int], int]  # prompt token ids, tokens to generate
Generate = Callable[[Sequence[Request]], list[list[int]]]  # the generated ids of each request, in order


def serve(name: str, generate: Generate) -> None:
    """Answers workloads until standard input ends."""
    _send({"ready": name})
    for line in sys.stdin:
        requests = [(prompt, count) for prompt, count in json.loads(line)["requests"]]
        try:
            started = time.perf_counter()
            token_ids = generate(requests)
            wall_s = time.perf_counter() - started
        except Exception as error:  # whatever another engine raises is an answer, too
            _send({"error": f"{type(error).__name__}: {error}"})
            continue
        _send({"wall_s": wall_s, "token_ids": [[int(token_id) for token_id in ids] for ids in token_ids]})


def _send(message: dict[str, object]) -> None:
    _answers.write(json.dumps(message) + "\n")
    _answers.flush()


# Engines print what they like: their standard output goes to standard error, answers to the pipe it was.
_answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
