"""A weight of few bits as a checkpoint holds it: what its tensors say together, read when it is taken."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch

from kernels.quantized_weight import QuantizedWeight
from worker_svc.models.quantized.shaping import side_by_side

_NUMBERS_AT_ONCE = 1 << 20  # that are expanded to float32: they stay in the caches


class QuantizedTensor(ABC):
    """A `StoredTensor` of [out_features, in_features], however it is stored, that can be had as it is, too."""

    dtype = torch.float32  # of its numbers, expanded

    def __init__(self, name: str, kind: str, out_features: int, in_features: int, num_bytes: int) -> None:
        """`name`: of the weight, for messages; `kind`: the format; `num_bytes`: of all that is stored for it."""
        self.name, self.kind, self.num_bytes = name, kind, num_bytes
        self.shape: tuple[int, ...] = (out_features, in_features)

    @abstractmethod
    def read(self, rows: range, columns: range, device: torch.device) -> QuantizedWeight:
        """These outputs and inputs; all inputs where the weight `is_ordered`. Raises ModelError."""

    def is_ordered(self) -> bool:
        """Whether inputs that share a scale lie apart, so that no part of the inputs is a weight of this kind."""
        return False

    def quantized(self, rows: Sequence[range], columns: range, device: torch.device) -> QuantizedWeight:
        """These outputs one after the other, of these inputs; see `read`."""
        return side_by_side([self.read(some, columns, device) for some in rows])

    def read_into(self, out: torch.Tensor, rows: Sequence[range], columns: Sequence[range]) -> None:
        """See `StoredTensor`: expanded, a piece of the rows at a time."""
        every = range(self.shape[1])
        for part, piece in _pieces(out, rows, self.shape[1]):
            weight = self.read(piece, every, out.device).dequantized()
            part.copy_(torch.cat([weight[:, some.start : some.stop] for some in columns], dim=1))


def dequantize_into(out: torch.Tensor, weight: QuantizedWeight) -> None:
    """Fills `out` [out_features, in_features], of any float type, a piece of the rows at a time."""
    for part, piece in _pieces(out, [range(weight.out_features)], weight.in_features):
        part.copy_(weight.rows(piece).dequantized())


def _pieces(out: torch.Tensor, rows: Sequence[range], in_features: int) -> Iterator[tuple[torch.Tensor, range]]:
    most, first = max(_NUMBERS_AT_ONCE // max(in_features, 1), 1), 0
    for some in rows:
        for start in range(some.start, some.stop, most):
            piece = range(start, min(start + most, some.stop))
            yield out[first : first + len(piece)], piece
            first += len(piece)
