"""The type that a checkpoint's weights have, for a `config.json` that does not say it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from worker_svc.models.checkpoint.checkpoint_files import open_checkpoint


def stored_dtype(folder: Path, names: Collection[str]) -> torch.dtype | None:
    """Of the first weight of one of these `names`, from the headers of safetensors; without names, of the first matrix
    of floats. None where there is none, and no weights are there yet.

    Raises ModelError for a file that cannot be read.
    """
    for path in sorted(folder.glob("model*.safetensors")):
        for name, tensor in open_checkpoint([path], "safetensors").items():
            is_float = tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1
            if is_float and (name in names if names else len(tensor.shape) == 2):
                return tensor.dtype
    return None
