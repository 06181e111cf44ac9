"""What tests of whole services share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from octavo.embedded.worker_process import WorkerProcess
from tests.forked_worker import fork


@pytest.fixture(scope="module")
def forked_workers() -> Iterator[None]:
    """An `LLM` of this file is up in half a second: its worker is forked (`tests.forked_worker`)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerProcess, "_open", fork)
        yield
