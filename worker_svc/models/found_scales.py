"""Which scales a cache of eight bits gets: those that are given, the checkpoint's, those measured here, or 1."""

from __future__ import annotations

from pathlib import Path

import structlog

from worker_svc.models.cache_scales import CacheScales, calibrated_path
from worker_svc.models.checkpoint_scales import numbers_of, scales_of_checkpoint
from worker_svc.models.config import ModelConfig

log = structlog.get_logger()


def find_scales(folder: Path, config: ModelConfig, load_format: str, given: Path | None) -> CacheScales:
    """`given` is a file. Raises ModelError for scales that cannot be used; warns where there are none."""
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
        log.warning(
            "the cache of 8 bits has no scales: keys and values beyond 448 are cut",
            hint="octavo model calibrate measures scales",
        )
        return CacheScales.ones(*sizes)
    log.info("scales of the cache", source=str(source), digest=scales.digest)
    return scales
