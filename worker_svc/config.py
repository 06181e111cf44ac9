"""Options of the worker service, one frozen dataclass: flags, variables and file keys follow from its fields.

Imports nothing heavy: a command line is parsed, and refused, before torch is loaded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from octavo.cores import parse_cores
from octavo.log import LEVELS
from octavo.options import check_port, option

AUTO: Literal["auto"] = "auto"


@dataclass(frozen=True)
class WorkerConfig:
    """Raises ValueError for options that contradict one another or that this build cannot serve."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(50061, "port to listen on; 0 takes a free one")
    log_level: str = option("info", "least important log lines to show", choices=LEVELS)
    model: str = option("smollm2-135m-instruct", "model folder, GGUF file, or a name that `octavo model list` shows")
    download_dir: str = option("", "folder of models to look a name up in before the cache", metavar="DIR")
    tokenizer: str = option(
        "",
        "folder, GGUF file or name of the model whose tokenizer is served in place of the model's own",
        metavar="DIR_OR_NAME",
    )
    tokenizer_mode: str = option(
        "auto",
        "auto: the folder's tokenizer.json, else one made of its other files; fast: never made; slow: always made",
        choices=("auto", "fast", "slow"),
    )
    load_format: str = option(
        "auto",
        "where weights come from; bin: pickled files, of which tensors alone are read; dummy: random ones",
        choices=("auto", "safetensors", "gguf", "bin", "dummy"),
    )
    model_impl: str = option(
        "auto",
        "whose code computes the layers; auto: Octavo's for the families that it knows, else that of transformers",
        choices=("auto", "octavo", "transformers"),
    )
    trust_remote_code: bool = option(False, "run Python code that lies in the model's folder")
    seed: int = option(0, "of the random weights that --load-format dummy makes")
    dtype: str = option("auto", "of weights and what is computed; auto takes the checkpoint's own", metavar="DTYPE")
    quantization: str = option(
        "none",
        "int8: products with weights of eight bits, or of four where they once were, and activations quantised as they "
        "come, on a CPU; quantised at the first start and kept in the cache",
        choices=("none", "int8"),
    )
    batch_invariant: bool = option(
        False, "a row's logits depend on nothing in its batch, bit for bit, whatever the model's type and shapes"
    )
    kv_cache_dtype: str = option(
        "auto",
        "of keys and values in the cache; auto: as dtype; fp8: float8_e4m3fn, on GPUs that have it",
        choices=("auto", "float32", "float16", "bfloat16", "fp8"),
    )
    device: str = option(
        "auto", "where the model runs: cpu, cuda, cuda:N; auto: the first GPU where there is one", metavar="DEVICE"
    )
    num_threads: int = option(
        0,
        "threads that compute, fewer while other processes keep cores busy; 0: one a core that this process may use, "
        "or OMP_NUM_THREADS",
    )
    cpu_pinning: str = option(
        "none",
        "cores to keep the threads that compute on, one each: auto: the first that this process may use; a list such "
        "as 0-3,8; none: where the system puts them; without meaning on a GPU",
        metavar="CORES",
    )
    block_size: int = option(16, "tokens in a block of the cache")
    gpu_memory_utilization: float = option(0.9, "share of a GPU's memory to use; without meaning on the cpu")
    enforce_eager: bool = option(False, "capture no CUDA graphs of decode steps; without meaning on the cpu")
    cuda_graph_memory: float = option(
        1.0, "GiB of GPU memory that CUDA graphs may take; fewer batch sizes get one where it is too little"
    )
    kv_cache_memory: float | None = option(
        None,
        "GiB of cache (default on the cpu: 4, at most 0.4 of the memory that is free; on a GPU: what the model, its "
        "steps and graphs leave)",
        metavar="GIB",
    )
    swap_space: float | None = option(
        None,
        "GiB of host memory for swapped blocks (default: 4, at most half of what cache and steps leave)",
        metavar="GIB",
    )
    memory_share: float = option(
        1.0, "share of the free memory that the defaults above count on; `octavo serve` divides it among its workers"
    )
    max_loras: int = option(0, "adapters in one step, at most")
    max_num_seqs: int = option(256, "sequences that run at once, at most")
    max_num_batched_tokens: int = option(2048, "tokens in one step, at most")
    max_model_len: int | str | None = option(
        None, "tokens in one sequence (default: what the model takes); auto: as many as fit in the cache", metavar="LEN"
    )

    def __post_init__(self) -> None:
        check_port("port", self.port)
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device is {self.device!r}; auto, cpu, cuda and cuda:N are accepted")
        if self.kv_cache_dtype == "fp8" and self.device == "cpu":
            raise ValueError("kv_cache_dtype fp8 is for GPUs, not for device cpu")
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, at least 1 is accepted")
        if self.max_num_seqs > min(self.max_num_batched_tokens, 65536):
            raise ValueError(
                f"max_num_seqs is {self.max_num_seqs}, more than max_num_batched_tokens, "
                f"{self.max_num_batched_tokens}, or than the 65536 slots of the protocol"
            )
        length = self.max_model_len
        if not (length is None or length == AUTO or (isinstance(length, int) and length > 0)):
            raise ValueError(f"max_model_len is {length!r}; a number from 1 on or auto is accepted")
        if self.kv_cache_memory is not None and self.kv_cache_memory <= 0:
            raise ValueError(f"kv_cache_memory is {self.kv_cache_memory} GiB, more than 0 is accepted")
        if self.swap_space is not None and self.swap_space < 0:
            raise ValueError(f"swap_space is {self.swap_space} GiB, at least 0 is accepted")
        if not 0 < self.memory_share <= 1:
            raise ValueError(f"memory_share is {self.memory_share}, not within (0, 1]")
        if self.num_threads < 0:
            raise ValueError(f"num_threads is {self.num_threads}, at least 0 is accepted")
        if self.cpu_pinning not in ("none", AUTO):
            try:
                num_cores = len(parse_cores(self.cpu_pinning))
            except ValueError as error:
                raise ValueError(f"cpu_pinning: {error}; auto and none are accepted, too") from None
            if self.num_threads > num_cores:
                raise ValueError(f"cpu_pinning {self.cpu_pinning} is too few cores for {self.num_threads} threads")
        if self.max_loras:
            raise ValueError(f"max_loras {self.max_loras} is not supported yet, only 0: adapters cannot be loaded")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization is {self.gpu_memory_utilization}, not within (0, 1]")
        if self.cuda_graph_memory < 0:
            raise ValueError(f"cuda_graph_memory is {self.cuda_graph_memory} GiB, at least 0 is accepted")
