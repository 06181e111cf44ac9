"""What an exception of a step means: for the answer, and for the device."""

from __future__ import annotations

import torch

from protos import worker_pb2
from worker_svc.errors import ProtocolError

# What says so in words alone: torch's allocator on the CPU, cuBLAS, the driver, and Triton when it loads a kernel.
_OUT_OF_MEMORY = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "out of memory")
_DRIVER_ERROR = "Triton Error [CUDA]"
MAX_CHARS = 2048  # of the error sent to a scheduler, which takes a longer text for the sign of a broken worker


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the device or the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def is_device_lost(error: BaseException) -> bool:
    """Whether the device can compute no more for this process, as after an access to memory that is not there."""
    if is_out_of_memory(error):
        return False
    return isinstance(error, torch.AcceleratorError) or _DRIVER_ERROR in str(error)


def step_error(error: Exception, *, operated: bool) -> worker_pb2.StepError:
    """For the answer: one line. `operated`: whether the step's block operations took place."""
    message = str(error) if isinstance(error, ProtocolError) else f"{type(error).__name__}: {error}"
    first_line = message.splitlines()[0][:MAX_CHARS]
    return worker_pb2.StepError(code=_code(error), message=first_line, block_operations_applied=operated)


def _code(error: Exception) -> worker_pb2.StepErrorCode:
    if isinstance(error, ProtocolError):
        return worker_pb2.STEP_ERROR_CODE_PROTOCOL
    return worker_pb2.STEP_ERROR_CODE_OUT_OF_MEMORY if is_out_of_memory(error) else worker_pb2.STEP_ERROR_CODE_INTERNAL
