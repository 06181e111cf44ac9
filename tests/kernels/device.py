"""Where kernel tests run Triton: on a GPU where there is one, else in its interpreter on the CPU."""

from __future__ import annotations

import torch

from tests.kernels import quick_interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IS_INTERPRETED = DEVICE == "cpu"
if IS_INTERPRETED:
    quick_interpreter.install()
