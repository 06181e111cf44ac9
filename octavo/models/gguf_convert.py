"""Reads a GGUF file as a Hugging Face folder: config, weights, tokenizer, template.

Weights are dequantised exactly as the `gguf` package does, to float32, or left as the bytes that they are, and put back
into the order that `transformers` and Octavo's worker expect (`gguf_families.Layout`). Whatever a file holds beyond its
architecture's weights is refused by name. Imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.models import gguf_values
from octavo.models.errors import GGUFError
from octavo.models.gguf_config import family_of, lengths, read_config
from octavo.models.gguf_families import GgufFamily, Layout, Weight
from octavo.models.gguf_file import FileTensor, GgufFile
from octavo.models.gguf_metadata import Metadata
from octavo.models.gguf_tokenizer import ENDS, tokenizer_files, typed_tokens
from octavo.models.safetensors_stream import PendingTensor, write_safetensors
from octavo.shared.terminal_row import ByteBar

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType


@dataclass(frozen=True)
class GgufTensor(PendingTensor):
    """A tensor that can be had as the file has it, too: `blocks` are its bytes."""

    kind: str = field(kw_only=True)  # the file's type of its numbers: Q4_K, F32
    matrix: tuple[int, ...] = field(kw_only=True)  # of a matrix its outputs and inputs, whatever `shape` has first
    blocks: Callable[[], np.ndarray] = field(kw_only=True)  # u8[outputs, bytes of a row], outputs in `shape`'s order

    @property
    def file_bytes(self) -> int:
        """What it takes in the GGUF file; `num_bytes` are those of its numbers in float32."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[self.kind]]
        return math.prod(self.shape) // block * block_bytes


_OF_ROPE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # the config says them


def write_model_folder(gguf_path: Path, folder: Path) -> None:
    """Convert `gguf_path` into the existing empty `folder`, with a bar on a terminal. Raises `GGUFError`."""
    tensors = list(write_description(gguf_path, folder))
    bar = ByteBar(f"converting {gguf_path.name}", sum(tensor.num_bytes for tensor in tensors))
    try:
        write_safetensors(folder / "model.safetensors", tensors, bar.add)
    finally:
        bar.finish()


def write_description(gguf_path: Path, folder: Path) -> Iterator[PendingTensor]:
    """Write all but the weights into the existing empty `folder`; the weights, by the names of Hugging Face.

    Raises `GGUFError`, for weights when they are iterated.
    """
    file = _read(gguf_path)
    metadata = Metadata(file.values)
    config = _config(file, metadata)
    tokenizer = tokenizer_files(file.values, metadata.integer("context_length"))
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(config, metadata, file.values))
    for name, text in tokenizer.items():
        (folder / name).write_text(text, encoding="utf-8")
    return _weights(file, family_of(metadata), config)


def read_tensors(gguf_path: Path) -> Iterator[GgufTensor]:
    """The weights, by the names of Hugging Face. Raises `GGUFError`."""
    file = _read(gguf_path)
    metadata = Metadata(file.values)
    yield from _weights(file, family_of(metadata), _config(file, metadata))


def _read(path: Path) -> GgufFile:
    file = GgufFile(path)
    if (count := gguf_values.integer(file.values, "split.count", 1)) > 1:
        part = gguf_values.integer(file.values, "split.no", 0) + 1
        raise GGUFError(f"this is part {part} of {count}: join them into one file first")
    for tensor in file.tensors:  # now, and not in the middle of a load
        if not _can_expand(tensor.kind):
            raise GGUFError(f"tensor {tensor.name!r} is of type {tensor.kind.name}, which is not read")
    return file


@cache
def _can_expand(kind: GGMLQuantizationType) -> bool:
    """Whether the `gguf` package expands numbers of this type; it says so only where it is to expand some."""
    from gguf import GGML_QUANT_SIZES, dequantize

    _, block_bytes = GGML_QUANT_SIZES[kind]
    try:
        dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _config(file: GgufFile, metadata: Metadata) -> dict[str, Any]:
    tensors = {tensor.name: tensor for tensor in file.tensors}
    if "token_embd.weight" not in tensors:
        raise GGUFError("the file lacks 'token_embd.weight'")

    if (count := metadata.integer("block_count")) > len(tensors):
        raise GGUFError(f"{metadata.name}.block_count is {count}, and the file has {len(tensors)} tensors")

    def values(name: str) -> np.ndarray | None:
        return _expanded(tensors[name]) if name in tensors else None

    return read_config(metadata, tensors["token_embd.weight"].shape[0], "output.weight" in tensors, values)


def _generation_config(config: dict[str, Any], metadata: Metadata, values: dict[str, Any]) -> dict[str, Any]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {name: config[name] for name in names if config[name] is not None}
    # What ends a turn of a chat ends an output, too; many files have no key for it.
    ends = [config["eos_token_id"], metadata.token_id("eot"), metadata.token_id("eom")]
    ends += [i for i, (text, _) in enumerate(typed_tokens(values)) if text in ENDS]
    if ends := list(dict.fromkeys(each for each in ends if each is not None)):
        ids["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    return ids


def _weights(file: GgufFile, family: GgufFamily, config: dict[str, Any]) -> Iterator[GgufTensor]:
    sizes = lengths(config)
    num_layers = config.get("num_hidden_layers") or config["n_layer"]
    missing = _names(family, num_layers, has_head=not config["tie_word_embeddings"])
    for tensor in file.tensors:
        if tensor.name in _OF_ROPE:
            continue
        if tensor.name not in missing:
            raise GGUFError(f"tensor {tensor.name!r} is not part of a plain {family.architecture}")
        name, weight = missing.pop(tensor.name)
        yield from _pending(tensor, name, weight, sizes)
    if missing:
        raise GGUFError(f"the file lacks {len(missing)} tensors, {min(missing)!r} among them")


def _names(family: GgufFamily, num_layers: int, has_head: bool) -> dict[str, tuple[str, Weight]]:
    """Name in the file -> name of Hugging Face, and what it is a part of."""
    places = [("", "", family.outer)]
    places += [(f"blk.{layer}.", family.layer_prefix.format(layer), family.layer) for layer in range(num_layers)]
    names = {}
    for file_prefix, prefix, weights in places:
        for leaf, weight in weights.items():
            if leaf == "output" and not has_head:
                continue
            for kind in ("weight", "bias") if weight.has_bias else ("weight",):
                names[f"{file_prefix}{leaf}.{kind}"] = (f"{prefix}{weight.name}.{kind}", weight)
    return names


def _pending(tensor: FileTensor, name: str, weight: Weight, sizes: dict[str, int]) -> Iterator[GgufTensor]:
    """One tensor, or one for each expert. Raises GGUFError for one of another shape."""
    shape = tuple(sizes[word] for word in weight.shape)
    is_turned, found = weight.layout is Layout.TRANSPOSED, tensor.shape
    if name.endswith(".bias"):  # of what comes out
        shape = shape[-1:] if is_turned else shape[:1]
    if weight.layout is Layout.EXPERTS:
        expected: tuple[int, ...] = (sizes["experts"], *shape)
    else:
        expected = shape[::-1] if is_turned else shape
    if found != expected:
        raise GGUFError(f"tensor {tensor.name!r} has shape {found}, not {expected}")
    kind = tensor.kind.name
    if weight.layout is Layout.EXPERTS:
        for expert in range(sizes["experts"]):
            load = partial(_expanded, tensor, expert)
            yield GgufTensor(
                name.format(expert), shape, load, kind=kind, matrix=shape, blocks=partial(_bytes, tensor, expert)
            )
        return

    def load_all() -> np.ndarray:
        values = _in_order(_expanded(tensor), weight.layout, sizes["head"])
        if weight.layout is Layout.TRANSPOSED:
            return values.T
        return values - np.float32(1) if weight.layout is Layout.ONE_ADDED else values

    def all_blocks() -> np.ndarray:
        return _in_order(_bytes(tensor), weight.layout, sizes["head"])

    yield GgufTensor(name, shape, load_all, kind=kind, matrix=found, blocks=all_blocks)


def _in_order(rows: np.ndarray, layout: Layout, head: int) -> np.ndarray:
    """Outputs [out, ...] as the checkpoint orders them."""
    if layout in (Layout.QUERY_PAIRS, Layout.KEY_PAIRS):
        return _by_halves(rows, head)
    return _by_heads(rows, head) if layout is Layout.PARTS else rows


def _bytes(tensor: FileTensor, expert: int | None = None) -> np.ndarray:
    return (tensor.data if expert is None else tensor.data[expert]).view(np.uint8)


def _expanded(tensor: FileTensor, expert: int | None = None) -> np.ndarray:
    """float32, of one expert where the tensor holds several."""
    from gguf import dequantize

    data = tensor.data if expert is None else tensor.data[expert]
    return dequantize(data, tensor.kind).astype(np.float32, copy=False)


def _by_halves(values: np.ndarray, head: int) -> np.ndarray:
    """Rows of each head from llama.cpp's (pair, half) order back to (half, pair). values [heads * head, ...]."""
    return values.reshape(-1, head // 2, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _by_heads(values: np.ndarray, head: int) -> np.ndarray:
    """Rows from all heads' queries, keys and values to one head's after the other's. values [3 * heads * head, ...]."""
    return values.reshape(3, -1, head, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
