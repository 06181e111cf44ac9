"""Weights of a byte each under their own name: int8 or e4m3, with a scale of all, of an output, of a group or a block.

    W[n, k] = scale * (weight[n, k] - zero)      zero: of int8 alone, and rarely

    weight              i8 or e4m3[N, K]
    weight_scale        f[], [1]; [N], [N, 1]; [N, G]; or a grid [ceil(N / rows), ceil(K / columns)] of blocks
    weight_scale_inv    the same under another name; it is multiplied by, too (DeepSeek, Qwen)
    weight_zero_point   i8, as the scale lies
    input_scale         f[] or [1]: rows are to be rounded by it, where the format says so
    input_zero_point    i8 or i32[] or [1]: with a zero, of int8 alone

Of rows, the largest scale (`input_scale_ub` of fbgemm) is not used.
"""

from __future__ import annotations

import torch

from kernels.quantized_weight import Inputs, Numbers, QuantizedWeight
from worker_svc.models.quantized.gptq import FLOATS
from worker_svc.models.quantized.quantized_tensor import QuantizedTensor
from worker_svc.models.quantized.shaping import part_of_groups
from worker_svc.models.quantized.stored_module import StoredModule, read_all, read_block

_OF_WEIGHT = {"weight", "weight_scale", "weight_scale_inv", "weight_zero_point"}
LEAVES = frozenset(_OF_WEIGHT | {"input_scale", "input_scale_ub", "input_zero_point"})
_NUMBERS = {torch.int8: Numbers.INT8, torch.float8_e4m3fn: Numbers.E4M3}
_CPU = torch.device("cpu")


class EightBitTensor(QuantizedTensor):
    """One layer's weight."""

    def __init__(
        self,
        module: StoredModule,
        dtype: torch.dtype,
        *,
        block: tuple[int, int] | None = None,
        group_size: int | None = None,
        inputs: Inputs = Inputs.AS_THEY_ARE,
    ) -> None:
        """`block`: outputs and inputs that share a scale; `group_size`: inputs of one output that do. Neither: as the
        shape of the scales says. Raises ModelError for tensors that do not belong together."""
        self._weight = module.need("weight", [dtype])
        out_features, in_features = self._weight.shape
        super().__init__(f"{module.name}.weight", module.kind, out_features, in_features, module.num_bytes)
        leaf = "weight_scale_inv" if "weight_scale_inv" in module.tensors else "weight_scale"
        self._scale = module.need(leaf, FLOATS, -1)
        self._group, self._rows = in_features, out_features
        shape = self._scale.shape
        if block is not None:
            self._rows, self._group = block
            module.check_shape(leaf, -(-out_features // self._rows), -(-in_features // self._group))
        elif group_size is not None:
            self._rows, self._group = 1, group_size
            module.check_shape(leaf, out_features, -(-in_features // self._group))
        elif shape not in ((), (1,), (1, 1)):
            self._rows = 1
            if shape != (out_features,):
                module.check_shape(leaf, out_features, 1)
        self._zero = module.find("weight_zero_point", [torch.int8], -1)
        if self._zero is not None:
            module.check_shape("weight_zero_point", *shape)
        self._inputs = inputs
        self._module, self._input_scale, self._input_zero = module, None, None
        if inputs is not Inputs.AS_THEY_ARE:
            self._input_scale = module.find("input_scale", FLOATS, -1)
            self._input_zero = module.find("input_zero_point", [torch.int8, torch.int32, dtype], -1)

    def read(self, rows: range, columns: range, device: torch.device) -> QuantizedWeight:
        """See `QuantizedTensor`."""
        group, groups = part_of_groups(self.name, self._group, self.shape[1], columns)
        index = torch.tensor(groups, device=device)
        codes = read_block(self._weight, rows, columns, device)
        zero = None if self._zero is None else read_all(self._zero, device)
        scale = read_all(self._scale, device).float()
        return QuantizedWeight(
            _NUMBERS[self._weight.dtype],
            codes.view(torch.uint8),
            self._by_output(scale, rows)[:, index].contiguous(),
            group,
            zero=None if zero is None else self._by_output(zero, rows).to(torch.int16)[:, index].contiguous(),
            inputs=self._inputs,
            input_scale=None if self._input_scale is None else float(read_all(self._input_scale, _CPU).max()),
            input_zero=self._zero_of_rows(),
        )

    def _zero_of_rows(self) -> int:
        """0 where the format has them rounded around 0, or each by itself. Raises ModelError."""
        if self._input_zero is None or self._input_scale is None:
            return 0
        zeros = read_all(self._input_zero, _CPU).float()
        if not bool((zeros == zeros.flatten()[0]).all()):
            raise self._module.error("input_zero_point has several numbers; one for all rows is read")
        zero = int(zeros.flatten()[0])
        if zero and self._weight.dtype is not torch.int8:
            raise self._module.error(f"input_zero_point is {zero}, and floats are rounded around 0")
        return zero

    def _by_output(self, stored: torch.Tensor, rows: range) -> torch.Tensor:
        """[outputs, G] of what is stored of blocks, of outputs or of all."""
        grid = stored.reshape(-1, -(-self.shape[1] // self._group))
        first, last = rows.start // self._rows, -(-rows.stop // self._rows)
        outputs = grid[first:last].repeat_interleave(self._rows, dim=0)
        return outputs[rows.start - first * self._rows :][: len(rows)]
