"""compressed-tensors, `pack-quantized`: weights of 4 or 8 bits in words, rows as they come.

    W[n, k] = weight_scale[n, g] * (q[n, k] - zero[n, g]),  g = weight_g_idx[k], or k // group_size

    weight_packed      i32[N, ceil(K * bits / 32)]     along K, q + 2^(bits - 1)
    weight_scale       f[N, G]                         G = 1: a scale an output
    weight_shape       i64[2]                          N, K
    weight_zero_point  i32[ceil(N * bits / 32), G]     along N, zero + 2^(bits - 1); older files i8[N, G], the zero
    weight_g_idx       i32[K]                          where inputs were ordered by `actorder: group`

Source: https://github.com/vllm-project/compressed-tensors, compressors/pack_quantized.
"""

from __future__ import annotations

import functools

import torch

from kernels.quantized_weight import Numbers, QuantizedWeight
from worker_svc.models.quantized.gptq import FLOATS, order_of
from worker_svc.models.quantized.quantized_tensor import QuantizedTensor
from worker_svc.models.quantized.shaping import part_of_groups
from worker_svc.models.quantized.stored_module import StoredModule, read_all, read_block
from worker_svc.models.quantized.words import numbers_in, words_around

LEAVES = frozenset({"weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"})
_CPU = torch.device("cpu")


class PackedTensor(QuantizedTensor):
    """One layer's weight."""

    def __init__(self, module: StoredModule, bits: int, group_size: int) -> None:
        """`group_size` -1: all inputs. Raises ModelError for tensors that do not belong together."""
        self._packed = module.need("weight_packed", [torch.int32])
        size = module.need("weight_shape", [torch.int64, torch.int32], 1)
        module.check_shape("weight_shape", 2)
        out_features, in_features = (int(each) for each in read_all(size, _CPU))
        super().__init__(f"{module.name}.weight", module.kind, out_features, in_features, module.num_bytes)
        self._module, self._bits = module, bits
        module.check_shape("weight_packed", out_features, -(-in_features * bits // 32))
        self._scales = module.need("weight_scale", FLOATS)
        self._group = in_features if group_size == -1 else group_size
        num_groups = -(-in_features // max(self._group, 1))
        module.check_shape("weight_scale", out_features, num_groups)
        self._g_idx = module.find("weight_g_idx", [torch.int32, torch.int64], 1)
        if self._g_idx is not None:
            module.check_shape("weight_g_idx", in_features)
        self._zeros = module.find("weight_zero_point", [torch.int32, torch.int8])
        if self._zeros is not None:
            num_rows = out_features if self._zeros.dtype == torch.int8 else -(-out_features * bits // 32)
            module.check_shape("weight_zero_point", num_rows, num_groups)

    def is_ordered(self) -> bool:
        """See `QuantizedTensor`."""
        return self._order is not None

    @functools.cached_property
    def _order(self) -> torch.Tensor | None:
        """As that of `GptqTensor`; -1 throughout stands for none."""
        groups = None if self._g_idx is None else read_all(self._g_idx, _CPU)
        return None if groups is None or bool((groups == -1).all()) else order_of(self._module, groups, self._group)

    def read(self, rows: range, columns: range, device: torch.device) -> QuantizedWeight:
        """See `QuantizedTensor`."""
        group, groups = part_of_groups(self.name, self._group, self.shape[1], columns)
        words, among = words_around(columns, self._bits)
        codes = numbers_in(read_block(self._packed, rows, words, device), self._bits)[:, among]
        edges = range(groups[0], groups[-1] + 1)
        index = torch.tensor(groups, device=device) - groups[0]
        scale = read_block(self._scales, rows, edges, device).float()[:, index]
        zero: torch.Tensor | None = self._zero(rows, edges, device)
        order = None
        if self._order is not None:
            order = self._order.to(device)
            codes = codes[:, order]
        if self._bits == 8:
            codes = codes ^ 128
            zero = None if zero is None or self._zeros is None else zero - 128
        return QuantizedWeight(
            Numbers.UINT4 if self._bits == 4 else Numbers.INT8,
            codes.contiguous(),
            scale.contiguous(),
            group,
            zero=None if zero is None else zero[:, index].contiguous(),
            order=order,
        )

    def _zero(self, rows: range, groups: range, device: torch.device) -> torch.Tensor:
        """i16[outputs, groups], as the codes count."""
        middle = 1 << (self._bits - 1)
        if self._zeros is None:
            return torch.full((len(rows), len(groups)), middle, dtype=torch.int16, device=device)
        if self._zeros.dtype == torch.int8:
            return read_block(self._zeros, rows, groups, device).to(torch.int16) + middle
        words, among = words_around(rows, self._bits)
        return numbers_in(read_block(self._zeros, words, groups, device).t(), self._bits)[:, among].t().to(torch.int16)
