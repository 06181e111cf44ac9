"""What a model is: the numbers of its `config.json` and `generation_config.json`, checked and under Octavo's names.

Reads plain JSON and the headers of the weight files; never weights, never `transformers`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ARCHITECTURES = ("LlamaForCausalLM",)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelError(Exception):
    """A model cannot be used; the message is one line that says why and names the file, key or tensor."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length a model was first trained for."""

    kind: str = "default"  # default, linear, llama3
    factor: float = 1.0
    # Only for llama3: wavelengths beyond original / low_freq_factor are divided by `factor`, those within
    # original / high_freq_factor are kept, those between are blended.
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's sizes. Lengths are in tokens."""

    architecture: str
    vocab_size: int  # rows of the logits, padding rows of the checkpoint included
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_model_len: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    model_name: str
    model_hash: str  # over config and weight headers: same hash, same model

    @property
    def weights_bytes(self) -> int:
        """What the weights take on a device, within a few parts in a hundred: embedding, head and layers' matrices."""
        attention = self.hidden_size * self.head_size * 2 * (self.num_heads + self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        return (2 * self.vocab_size * self.hidden_size + self.num_layers * layer) * self.dtype.itemsize

    @classmethod
    def from_folder(
        cls, folder: str | Path, dtype: str = "auto", max_model_len: int | None = None, device: str = "cpu"
    ) -> ModelConfig:
        """Read a Hugging Face folder.

        `dtype` auto takes the checkpoint's own, but float32 in place of float16 on a CPU, which computes in no float16.
        Raises `ModelError` where the folder, a key or a value is missing or is one that Octavo does not know.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise ModelError(f"model folder {folder} does not exist")
        raw = _read_json(folder / "config.json")
        generation = _read_json(folder / "generation_config.json", required=False)
        architecture = _architecture(raw, folder)
        if raw.get("hidden_act", "silu") != "silu":
            raise ModelError(f"{folder}/config.json: hidden_act {raw['hidden_act']!r} is not supported, only 'silu'")

        def integer(key: str, default: int | None = None) -> int:
            value = raw.get(key)
            value = default if value is None else value
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ModelError(f"{folder}/config.json: {key} must be a positive integer, not {value!r}")
            return value

        hidden_size, num_heads = integer("hidden_size"), integer("num_attention_heads")
        num_kv_heads = integer("num_key_value_heads", num_heads)
        head_size = integer("head_dim", hidden_size // num_heads)
        if num_heads % num_kv_heads:
            raise ModelError(f"{folder}/config.json: {num_heads} heads do not divide by {num_kv_heads} key/value heads")
        if head_size % 2:
            raise ModelError(f"{folder}/config.json: head size {head_size} is odd; rotary embedding needs pairs")
        longest = integer("max_position_embeddings")
        if max_model_len is not None and not 1 <= max_model_len <= longest:
            raise ModelError(f"max_model_len {max_model_len} is not within 1 and {longest}, the most this model takes")
        rope_theta, rope_scaling = _rope(raw, folder)
        return cls(
            architecture=architecture,
            vocab_size=integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=integer("intermediate_size"),
            num_layers=integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            max_model_len=max_model_len or longest,
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(raw.get("attention_bias", False)),
            mlp_bias=bool(raw.get("mlp_bias", False)),
            dtype=_dtype(raw, dtype, device),
            eos_token_ids=_token_ids(generation.get("eos_token_id", raw.get("eos_token_id")), folder),
            model_name=folder.resolve().name,
            model_hash=_model_hash(folder),
        )


def _read_json(path: Path, required: bool = True) -> dict[str, Any]:
    if not path.exists() and not required:
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def _architecture(raw: dict[str, Any], folder: Path) -> str:
    names = raw.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    known = ", ".join(ARCHITECTURES)
    raise ModelError(f"{folder}/config.json: architecture {', '.join(map(str, names)) or 'not given'}; known: {known}")


def _rope(raw: dict[str, Any], folder: Path) -> tuple[float, RopeScaling]:
    """(theta, scaling); since transformers 5 both stand in `rope_parameters`, before that each on its own."""
    parameters = raw.get("rope_parameters") or {}
    scaling = parameters or raw.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta", raw.get("rope_theta", 10000.0)))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, RopeScaling()
    try:
        if kind == "linear":
            return theta, RopeScaling(kind="linear", factor=float(scaling["factor"]))
        if kind == "llama3":
            return theta, RopeScaling(
                kind="llama3",
                factor=float(scaling["factor"]),
                low_freq_factor=float(scaling["low_freq_factor"]),
                high_freq_factor=float(scaling["high_freq_factor"]),
                original_max_position_embeddings=int(scaling["original_max_position_embeddings"]),
            )
    except KeyError as error:
        raise ModelError(f"{folder}/config.json: rope type {kind} lacks {error}") from None
    raise ModelError(f"{folder}/config.json: rope type {kind!r} is not supported; known: default, linear, llama3")


def _dtype(raw: dict[str, Any], asked: str, device: str) -> torch.dtype:
    if asked != "auto":
        if asked not in DTYPES:
            raise ModelError(f"dtype {asked!r} is not supported; known: auto, {', '.join(DTYPES)}")
        if asked == "float16" and torch.device(device).type == "cpu":
            raise ModelError("dtype float16 is not computed on a CPU; use float32 or bfloat16")
        return DTYPES[asked]
    own = DTYPES.get(str(raw.get("dtype") or raw.get("torch_dtype") or "float32"), torch.float32)
    if own == torch.float16 and torch.device(device).type == "cpu":
        return torch.float32
    return own


def _token_ids(value: Any, folder: Path) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and i >= 0 for i in ids):
        raise ModelError(f"{folder}: eos_token_id must be a token id or a list of them, not {value!r}")
    return tuple(ids)


def _model_hash(folder: Path) -> str:
    """sha256 over config.json and each weight file's name, size and header (names, shapes and offsets of tensors)."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(header_bytes, path.stat().st_size)))
    return digest.hexdigest()
