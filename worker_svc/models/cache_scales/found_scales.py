"""Which scales a cache of eight bits gets: those that are given, the checkpoint's, those measured here, or 1; and
whether they are enough for what a first step puts there.
"""

from __future__ import annotations

from pathlib import Path

import structlog
import torch

from worker_svc.models.cache_scales.cache_scales import CacheScales, calibrated_path
from worker_svc.models.cache_scales.checkpoint_scales import numbers_of, scales_of_checkpoint
from worker_svc.models.config import ModelConfig

log = structlog.get_logger()

_HINT = "octavo model calibrate measures scales"
_LARGEST_CODE = 0x7E  # 448, without its sign; above it is NaN


def find_scales(folder: Path, config: ModelConfig, load_format: str, given: Path | None) -> CacheScales:
    """`given` is a file. Raises ModelError for scales that cannot be used."""
    sizes = config.num_layers, config.num_kv_heads
    measured = calibrated_path(config.model_hash)
    if given is None and (found := scales_of_checkpoint(folder, load_format, *sizes)):
        scales, lacking = found
        if lacking:
            log.warning("scales of the cache are missing in the checkpoint, and are 1", layers=numbers_of(lacking))
        source = folder
    elif given is not None or measured.exists():
        source = given or measured
        scales = CacheScales.of_file(source, *sizes, config.model_hash)
    else:
        return CacheScales.ones(*sizes)
    log.info("scales of the cache", source=str(source), digest=scales.digest)
    return scales


def warn_of_cuts(scales: CacheScales, store: torch.Tensor, first_layer: int = 0) -> None:
    """Says which layers have keys or values at the end of what eight bits can tell, or that others may have them, where
    there are no scales. `store` float8_e4m3fn[layers, ...] holds those of any tokens, from `first_layer` of the model
    on."""
    is_cut = (store.view(torch.uint8) & 0x7F).flatten(1).amax(dim=1) >= _LARGEST_CODE
    cut = (first_layer + is_cut.nonzero().flatten()).tolist()
    of = "the cache of 8 bits, which has no scales" if scales.is_plain else "the cache of 8 bits"
    if cut:
        log.warning(f"keys or values are cut in {of}", layers=numbers_of(cut), hint=_HINT)
    elif scales.is_plain:
        log.warning(f"keys or values beyond 448 are cut in {of}", hint=_HINT)
