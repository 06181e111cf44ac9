"""Sizes of a decoder that Octavo has no family for, by the configuration class of `transformers`; and what is refused.

What can be known from a configuration is refused here, by name; what only a model's code shows, `TransformersModel`
refuses when it is made, or in its first forward pass.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from worker_svc.models.errors import ModelError
from worker_svc.models.families.sizes import Sizes
from worker_svc.models.raw_config import RawConfig

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_LENGTH_DEPENDENT_ROPES = {"dynamic", "longrope"}


def read_config(folder: Path, trust_remote_code: bool) -> Any:
    """The folder's configuration as an object of `transformers`. Raises ModelError."""
    try:
        from transformers import AutoConfig
    except ImportError:
        raise ModelError(
            f"{folder}: models outside Octavo's own families need the Python package `transformers`: "
            "install octavo[transformers] on the worker"
        ) from None
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # whatever a configuration's own code raises
        if not trust_remote_code and "auto_map" in RawConfig.read(folder / "config.json"):
            raise ModelError(f"{folder}: the model is code of its own, run only with --trust-remote-code") from None
        raise ModelError(f"{folder}/config.json: {' '.join(str(error).split())[:300]}") from None


def sizes_of(config: Any, architecture: str, max_model_len: int | None) -> Sizes:
    """Raises ModelError, with the architecture's name, for what the paged cache cannot serve."""
    try:
        return _sizes(config, architecture, max_model_len)
    except ModelError:
        raise
    except Exception as error:  # what some configurations raise for a key that is another by layer
        why = " ".join(str(error).split())[:300]
        raise ModelError(f"architecture {architecture} is not supported: {why}") from None


def _sizes(config: Any, architecture: str, max_model_len: int | None) -> Sizes:
    if why := _other_decoder(config, architecture) or _refusal(config, max_model_len):
        raise ModelError(f"architecture {architecture} is not supported: {why}")
    num_heads = int(config.num_attention_heads)
    hidden = int(config.hidden_size)
    return Sizes(
        hidden_size=hidden,
        intermediate_size=int(getattr(config, "intermediate_size", None) or 4 * hidden),
        num_layers=int(config.num_hidden_layers),
        num_heads=num_heads,
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or num_heads),
        head_size=int(getattr(config, "head_dim", None) or hidden // num_heads),
        max_positions=int(config.max_position_embeddings),
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
    )


def _other_decoder(config: Any, architecture: str) -> str | None:
    """Why the library would compute something else than the architecture says; None where it would not."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if getattr(config, "auto_map", None):
        return None  # the folder brings the code of its own
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if known is None:
        return f"no decoder is known for model type {config.model_type}"
    if architecture not in ((known,) if isinstance(known, str) else known):
        return f"the decoder of model type {config.model_type} is {known}"
    return None


def _refusal(config: Any, max_model_len: int | None) -> str | None:
    """Why a model cannot be served; None where nothing speaks against it."""
    if getattr(config, "is_encoder_decoder", False):
        return "it has an encoder"
    if getattr(config, "text_config", None) is not None or getattr(config, "vision_config", None) is not None:
        return "it reads more than text"
    if getattr(config, "kv_lora_rank", None):
        return "latent attention keeps no keys and values of heads"
    if getattr(config, "num_kv_shared_layers", None):
        return "its layers share keys and values"
    if unknown := set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES:
        return f"it has layers of type {min(unknown)}"
    if not all(getattr(config, name, None) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")):
        return "its configuration does not tell layers, heads and hidden size"
    if not getattr(config, "max_position_embeddings", None):
        return "its configuration does not tell how long a sequence may be"
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(each for each in rope.values() if isinstance(each, dict))):  # some have one a type of layers
        if (kind := part.get("rope_type")) in _LENGTH_DEPENDENT_ROPES:
            trained = part.get("original_max_position_embeddings") or config.max_position_embeddings
            if (max_model_len or config.max_position_embeddings) > trained:
                return f"rope type {kind} changes with a sequence's length; max_model_len {trained} can be served"
    return None
