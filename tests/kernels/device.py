"""Where kernel tests run Triton: on a GPU where there is one, else in its interpreter on the CPU."""

from __future__ import annotations

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IS_INTERPRETED = DEVICE == "cpu"
