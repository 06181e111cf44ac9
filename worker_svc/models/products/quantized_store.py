"""The products of a model that are quantised when it is loaded, to eight bits or four: made once, and read from a file
at every later start.

A weight that the checkpoint has in few bits keeps its numbers: with int8 all integers, with int4 those of up to six
bits. It is no product of this store, which only says so (`keeps`). A float32 weight that is one of four bits
(`few_bits_fit` finds it) keeps these, whatever is asked for. Any other is quantised, expanded first
where it has few bits: with int8 to eight bits, with int4 to four, but for the head, which takes eight.

The file lies in Octavo's cache, beside the models. Its name holds the model's hash, the sizes and times of the files
that have the weights, the type that these were read in, the quantisation and the version of the layout: a file that is
there fits. One that cannot be read or written (`KeptFile`), or holds a product that is not the one that was written,
costs time and nothing else.
"""

from __future__ import annotations

import hashlib
import threading
import time
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import structlog
import torch

from kernels.int8_weight import GROUP, PANEL, QUAD
from kernels.quantized_weight import Numbers
from octavo.models.safetensors_stream import PendingTensor, write_safetensors
from octavo.shared.cache import cache_dir
from worker_svc.models.checkpoint.checkpoint_files import Tensors, open_checkpoint
from worker_svc.models.checkpoint.stored_tensor import StoredTensor
from worker_svc.models.config import ModelConfig
from worker_svc.models.errors import ModelError
from worker_svc.models.parts import ModelPart
from worker_svc.models.products.compiled_linear import CompiledLinear
from worker_svc.models.products.kept_file import KeptFile
from worker_svc.models.quantized.stored_module import read_all

if TYPE_CHECKING:
    from kernels.cpu.products.layer_product import Product
    from kernels.cpu.products.records import Records

log = structlog.get_logger()

_LAYOUT_VERSION = 7  # to be counted up with every change of what is made of the same weights
_PACKED, _SCALE, _RECORDS, _BIAS = "packed", "scale", "records", "bias"
_OUTPUTS, _CHECKSUM = "outputs", "checksum"  # how many there are; of the other parts
KEEPING = "quantised weights are written"  # the name of the thread
GROUPS = {"int4": 32, "int4-128": 128}  # inputs that share a scale; int8 has one an output


class QuantizedStore:
    """Products of 8-bit or 4-bit weights by name in the checkpoint."""

    def __init__(self, config: ModelConfig, path: Path | None = None) -> None:
        """For the quantization of `config`; `path` None keeps nothing for later starts."""
        self._file, self._started_s = KeptFile(path) if path is not None else None, time.monotonic()
        self._quantization, self._group = config.quantization, GROUPS.get(config.quantization)
        self._heads = config.style.names.head, config.style.names.embedding  # the latter where it is tied
        self._may_have_four_bits = config.dtype == torch.float32
        self._parts: dict[str, dict[str, torch.Tensor]] = {}  # of each product, what is written of it
        self._num_made = 0
        self._stored: Tensors = _read(path) if path is not None else {}

    @classmethod
    def of_model(cls, part: ModelPart, weight_files: Sequence[Path]) -> QuantizedStore:
        """The store of a checkpoint's products, or of those of a stage; its files have yet to be opened."""
        if (path := kept_path(part, weight_files)) is None:
            log.warning("quantised weights are not kept", path=None, error="this user has no home: set OCTAVO_CACHE")
        return cls(part.whole, path)

    def keeps(self, numbers: Numbers) -> bool:
        """Whether a weight that the checkpoint has in these stays as it is, and only rows are rounded."""
        return numbers in (Numbers.UINT4, Numbers.INT6) or (numbers is Numbers.INT8 and self._group is None)

    def find(self, name: str, out_features: int, in_features: int) -> CompiledLinear | None:
        """The product that an earlier start kept; None where there is none of these sizes."""
        names = _PACKED, _SCALE, _RECORDS, _BIAS, _OUTPUTS, _CHECKSUM
        stored = {part: self._stored.get(f"{name}.{part}") for part in names}
        if stored[_PACKED] is None:
            return None
        try:
            outputs = _small(stored[_OUTPUTS], 1, torch.int32)
            if outputs is None or int(outputs) != out_features:
                return None  # what has this name is a part of the product, kept by itself
            parts = _read_parts(stored, out_features, in_features)
            return self._add(name, parts, out_features, in_features)
        except (ModelError, OSError, ValueError, ZeroDivisionError) as error:  # the last of a group of no inputs
            path = None if self._file is None else str(self._file.path)
            log.warning("a kept product is damaged, and is made again", product=name, path=path, error=str(error))
            return None

    def make(self, name: str, weight: torch.Tensor, bias: torch.Tensor | None = None) -> CompiledLinear:
        """Quantises a product; its weight [out_features, in_features] is not needed afterwards."""
        from kernels.cpu.products import eight_bits, four_bits  # here, see `_product`

        self._num_made += 1
        parts = {} if bias is None else {_BIAS: bias.float()}
        found = four_bits.find_four_bits(weight) if self._may_have_four_bits else None
        if found is None and self._group is not None and not name.endswith(self._heads):
            found = four_bits.quantize_four_bits(weight, self._group)
        if found is None:
            parts[_PACKED], parts[_SCALE] = eight_bits.quantize_eight_bits(weight)
        else:
            records = found.records
            format_ = torch.tensor([records.codes, records.scale, records.offset, records.group], dtype=torch.int32)
            parts |= {_PACKED: found.packed, _RECORDS: format_}
        return self._add(name, parts, *weight.shape)

    def _add(self, name: str, parts: dict[str, torch.Tensor], out_features: int, in_features: int) -> CompiledLinear:
        product = _product(parts, out_features, in_features)
        self._parts[name] = parts | {_OUTPUTS: torch.tensor([out_features], dtype=torch.int32)}
        return CompiledLinear(product)

    def finish(self) -> None:
        """All products are made or found: unless the file had them all a thread writes it, as a disk takes seconds for
        what this process itself does not need. Its end waits for the thread."""
        parts, self._parts, self._stored = self._parts, {}, {}
        if self._file is None or not self._num_made:
            return
        seconds = round(time.monotonic() - self._started_s, 2)
        log.info(f"weights quantised to {self._quantization}", products=self._num_made, seconds=seconds)
        # No daemon, as it would be by itself: a worker loads its model in a thread that nothing waits for.
        threading.Thread(target=_keep, args=(self._file, _tensors(parts)), name=KEEPING, daemon=False).start()


def kept_path(part: ModelPart, weight_files: Sequence[Path]) -> Path | None:
    """Where the products of a checkpoint, or of a stage of it, are kept; None for a user that has no cache."""
    config, layers = part.whole, part.layers
    dtype = str(config.dtype).removeprefix("torch.")
    of_stage = f"-layers-{layers.start}-{layers.stop}" if part.stages.count > 1 else ""
    kind = f"{dtype}-{config.quantization}-{_LAYOUT_VERSION}{of_stage}"
    name = f"{config.model_hash[:32]}-{_digest(weight_files)}-{kind}.safetensors"
    try:
        return cache_dir() / "quantized" / name
    except RuntimeError:  # neither HOME nor an entry in passwd, as some containers' users
        return None


def _keep(file: KeptFile, tensors: list[PendingTensor]) -> None:
    path, num_bytes = str(file.path), sum(tensor.num_bytes for tensor in tensors)
    try:
        if file.write(num_bytes, partial(write_safetensors, tensors=tensors)):
            log.info("quantised weights are kept for later starts", path=path)
        else:
            log.info("quantised weights are kept by another process", path=path)
    except OSError as error:
        log.warning("quantised weights are not kept", path=error.filename or path, error=error.strerror)


def _digest(weight_files: Sequence[Path]) -> str:
    """Of names, sizes and times: the model's hash has samples of the weights, and may miss what was edited in place."""
    facts = [(path.name, (status := path.stat()).st_size, status.st_mtime_ns) for path in weight_files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _read(path: Path) -> Tensors:
    """Everything in the file."""
    try:
        return open_checkpoint([path], "safetensors") if path.exists() else {}
    except (ModelError, OSError) as error:  # the latter where one may not look into its folder
        log.warning("quantised weights cannot be read, and are made again", path=str(path), error=str(error))
        return {}


def _tensors(of_products: dict[str, dict[str, torch.Tensor]]) -> list[PendingTensor]:
    tensors = [
        PendingTensor(f"{name}.{part}", tuple(tensor.shape), tensor.numpy, _TYPES[tensor.dtype])
        for name, parts in of_products.items()
        for part, tensor in parts.items()
    ]
    for name, parts in of_products.items():
        tensors.append(PendingTensor(f"{name}.{_CHECKSUM}", (1,), partial(_checksum, parts), "I32"))
    return tensors


def _checksum(parts: dict[str, torch.Tensor]) -> np.ndarray:
    """Of all parts of a product, i32[1]."""
    found = 0
    for name in sorted(parts):
        found = zlib.crc32(parts[name].numpy().data, found)
    return np.array([found], np.uint32).view(np.int32)


def _product(parts: dict[str, torch.Tensor], out_features: int, in_features: int) -> Product:
    """Raises ValueError for what is of other sizes or types."""
    # Here, so that a worker with a GPU waits for no compiler of CPU code.
    from kernels.cpu.products.layer_product import Product
    from kernels.cpu.products.records import RecordWeight

    if _RECORDS not in parts:
        return Product.of_int8(parts[_PACKED], parts[_SCALE], parts.get(_BIAS), in_features)
    weight = RecordWeight(_format(parts[_RECORDS]), parts[_PACKED], out_features, in_features)
    return Product.of_records(weight, parts.get(_BIAS), are_rows_rounded=True)


def _format(fields: torch.Tensor) -> Records:
    from kernels.cpu.products.records import Codes, Offset, Records, Scale

    codes, scale, offset, group = fields.tolist()
    return Records(Codes(codes), Scale(scale), Offset(offset), group)


def _read_parts(stored: dict[str, StoredTensor | None], out_features: int, in_features: int) -> dict[str, torch.Tensor]:
    """What `make` has kept. Raises ValueError and ZeroDivisionError for what is of other sizes or types or has become
    something else on the disk, ModelError for what cannot be read."""
    packed, records = stored[_PACKED], _small(stored[_RECORDS], 4, torch.int32)
    bias, scale = (_small(stored[part], out_features, torch.float32) for part in (_BIAS, _SCALE))
    shape: tuple[int, ...] = -(-out_features // PANEL), -(-in_features // GROUP), GROUP // QUAD, PANEL, QUAD
    if records is not None:
        shape = _format(records).packed_shape(out_features, in_features)
    if packed is None or packed.dtype != torch.uint8 or packed.shape != shape:
        raise ValueError(f"its weight is not one of {out_features} outputs of {in_features} inputs")
    if records is None and scale is None:
        raise ValueError("it has no scale")
    weight = torch.empty(shape, dtype=torch.uint8)
    packed.read_into(weight, [range(shape[0])], [range(shape[-1])])
    outputs, checksum = (_small(stored[part], 1, torch.int32) for part in (_OUTPUTS, _CHECKSUM))
    found = {_BIAS: bias, _PACKED: weight, _SCALE: scale, _RECORDS: records, _OUTPUTS: outputs}
    parts = {part: tensor for part, tensor in found.items() if tensor is not None}
    if checksum is None or int(checksum) != int(_checksum(parts)[0]):
        raise ValueError("its checksum is another")
    return parts


def _small(tensor: StoredTensor | None, size: int, dtype: torch.dtype) -> torch.Tensor | None:
    """One of so many numbers; None where there is none. Raises ValueError for another."""
    if tensor is None:
        return None
    if tensor.shape != (size,) or tensor.dtype != dtype:
        raise ValueError(f"{list(tensor.shape)} of {tensor.dtype} is not {size} of {dtype}")
    return read_all(tensor, torch.device("cpu"))


_TYPES = {torch.uint8: "U8", torch.int32: "I32", torch.float32: "F32"}
