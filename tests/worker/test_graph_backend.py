"""Captures that fail, on a machine without a GPU: torch's calls are fakes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from worker_svc.host.graph_backend import CudaGraphBackend


class FakeStream:
    """Of which a thread has one at a time."""

    def wait_stream(self, other: FakeStream) -> None:
        """Nothing is launched that could be waited for."""


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[FakeStream]:
    """The stream of this thread, in a list of one."""
    now = [FakeStream()]

    @contextlib.contextmanager
    def stream(new: FakeStream) -> Iterator[None]:
        before, now[0] = now[0], new
        yield
        now[0] = before

    @contextlib.contextmanager
    def graph(_: object, *, pool: object, stream: FakeStream) -> Iterator[None]:
        now[0] = stream
        yield
        raise RuntimeError("operation not permitted when stream is capturing")  # as `capture_end` does; nothing more

    fakes: dict[str, Any] = {"Stream": lambda device: FakeStream(), "current_stream": lambda device: now[0]}
    fakes |= {"stream": stream, "graph": graph, "CUDAGraph": object, "graph_pool_handle": lambda: 0}
    fakes |= {"set_stream": lambda new: now.__setitem__(0, new), "synchronize": lambda device: None}
    fakes |= {"empty_cache": lambda: None, "mem_get_info": lambda device: (1, 2)}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return now


def test_a_capture_whose_end_fails_leaves_the_thread_on_its_stream(current: list[FakeStream]) -> None:
    (before,) = current
    with pytest.raises(RuntimeError, match="not permitted"):
        CudaGraphBackend(torch.device("cuda", 0)).capture(lambda: None)
    assert current == [before]
