"""What becomes of the quantised weights of a model: products of few bits where the device has them, else plain ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import structlog
import torch

from kernels.quantized_weight import Inputs, Numbers, QuantizedWeight
from kernels.select import kernels_for
from worker_svc.models.products.compiled_linear import CompiledLinear
from worker_svc.models.products.dense import dense
from worker_svc.models.products.float_linear import FloatLinear
from worker_svc.models.products.tiled_linear import TiledLinear
from worker_svc.models.quantized.quantized_linear import QuantizedLinear, QuantizedProduct, quantized_linear
from worker_svc.models.quantized.quantized_tensor import QuantizedTensor, dequantize_into

log = structlog.get_logger()

_TRIED_OUTPUTS = 192  # whole tiles of every device
_PIECE_INPUTS = 256  # whole groups and pieces of every product


class QuantizedProducts:
    """Makes them, and says at the end which weights had to be expanded to the model's type."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._bytes_per_number: dict[tuple[str, int], float | None] = {}
        self._has_product: dict[str, bool] = {}  # by format and number of inputs, as was found of an expanded weight
        self._expanded: Counter[tuple[str, str]] = Counter()

    def make(
        self, kind: str, weight: QuantizedWeight, bias: torch.Tensor | None, *, is_batch_invariant: bool
    ) -> CompiledLinear | QuantizedLinear | FloatLinear | TiledLinear:
        """The product with a weight of a format `kind`, which is not needed afterwards; bias of the model's type."""
        if (product := self._few_bits(weight, bias, is_batch_invariant=is_batch_invariant)) is not None:
            return quantized_linear(product, weight.out_features)
        expanded = self.expanded(weight)
        made = dense(expanded, bias, is_batch_invariant=is_batch_invariant)
        if made.weight_bytes >= expanded.nbytes:  # numbers of few bits that a plain product keeps so are not expanded
            self.note_expanded(kind, self._why_expanded(weight))
        return made

    def with_rounded_rows(
        self, weight: QuantizedWeight, bias: torch.Tensor | None
    ) -> CompiledLinear | QuantizedLinear | None:
        """The product of rows that are rounded to 8 bits with the very numbers of a weight; None where the device has
        none."""
        product = self._few_bits(replace(weight, inputs=Inputs.INT8, input_scale=None), bias)
        return None if product is None else quantized_linear(product, weight.out_features)

    def expanded(self, weight: QuantizedWeight) -> torch.Tensor:
        """All of it in the model's type [out_features, in_features]."""
        shape = weight.out_features, weight.in_features
        expanded = torch.empty(shape, dtype=self._dtype, device=weight.codes.device)
        dequantize_into(expanded, weight)
        return expanded

    def bytes_per_number(self, tensor: QuantizedTensor, keeps: Callable[[Numbers], bool] | None = None) -> float | None:
        """What a product with this weight takes for each of its numbers: that of its first outputs is made, once for
        all tensors that are stored alike. None: it does not stay in few bits. `keeps`: where rows are rounded, of which
        numbers weights stay so (`QuantizedStore.keeps`)."""
        count = math.prod(tensor.shape)
        key = tensor.kind, round(32 * tensor.num_bytes / count)
        if key not in self._bytes_per_number:
            rows, columns = range(min(tensor.shape[0], _TRIED_OUTPUTS)), range(tensor.shape[1])
            weight = tensor.read(rows, columns, self._device)
            if keeps is not None:
                weight = replace(weight, inputs=Inputs.INT8, input_scale=None)
            is_kept = keeps is None or keeps(weight.numbers)
            product = self._few_bits(weight, None) if is_kept else None
            taken = None if product is None else product.weight_bytes / (len(rows) * len(columns))
            self._bytes_per_number[key] = taken
        return self._bytes_per_number[key]

    def _few_bits(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, *, is_batch_invariant: bool = True
    ) -> QuantizedProduct | None:
        is_cpu = kernels_for(self._device).__name__ == "kernels.cpu"  # whose products are invariant in any case
        options = {} if is_cpu else {"may_expand": not is_batch_invariant}
        product: QuantizedProduct | None = kernels_for(self._device).quantized_product(weight, bias, **options)
        return product

    def _why_expanded(self, weight: QuantizedWeight) -> str:
        """What keeps a weight from being multiplied in few bits, found by asking for products of plainer ones."""
        has_one_scale = weight.group >= weight.in_features
        format_ = f"{weight.numbers.value} with " + (
            "one scale an output" if has_one_scale else f"groups of {weight.group}"
        )
        if weight.offset is not None:
            format_ += " and offsets"
        for in_features, of_inputs in (
            (_PIECE_INPUTS if has_one_scale else math.lcm(_PIECE_INPUTS, weight.group), ""),
            (weight.in_features, f" for {weight.in_features} inputs"),
        ):
            key = f"{format_} {weight.zero is None} {weight.inputs} {in_features}"
            if key not in self._has_product:
                self._has_product[key] = self._few_bits(_of_ones(weight, in_features), None) is not None
            if not self._has_product[key]:
                return f"there is no product of {format_}{of_inputs}"
        return f"its numbers or scales are none that a product of {format_} has"

    def note_expanded(self, kind: str, why: str) -> None:
        """A product whose weight is kept in the model's type."""
        self._expanded[kind, why] += 1

    def finish(self) -> None:
        """All products are made."""
        for (kind, why), count in self._expanded.items():
            dtype = str(self._dtype).removeprefix("torch.")
            log.info("quantised weights expanded", format=kind, products=count, dtype=dtype, why=why)
        self._expanded.clear()


def _of_ones(weight: QuantizedWeight, in_features: int) -> QuantizedWeight:
    """A weight of the same format and of few outputs, with nothing special in it."""
    group = in_features if weight.group >= weight.in_features else weight.group
    shape, device = (_TRIED_OUTPUTS, -(-in_features // group)), weight.codes.device
    return replace(
        weight,
        codes=torch.ones(_TRIED_OUTPUTS, in_features, dtype=torch.uint8, device=device),
        scale=torch.ones(shape, device=device),
        group=group,
        zero=None if weight.zero is None else torch.ones(shape, dtype=torch.int16, device=device),
        offset=None if weight.offset is None else torch.ones(shape, device=device),
        order=None,
    )
