"""Cards that tests of attention say they run on."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from kernels.gpu.attention.card import card_of
from kernels.gpu.launch import once_a_layout
from tests.kernels.device import DEVICE


def pretend(monkeypatch: pytest.MonkeyPatch, module: ModuleType, **facts: Any) -> None:
    """Launches of `module` are bound for a card with these facts of `Card` from here on, and none that were before."""
    card = replace(card_of(torch.device(DEVICE)), **facts)
    monkeypatch.setattr(module, "card_of", lambda device: card)
    monkeypatch.setattr(module, "_bound", once_a_layout(module._bound.__wrapped__))
