"""From a folder to a model that computes."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import structlog
import torch

from kernels.select import kernels_for
from octavo.shared.terminal_row import ByteBar
from worker_svc.host.memory import GIB, available_bytes
from worker_svc.models.attention import AttentionMetadata
from worker_svc.models.cache_scales.checkpoint_scales import is_cache_scale
from worker_svc.models.checkpoint.checkpoint_files import (
    LOAD_FORMATS,
    Tensors,
    checkpoint_paths,
    detect_format,
    open_checkpoint,
)
from worker_svc.models.checkpoint.tied_head import is_head_apart, settle_table
from worker_svc.models.checkpoint.weights import CheckpointWeights, DummyWeights, Weights
from worker_svc.models.config import ModelConfig, ModelError
from worker_svc.models.decoder import Decoder
from worker_svc.models.experts.stacked_experts import with_experts_apart
from worker_svc.models.logit_reader import LogitReader
from worker_svc.models.parts import ModelPart
from worker_svc.models.products.quantized_store import QuantizedStore, kept_path
from worker_svc.models.quantized.checkpoint_format import with_quantized
from worker_svc.models.quantized.fp8_store import Fp8Store
from worker_svc.models.quantized.quantized_table import BYTES_PER_NUMBER
from worker_svc.models.quantized.quantized_tensor import QuantizedTensor

log = structlog.get_logger()

_BYTES_OF_CODES = 3  # a number of few bits while it is packed: a byte, and as much twice on its way
_BYTES_BESIDE_EXPANDED = 2  # one that is expanded first: its code, its part of the scales, and what is made on the way


class Model(Protocol):
    """A decoder over a paged cache. It holds no state between calls but its weights."""

    config: ModelConfig
    device: torch.device

    @property
    def weights_bytes(self) -> int:
        """Bytes that the weights occupy on the device."""

    @property
    def is_capturable(self) -> bool:
        """Whether `forward` without a reader asks the device for the same work whatever its tensors hold, and waits for
        nothing: a CUDA graph of it can be replayed."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: list[tuple[torch.Tensor, torch.Tensor]],
        attention: AttentionMetadata,
        logits_rows: torch.Tensor,
        reader: LogitReader | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute T tokens, write their keys and values to `caches`, and return logits of R rows: f32[R, vocab_size].

        token_ids, positions i64[T]; caches: a layer's (keys, values) as `CacheEngine.layers`; logits_rows i64[R] are
        row numbers below T, ascending where there are T of them; R may be 0. `reader` is given the logits of its own
        rows before this returns. `out` is where logits are written; None: to a new tensor. A row's logits depend on its
        own sequence alone, on a CPU bit for bit.
        """


def load_model(
    folder: str | Path,
    config: ModelConfig | ModelPart,
    device: str | torch.device,
    load_format: str = "auto",
    seed: int = 0,
    trust_remote_code: bool = False,
    free_bytes: int | None = None,
) -> Model:
    """Load weights from `folder`, or make them up from `seed` (`load_format` dummy).

    `config` is that of a model that this process has all of, or its part of one: nothing else is read then.
    `free_bytes` of the host's memory may be taken; None: all that are free.

    Raises `ModelError` with a line that names the file or tensor when the checkpoint cannot be read, lacks a tensor,
    has one too many or one of another shape, or when memory does not suffice.
    """
    device = torch.device(device)
    part = config if isinstance(config, ModelPart) else ModelPart.of(config)
    config = part.whole
    if load_format not in LOAD_FORMATS:
        raise ModelError(f"load format {load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
    if config.quantization:
        check_quantization(config, device)
    if device.type == "cuda":
        _check_heads(config)
    if config.impl == "transformers":
        if config.is_batch_invariant:
            raise ModelError(
                f"batch_invariant is for the families that Octavo computes itself; {config.architecture} is computed "
                f"by transformers"
            )
        from worker_svc.models.transformers_model import TransformersModel

        _check_memory(part, device, config.weights_bytes // part.num_parts, free_bytes)
        return TransformersModel(Path(folder), config, device, load_format, seed, trust_remote_code)
    weights: Weights
    if load_format == "dummy":
        _check_memory(part, device, config.weights_bytes // part.num_parts, free_bytes)
        weights = DummyWeights(config.dtype, device, seed, _store(part, device))
        weights.weights_format, weights.names = config.weights_format, config.style.names
    else:
        part, weights = _checkpoint(Path(folder), part, device, load_format, free_bytes)
    weights.is_batch_invariant = config.is_batch_invariant
    try:
        with torch.inference_mode():
            model = Decoder(part, weights, device)
    except torch.OutOfMemoryError:
        raise ModelError(f"too little memory on {device} for the weights of {config.model_name}") from None
    weights.finish()
    weights.quantized.finish()
    if weights.store is not None:
        weights.store.finish()
    return model


def log_source(folder: Path, part: ModelPart, load_format: str) -> None:
    """One line before weights are read, which may take minutes: how large their files are, and where products are
    quantised whether an earlier start has kept them."""
    facts: dict[str, object] = {}
    if load_format != "dummy":
        with suppress(ModelError, OSError):  # `load_model` says what is wrong with the files
            paths = checkpoint_paths(folder, detect_format(folder) if load_format == "auto" else load_format)
            facts["gib"] = round(sum(path.stat().st_size for path in paths) / GIB, 3)
            if part.whole.quantization not in ("", "fp8"):
                is_kept = (path := kept_path(part, paths)) is not None and os.path.exists(path)
                facts["quantised_weights"] = "kept" if is_kept else "to be made"
    log.info("loading weights", model=part.whole.model_name, load_format=load_format, **facts)


def check_quantization(config: ModelConfig, device: torch.device) -> None:
    """Raises ModelError where products cannot be of few bits."""
    kind, name = ("cuda", "GPU") if config.quantization == "fp8" else ("cpu", "CPU")
    if device.type != kind:
        raise ModelError(
            f"quantization {config.quantization} is computed on a {name} alone: --device {kind}, not {device}"
        )
    if config.impl == "transformers":
        raise ModelError(
            f"quantization {config.quantization} is for the families that Octavo computes itself; "
            f"{config.architecture} is computed by transformers"
        )


def _check_heads(config: ModelConfig) -> None:
    """Raises ModelError where a GPU cannot compute attention of heads so large."""
    from kernels.gpu.attention.tiling import MAX_HEAD_SIZE  # here: only workers with a GPU need Triton

    if config.style.latent is None and config.head_size > MAX_HEAD_SIZE:
        raise ModelError(
            f"{config.architecture} has heads of {config.head_size} elements, more than the {MAX_HEAD_SIZE} that are "
            "computed on a GPU: --device cpu computes it"
        )


def _store(
    part: ModelPart, device: torch.device, weight_files: Sequence[Path] = ()
) -> QuantizedStore | Fp8Store | None:
    """What quantises a model's products; those of files are kept for later starts."""
    if not part.whole.quantization:
        return None
    if part.whole.quantization == "fp8":
        return Fp8Store(kernels_for(device), may_expand=not part.whole.is_batch_invariant)
    return QuantizedStore.of_model(part, weight_files) if weight_files else QuantizedStore(part.whole)


def _check_memory(part: ModelPart, device: torch.device, needed_bytes: int, free_bytes: int | None) -> None:
    """Raises ModelError where a part does not fit whose weights take so many bytes, and tables of rotation beside them.
    Asked before weights are read, because Linux promises memory that it does not have and then kills the process that
    touches it. For a GPU the host makes the tables, and nothing else that stays."""
    if device.type != "cpu":
        needed_bytes = 0
    needed_bytes += sum(rope.table_bytes(part.whole.max_model_len) for rope in part.whole.style.ropes)
    if free_bytes is None:
        free_bytes = available_bytes()
    if needed_bytes > free_bytes:
        raise ModelError(
            f"too little memory for {part.whole.model_name}: loading its weights takes up to "
            f"{needed_bytes / GIB:.3g} GiB, {free_bytes / GIB:.3g} GiB are free for it"
        )


def _checkpoint(
    folder: Path, part: ModelPart, device: torch.device, load_format: str, free_bytes: int | None
) -> tuple[ModelPart, CheckpointWeights]:
    """The weights, and the part with its head tied or not as the files have it."""
    if load_format == "auto":
        load_format = detect_format(folder)
    config, paths = part.whole, checkpoint_paths(folder, load_format)
    store = _store(part, device, paths)  # which looks at the files' times before they are opened
    tensors = with_experts_apart(folder, config.style, open_checkpoint(paths, load_format))
    if config.weights_format is not None:
        tensors = with_quantized(folder, config.weights_format, tensors)
    tensors = {name: tensor for name, tensor in tensors.items() if not is_cache_scale(name)}  # in `config` if wanted
    part = _with_head_as_stored(part, tensors)
    num_bytes = sum(tensor.num_bytes for tensor in _of_part(part, tensors).values())
    progress = ByteBar(f"loading {config.model_name}", num_bytes)
    weights = CheckpointWeights(folder, tensors, config.dtype, device, progress, store)
    needed_bytes = _peak_bytes(part, tensors, weights) if device.type == "cpu" else 0
    _check_memory(part, device, needed_bytes, free_bytes)
    return part, weights


def _with_head_as_stored(part: ModelPart, tensors: Tensors) -> ModelPart:
    table, head, is_tied = _ends(part.whole, tensors)
    if not part.whole.tie_word_embeddings:
        return part
    settle_table(tensors, table, head)
    if not (is_tied and part.is_last and is_head_apart(tensors, table, head, part.whole.dtype)):
        return part
    log.warning("config.json ties the head to the embedding, and the files hold another: it is taken", tensor=head)
    whole, own = (replace(config, tie_word_embeddings=False) for config in (part.whole, part.own))
    return replace(part, whole=whole, own=own)


def _ends(config: ModelConfig, tensors: Tensors) -> tuple[str, str, bool]:
    """Names of embedding and head, and whether the head is the embedding, whatever the file has under its name."""
    names = config.style.names
    table, head = f"{names.base(tensors.__contains__)}{names.embedding}.weight", f"{names.head}.weight"
    return table, head, config.tie_word_embeddings and not isinstance(tensors.get(head), QuantizedTensor)


def _of_part(part: ModelPart, tensors: Tensors) -> Tensors:
    """The tensors that a part reads, or some of each."""
    table, head, is_tied = _ends(part.whole, tensors)
    elsewhere = tuple(part.prefixes_without_place(part.whole.style.names.base(tensors.__contains__)))
    kept = {table} if is_tied and part.is_last else set()
    left_out = {head} if is_tied else set()
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name in kept or not (name in left_out or name.startswith(elsewhere))
    }


def _peak_bytes(part: ModelPart, tensors: Tensors, weights: CheckpointWeights) -> int:
    """What a part takes of a checkpoint on a CPU while it is loaded: all that stays, and beside it the largest weight
    as it is read. Numbers that may turn out to need fewer bits count as they are read, and
    products as if none were kept of an earlier start."""
    config, total, largest = part.whole, 0.0, 0.0
    table, head, is_tied = _ends(config, tensors)
    keeps = weights.store.keeps if isinstance(weights.store, QuantizedStore) else None
    for name, tensor in _of_part(part, tensors).items():
        count = math.prod(tensor.shape)
        has_table, has_product = part.is_first and name == table, name != table or (is_tied and part.is_last)
        beside = 2 if tensor.dtype == torch.bfloat16 else config.dtype.itemsize
        of_product = of_table = float(beside)
        if config.quantization:
            of_product = 1 if name in (table, head) else config.bytes_per_number
        if isinstance(tensor, QuantizedTensor):
            of_few_bits = weights.quantized.bytes_per_number(tensor, keeps)
            beside, of_table = _BYTES_OF_CODES, BYTES_PER_NUMBER
            if of_few_bits is not None:
                of_product = of_few_bits
            elif has_product:  # it is expanded before its product is made
                beside = _BYTES_BESIDE_EXPANDED + config.dtype.itemsize
        # Of the embedding rows are copied, so it stays as it is read; as a tied head it is a product as well.
        stays = has_table and not isinstance(tensor, QuantizedTensor)
        total += count * (of_product * has_product + of_table * has_table)
        # Two weights of a layer are often one product.
        largest = max(largest, 0 if stays else count * beside * (1 if name in (table, head) else 2))
    return int((total + largest) / part.ranks.size)
