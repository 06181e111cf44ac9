"""What launches of attention ask of a device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton.language as tl

from kernels.gpu.architectures import INTERPRETED, MAX_SHARED_BYTES, capability_of

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}  # of queries


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU, or the interpreter in place of one."""

    capability: int  # 90 is Hopper
    num_multiprocessors: int
    max_shared_bytes: int  # of one block
    is_interpreted: bool

    def dot_type(self, dtype: torch.dtype) -> Any:
        """What products are made of; the interpreter's cannot be of bfloat16."""
        return tl.float32 if self.is_interpreted and dtype == torch.bfloat16 else TYPES[dtype]


@cache
def card_of(device: torch.device) -> Card:
    """Asked once a device."""
    if device.type != "cuda":
        return Card(INTERPRETED, 3, MAX_SHARED_BYTES[INTERPRETED], True)
    facts = torch.cuda.get_device_properties(device)
    shared: int = facts.shared_memory_per_block_optin  # type: ignore[attr-defined]  # torch's stubs do not list it
    return Card(capability_of(device), facts.multi_processor_count, shared, False)
