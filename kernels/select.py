"""Which kernels run on a device."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

_MODULES = {"cpu": "kernels.cpu", "cuda": "kernels.gpu"}


def kernels_for(device: str | torch.device) -> ModuleType:
    """The module that has the operations. Imported when it is asked for: a CPU needs no Triton, a GPU no numba.

    Raises ValueError for a kind of device that has no kernels.
    """
    kind = torch.device(device).type
    if kind not in _MODULES:
        raise ValueError(f"there are no kernels for {device}, only for {' and '.join(_MODULES)}")
    return importlib.import_module(_MODULES[kind])
