"""An adapter's `adapter_config.json` as PEFT writes it: ranks and scales, and a refusal by name of all other kinds."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker_svc.adapters.errors import AdapterError
from worker_svc.models.patterns import why_too_slow

CONFIG_FILE = "adapter_config.json"
ALL_LINEAR = "all-linear"  # in place of a pattern

# What changes the result and is not computed, unless it has one of these values.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "bias": ("none",),
    "lora_bias": (False,),
    "modules_to_save": ([],),
    "target_parameters": ([],),
    "layer_replication": ([],),
    "alora_invocation_tokens": ([],),
    "use_qalora": (False,),
    "use_bdlora": (False,),
    "arrow_config": (),
    "trainable_token_indices": ([], {}),
    "corda_config": (),
    "eva_config": (),
    "kasa_config": (),
    "megatron_config": (),
    "monteclora_config": (),
    # Others start from another base than the checkpoint's; gaussian and orthogonal ones from zero.
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
}


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """A low-rank adapter's numbers (Hu et al. 2021, arXiv:2106.09685)."""

    rank: int
    alpha: float
    is_rank_stabilized: bool  # rsLoRA (Kalajdzievski 2023, arXiv:2312.03732)
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    base: str  # name of the model that it was trained for
    targets: tuple[str, ...] | str | None  # ends of modules' names, or a pattern of whole ones; None: not told
    excluded: tuple[str, ...] | str | None
    layers: tuple[int, ...] | None  # None: all

    @classmethod
    def read(cls, folder: Path) -> PeftConfig:
        """Raises AdapterError."""
        path = folder / CONFIG_FILE
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise AdapterError(f"{folder} has no {CONFIG_FILE}") from None
        except (OSError, ValueError) as error:
            raise AdapterError(f"cannot read {path}: {str(error).splitlines()[0]}") from None
        if not isinstance(raw, dict) or raw.get("peft_type") != "LORA":
            kind = raw.get("peft_type") if isinstance(raw, dict) else raw
            raise AdapterError(f"{path}: peft_type {kind!r} is not supported, only 'LORA'")
        for key, harmless in _REFUSED.items():
            if (value := raw.get(key)) is not None and value not in harmless:
                raise AdapterError(f"{path}: {key} {value!r} is not supported: merge this adapter into its model")
        try:
            return cls(
                rank=_rank(raw["r"]),
                alpha=_alpha(raw["lora_alpha"]),
                is_rank_stabilized=_flag(raw.get("use_rslora") or False),
                rank_pattern={str(key): _rank(value) for key, value in (raw.get("rank_pattern") or {}).items()},
                alpha_pattern={str(key): _alpha(value) for key, value in (raw.get("alpha_pattern") or {}).items()},
                base=str(raw.get("base_model_name_or_path") or ""),
                # Names of the list of layers would narrow the targets further: then nothing is known of them.
                targets=None if raw.get("layers_pattern") else _modules(raw.get("target_modules"), "target_modules"),
                excluded=_modules(raw.get("exclude_modules"), "exclude_modules"),
                layers=_layers(raw.get("layers_to_transform")),
            )
        except KeyError as error:
            raise AdapterError(f"{path} has no {error}") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise AdapterError(f"{path}: {error}") from None

    def check_patterns(self, modules: Sequence[str]) -> None:
        """Raises AdapterError where a pattern takes too long over one of these names."""
        whole = [each for each in (self.targets, self.excluded) if isinstance(each, str)]
        patterns = (*self.rank_pattern, *self.alpha_pattern, *whole)
        if (why := why_too_slow(patterns, modules, CONFIG_FILE)) is not None:
            raise AdapterError(why)

    def rank_of(self, module: str) -> int:
        """Of one module, by its name in the model."""
        return int(_matching(self.rank_pattern, module, self.rank))

    def wants(self, module: str, layer: int) -> bool | None:
        """Whether the adapter is for this linear module of a layer; None: the configuration does not say."""
        if self.targets is None:
            return None
        if self.excluded is not None and _is_among(self.excluded, module):
            return False
        is_in_layer = self.layers is None or layer in self.layers or isinstance(self.targets, str)
        return is_in_layer and (self.targets == ALL_LINEAR or _is_among(self.targets, module))

    def scale_of(self, module: str) -> float:
        """What B A x is multiplied by."""
        rank, alpha = self.rank_of(module), _matching(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def _rank(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"rank {value!r} is no number from 1 on")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"use_rslora {value!r} is neither true nor false")
    return value


def _alpha(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"alpha {value!r} is no number")
    return float(value)


def _modules(value: Any, key: str) -> tuple[str, ...] | str | None:
    if not value or isinstance(value, str):
        return value or None
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError(f"{key} {value!r} is no list of modules")
    return tuple(value)


def _layers(value: Any) -> tuple[int, ...] | None:
    values = [value] if isinstance(value, int) else value or []
    if not isinstance(values, list) or not all(isinstance(each, int) for each in values):
        raise ValueError(f"layers_to_transform {value!r} is no list of layers")
    return tuple(values) or None


def _is_among(names: tuple[str, ...] | str, module: str) -> bool:
    """A list has names, or what they end with behind a dot; a text is a pattern of whole names."""
    if not isinstance(names, str):
        return any(module == name or module.endswith(f".{name}") for name in names)
    try:
        return re.fullmatch(names, module) is not None
    except re.error:
        raise AdapterError(f"{names!r} in target_modules or exclude_modules is no regular expression") from None


def _matching(patterns: dict[str, Any], module: str, default: float) -> float:
    """The first pattern that the end of the dotted name matches decides."""
    for pattern, value in patterns.items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return float(value)
        except re.error:
            raise AdapterError(f"{pattern!r} in rank_pattern or alpha_pattern is no regular expression") from None
    return default
