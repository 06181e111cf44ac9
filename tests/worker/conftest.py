"""What tests of models share."""

from __future__ import annotations

import time

import pytest

from octavo.embedded.worker_process import WorkerProcess
from octavo.shared.cores import allowed_cores
from tests.forked_worker import fork
from worker_svc.host.busy_cores import read_core_times
from worker_svc.models.products import linear
from worker_svc.models.products.float_linear import FloatLinear


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An `LLM` is up in half a second: its worker is forked (`tests.forked_worker`)."""
    monkeypatch.setattr(WorkerProcess, "_open", fork)


@pytest.fixture
def core_times_are_counted() -> None:
    """Skips where /proc/stat stands still, as in some sandboxes; nothing gives way to neighbours there."""
    before, until = read_core_times(allowed_cores()), time.process_time() + 0.3
    while time.process_time() < until:
        pass
    after = read_core_times(allowed_cores())
    if before is None or after is None or after.all_processes - before.all_processes < 0.1:
        pytest.skip("this system does not count what its cores do")


@pytest.fixture
def without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense layers take the form that pads nothing: panels of 48 columns are a sixth of the tiny models' bytes."""
    monkeypatch.setattr(linear, "dense", lambda weight, bias=None, **_: FloatLinear(weight, bias))
