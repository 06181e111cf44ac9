"""The style that Llama's keys tell, and what is accepted of a key."""

from __future__ import annotations

from typing import Any

from worker_svc.models.families.sizes import Sizes
from worker_svc.models.raw_config import RawConfig
from worker_svc.models.rope import read_rope
from worker_svc.models.style import Activation, DecoderStyle

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def llama_style(raw: RawConfig, sizes: Sizes, **differences: Any) -> DecoderStyle:
    """Llama's, with what Llama's keys say."""
    values: dict[str, Any] = {
        "norm_eps": raw.number("rms_norm_eps", 1e-6),
        "activation": read_activation(raw, "hidden_act", "silu"),
        "ropes": differences.get("ropes") or (read_rope(raw, sizes.head_size),),
    }
    return DecoderStyle(**values | differences)


def read_activation(raw: RawConfig, key: str, default: str) -> Activation:
    """What the key names, or the default where it is absent. Raises ModelError for what no kernel computes."""
    name = raw.text(key, default)
    if name not in _ACTIVATIONS:
        raise raw.error(f"{key} {name!r} is not supported; known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def accept_only(raw: RawConfig, key: str, accepted: Any) -> None:
    """Refuses a file that asks for anything else under a key, which is not computed here. Raises ModelError."""
    if raw.get(key, accepted) not in (accepted, None):
        raise raw.error(f"{key} {raw.get(key)!r} is not supported, only {accepted!r}; try --model-impl transformers")
