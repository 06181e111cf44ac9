"""Whether a head that config.json ties to the embedding is tied in the files, too."""

from __future__ import annotations

import torch

from worker_svc.models.checkpoint.checkpoint_files import Tensors
from worker_svc.models.checkpoint.stored_tensor import StoredTensor
from worker_svc.models.quantized.quantized_tensor import QuantizedTensor

_NUMBERS_AT_ONCE = 1 << 20


def settle_table(tensors: Tensors, table: str, head: str) -> None:
    """Where the files hold a tied head alone, it becomes the table. `table` and `head` are names of tensors."""
    if head in tensors and table not in tensors:
        tensors[table] = tensors.pop(head)


def is_head_apart(tensors: Tensors, table: str, head: str, dtype: torch.dtype) -> bool:
    """Whether the files hold a head beside the table that is another matrix, as numbers of `dtype`: a fine-tune may
    have trained it apart, and transformers goes by it then. Reads both, up to the first numbers that differ. Of weights
    of few bits only a head counts (`Head`), and is not compared."""
    one, other = tensors.get(table), tensors.get(head)
    if one is None or other is None or isinstance(one, QuantizedTensor) or isinstance(other, QuantizedTensor):
        return False
    return not _are_equal(one, other, dtype)


def _are_equal(one: StoredTensor, other: StoredTensor, dtype: torch.dtype) -> bool:
    if one.shape != other.shape or len(one.shape) != 2:
        return False
    num_rows, width = one.shape
    most = max(_NUMBERS_AT_ONCE // max(width, 1), 1)
    for first in range(0, num_rows, most):
        rows = range(first, min(first + most, num_rows))
        pieces = torch.empty(2, len(rows), width, dtype=dtype)
        for tensor, piece in zip((one, other), pieces, strict=True):
            tensor.read_into(piece, [rows], [range(width)])
        if not torch.equal(*pieces):
            return False
    return True
