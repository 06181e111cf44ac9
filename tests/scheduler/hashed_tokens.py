"""What a `FakeWorker` that says `hashed_token` gives, computed beside it."""

from __future__ import annotations

import numpy as np

from tests.fakes import hashed_token


def hashed_after(prompt: str | list[int], count: int, index: int = 0) -> list[int]:
    """The ids after a prompt, given as ids or as a text of single bytes, for the output of that index."""
    history = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
    for _ in range(count):
        history.append(hashed_token(np.array(history), index))
    return history[-count:]
