"""How many blocks a worker has, from its options, the memory that is there, and what a step was measured to take.

Pure arithmetic over numbers that others measured; allocates nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from worker_svc.config import AUTO, WorkerConfig
from worker_svc.errors import StartupError
from worker_svc.host.memory import GIB

CPU_CACHE_BYTES = 4 * GIB  # default: the rest is for other processes on the machine
CPU_CACHE_SHARE = 0.4  # of the free memory that this worker counts on
SWAP_BYTES = 4 * GIB  # default
SWAP_SHARE = 0.5  # of what cache and steps leave


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds that a scheduler and a worker have agreed on."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int  # tokens


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Blocks of the cache, and the limits that hold with them."""

    num_device_blocks: int
    num_host_blocks: int
    limits: Limits


def size_cache(
    config: WorkerConfig,
    limits: Limits,
    block_bytes: int,
    available_bytes: int,
    step_bytes: int,
    host_bytes: int | None = None,
    num_ranks: int = 1,
) -> CacheSizes:
    """`step_bytes` is the most that a step takes besides the cache. Raises StartupError with the numbers.

    `available_bytes` are those of the device; `host_bytes` those of the host, None: the same memory. `num_ranks`: of a
    parallel group, which take as much each of this host.

    Defaults count on `memory_share` of what is free of the host: a neighbour that starts as well has not taken its own
    part yet. A size that was set only has to fit: a worker that is started again beside one that is full then finds its
    place. Never more blocks than all sequences at their longest need, except on the host where `--swap-space` says so.
    """
    is_host = host_bytes is None
    share = config.memory_share if is_host else 1.0  # of a GPU, gpu_memory_utilization has been taken off
    own_bytes = share * available_bytes - step_bytes
    if config.kv_cache_memory is not None:
        cache_bytes = int(config.kv_cache_memory * GIB)
    else:
        cache_bytes = min(CPU_CACHE_BYTES, int(CPU_CACHE_SHARE * own_bytes)) if is_host else int(own_bytes)
    longest_blocks = -(-limits.max_model_len // config.block_size)
    most_blocks = limits.max_num_seqs * longest_blocks
    num_blocks = min(cache_bytes // block_bytes, most_blocks)
    if num_blocks < 1 and config.kv_cache_memory is not None:
        raise StartupError(
            f"--kv-cache-memory {config.kv_cache_memory:g} is too little: a block takes {_gib(block_bytes)}, "
            f"a sequence of {limits.max_model_len} tokens {_gib(longest_blocks * block_bytes)}"
        )
    if num_blocks < 1:
        raise StartupError(
            f"too little memory for the cache: {_gib(max(cache_bytes, 0))}, a block takes {_gib(block_bytes)}; "
            f"{_gib(available_bytes)} are free, of which a step takes up to {_gib(step_bytes)}"
        )
    left_bytes = own_bytes - num_blocks * block_bytes if host_bytes is None else config.memory_share * host_bytes
    if config.swap_space is None:
        swap_bytes = min(SWAP_BYTES, int(SWAP_SHARE * max(left_bytes, 0)), most_blocks * block_bytes)
    else:
        swap_bytes = int(config.swap_space * GIB)
    taken_bytes = num_blocks * block_bytes + (swap_bytes if is_host else 0) + step_bytes
    of_ranks = f" for {num_ranks} ranks" if num_ranks > 1 else ""
    if (num_ranks if is_host else 1) * taken_bytes > available_bytes:
        swapped = f"swapped blocks {_gib(swap_bytes)}, " if is_host else ""
        raise StartupError(
            f"too little memory{of_ranks if is_host else ''}: the cache takes {_gib(num_blocks * block_bytes)}, "
            f"{swapped}a step up to {_gib(step_bytes)}, but {_gib(available_bytes)} are free"
        )
    if host_bytes is not None:
        if config.swap_space is None and _power_of_two(swap_bytes) > swap_bytes:
            swap_bytes = _power_of_two(swap_bytes) // 2
        if num_ranks * (pinned_bytes := _power_of_two(swap_bytes)) > host_bytes:
            raise StartupError(
                f"too little memory on the host{of_ranks}: swapped blocks of {_gib(swap_bytes)} take "
                f"{_gib(pinned_bytes)} of pinned memory, which comes in powers of two, but {_gib(host_bytes)} are free"
            )
    longest = num_blocks * config.block_size
    if longest < limits.max_model_len:
        if config.max_model_len != AUTO:
            raise StartupError(
                f"max_model_len {limits.max_model_len} does not fit in a cache of {num_blocks} blocks of "
                f"{config.block_size} tokens: {longest} is the most (--max-model-len auto takes it, "
                f"--kv-cache-memory enlarges the cache)"
            )
        limits = Limits(limits.max_num_seqs, limits.max_num_batched_tokens, longest)
    return CacheSizes(num_blocks, swap_bytes // block_bytes, limits)


def _power_of_two(num_bytes: int) -> int:
    """What torch pins for so many bytes: the next power of two."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes > 0 else 0


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.3g} GiB"
