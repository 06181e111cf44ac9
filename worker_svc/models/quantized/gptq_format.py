"""`quant_method: gptq` of a config.json."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from kernels.quantized_weight import Numbers
from worker_svc.models.quantized.gptq import LEAVES, GptqTensor
from worker_svc.models.quantized.stored_module import StoredModule
from worker_svc.models.quantized.usual_weight import UsualWeight
from worker_svc.models.raw_config import RawConfig

_VERSIONS = {"gptq": 1, "gptq_v2": 2}
_BITS = (4, 8)


@dataclass(frozen=True, slots=True)
class GptqFormat:
    """See `CheckpointFormat`."""

    bits: int
    group_size: int  # -1: all inputs
    is_symmetric: bool
    version: int
    is_ordered: bool = False  # by `desc_act`: tensors say which group each input is in
    dynamic: tuple[
        tuple[str, int, int, bool], ...
    ] = ()  # what layers' names look like, and their bits, group, symmetry
    name: str = "gptq"
    leaves: frozenset[str] = LEAVES

    @property
    def usual(self) -> UsualWeight:
        """See `CheckpointFormat`."""
        return UsualWeight(
            Numbers.UINT4 if self.bits == 4 else Numbers.INT8, self.group_size if self.group_size > 0 else None
        )

    @property
    def patterns(self) -> tuple[str, ...]:
        """See `CheckpointFormat`."""
        return tuple(pattern for pattern, *_ in self.dynamic)

    def tensor_of(self, module: StoredModule) -> GptqTensor:
        """See `CheckpointFormat`."""
        own = self
        for pattern, bits, group_size, is_symmetric in self.dynamic:
            if re.match(pattern, module.name):
                own = replace(self, bits=bits, group_size=group_size, is_symmetric=is_symmetric)
                break
        if own.bits not in _BITS:
            raise module.error(f"weights of {own.bits} bits are not read, only of 4 and 8")
        if own.is_ordered and own.group_size > 0 and "g_idx" not in module.tensors:
            raise module.error("the checkpoint has no tensor g_idx, which says the order of desc_act")
        return GptqTensor(module, own.bits, own.group_size, is_symmetric=own.is_symmetric, version=own.version)


def read_gptq(raw: RawConfig) -> GptqFormat:
    """Raises ModelError for what is not read."""
    layout = str(raw.get("checkpoint_format") or "gptq")
    if raw.flag("is_marlin_format"):
        layout = "marlin"
    if layout not in _VERSIONS:
        raise raw.error(
            f"quantization_config: gptq with checkpoint_format {layout!r} is not read, only gptq and gptq_v2"
        )
    bits = raw.integer("bits")
    if bits not in _BITS:
        raise raw.error(f"quantization_config: gptq with {bits} bits is not read, only with 4 and 8")
    group_size, is_symmetric = group_size_of(raw, "group_size", 128), raw.flag("sym", True)
    format_ = GptqFormat(bits, group_size, is_symmetric, _VERSIONS[layout], raw.flag("desc_act"))
    dynamic: list[tuple[str, int, int, bool]] = []
    for key, values in raw.part("dynamic").items():
        if key.startswith("-:"):  # such layers are plain, as their tensors say
            continue
        pattern = key.removeprefix("+:")
        try:
            re.compile(pattern)
        except re.error as error:
            raise raw.error(f"quantization_config: dynamic {key!r} is no regular expression: {error}") from None
        own: Any = RawConfig(values if isinstance(values, dict) else {}, raw.path)
        group_size = group_size_of(own, "group_size", format_.group_size)
        dynamic.append((pattern, own.integer("bits", bits), group_size, own.flag("sym", format_.is_symmetric)))
    return replace(format_, dynamic=tuple(dynamic))


def group_size_of(raw: RawConfig, key: str, default: int) -> int:
    """Positive, or -1. Raises ModelError."""
    value = raw.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
        raise raw.error(f"quantization_config: {key} must be -1 or a positive integer, not {value!r}")
    return value
