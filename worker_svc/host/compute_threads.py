"""How many threads a worker computes with, and on which cores."""

from __future__ import annotations

import structlog
import torch

from octavo.shared.cores import allowed_cores, available_cores, parse_cores
from worker_svc.config import AUTO, WorkerConfig
from worker_svc.errors import StartupError

log = structlog.get_logger()


def set_threads(config: WorkerConfig, device: torch.device, local_rank: int = 0, local_size: int = 1) -> None:
    """Sets how many threads compute, and where. Call it on the thread that will run the model. Raises StartupError.

    The ranks of one machine, `local_size` of them, share its cores.
    """
    cores: list[int] | None = None
    if config.cpu_pinning != "none" and device.type == "cpu":
        cores = allowed_cores() if config.cpu_pinning == AUTO else parse_cores(config.cpu_pinning)
    # torch counts the cores of its affinity and OMP_NUM_THREADS, but not what a control group pays for.
    most = min(available_cores(), len(cores or allowed_cores())) // local_size
    num_threads = config.num_threads or max(min(torch.get_num_threads(), most), 1)
    torch.set_num_threads(num_threads)
    if cores is None:
        return
    cores = cores[local_rank * num_threads :]
    if len(cores) < num_threads:
        raise StartupError(f"cpu_pinning: {num_threads} threads, and {len(cores)} cores that this process may use")
    from kernels.cpu.pinning import pin_threads

    try:
        pin_threads(cores[:num_threads])
    except (ValueError, RuntimeError) as error:  # RuntimeError: a thread did not come
        raise StartupError(f"cpu_pinning {config.cpu_pinning}: {error}") from error
    log.info("threads pinned", cores=cores[:num_threads])


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
