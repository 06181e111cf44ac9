"""`quant_method: mxfp4` of a config.json, as gpt-oss has its experts: E2M1 with a power of two for each 32 inputs.

    W[n, k] = number(code[n, k]) * 2^(scales[n, k // 32] - 127)

    blocks  u8[N, K / 2]     input 2 i in the low bits of byte i, input 2 i + 1 in the high ones
    scales  u8[N, K / 32]    255 stands for NaN

Source: OCP Microscaling Formats, version 1.0 (2023), https://www.opencompute.org; the tensors of all experts are taken
apart by `stacked_experts`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.quantized_weight import Numbers, QuantizedWeight
from worker_svc.models.quantized.quantized_tensor import QuantizedTensor
from worker_svc.models.quantized.shaping import part_of_groups
from worker_svc.models.quantized.stored_module import StoredModule, read_block
from worker_svc.models.quantized.usual_weight import UsualWeight
from worker_svc.models.raw_config import RawConfig

_GROUP = 32
_BYTES = [torch.uint8]
_POWERS = torch.exp2(torch.arange(-127, 129, dtype=torch.float64)).float()
_POWERS[-1] = torch.nan


class Mxfp4Tensor(QuantizedTensor):
    """One expert's weight."""

    def __init__(self, module: StoredModule) -> None:
        """Raises ModelError for tensors that do not belong together."""
        self._blocks, self._scales = module.need("blocks", _BYTES), module.need("scales", _BYTES)
        out_features, num_groups = self._scales.shape
        module.check_shape("blocks", out_features, num_groups * _GROUP // 2)
        super().__init__(f"{module.name}.weight", module.kind, out_features, num_groups * _GROUP, module.num_bytes)

    def read(self, rows: range, columns: range, device: torch.device) -> QuantizedWeight:
        """See `QuantizedTensor`."""
        group, groups = part_of_groups(self.name, _GROUP, self.shape[1], columns)
        halves, first = range(columns.start // 2, -(-columns.stop // 2)), columns.start % 2
        packed = read_block(self._blocks, rows, halves, device)
        exponents = read_block(self._scales, rows, range(groups[0], groups[-1] + 1), device)
        index = torch.tensor(groups, device=device) - groups[0]
        return QuantizedWeight(
            Numbers.E2M1,
            torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)[:, first : first + len(columns)].contiguous(),
            _POWERS.to(device)[exponents[:, index].long()],
            group,
        )


@dataclass(frozen=True, slots=True)
class Mxfp4Format:
    """See `CheckpointFormat`."""

    name: str = "mxfp4"
    leaves: frozenset[str] = frozenset({"blocks", "scales"})
    patterns: tuple[str, ...] = ()

    @property
    def usual(self) -> UsualWeight:
        """See `CheckpointFormat`."""
        return UsualWeight(Numbers.E2M1, _GROUP, is_of_experts=True)

    def tensor_of(self, module: StoredModule) -> Mxfp4Tensor:
        """See `CheckpointFormat`."""
        return Mxfp4Tensor(module)


def read_mxfp4(raw: RawConfig) -> Mxfp4Format:
    """Nothing is left to choose; what is not quantised is told by its tensors."""
    return Mxfp4Format()
