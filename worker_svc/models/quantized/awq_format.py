"""`quant_method: awq` of a config.json."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.quantized_weight import Numbers
from worker_svc.models.quantized.awq import LEAVES, AwqTensor
from worker_svc.models.quantized.gptq_format import group_size_of
from worker_svc.models.quantized.stored_module import StoredModule
from worker_svc.models.quantized.usual_weight import UsualWeight
from worker_svc.models.raw_config import RawConfig


@dataclass(frozen=True, slots=True)
class AwqFormat:
    """See `CheckpointFormat`."""

    group_size: int  # -1: all inputs
    name: str = "awq"
    leaves: frozenset[str] = LEAVES

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
