"""The files of a checkpoint, opened: every tensor by the model's name for it, read when it is taken.

Of safetensors only the header is read at first; pickled files and GGUF files are memory-mapped, and the tensors of the
latter kept as they are (`gguf_blocks`) or expanded to float32. All raise `ModelError` with one line that names the
file.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from worker_svc.models.checkpoint.stored_tensor import FileTensor, MadeTensor, OpenFile, StoredTensor
from worker_svc.models.errors import ModelError
from worker_svc.models.quantized.gguf_blocks import GgufBlocks, is_matrix_of_blocks

if TYPE_CHECKING:
    from octavo.models.safetensors_stream import PendingTensor

Tensors = dict[str, StoredTensor]

_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

LOAD_FORMATS = ("auto", "safetensors", "gguf", "bin", "dummy")


def detect_format(folder: Path) -> str:
    """What `auto` means for a folder: safetensors, or gguf where there is such a file alone.

    Never bin: a pickle may carry code; none of it would run, but pickles are read only with `--load-format bin`.
    """
    if any(folder.glob("model*.safetensors*")):
        return "safetensors"
    if any(folder.glob("*.gguf")):
        return "gguf"
    if any(folder.glob("pytorch_model*.bin*")):
        raise ModelError(
            f"{folder} has its weights as pickles alone: --load-format bin reads them, and runs nothing that they carry"
        )
    return "safetensors"


def checkpoint_paths(folder: Path, load_format: str) -> list[Path]:
    """The files that hold the weights, from the index where there are shards."""
    if load_format == "gguf":
        paths = sorted(folder.glob("*.gguf"))
        if len(paths) != 1:
            raise ModelError(f"{folder} holds {len(paths)} GGUF files, not one")
        return paths
    single = folder / ("model.safetensors" if load_format == "safetensors" else "pytorch_model.bin")
    index = single.with_name(f"{single.name}.index.json")
    if single.exists():
        return [single]
    if not index.exists():
        others = ", ".join(sorted(path.name for path in folder.glob(f"*{single.suffix}")))
        has_pickles = load_format != "bin" and any(folder.glob("pytorch_model*.bin*"))
        hint = "; --load-format bin reads its pickles" if has_pickles else ""
        raise ModelError(f"{folder} holds neither {single.name} nor {index.name}{others and f', but {others}'}{hint}")
    paths = [folder / name for name in sorted(set(_weight_map(index).values()))]
    for path in paths:
        if not path.is_file():
            raise ModelError(f"{index} names {path.name}, which does not exist")
    return paths


def open_checkpoint(paths: list[Path], load_format: str) -> Tensors:
    """Every tensor of these files."""
    read = {"safetensors": _safetensors, "bin": _pickled, "gguf": _gguf}[load_format]
    tensors: Tensors = {}
    for path in paths:
        for name, tensor in read(path):
            if name in tensors:
                raise ModelError(f"{path.parent}: tensor {name} is in more than one file")
            tensors[name] = tensor
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor -> name of a file beside the index."""
    try:
        names = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ModelError(f"{index} has no readable weight_map") from None
    for name in names.values():
        if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
            raise ModelError(f"{index} names {name!r}, which is no file of this folder")
    return names


def _safetensors(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """The library checks the file; where each tensor lies is then read from the same header."""
    try:
        file = OpenFile(path)  # before the library opens it, which calls any error "No such file"
        with safe_open(path, framework="pt", device="cpu"):
            pass
        with path.open("rb") as start:
            size = int.from_bytes(start.read(8), "little")
            header: dict[str, Any] = json.loads(start.read(size))
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _SAFETENSORS_DTYPES:
            raise ModelError(f"{path}: tensor {name} is of type {entry['dtype']}, which is not supported")
        offset, dtype = 8 + size + entry["data_offsets"][0], _SAFETENSORS_DTYPES[entry["dtype"]]
        yield name, FileTensor(file, offset, tuple(entry["shape"]), dtype)


def _pickled(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    try:
        # Files of before torch 1.6 are no archives and cannot be mapped.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError:
        raise ModelError(f"cannot read {path}: it is damaged, or holds more than tensors") from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot read {path}: {' '.join(str(error).split())[:200] or 'it is damaged'}") from None
    if not isinstance(state, dict):
        raise ModelError(f"{path} holds a {type(state).__name__}, not tensors by name")
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise ModelError(f"{path}: {name} is a {type(tensor).__name__}, not a tensor")
        if tensor.layout != torch.strided or tensor.is_meta:
            raise ModelError(f"{path}: tensor {name} is sparse or without numbers, and is not read")
        yield name, MadeTensor(tuple(tensor.shape), tensor.dtype, tensor.detach)


def _gguf(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    from octavo.models.errors import GGUFError
    from octavo.models.gguf_convert import read_tensors

    if path.is_symlink() and (target := path.readlink()).is_absolute():
        path = target  # errors name the file, not the link to it that `model_folder` removes
    try:
        pending = list(read_tensors(path))
    except GGUFError as error:
        raise ModelError(f"{path}: {error}") from None
    for tensor in pending:
        if is_matrix_of_blocks(tensor):
            yield tensor.name, GgufBlocks(path, tensor)
        else:
            yield tensor.name, MadeTensor(tensor.shape, torch.float32, partial(_expanded, tensor), tensor.file_bytes)


def _expanded(tensor: PendingTensor) -> torch.Tensor:
    values = tensor.load()
    return torch.from_numpy(values if values.flags.writeable else values.copy())  # plain float32 lies in the file's map
