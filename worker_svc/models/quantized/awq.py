"""AWQ (Lin et al. 2023, arXiv:2306.00978) as AutoAWQ writes it for its product `gemm`, with 4 bits.

    W[n, k] = scales[k // group_size, n] * (q[k, n] - zero[k // group_size, n])

    qweight i32[K, N / 8], qzeros i32[G, N / 8]      along N: of eight numbers, those of _FIELDS in this order
    scales  f16[G, N]

Source: https://github.com/casper-hansen/AutoAWQ, awq/modules/linear/gemm.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.quantized_weight import Numbers, QuantizedWeight
from worker_svc.models.quantized.gptq import FLOATS
from worker_svc.models.quantized.gptq_format import group_size_of
from worker_svc.models.quantized.quantized_tensor import QuantizedTensor
from worker_svc.models.quantized.shaping import part_of_groups
from worker_svc.models.quantized.stored_module import StoredModule, read_block
from worker_svc.models.quantized.usual_weight import UsualWeight
from worker_svc.models.quantized.words import words_around
from worker_svc.models.raw_config import RawConfig

LEAVES = frozenset({"qweight", "qzeros", "scales"})
_FIELDS = (0, 4, 1, 5, 2, 6, 3, 7)  # of a word, where its output 0, 1, ... is


class AwqTensor(QuantizedTensor):
    """One layer's weight."""

    def __init__(self, module: StoredModule, group_size: int) -> None:
        """`group_size` -1: all inputs. Raises ModelError for tensors that do not belong together."""
        self._qweight, self._qzeros = module.need("qweight", [torch.int32]), module.need("qzeros", [torch.int32])
        self._scales = module.need("scales", FLOATS)
        in_features, num_words = self._qweight.shape
        super().__init__(f"{module.name}.weight", module.kind, num_words * 8, in_features, module.num_bytes)
        self._group = in_features if group_size == -1 else group_size
        if in_features % self._group:
            raise module.error(f"{in_features} inputs do not divide into groups of {self._group}")
        module.check_shape("qzeros", in_features // self._group, num_words)
        module.check_shape("scales", in_features // self._group, num_words * 8)

    def read(self, rows: range, columns: range, device: torch.device) -> QuantizedWeight:
        """See `QuantizedTensor`."""
        group, groups = part_of_groups(self.name, self._group, self.shape[1], columns)
        words, among = words_around(rows, 4)
        edges = range(groups[0], groups[-1] + 1)
        index = torch.tensor(groups, device=device) - groups[0]
        codes = _outputs(read_block(self._qweight, columns, words, device))[among]
        zero = _outputs(read_block(self._qzeros, edges, words, device))[among]
        scale = read_block(self._scales, edges, rows, device).float().t()
        return QuantizedWeight(
            Numbers.UINT4,
            codes.contiguous(),
            scale[:, index].contiguous(),
            group,
            zero=zero.to(torch.int16)[:, index].contiguous(),
        )


def _outputs(words: torch.Tensor) -> torch.Tensor:
    """i32[n, outputs / 8] as u8[outputs, n]."""
    by_output = words.t().contiguous()
    return torch.stack([(by_output >> (4 * field) & 15).to(torch.uint8) for field in _FIELDS], dim=1).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class AwqFormat:
    """`quant_method: awq` of a config.json; see `CheckpointFormat`."""

    group_size: int  # -1: all inputs
    name: str = "awq"
    leaves: frozenset[str] = LEAVES
    patterns: tuple[str, ...] = ()

    @property
    def usual(self) -> UsualWeight:
        """See `CheckpointFormat`."""
        return UsualWeight(Numbers.UINT4, self.group_size if self.group_size > 0 else None)

    def tensor_of(self, module: StoredModule) -> AwqTensor:
        """See `CheckpointFormat`."""
        return AwqTensor(module, self.group_size)


def read_awq(raw: RawConfig) -> AwqFormat:
    """Raises ModelError for what is not read. Older files call bits and groups otherwise."""
    layout = str(raw.get("version") or "gemm").lower()
    if layout != "gemm" or raw.get("backend") == "llm-awq":
        layout = "llm-awq" if layout == "gemm" else layout
        raise raw.error(f"quantization_config: awq packed for {layout!r} is not read, only for 'gemm'")
    bits = raw.integer("bits", raw.get("w_bit"))
    if bits != 4:
        raise raw.error(f"quantization_config: awq with {bits} bits is not read, only with 4")
    return AwqFormat(group_size_of(raw, "group_size" if "group_size" in raw else "q_group_size", 128))
