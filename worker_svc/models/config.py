"""What a model is: the numbers of its `config.json` and `generation_config.json`, checked and under Octavo's names.

Reads plain JSON and the headers of the weight files; never weights, never `transformers`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from worker_svc.models.cache_scales.cache_scales import CacheScales
from worker_svc.models.checkpoint.stored_dtype import stored_dtype
from worker_svc.models.errors import ModelError
from worker_svc.models.families.families import FAMILIES
from worker_svc.models.quantized.checkpoint_format import CheckpointFormat
from worker_svc.models.quantized.detect import detect_format
from worker_svc.models.raw_config import RawConfig
from worker_svc.models.style import DecoderStyle
from worker_svc.models.transformers_config import read_config, sizes_of

__all__ = ["DTYPES", "ModelConfig", "ModelError"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_UNSAID_DTYPES = {"GptOssForCausalLM": torch.bfloat16}  # of published models whose config.json does not say it

_WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin")
_BYTES_A_NUMBER = {"int8": 1, "int4": 5 / 8, "int4-128": 4.25 / 8, "fp8": 1}  # by `--quantization`
_MOST_LAYERS = 10_000  # published models have up to some 200
_HASHED_BYTES = 16 << 20
_MOST_HEADER_BYTES = 100_000_000  # of safetensors, whose library refuses more
_NUM_SAMPLES = 256  # with what they read, the most that a slow disk does in a second or two
_SAMPLE_BYTES = 4096


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
    head_size: int  # of a head's key in the cache
    max_positions: int  # that the model was trained for; may be more than max_model_len
    max_model_len: int
    tie_word_embeddings: bool
    style: DecoderStyle  # of Octavo's own decoder; not of one that transformers computes
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    model_name: str
    model_hash: str  # over config, weight headers and samples of the weights: same hash, same model
    impl: Literal["octavo", "transformers"] = "octavo"  # whose code computes the layers
    quantization: str = ""  # of the weights of products when they are loaded: int8, int4, int4-128, fp8; empty: none
    weights_format: CheckpointFormat | None = None  # how the checkpoint is quantised; None: not, or as a GGUF file is
    is_batch_invariant: bool = False  # whether a row's products must have the same bits in any batch
    cache_scales: CacheScales | None = None  # of a cache of eight bits; None: it has more
    first_layer: int = 0  # the number in the model of the first of the layers; of a stage that has some of them

    @property
    def gathered_size(self) -> int:
        """Elements of what attention adds up for a head from the cache."""
        return self.head_size if self.style.latent is None else self.style.latent.latent_size

    @property
    def attended_size(self) -> int:
        """Elements of what a token's heads attend to, all together."""
        return self.num_heads * (self.head_size if self.style.latent is None else self.style.latent.value_size)

    @property
    def weights_bytes(self) -> int:
        """What the weights take on a device, within a few parts in a hundred: embedding, head and layers' matrices."""
        attention = self.hidden_size * self.head_size * 2 * (self.num_heads + self.num_kv_heads)
        if self.style.latent is not None:
            attention = self.style.latent.num_weights(self.hidden_size, self.num_heads)
        num_products, experts = 3 if self.style.is_gated else 2, self.style.experts
        num_sparse = sum(experts.is_sparse) if experts else 0
        inner = (self.num_layers - num_sparse) * self.intermediate_size
        if experts:
            inner += num_sparse * (experts.num_experts + experts.num_shared) * experts.intermediate_size
        layers = self.num_layers * attention + num_products * self.hidden_size * inner
        table = self.vocab_size * self.hidden_size
        if self.weights_format is not None and not self.quantization:
            usual = self.weights_format.usual
            plain = self.num_layers * attention if usual.is_of_experts else 0
            return (2 * table + plain) * self.dtype.itemsize + int((layers - plain) * usual.bits_per_number / 8)
        of_head = self.dtype.itemsize if self.quantization in ("", "fp8") else 1
        return table * (self.dtype.itemsize + of_head) + int(layers * self.bytes_per_number)

    @property
    def bytes_per_number(self) -> float:
        """Of a layer's product that is made of plain weights."""
        return _BYTES_A_NUMBER.get(self.quantization, self.dtype.itemsize)

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        dtype: str = "auto",
        max_model_len: int | None = None,
        device: str = "cpu",
        impl: str = "auto",
        trust_remote_code: bool = False,
        quantization: str = "",
        is_batch_invariant: bool = False,
    ) -> ModelConfig:
        """Read a Hugging Face folder.

        `dtype` auto takes the checkpoint's own, which is that of the embedding where config.json says nothing, where
        the device multiplies it. On a CPU it takes float32 in place of float16, and of bfloat16 where the processor has
        no fast instructions for its products. A GGUF file's is float32 on a CPU, where its numbers are then exact, and
        bfloat16 on a GPU.
        `impl` auto takes Octavo's own code for the families it knows, else that of transformers (`trust_remote_code`:
        also code that lies in the folder).
        Raises `ModelError` where the folder, a key or a value is missing or is one that Octavo does not know.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise ModelError(f"model folder {folder} does not exist")
        if not (folder / "config.json").exists():
            found = [str(path) for path in sorted(folder.glob("*.gguf"))]
            files = " or ".join(found[:3]) + (f" or one of {len(found) - 3} more" if found[3:] else "")
            wanted = f"; name the file: {files}" if files else ": a model folder has that, a tokenizer and weights"
            raise ModelError(f"{folder} has no config.json{wanted}")
        raw = RawConfig.read(folder / "config.json")
        _check_layers(raw)
        generation = RawConfig.read(folder / "generation_config.json", required=False)
        weights_format = detect_format(raw)
        architecture, impl = _architecture(raw, impl)
        if weights_format is not None and impl == "transformers":
            what = f"{architecture} is computed by transformers: weights quantised as {weights_format.name}"
            raise raw.error(f"{what} are read for the families that Octavo computes itself")
        if impl == "octavo":
            sizes, style = FAMILIES[architecture](raw)
            if (experts := style.experts) is not None and experts.num_chosen > experts.num_experts:
                raise raw.error(f"{experts.num_chosen} experts cannot be chosen among {experts.num_experts}")
        else:
            library_config = read_config(folder, trust_remote_code)
            sizes, style = sizes_of(library_config, architecture, max_model_len), DecoderStyle()
        return cls(
            architecture=architecture,
            vocab_size=raw.integer("vocab_size"),
            hidden_size=sizes.hidden_size,
            intermediate_size=sizes.intermediate_size,
            num_layers=sizes.num_layers,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_size=sizes.head_size,
            max_positions=sizes.max_positions,
            max_model_len=_max_model_len(style, sizes.max_positions, max_model_len),
            tie_word_embeddings=sizes.tie_word_embeddings,
            style=style,
            dtype=_dtype(raw, dtype, device, folder, architecture, style if impl == "octavo" else None),
            eos_token_ids=_eos_token_ids(raw, generation),
            model_name=folder.resolve().name,
            model_hash=_model_hash(folder),
            impl=impl,
            quantization=quantization,
            weights_format=weights_format,
            is_batch_invariant=is_batch_invariant,
        )


def _check_layers(raw: RawConfig) -> None:
    """Raises ModelError for more than a model can have, before anything is made for each of them."""
    for key in ("num_hidden_layers", "n_layer", "num_nextn_predict_layers"):
        if isinstance(value := raw.get(key), int) and value > _MOST_LAYERS:
            raise raw.error(f"{key} is {value!r:.40}, more than {_MOST_LAYERS}")


def _architecture(raw: RawConfig, impl: str) -> tuple[str, Literal["octavo", "transformers"]]:
    """The architecture and whose code computes it."""
    named: list[str] = raw.list_of(str, "architectures")
    own = next((name for name in named if name in FAMILIES), None)
    if own and impl != "transformers":
        return own, "octavo"
    if impl == "octavo" or not named:
        known = ", ".join(FAMILIES)
        raise raw.error(f"architecture {', '.join(named) or 'not given'}; known: {known}")
    if not named[0].endswith(("ForCausalLM", "LMHeadModel")):
        raise raw.error(f"architecture {named[0]} is not supported: it is no decoder that generates text")
    return named[0], "transformers"


def _max_model_len(style: DecoderStyle, max_positions: int, asked: int | None) -> int:
    longest = max([rope.longest(max_positions) for rope in style.ropes], default=max_positions)
    if asked is None:
        return min([rope.default_len(max_positions) for rope in style.ropes], default=max_positions)
    if not 1 <= asked <= longest:
        raise ModelError(f"max_model_len {asked} is not within 1 and {longest}, the most this model takes")
    return asked


def _is_gguf(folder: Path) -> bool:
    return any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors"))


def _dtype(
    raw: RawConfig, asked: str, device: str, folder: Path, architecture: str, style: DecoderStyle | None
) -> torch.dtype:
    """`style`: None where `transformers` computes the model."""
    if asked != "auto":
        if asked not in DTYPES:
            raise ModelError(f"dtype {asked!r} is not supported; known: auto, {', '.join(DTYPES)}")
        if asked == "float16" and torch.device(device).type == "cpu":
            raise ModelError("dtype float16 is not computed on a CPU; use float32 or bfloat16")
        return DTYPES[asked]
    own = _own_dtype(raw, folder, architecture, style)
    if torch.device(device).type != "cpu":
        return torch.bfloat16 if _is_gguf(folder) else own
    if own == torch.float16 or (own == torch.bfloat16 and not _has_pairs()):
        return torch.float32
    return own


def _own_dtype(raw: RawConfig, folder: Path, architecture: str, style: DecoderStyle | None) -> torch.dtype:
    if (named := str(raw.get("dtype") or raw.get("torch_dtype"))) in DTYPES:
        return DTYPES[named]
    # Not of any tensor: scales of quantised products have types of their own.
    names = [f"{base}{style.names.embedding}.weight" for base in style.names.bases] if style is not None else []
    stored = stored_dtype(folder, names)
    if stored is None or stored not in DTYPES.values():
        return _UNSAID_DTYPES.get(architecture, torch.float32)
    return stored


def _has_pairs() -> bool:
    """Whether this processor has fast products of bfloat16: without, those of float32 rows are as fast, and exact."""
    # Here, so that a worker with a GPU waits for no compiler of CPU code.
    from kernels.cpu.library import library

    return library().has_pairs


def _eos_token_ids(raw: RawConfig, generation: RawConfig) -> tuple[int, ...]:
    value = generation.get("eos_token_id")
    value = raw.get("eos_token_id") if value is None else value  # a null there says nothing
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and i >= 0 for i in ids):
        raise raw.error(f"eos_token_id must be a token id or a list of them, not {value!r}")
    return tuple(ids)


def _model_hash(folder: Path) -> str:
    """sha256 over config.json and each weight file's name, size, beginning, and samples from all over it.

    The beginning of safetensors is the header (names, shapes and offsets of tensors), of others the first 16 MiB. A
    fine-tuned model has the same header as its base; the samples tell them apart without reading gigabytes.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(path for suffix in _WEIGHT_SUFFIXES for path in folder.glob(f"*{suffix}")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            num_bytes = _HASHED_BYTES
            if path.suffix == ".safetensors":  # of a damaged file it may be any number
                num_bytes = min(int.from_bytes(file.read(8), "little"), _MOST_HEADER_BYTES)
            digest.update(file.read(num_bytes))
            for number in range(_NUM_SAMPLES):
                file.seek(size * number // _NUM_SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
