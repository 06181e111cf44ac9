"""How many threads a worker computes with, and by which instructions."""

from __future__ import annotations

import os

import structlog
import torch

from octavo.shared.cores import available_cores
from worker_svc.config import WorkerConfig

log = structlog.get_logger()


def set_threads(config: WorkerConfig, local_size: int = 1) -> None:
    """Sets how many threads compute. Call it on the thread that will run the model.

    The ranks of one machine, `local_size` of them, share its cores.
    """
    torch.set_num_threads(config.num_threads or _threads_of_share(local_size))


def _threads_of_share(local_size: int) -> int:
    """As `octavo serve` divides them. torch itself would count two hardware threads of a core as one, and not what a
    control group pays for."""
    most = max(available_cores() // local_size, 1)
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # of nested teams the outermost comes first
    return min(int(asked), most) if asked.isdecimal() and int(asked) else most


def log_arithmetic(device: torch.device, dtype: torch.dtype) -> None:
    """One line on what computes: numbers, and on a CPU the instructions that its kernels use."""
    fields: dict[str, object] = {"device": str(device), "dtype": str(dtype).removeprefix("torch.")}
    if device.type != "cpu":
        log.info("computing", **fields)
        return
    from kernels.cpu.library import library

    fields |= {"threads": torch.get_num_threads(), "instructions": library().level}
    if library().level == "plain":
        log.warning("computing without AVX2, many times slower than with it", **fields)
    else:
        log.info("computing", **fields)


def bfloat16_instructions(device: torch.device, dtype: torch.dtype) -> str:
    """What a CPU's products of bfloat16 are made of, where they round otherwise than those of other processors; empty:
    they are alike on all that lack such instructions, as float32 and rounded rows are on all that there are."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return ""
    from kernels.cpu.library import library

    return library().level if library().has_pairs else ""
