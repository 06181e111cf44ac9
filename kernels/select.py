"""Which kernels run on a device."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch

_MODULES = {"cpu": "kernels.cpu", "cuda": "kernels.gpu.operations"}
_imported = functools.cache(importlib.import_module)  # asking again takes locks, and a step asks several times


def kernels_for(device: str | torch.device) -> ModuleType:
    """The module that has the operations. Imported when it is asked for: a CPU needs no Triton, a GPU no C++.

    Raises ValueError for a kind of device that has no kernels.
    """
    kind = torch.device(device).type
    if kind not in _MODULES:
        raise ValueError(f"there are no kernels for {device}, only for {' and '.join(_MODULES)}")
    return _imported(_MODULES[kind])
