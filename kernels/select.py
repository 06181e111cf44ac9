"""Which kernels run on a device."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch


def kernels_for(device: str | torch.device) -> ModuleType:
    """The module that has the operations: compiled ones for a CPU, the oracles for other devices."""
    return importlib.import_module("kernels.cpu" if torch.device(device).type == "cpu" else "kernels.reference")
