"""What tests of models share."""

from __future__ import annotations

import pytest

from worker_svc.models.packed_linear import PackedLinear


@pytest.fixture
def without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense layers take the form that pads nothing: panels of 48 columns are a sixth of the tiny models' bytes."""
    monkeypatch.setattr(PackedLinear, "is_fastest", lambda weight: False)
