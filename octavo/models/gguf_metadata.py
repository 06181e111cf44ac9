"""The keys of a GGUF file that say what its model is, and those for which it is refused.

A key that changes what a model computes and that is not understood is refused by name: a model that loads and answers
nonsense is worse than an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from octavo.models import gguf_values
from octavo.models.errors import GGUFError
from octavo.models.gguf_families import FAMILIES

_NOT_UNDERSTOOD = (
    "attention.causal",
    "attention.clamp_kqv",
    "attention.key_length_swa",
    "attention.output_scale",
    "attention.scale",
    "attention.shared_kv_layers",
    "attention.temperature_length",
    "attention.temperature_scale",
    "embedding_scale",
    "expert_shared_count",
    "expert_group_count",
    "expert_group_scale",
    "expert_group_used_count",
    "expert_weights_scale",
    "interleave_moe_layer_step",
    "leading_dense_block_count",
    "logit_scale",
    "moe_every_n_layers",
    "residual_scale",
    "rope.dimension_count_swa",
    "rope.scale_linear",
    "rope.scaling.alpha",
    "rope.scaling.yarn_log_multiplier",
    "router_logit_softcapping",
    "use_parallel_residual",
)
# Keys that are understood only where they say what is so without them.
_UNDERSTOOD_AS: dict[str, float] = {
    "expert_gating_func": 1,  # softmax
    "expert_weights_norm": True,
    "rope.scaling.yarn_ext_factor": 1.0,
}
_FLOAT32_END = 2.0**128
SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_OF_SOME = {  # of which architectures they are understood
    **dict.fromkeys(SOFT_CAPS, ("gemma2", "gemma3")),
    "rope.freq_base_swa": ("gemma3",),
}


class Metadata:
    """The keys of one architecture, without its name in front."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Raises GGUFError for an architecture that cannot be converted."""
        self._values = values
        self.name = str(values.get("general.architecture"))
        if self.name not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise GGUFError(f"architecture {self.name!r} cannot be converted; those that can: {known}")
        for key in _NOT_UNDERSTOOD:
            if key in self:
                raise self.refused(key)
        for key, usual in _UNDERSTOOD_AS.items():
            if key in self and self[key] != usual:
                raise self.refused(key)
        for key, names in _OF_SOME.items():
            if key in self and self.name not in names:
                raise self.refused(key)

    def refused(self, key: str) -> GGUFError:
        """Of a model that cannot be converted for what this key says."""
        return GGUFError(f"{self.name}.{key} is {self[key]!r}; such a model cannot be converted")

    def __contains__(self, key: str) -> bool:
        return f"{self.name}.{key}" in self._values

    def __getitem__(self, key: str) -> Any:
        if key not in self:
            raise gguf_values.lacking(f"{self.name}.{key}")
        return self._values[f"{self.name}.{key}"]

    def get(self, key: str, default: Any) -> Any:
        """The value of `ARCHITECTURE.key`, of whatever type the file gives it."""
        return self._values.get(f"{self.name}.{key}", default)

    def text(self, key: str, default: str) -> str:
        """Raises GGUFError for what is none."""
        return gguf_values.text(self._values, f"{self.name}.{key}", default)

    def count(self, key: str) -> int:
        """0 where the file has no such key. Raises GGUFError, also for a list by layer."""
        return gguf_values.integer(self._values, f"{self.name}.{key}", 0)

    def integer(self, key: str, default: int | None = None) -> int:
        """At least 1. Raises GGUFError, also for a list by layer."""
        value = self[key] if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise gguf_values.unlike(f"{self.name}.{key}", value, "one positive number for all layers")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The shortest decimal that is the same float32: 9.999999747378752e-06 was written as 1e-05. Raises GGUFError
        for what is no number, or no finite one."""
        value = self[key] if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _FLOAT32_END:
            raise gguf_values.unlike(f"{self.name}.{key}", value, "a number")
        return float(str(np.float32(value)))

    def token_id(self, key: str) -> int | None:
        """None where the file names no such token. Raises GGUFError for an id that no token has."""
        return gguf_values.token_id(self._values, key)
