"""What a front shows of the pool: whether requests can be served, and which models."""

from __future__ import annotations

import asyncio

import structlog

from scheduler_svc.frontends.front import Shown
from scheduler_svc.models.served_models import ServedModels
from scheduler_svc.serving import Serving

log = structlog.get_logger()

READINESS_INTERVAL_S = 0.05


async def follow_readiness(serving: Serving, front: Shown) -> None:
    """Tells `front` whether requests can be served, and the models, whenever either changes."""
    ready, models = False, ServedModels()
    while True:
        if serving.is_ready != ready or serving.pool.look() is not models:
            was_ready, ready, models = ready, serving.is_ready, serving.pool.models
            await front.show(ready, models)
            if ready != was_ready:
                log.info("scheduler is ready" if ready else "scheduler has no worker")
        await asyncio.sleep(READINESS_INTERVAL_S)
