"""`quant_method: compressed-tensors` of a config.json, as llm-compressor writes it.

`config_groups` say how weights and inputs of which layers (`targets`) are quantised; `format` how they are stored.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from kernels.quantized_weight import Inputs, Numbers
from worker_svc.models.quantized.eight_bits import LEAVES as OF_EIGHT_BITS
from worker_svc.models.quantized.eight_bits import EightBitTensor
from worker_svc.models.quantized.fp8_format import PLAIN, block_of
from worker_svc.models.quantized.gptq_format import group_size_of
from worker_svc.models.quantized.packed import LEAVES as OF_PACKED
from worker_svc.models.quantized.packed import PackedTensor
from worker_svc.models.quantized.quantized_tensor import QuantizedTensor
from worker_svc.models.quantized.stored_module import StoredModule
from worker_svc.models.quantized.usual_weight import UsualWeight
from worker_svc.models.raw_config import RawConfig

_PACKED, _PLAIN_NUMBERS = "pack-quantized", ("int-quantized", "float-quantized", "naive-quantized")
_READ = (_PACKED, *_PLAIN_NUMBERS, "mixed-precision", "dense")
_BITS = {"int": (4, 8), "float": (8,)}
_STRATEGIES = ("tensor", "channel", "group", "block")


@dataclass(frozen=True, slots=True)
class LayerScheme:
    """How some layers are quantised."""

    targets: tuple[str, ...]  # names of layers, `re:` and what they look like, or a class
    bits: int
    is_float: bool
    group_size: int | None  # of the strategy `group`
    block: tuple[int, int] | None  # of the strategy `block`
    inputs: Inputs


@dataclass(frozen=True, slots=True)
class CompressedFormat:
    """See `CheckpointFormat`."""

    schemes: tuple[LayerScheme, ...]  # at least one
    name: str
    leaves: frozenset[str] = OF_PACKED | OF_EIGHT_BITS

    @property
    def usual(self) -> UsualWeight:
        """See `CheckpointFormat`; those of the first group of layers."""
        first = self.schemes[0]
        if first.is_float:
            numbers = Numbers.E4M3
        else:
            numbers = Numbers.UINT4 if first.bits == 4 and _PACKED in self.name else Numbers.INT8
        return UsualWeight(numbers, first.block[1] if first.block else first.group_size, first.inputs)

    @property
    def patterns(self) -> tuple[str, ...]:
        """See `CheckpointFormat`."""
        return tuple(target[3:] for each in self.schemes for target in each.targets if target.startswith("re:"))

    def tensor_of(self, module: StoredModule) -> QuantizedTensor | None:
        """See `CheckpointFormat`."""
        weight = module.tensors.get("weight")
        if "weight_packed" not in module.tensors and (weight is None or weight.dtype in PLAIN):
            return None
        scheme = self._scheme_of(module)
        if "weight_packed" in module.tensors:
            if scheme.is_float:
                raise module.error("packed floats are not read")
            return PackedTensor(module, scheme.bits, scheme.group_size or -1)
        return EightBitTensor(
            module,
            torch.float8_e4m3fn if scheme.is_float else torch.int8,
            block=scheme.block,
            group_size=scheme.group_size,
            inputs=scheme.inputs,
        )

    def _scheme_of(self, module: StoredModule) -> LayerScheme:
        """By its own name, else by what it looks like, else by the class of all such layers. Raises ModelError."""

        def is_like(target: str) -> bool:
            return target.startswith("re:") and re.match(target.removeprefix("re:"), module.name) is not None

        for fits in (module.name.__eq__, is_like, "Linear".__eq__):
            for scheme in self.schemes:
                if any(fits(target) for target in scheme.targets):
                    return scheme
        raise module.error("it is quantised, and none of the config_groups is for it")


def read_compressed(raw: RawConfig) -> CompressedFormat | None:
    """None for weights that are stored plain. Raises ModelError for what is not read."""
    layout = str(raw.get("format") or "dense")
    if layout not in _READ:
        raise raw.error(f"quantization_config: compressed-tensors {layout!r} is not read, only {', '.join(_READ[:4])}")
    if raw.part("sparsity_config").get("format", "dense") != "dense":
        raise raw.error("quantization_config: compressed-tensors with sparse weights is not read")
    if raw.get("transform_config"):
        raise raw.error("quantization_config: compressed-tensors with a transform_config is not read")
    groups = raw.part("config_groups")
    schemes = tuple(_scheme(name, groups.part(name)) for name, _ in groups.items())
    return CompressedFormat(schemes, f"compressed-tensors {layout}") if schemes and layout != "dense" else None


def _scheme(group: str, raw: RawConfig) -> LayerScheme:
    def refuse(what: str) -> None:
        raise raw.error(f"quantization_config: compressed-tensors {group}: {what} is not read")

    weights, given = raw.part("weights"), raw.part("input_activations")
    if (layout := raw.get("format") or _PACKED) not in _READ:
        refuse(f"format {layout!r}")
    targets = raw.get("targets")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise raw.error(f"quantization_config: {group}.targets must be a list of strings, not {targets!r:.60}")
    for target in targets:
        if target.startswith("re:"):
            try:
                re.compile(target.removeprefix("re:"))
            except re.error as error:
                refuse(f"target {target!r} is no regular expression ({error}), which")
    kind, bits, strategy = str(weights.get("type") or "int"), weights.integer("num_bits", 8), weights.get("strategy")
    if bits not in _BITS.get(kind, ()):
        refuse(f"{kind} of {bits} bits")
    group_size = weights.get("group_size")
    if not strategy:
        strategy = "group" if group_size and group_size_of(weights, "group_size", -1) else "tensor"
    if strategy == "group" and group_size == -1:
        strategy = "channel"
    if strategy not in _STRATEGIES:
        refuse(f"strategy {strategy!r}")
    return LayerScheme(
        targets=tuple(targets),
        bits=bits,
        is_float=kind == "float",
        group_size=group_size_of(weights, "group_size", 128) if strategy == "group" else None,
        block=(block_of(weights, "block_structure") or (128, 128)) if strategy == "block" else None,
        inputs=_inputs(given),
    )


def _inputs(raw: RawConfig) -> Inputs:
    """How rows are rounded; as they are where Octavo has no such rounding: more precise, never less."""
    if not raw or raw.get("num_bits", 8) != 8:
        return Inputs.AS_THEY_ARE
    is_float, strategy = raw.get("type", "int") == "float", raw.get("strategy", "token")
    if strategy in ("group", "tensor_group"):
        return Inputs.E4M3_BY_GROUP if is_float and raw.get("group_size") == 128 else Inputs.AS_THEY_ARE
    return Inputs.E4M3 if is_float else Inputs.INT8
