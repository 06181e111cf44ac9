"""GPTQ (Frantar et al. 2022, arXiv:2210.17323) as AutoGPTQ and GPTQModel write it, with 4 or 8 bits.

    W[n, k] = scales[g, n] * (q[k, n] - zero[g, n]),  g = g_idx[k], or k // group_size where there is no g_idx

    qweight i32[K * bits / 32, N]      along K
    qzeros  i32[G, N * bits / 32]      along N; version 1 has the zero minus 1, version 2 the zero
    scales  f16[G, N]
    g_idx   i32[K]                     in order but for models that were quantised with `desc_act`

Version 1 cannot say that a zero is 0. GPTQModel makes one version of the other by adding to whole words and taking
away, with what is carried; so does this. Files of version 1 that hold the zeros of symmetric weights as they are exist.
"""

from __future__ import annotations

import functools

import torch

from kernels.quantized_weight import Numbers, QuantizedWeight
from worker_svc.models.quantized.quantized_tensor import QuantizedTensor
from worker_svc.models.quantized.shaping import part_of_groups
from worker_svc.models.quantized.stored_module import StoredModule, read_all, read_block
from worker_svc.models.quantized.words import numbers_in, words_around

LEAVES = frozenset({"qweight", "qzeros", "scales", "g_idx"})
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_CPU = torch.device("cpu")


class GptqTensor(QuantizedTensor):
    """One layer's weight."""

    def __init__(self, module: StoredModule, bits: int, group_size: int, *, is_symmetric: bool, version: int) -> None:
        """`group_size` -1: all inputs. Raises ModelError for tensors that do not belong together."""
        qweight = module.need("qweight", [torch.int32])
        in_features, out_features = qweight.shape[0] * 32 // bits, qweight.shape[1]
        super().__init__(f"{module.name}.weight", module.kind, out_features, in_features, module.num_bytes)
        self._group = in_features if group_size == -1 else group_size
        num_groups = -(-in_features // max(self._group, 1))
        if out_features * bits % 32:
            raise module.error(f"{out_features} outputs do not fill words of 32 bits with {bits} bits each")
        self._qweight, self._qzeros = qweight, module.need("qzeros", [torch.int32])
        self._scales, self._g_idx = module.need("scales", FLOATS), module.find("g_idx", [torch.int32], 1)
        module.check_shape("qzeros", num_groups, out_features * bits // 32)
        module.check_shape("scales", num_groups, out_features)
        if self._g_idx is not None:
            module.check_shape("g_idx", in_features)
        self._module, self._bits, self._is_symmetric, self._version = module, bits, is_symmetric, version

    def is_ordered(self) -> bool:
        """See `QuantizedTensor`."""
        return self._order is not None

    @functools.cached_property
    def _order(self) -> torch.Tensor | None:
        """Inputs i64[K], those of a group beside each other; None: they are so as they come."""
        if self._g_idx is None:
            return None
        return order_of(self._module, read_all(self._g_idx, _CPU), self._group)

    def read(self, rows: range, columns: range, device: torch.device) -> QuantizedWeight:
        """See `QuantizedTensor`."""
        group, groups = part_of_groups(self.name, self._group, self.shape[1], columns)
        words, among = words_around(columns, self._bits)
        codes = numbers_in(read_block(self._qweight, words, rows, device).t(), self._bits)[:, among]
        all_groups = range(self._scales.shape[0])
        scale = read_block(self._scales, all_groups, rows, device).float().t()
        zeros = self._zeros(rows, device).t()
        order = None
        if self._order is not None:
            order = self._order.to(device)
            codes = codes[:, order]
        zero: torch.Tensor | None = zeros
        if self._bits == 8:
            codes = codes ^ 128
            zero = None if bool((zeros == 128).all()) else zeros - 128
        index = torch.tensor(groups, device=device)
        return QuantizedWeight(
            Numbers.UINT4 if self._bits == 4 else Numbers.INT8,
            codes.contiguous(),
            scale[:, index].contiguous(),
            group,
            zero=None if zero is None else zero[:, index].contiguous(),
            order=order,
        )

    def _zeros(self, rows: range, device: torch.device) -> torch.Tensor:
        """i16[G, outputs]."""
        words, among = words_around(rows, self._bits)
        stored = read_block(self._qzeros, range(self._qzeros.shape[0]), words, device)
        middle = 1 << (self._bits - 1)
        fields = numbers_in(stored, self._bits)
        is_middle = self._is_symmetric and bool((fields == middle).all())
        if self._version == 1 and not is_middle:
            ones = 0x11111111 if self._bits == 4 else 0x01010101
            fields = numbers_in(stored + ones, self._bits)
        return fields[:, among].to(torch.int16)


def order_of(module: StoredModule, groups: torch.Tensor, group: int) -> torch.Tensor | None:
    """The order of inputs i64[K] in which each group of `group` lies together, from the group of each [K]; None where
    that is how they come. Raises ModelError for groups of another size."""
    in_turn = torch.arange(len(groups), dtype=groups.dtype) // group
    if torch.equal(groups, in_turn):
        return None
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], in_turn):
        raise module.error(f"g_idx does not put {group} inputs into every group")
    return order
