"""From a folder to a model that computes."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from octavo.shared.terminal_row import ByteBar
from worker_svc.host.memory import GIB, available_bytes
from worker_svc.models.attention import AttentionMetadata
from worker_svc.models.checkpoint_files import LOAD_FORMATS, checkpoint_paths, detect_format, open_checkpoint
from worker_svc.models.config import ModelConfig, ModelError
from worker_svc.models.decoder import Decoder
from worker_svc.models.logit_reader import LogitReader
from worker_svc.models.parts import ModelPart
from worker_svc.models.quantized_store import QuantizedStore
from worker_svc.models.weights import CheckpointWeights, DummyWeights, Weights


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
    ) -> torch.Tensor:
        """Compute T tokens, write their keys and values to `caches`, and return logits of R rows: f32[R, vocab_size].

        token_ids, positions i64[T]; caches: a layer's (keys, values) as `CacheEngine.layers`; logits_rows i64[R] are
        row numbers below T, R may be 0. `reader` is given the logits of its own rows before this returns. A row's
        logits depend on its own sequence alone, on a CPU bit for bit.
        """


def load_model(
    folder: str | Path,
    config: ModelConfig | ModelPart,
    device: str | torch.device,
    load_format: str = "auto",
    seed: int = 0,
    trust_remote_code: bool = False,
) -> Model:
    """Load weights from `folder`, or make them up from `seed` (`load_format` dummy).

    `config` is that of a model that this process has all of, or its part of one: nothing else is read then.

    Raises `ModelError` with a line that names the file or tensor when the checkpoint cannot be read, lacks a tensor,
    has one too many or one of another shape, or when memory does not suffice.
    """
    device = torch.device(device)
    part = config if isinstance(config, ModelPart) else ModelPart.of(config)
    config = part.whole
    if load_format not in LOAD_FORMATS:
        raise ModelError(f"load format {load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
    # Asked before, because Linux promises memory that it does not have and then kills the process that touches it.
    needed_bytes = config.weights_bytes // part.num_parts
    if device.type == "cpu" and needed_bytes > (free_bytes := available_bytes()):
        raise ModelError(
            f"too little memory for {config.model_name}: its weights take {needed_bytes / GIB:.3g} GiB, "
            f"{free_bytes / GIB:.3g} GiB are free"
        )
    if config.quantization:
        check_quantization(config, device)
    if config.impl == "transformers":
        if config.is_batch_invariant:
            raise ModelError(
                f"batch_invariant is for the families that Octavo computes itself; {config.architecture} is computed "
                f"by transformers"
            )
        from worker_svc.models.transformers_model import TransformersModel

        return TransformersModel(Path(folder), config, device, load_format, seed, trust_remote_code)
    weights: Weights
    if load_format == "dummy":
        weights = DummyWeights(config.dtype, device, seed, QuantizedStore(config) if config.quantization else None)
    else:
        weights = _checkpoint(Path(folder), part, device, load_format)
    weights.is_batch_invariant = config.is_batch_invariant
    try:
        with torch.inference_mode():
            model = Decoder(part, weights, device)
    except torch.OutOfMemoryError:
        raise ModelError(f"too little memory on {device} for the weights of {config.model_name}") from None
    weights.finish()
    if weights.store is not None:
        weights.store.finish()
    return model


def check_quantization(config: ModelConfig, device: torch.device) -> None:
    """Raises ModelError where products cannot be of few bits."""
    if device.type != "cpu":
        raise ModelError(f"quantization {config.quantization} is computed on a CPU alone: --device cpu, not {device}")
    if config.impl == "transformers":
        raise ModelError(
            f"quantization {config.quantization} is for the families that Octavo computes itself; "
            f"{config.architecture} is computed by transformers"
        )


def _checkpoint(folder: Path, part: ModelPart, device: torch.device, load_format: str) -> CheckpointWeights:
    if load_format == "auto":
        load_format = detect_format(folder)
    config, paths = part.whole, checkpoint_paths(folder, load_format)
    num_bytes = sum(path.stat().st_size for path in paths) // part.num_parts
    progress = ByteBar(f"loading {config.model_name}", num_bytes)
    store = QuantizedStore.of_model(part) if config.quantization else None
    return CheckpointWeights(folder, open_checkpoint(paths, load_format), config.dtype, device, progress, store)
