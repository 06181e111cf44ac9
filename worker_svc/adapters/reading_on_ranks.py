"""An adapter that every rank of a parallel group reads for itself, and that has to be the same one."""

from __future__ import annotations

import structlog

from protos import ranks_pb2
from worker_svc.adapters.adapter_folder import Adapter
from worker_svc.adapters.adapter_set import AdapterSet
from worker_svc.adapters.errors import AdapterError
from worker_svc.parallel.group import ParallelGroup

log = structlog.get_logger()


def read_on_all_ranks(group: ParallelGroup, adapters: AdapterSet, path: str, adapter: Adapter | None) -> Adapter:
    """What all ranks have read from `path`; `adapter`: this one has already.

    To be called by all ranks, on a thread beside the model's: no step waits for the slowest disk. Raises AdapterError
    on all ranks where one cannot read it, or has read other files than rank 0.
    """
    mine = ranks_pb2.RankAdapter()
    try:
        adapter = adapter or adapters.read(path)
        mine.digest = adapter.digest
    except AdapterError as own:
        mine.error = str(own)
    except Exception as own:  # a mistake of ours, and the others wait all the same
        log.exception("an adapter cannot be read", path=path)
        mine.error = str(AdapterError(f"{type(own).__name__}: {own}"))
    first, *_ = everyones = group.exchange_aside(mine)
    for rank, answer in enumerate(everyones):
        if answer.error:
            raise AdapterError(f"rank {rank}: {answer.error}")
        if answer.digest != first.digest:  # an older copy on another machine, say: its products would be added up
            raise AdapterError(f"rank {rank} has read other files than rank 0: {path}")
    assert adapter is not None, "an error of its own is among all"
    return adapter
