"""What a `FakeWorker` that says `hashed_token` gives, computed beside it."""

from __future__ import annotations

import numpy as np

from tests.fakes import hashed_token


def hashed_after(prompt: str, count: int, index: int = 0) -> list[int]:
    """The ids after a prompt of single bytes, for the output of that index."""
    history = list(prompt.encode())
    for _ in range(count):
        history.append(hashed_token(np.array(history), index))
    return history[-count:]
