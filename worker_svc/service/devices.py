"""Which device a worker computes on, and what it can do: the option, checked against what machine and torch have."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import structlog
import torch

from worker_svc.errors import StartupError
from worker_svc.models.config import DTYPES

log = structlog.get_logger()

LEAST_CAPABILITY = (8, 0)  # of a GPU: bfloat16 in its matrix units, and asynchronous copies to shared memory
_FP8_CAPABILITY = (8, 9)  # conversions from and to 8 bits
_DEVICES = Path("/dev")
_DEVICE_FILES = "nvidia[0-9]*"  # there: made by NVIDIA's driver, one a GPU, and in a container only for those it has


def choose_device(asked: str, local_rank: int = 0) -> torch.device:
    """The device, made current where it is a GPU. Raises StartupError where it cannot be used, and says why.

    auto is GPU 0 where that can be used, else the CPU, with a warning where the machine has a GPU all the same. Ranks
    of one machine have GPUs one after the other.
    """
    if asked == "cpu":
        return torch.device("cpu")
    if asked == "auto" and (why := _why_not(0)):
        if _has_unused_gpu():
            log.warning("computing on the CPU, though there is a GPU (--device cpu, if that is meant)", why=why)
        return torch.device("cpu")
    index = local_rank if asked == "auto" else (torch.device(asked).index or 0) + local_rank
    if why := _why_not(index):
        of_rank = f" by rank {local_rank} of this machine" if local_rank else ""
        raise StartupError(f"device {asked} cannot be used{of_rank}: {why}")
    if missing := _missing_for_triton():
        raise StartupError(f"a worker on a GPU needs {missing}, with which Triton compiles its kernels")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def cache_dtype(asked: str, device: torch.device, quantization: str = "") -> torch.dtype | None:
    """The type of keys and values by `--kv-cache-dtype`; None: the model's. auto is that, but bfloat16 where a CPU
    rounds the rows of products to 8 bits anyway. Raises StartupError."""
    if asked == "auto" and quantization and device.type == "cpu":
        return torch.bfloat16
    if asked != "fp8":
        return DTYPES.get(asked)
    if device.type != "cuda":
        raise StartupError(f"kv_cache_dtype fp8 is for GPUs, not for device {device}")
    if torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        raise StartupError(f"kv_cache_dtype fp8: {torch.cuda.get_device_name(device)} computes with no 8-bit floats")
    return torch.float8_e4m3fn


def _missing_for_triton() -> str:
    """What Triton builds the callers of its kernels with and is not here; empty: nothing. It looks at these places."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "a C compiler (gcc, clang, or one that $CC names)"
    scheme = "posix_prefix" if (default := sysconfig.get_default_scheme()) == "posix_local" else default
    if not Path(sysconfig.get_paths(scheme=scheme)["include"], "Python.h").exists():
        return "Python's headers (on Debian python3-dev)"
    return ""


def _has_unused_gpu() -> bool:
    """Whether this machine has a GPU of NVIDIA's, whatever torch says, and nobody has hidden it on purpose."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return torch.cuda.is_available() or (not is_hidden and any(_DEVICES.glob(_DEVICE_FILES)))


def _why_not(index: int) -> str:
    """What keeps a GPU from being used; empty: nothing."""
    if not torch.cuda.is_available():
        has_cuda = torch.version.cuda is not None
        return "no GPU is visible" if has_cuda else f"this torch ({torch.__version__}) is built without CUDA"
    if index >= (count := torch.cuda.device_count()):
        return f"{count} GPU{'s are' if count > 1 else ' is'} visible, counted from 0"
    if (capability := torch.cuda.get_device_capability(index)) < LEAST_CAPABILITY:
        has, least = (".".join(map(str, numbers)) for numbers in (capability, LEAST_CAPABILITY))
        return f"{torch.cuda.get_device_name(index)} has compute capability {has}, at least {least} is needed"
    return ""
