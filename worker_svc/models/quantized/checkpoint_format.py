"""How a checkpoint is quantised: by one format, whose tensors stand for a layer's weight."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Protocol

from worker_svc.models.checkpoint.stored_tensor import StoredTensor
from worker_svc.models.errors import ModelError
from worker_svc.models.patterns import why_too_slow
from worker_svc.models.quantized.quantized_tensor import QuantizedTensor
from worker_svc.models.quantized.stored_module import StoredModule
from worker_svc.models.quantized.usual_weight import UsualWeight


class CheckpointFormat(Protocol):
    """What a `quantization_config` says. Which layers it holds for is said by the tensors that they have: lists of
    layers left out are often wrong in names or hold those of fused layers, and tell nothing beyond that."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def leaves(self) -> frozenset[str]:
        """Last parts of the names of tensors that may belong to a quantised layer."""

    @property
    def usual(self) -> UsualWeight:
        """What most layers' weights are like."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """Regular expressions that `tensor_of` matches beginnings of layers' names with."""

    def tensor_of(self, module: StoredModule) -> QuantizedTensor | None:
        """The weight of a layer with some of these tensors; None where it is plain. Raises ModelError."""


def with_quantized(
    folder: Path, format_: CheckpointFormat, tensors: dict[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """A checkpoint's tensors, with one under NAME.weight for those of each quantised layer.

    Reads what the files say of their tensors, and nothing large. Raises ModelError for a layer that lacks one, or whose
    tensors do not belong together.
    """
    modules: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf in format_.leaves:
            modules[module][leaf] = tensor
    found = dict(tensors)
    if (why := why_too_slow(format_.patterns, list(modules), "quantization_config")) is not None:
        raise ModelError(f"{folder / 'config.json'}: {why}")
    for name, leaves in modules.items():
        weight = format_.tensor_of(StoredModule(folder, format_.name, name, leaves))
        if weight is not None:
            for leaf in leaves:
                del found[f"{name}.{leaf}"]
            found[f"{name}.weight"] = weight
    return found
