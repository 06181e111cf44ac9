"""Served models as clients and operators are shown them."""

from __future__ import annotations

from collections.abc import Iterable

from protos import inference_pb2 as pb
from scheduler_svc.leases.worker_handle import WorkerHandle
from scheduler_svc.models.served_models import ServedModels


def model_states(models: ServedModels) -> list[pb.ModelState]:
    """What `ListModels` answers."""
    default = models.default_or_none()
    current = [models.current(name) for name in models.names]
    return [
        pb.ModelState(
            name=model.name,
            fingerprint=model.fingerprint,
            architecture=model.architecture,
            dtype=model.dtype,
            kv_cache_dtype=model.kv_cache_dtype,
            quantization=model.quantization,
            max_model_len=model.max_model_len,
            num_workers_serving=each.num_serving,
            num_workers_draining=each.num_draining,
            is_default=model is default,
            is_current=any(model is other for other in current),
        )
        for each in models.known
        for model in (each.model,)
    ]


def model_loads(models: ServedModels, num_live: dict[str, int], workers: Iterable[WorkerHandle]) -> list[pb.ModelLoad]:
    """Requests by model. `num_live`: those that have not ended and are not held by a limit of their tenant, by
    fingerprint; who does not run waits."""
    num_running: dict[str, int] = {}
    for worker in workers:
        num_running[worker.model] = num_running.get(worker.model, 0) + worker.num_running
    return [
        pb.ModelLoad(
            name=each.model.name,
            fingerprint=(fingerprint := each.model.fingerprint),
            num_requests_running=num_running.get(fingerprint, 0),
            num_requests_waiting=max(0, num_live.get(fingerprint, 0) - num_running.get(fingerprint, 0)),
            num_workers_serving=each.num_serving,
            num_workers_draining=each.num_draining,
        )
        for each in models.known
    ]
