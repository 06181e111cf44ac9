"""Options of the worker service, one frozen dataclass: flags, variables and file keys follow from its fields.

Imports nothing heavy: a command line is parsed, and refused, before torch is loaded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from octavo.shared.log import LEVELS
from octavo.shared.options import COMMON, LOGGING, check_port, check_tls_files, option
from octavo.shared.tracing.options import ENDPOINT_HELP, check_endpoint

AUTO: Literal["auto"] = "auto"
MODEL_FILES, MEMORY, COMPUTE, ADAPTERS = "model files", "memory", "computing", "adapters"  # groups of options
ACCESS = "access"  # likewise

MAX_FINISH_TIMEOUT_S = 86_400.0  # a message says it in milliseconds of 32 bits


@dataclass(frozen=True)
class WorkerConfig:
    """Raises ValueError for options that contradict one another or that this build cannot serve."""

    model: str = option(
        "smollm2-135m-instruct",
        "folder, GGUF file, known name, or OWNER/NAME on the hub",
        group=COMMON,
        metavar="MODEL",
    )
    host: str = option("127.0.0.1", "address to listen on", group=COMMON)
    port: int = option(50061, "port to listen on; 0 takes a free one", group=COMMON)
    device: str = option(
        "auto", "auto: GPU 0, or the CPU where that cannot be used", group=COMMON, metavar="auto|cpu|cuda|cuda:N"
    )
    dtype: str = option(
        "auto",
        "type of weights and products; auto: the checkpoint's, where the device multiplies it",
        group=COMMON,
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str = option(
        "none",
        "int8, int4 and int4-128 are for CPUs and round activations to 8 bits, fp8 is for GPUs",
        group=COMMON,
        choices=("none", "int8", "int4", "int4-128", "fp8"),
    )
    max_model_len: int | str | None = option(
        None,
        "tokens in one sequence (default: what the model takes); auto: what the cache holds",
        group=COMMON,
        metavar="N|auto",
    )
    max_num_seqs: int = option(256, "most sequences that run at once on a worker", group=COMMON)
    max_num_batched_tokens: int = option(2048, "most tokens in one step", group=COMMON)

    load_format: str = option(
        "auto",
        "auto: safetensors, else GGUF; bin: pickles, tensors only; dummy: random weights",
        group=MODEL_FILES,
        choices=("auto", "safetensors", "gguf", "bin", "dummy"),
    )
    download_dir: str = option(
        "", "folder of models by name (default: the caches of the hub and of Octavo)", group=MODEL_FILES, metavar="DIR"
    )
    tokenizer: str = option(
        "",
        "folder, GGUF file or name of a model whose tokenizer to use (default: the model's own)",
        group=MODEL_FILES,
        metavar="MODEL",
    )
    tokenizer_mode: str = option(
        "auto",
        "auto: make a tokenizer.json where there is none; fast: never; slow: always",
        group=MODEL_FILES,
        choices=("auto", "fast", "slow"),
    )
    model_impl: str = option(
        "auto",
        "whose code computes the layers; auto: Octavo's if it knows the family",
        group=MODEL_FILES,
        choices=("auto", "octavo", "transformers"),
    )
    trust_remote_code: bool = option(False, "run Python code from the model's folder", group=MODEL_FILES)
    seed: int = option(0, "seed of the random weights of --load-format dummy", group=MODEL_FILES)

    kv_cache_memory: float | None = option(
        None,
        "GiB of cache (default: on a CPU 4, at most 0.4 of the free memory; on a GPU all that is left)",
        group=MEMORY,
        metavar="GIB",
    )
    gpu_memory_utilization: float = option(0.9, "share of a GPU's memory to use", group=MEMORY)
    swap_space: float | None = option(
        None,
        "GiB of host memory for swapped blocks (default: 4, at most half of what is left)",
        group=MEMORY,
        metavar="GIB",
    )
    memory_share: float = option(
        1.0, "share of the free memory that the defaults of cache and swap space start from", group=MEMORY
    )
    block_size: int = option(16, "tokens in a cache block", group=MEMORY)
    kv_cache_dtype: str = option(
        "auto",
        "type of keys and values; auto: --dtype, or bfloat16 with --quantization on CPUs; fp8: on newer GPUs",
        group=MEMORY,
        choices=("auto", "float32", "float16", "bfloat16", "fp8"),
    )
    kv_cache_scales: Path | None = option(
        None,
        "scales of an fp8 cache, from octavo model calibrate (default: the checkpoint's, or those measured here)",
        group=MEMORY,
        metavar="FILE",
    )
    cuda_graph_memory: float = option(
        1.0, "GiB for CUDA graphs; with too little, fewer sizes of steps get one", group=MEMORY, metavar="GIB"
    )

    num_threads: int = option(
        0, "threads that compute, of each rank; 0: one a core of its share, at most OMP_NUM_THREADS", group=COMPUTE
    )
    batch_invariant: bool = option(
        False,
        "logits do not depend on the batch, bit for bit, on a GPU too; refuses models that transformers computes",
        group=COMPUTE,
    )
    enforce_eager: bool = option(False, "launch every step kernel by kernel, without CUDA graphs", group=COMPUTE)
    tensor_parallel_size: int = option(
        1, "ranks that every layer is split over, each with a GPU, or a share of the cores, of its own", group=COMPUTE
    )
    pipeline_parallel_size: int = option(
        1, "stages that the layers are divided among, each of as many ranks as --tensor-parallel-size", group=COMPUTE
    )
    enable_expert_parallel: bool = option(False, "give each rank whole experts, not a part of every one", group=COMPUTE)

    enable_lora: bool = option(False, "take low-rank adapters", group=ADAPTERS)
    max_loras: int = option(1, "most adapters in one step", group=ADAPTERS)
    max_lora_rank: int = option(16, "largest rank of an adapter, up to 256", group=ADAPTERS)
    max_cpu_loras: int = option(32, "most adapters that are loaded at a time", group=ADAPTERS)

    tls_cert_file: Path | None = option(
        None, "certificate (PEM) for schedulers; switches TLS on", group=ACCESS, metavar="FILE"
    )
    tls_key_file: Path | None = option(None, "its key (PEM)", group=ACCESS, metavar="FILE")
    tls_client_ca_file: Path | None = option(
        None, "authorities (PEM) of schedulers, which then have to show a certificate", group=ACCESS, metavar="FILE"
    )
    tls_client_name: tuple[str, ...] = option(
        (),
        "a name, or SPIFFE URI, that such a certificate may have; repeatable (default: any)",
        group=ACCESS,
        metavar="NAME",
    )
    insecure: bool = option(False, "listen where others reach this service although nothing locks it", group=ACCESS)
    token_file: Path | None = option(
        None,
        "file with a token that schedulers have to bring (their --worker-token-file)",
        group=ACCESS,
        metavar="FILE",
    )

    finish_timeout: float = option(
        20.0, "seconds after SIGTERM to finish requests that no other worker can take over", group=COMMON
    )
    log_level: str = option("info", "least severe log lines to show", group=LOGGING, choices=LEVELS)
    otlp_traces_endpoint: str = option("", ENDPOINT_HELP, group=LOGGING, metavar="URL")

    @property
    def num_ranks(self) -> int:
        """Processes that compute the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def __post_init__(self) -> None:
        check_port("port", self.port)
        check_endpoint(self.otlp_traces_endpoint)
        check_tls_files(self.tls_cert_file, self.tls_key_file, self.tls_client_ca_file)
        if self.tls_client_name and self.tls_client_ca_file is None:
            raise ValueError("tls_client_name is for certificates of schedulers, which tls_client_ca_file asks for")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device is {self.device!r}; auto, cpu, cuda and cuda:N are accepted")
        if self.kv_cache_dtype == "fp8" and self.device == "cpu":
            raise ValueError("kv_cache_dtype fp8 is for GPUs, not for device cpu")
        if self.kv_cache_scales is not None and self.kv_cache_dtype != "fp8":
            raise ValueError(f"kv_cache_scales are for kv_cache_dtype fp8, not for {self.kv_cache_dtype}")
        sizes = "block_size max_num_seqs max_num_batched_tokens tensor_parallel_size pipeline_parallel_size"
        for name in sizes.split():
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
        if not 0 <= self.finish_timeout <= MAX_FINISH_TIMEOUT_S:
            accepted = f"0 to {MAX_FINISH_TIMEOUT_S:g} are accepted"
            raise ValueError(f"finish_timeout is {self.finish_timeout} s, {accepted}")
        if not 1 <= self.max_lora_rank <= 256:
            raise ValueError(f"max_lora_rank is {self.max_lora_rank}, not within 1 and 256")
        if not 1 <= self.max_loras <= self.max_cpu_loras:
            raise ValueError(f"max_loras is {self.max_loras}, not within 1 and max_cpu_loras, {self.max_cpu_loras}")
        if self.max_loras > 1 and not self.enable_lora:
            raise ValueError(f"max_loras is {self.max_loras}, but adapters are taken with enable_lora alone")
        if self.enable_lora and self.model_impl == "transformers":
            raise ValueError(
                "enable_lora is for the families that Octavo computes itself, not for those of transformers"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization is {self.gpu_memory_utilization}, not within (0, 1]")
        if self.cuda_graph_memory < 0:
            raise ValueError(f"cuda_graph_memory is {self.cuda_graph_memory} GiB, at least 0 is accepted")
