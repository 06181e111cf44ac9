"""Where weights come from: a checkpoint or random numbers, both through `take`.

A model takes each tensor once, by name and expected shape; `finish` then refuses tensors that were not taken. So a
checkpoint is understood whole or refused.
"""

from __future__ import annotations

import math
import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path
from typing import Protocol

import torch

from kernels.quantized_weight import QuantizedWeight
from octavo.shared.terminal_row import ByteBar
from worker_svc.host.untouched import untouched_zeros
from worker_svc.models.checkpoint.checkpoint_files import Tensors
from worker_svc.models.checkpoint.stored_tensor import StoredTensor
from worker_svc.models.errors import ModelError
from worker_svc.models.names import LLAMA, Names
from worker_svc.models.products.quantized_store import QuantizedStore
from worker_svc.models.quantized.checkpoint_format import CheckpointFormat
from worker_svc.models.quantized.fp8_store import Fp8Store
from worker_svc.models.quantized.quantized_products import QuantizedProducts
from worker_svc.models.quantized.quantized_tensor import QuantizedTensor
from worker_svc.models.quantized.shaping import side_by_side, some_inputs


class Weights(Protocol):
    """Tensors by name, each to be taken once."""

    dtype: torch.dtype  # the model's
    store: QuantizedStore | Fp8Store | None  # what quantises products; None: they stay in the model's dtype
    quantized: QuantizedProducts  # what makes products of weights that are quantised in the checkpoint
    is_batch_invariant: bool  # set by the loader: whether a row's products have the same bits in any batch

    def has(self, name: str) -> bool:
        """Whether this tensor can be taken."""

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor, in the model's dtype and on its device; raises `ModelError` if missing or of another shape."""

    def take_float32(self, name: str, *shape: int) -> torch.Tensor:
        """As `take`, but float32 whatever the model computes in."""

    def take_parts(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        *rest: int,
        rows: Sequence[range] | None = None,
        columns: Sequence[range] | None = None,
    ) -> torch.Tensor:
        """The tensors [size, *rest] of these names, one after the other in one; raises `ModelError` as `take` does.

        `rows`, `columns`: which of that one are wanted, in this order (default: all); a range of rows is within one
        tensor. Columns are of tensors with two dimensions.
        """

    def take_matrix(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        width: int,
        *,
        rows: Sequence[range],
        columns: Sequence[range] | None = None,
        is_passing: bool = False,
    ) -> torch.Tensor:
        """What `take_parts` gives; on a CPU as bfloat16 where the checkpoint has all of it so and the model is float32:
        the same numbers in half the bytes. `is_passing`: to be read before the next one is taken, which may then lie
        in its place."""

    def format_of(self, name: str) -> str:
        """The format of a weight that can be had as it is, in few bits; empty for a plain one, and for none. `take` and
        `take_parts` expand it."""

    def can_cut_inputs(self, name: str) -> bool:
        """Whether a quantised weight can be had for some of its inputs."""

    def take_quantized(
        self, name: str, out_features: int, in_features: int, rows: Sequence[range], columns: range
    ) -> QuantizedWeight:
        """A quantised weight: these outputs one after the other, of these inputs; may be taken again. Raises
        `ModelError` where it is of another size or cannot be read so."""

    def ignore(self, name: str) -> None:
        """This tensor may exist and is not needed."""

    def ignore_all(self, prefix: str) -> None:
        """Nor are those whose names begin so."""

    def finish(self) -> None:
        """Raise `ModelError` if a tensor has been left."""


class CheckpointWeights:
    """The tensors of one folder's files; see `checkpoint_files` for what opens them."""

    is_batch_invariant = False

    def __init__(
        self,
        folder: Path,
        tensors: Tensors,
        dtype: torch.dtype,
        device: torch.device,
        progress: ByteBar,
        store: QuantizedStore | Fp8Store | None = None,
    ) -> None:
        self.store, self.quantized = store, QuantizedProducts(device, dtype)
        self._folder, self._left = folder, tensors
        self._quantized = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, QuantizedTensor)}
        self.dtype, self._device, self._progress = dtype, device, progress
        self._passing = torch.empty(0, dtype=torch.uint8)

    def has(self, name: str) -> bool:
        """See `Weights`."""
        return name in self._left

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """See `Weights`; reads the file now."""
        return self.take_parts([name], shape[:1], *shape[1:])

    def take_float32(self, name: str, *shape: int) -> torch.Tensor:
        """See `Weights`; reads the file now."""
        stored = self._pop(name, shape)
        out = torch.empty(shape, dtype=torch.float32, device=self._device)
        stored.read_into(out, [range(shape[0])], [range(shape[-1])])
        return out

    def take_parts(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        *rest: int,
        rows: Sequence[range] | None = None,
        columns: Sequence[range] | None = None,
    ) -> torch.Tensor:
        """See `Weights`."""
        # All are checked before memory is allocated for them.
        stored = [self._pop(name, (size, *rest)) for name, size in zip(names, sizes, strict=True)]
        return self._read(stored, rest, rows, columns, self._new)

    def take_matrix(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        width: int,
        *,
        rows: Sequence[range],
        columns: Sequence[range] | None = None,
        is_passing: bool = False,
    ) -> torch.Tensor:
        """See `Weights`."""
        stored = [self._pop(name, (size, width)) for name, size in zip(names, sizes, strict=True)]
        on_cpu = self._device.type == "cpu"
        is_narrow = on_cpu and self.dtype == torch.float32 and all(each.dtype == torch.bfloat16 for each in stored)
        dtype = torch.bfloat16 if is_narrow else self.dtype
        new = self._new_passing if is_passing and on_cpu else self._new
        return self._read(stored, (width,), rows, columns, partial(new, dtype=dtype))

    def _new(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self._device)

    def _new_passing(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._passing.numel() < num_bytes:
            del self._passing
            self._passing = untouched_zeros((num_bytes,), torch.uint8)
        return self._passing[:num_bytes].view(dtype).view(shape)

    def _read(
        self,
        stored: Sequence[StoredTensor],
        rest: tuple[int, ...],
        rows: Sequence[range] | None,
        columns: Sequence[range] | None,
        new: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        """Tensors [size, *rest], or what is wanted of them, in one; every part is read straight into its place, and
        nothing else."""
        sizes = [tensor.shape[0] for tensor in stored]
        starts = [0, *accumulate(sizes)]
        wanted = list(map(range, starts, starts[1:])) if rows is None else rows
        across = [range(rest[-1] if rest else 1)] if columns is None else columns
        width = [sum(map(len, across))] if rest else []
        out = new(sum(map(len, wanted)), *rest[:-1], *width)
        first = 0
        for index, of_tensor in groupby(filter(len, wanted), lambda some: bisect_right(starts, some.start) - 1):
            own = [range(some.start - starts[index], some.stop - starts[index]) for some in of_tensor]
            part = out[first : first + sum(map(len, own))]
            stored[index].read_into(part, own, across)
            first += len(part)
        return out

    def _pop(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        tensor = self._leave(name) or self._quantized.get(name)
        if tensor is None:
            raise ModelError(f"{self._folder}: the checkpoint has no tensor {name}")
        self._check_shape(name, tensor, shape)
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(f"{self._folder}: tensor {name} is {dtype}, and nothing says how it was quantised")
        return tensor

    def _check_shape(self, name: str, tensor: StoredTensor, shape: tuple[int, ...]) -> None:
        if tensor.shape != shape:
            raise ModelError(f"{self._folder}: tensor {name} is {list(tensor.shape)}, config.json says {list(shape)}")

    def format_of(self, name: str) -> str:
        """See `Weights`."""
        tensor = self._quantized.get(name)
        return "" if tensor is None else tensor.kind

    def can_cut_inputs(self, name: str) -> bool:
        """See `Weights`."""
        return not self._quantized[name].is_ordered()

    def take_quantized(
        self, name: str, out_features: int, in_features: int, rows: Sequence[range], columns: range
    ) -> QuantizedWeight:
        """See `Weights`; reads the file now."""
        tensor = self._quantized[name]
        self._check_shape(name, tensor, (out_features, in_features))
        self._leave(name)
        return tensor.quantized(rows, columns, self._device)

    def ignore(self, name: str) -> None:
        """See `Weights`."""
        self._leave(name)

    def _leave(self, name: str) -> StoredTensor | None:
        """The tensor, which is not left any more; None where it is not. It counts as done, before it is read, with
        all that the file has of it, whatever of it is read here."""
        tensor = self._left.pop(name, None)
        if tensor is not None:
            self._progress.add(tensor.num_bytes)
        return tensor

    def ignore_all(self, prefix: str) -> None:
        """See `Weights`."""
        for name in [name for name in self._left if name.startswith(prefix)]:
            del self._left[name]

    def finish(self) -> None:
        """See `Weights`."""
        self._progress.finish()
        self._passing = torch.empty(0, dtype=torch.uint8)
        if self._left:
            names = sorted(self._left)
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ModelError(f"{self._folder}: the model has no place for tensor {names[0]}{others}")


class DummyWeights:
    """Small random numbers for any shape, the same for the same model, seed and kind of device: load tests need no
    checkpoint. A GPU draws its own, since billions of them take a minute on one core.
    """

    is_batch_invariant = False
    weights_format: CheckpointFormat | None = None  # set by the loader: how products' weights would be quantised
    names: Names = LLAMA  # likewise: whose are not

    def __init__(
        self, dtype: torch.dtype, device: torch.device, seed: int, store: QuantizedStore | Fp8Store | None = None
    ) -> None:
        self.store, self.quantized = store, QuantizedProducts(device, dtype)
        self.dtype, self._device = dtype, device
        self._drawn_on = device if device.type == "cuda" else torch.device("cpu")
        self._seed, self._generator = seed, torch.Generator(self._drawn_on)

    def has(self, name: str) -> bool:
        """Every name that a model may ask for; none has a bias that it may be without."""
        return not name.endswith(".bias")

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Ones for a norm, else uniform in +-1/sqrt(last dimension)."""
        if len(shape) == 1 and name.endswith(".weight"):  # of a norm
            return torch.ones(shape, dtype=self.dtype, device=self._device)
        # By its name, so that a rank which leaves tensors out has the others alike.
        self._generator.manual_seed(zlib.crc32(name.encode(), self._seed & 0xFFFFFFFF))
        numbers = torch.empty(shape, device=self._drawn_on).uniform_(-1, 1, generator=self._generator)
        scaled: torch.Tensor = numbers / shape[-1] ** 0.5
        return scaled.to(device=self._device, dtype=self.dtype)

    def take_float32(self, name: str, *shape: int) -> torch.Tensor:
        """As `take`."""
        return self.take(name, *shape).float()

    def take_parts(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        *rest: int,
        rows: Sequence[range] | None = None,
        columns: Sequence[range] | None = None,
    ) -> torch.Tensor:
        """See `Weights`; part after part, as `take` draws them, wanted or not: ranks have parts of one model."""
        whole = torch.cat([self.take(name, size, *rest) for name, size in zip(names, sizes, strict=True)])
        if rows is not None:
            whole = torch.cat([whole[some.start : some.stop] for some in rows])
        if columns is not None:
            whole = torch.cat([whole[..., some.start : some.stop] for some in columns], dim=-1)
        return whole

    def take_matrix(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        width: int,
        *,
        rows: Sequence[range],
        columns: Sequence[range] | None = None,
        is_passing: bool = False,
    ) -> torch.Tensor:
        """See `Weights`."""
        return self.take_parts(names, sizes, width, rows=rows, columns=columns)

    def format_of(self, name: str) -> str:
        """See `Weights`; of all products but the head and routers, or of experts alone."""
        names = self.names
        plain = names.embedding, names.head, names.router, names.project_in, names.project_out
        if self.weights_format is None or name.removesuffix(".weight").endswith(plain):
            return ""
        is_of_experts = names.expert.partition("{}")[0] in name
        return "" if self.weights_format.usual.is_of_experts and not is_of_experts else self.weights_format.name

    def can_cut_inputs(self, name: str) -> bool:
        """All can."""
        return True

    def take_quantized(
        self, name: str, out_features: int, in_features: int, rows: Sequence[range], columns: range
    ) -> QuantizedWeight:
        """See `Weights`; as `take_parts` draws numbers."""
        assert self.weights_format is not None
        self._generator.manual_seed(zlib.crc32(name.encode(), self._seed & 0xFFFFFFFF))
        whole = self.weights_format.usual.made_up(out_features, in_features, self._generator)
        return some_inputs(name, side_by_side([whole.rows(some) for some in rows]), columns)

    def ignore(self, name: str) -> None:
        """Nothing is stored that could be left."""
        pass

    def ignore_all(self, prefix: str) -> None:
        """Nothing is stored that could be left."""
        pass

    def finish(self) -> None:
        """Nothing is stored that could be left."""
        pass
