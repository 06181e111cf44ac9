"""`quant_method: fp8`, and `fbgemm_fp8`, of a config.json: e4m3 with a scale a tensor, an output or a block."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.quantized_weight import Inputs, Numbers
from worker_svc.models.quantized.eight_bits import LEAVES, EightBitTensor
from worker_svc.models.quantized.stored_module import StoredModule
from worker_svc.models.quantized.usual_weight import UsualWeight
from worker_svc.models.raw_config import RawConfig

PLAIN = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """See `CheckpointFormat`."""

    block: tuple[int, int] | None  # outputs and inputs that share a scale; None: as the scales' shape says
    name: str = "fp8"
    leaves: frozenset[str] = LEAVES
    patterns: tuple[str, ...] = ()

    @property
    def usual(self) -> UsualWeight:
        """See `CheckpointFormat`."""
        return UsualWeight(Numbers.E4M3, self.block[1] if self.block else None, self._inputs)

    @property
    def _inputs(self) -> Inputs:
        if self.block is None:
            return Inputs.E4M3
        return Inputs.E4M3_BY_GROUP if self.block[1] == 128 else Inputs.AS_THEY_ARE

    def tensor_of(self, module: StoredModule) -> EightBitTensor | None:
        """See `CheckpointFormat`."""
        weight = module.tensors.get("weight")
        if weight is None or weight.dtype in PLAIN:
            return None
        if self.block is not None and "weight_scale_inv" in module.tensors:
            return EightBitTensor(module, torch.float8_e4m3fn, block=self.block, inputs=self._inputs)
        return EightBitTensor(module, torch.float8_e4m3fn, inputs=Inputs.E4M3)


def read_fp8(raw: RawConfig) -> Fp8Format:
    """Raises ModelError for what is not read."""
    name = str(raw.get("quant_method"))
    if (kind := raw.get("fmt") or "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise raw.error(f"quantization_config: {name} of {kind!r} is not read, only of e4m3")
    if (scheme := raw.get("activation_scheme") or "dynamic") not in ("dynamic", "static"):
        raise raw.error(f"quantization_config: {name} with activation_scheme {scheme!r} is not read")
    return Fp8Format(block_of(raw, "weight_block_size"), name)


def block_of(raw: RawConfig, key: str) -> tuple[int, int] | None:
    """Two positive integers, or None where the key is absent or null; older files have a text, `128x128`. Raises
    ModelError."""
    value = raw.get(key)
    if isinstance(value, str):
        value = [int(part) if part.isdecimal() else part for part in value.split("x")]
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(each, int) and each > 0 for each in value):
        raise raw.error(f"quantization_config: {key} must be two positive integers, not {value!r}")
    return value[0], value[1]
