"""An adapter that every rank of a parallel group reads for itself, and that has to be the same one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import structlog

from protos import ranks_pb2
from worker_svc.adapters.adapter_folder import Adapter
from worker_svc.adapters.adapter_set import AdapterSet
from worker_svc.adapters.errors import AdapterError
from worker_svc.host.model_thread import ModelThread
from worker_svc.parallel.group import ParallelGroup

log = structlog.get_logger()

READ_S = 60.0  # that the others wait for one rank's disk, which may be one that never answers
MOST_UNREAD = 4  # reads that have not ended, with a thread each


class ReadingOnRanks:
    """One rank's part. All call it, each on a thread beside the model's: no step waits for the slowest disk."""

    def __init__(self, group: ParallelGroup, adapters: AdapterSet, new_thread: Callable[[str], ModelThread]) -> None:
        """`new_thread` makes one for this rank's device."""
        self._group, self._adapters, self._new_thread = group, adapters, new_thread
        self._unread: list[Future[Adapter]] = []

    def read(self, path: str, adapter: Adapter | None) -> Adapter:
        """What all ranks have read from `path`; `adapter`: this one has already.

        Raises AdapterError on all ranks where one cannot read it, or has read other files than rank 0.
        """
        mine = ranks_pb2.RankAdapter()
        try:
            adapter = adapter or self._read_in_time(path)
            mine.digest = adapter.digest
        except AdapterError as own:
            mine.error = str(own)
        except Exception as own:  # a mistake of ours, and the others wait all the same
            log.exception("an adapter cannot be read", path=path)
            mine.error = str(AdapterError(f"{type(own).__name__}: {own}"))
        first, *_ = everyones = self._group.exchange_aside(mine)
        for rank, answer in enumerate(everyones):
            if answer.error:
                raise AdapterError(f"rank {rank}: {answer.error}")
            if answer.digest != first.digest:  # an older copy on another machine, say: its products would be added up
                raise AdapterError(f"rank {rank} has read other files than rank 0: {path}")
        assert adapter is not None, "an error of its own is among all"
        return adapter

    def _read_in_time(self, path: str) -> Adapter:
        self._unread = [each for each in self._unread if not each.done()]
        if len(self._unread) >= MOST_UNREAD:
            raise AdapterError(f"{MOST_UNREAD} adapters are being read already, and their disk does not answer")
        thread = self._new_thread("adapter")
        reading = thread.call(lambda: self._adapters.read(path))
        thread.stop(timeout_s=0.0)  # when it has read
        self._unread.append(reading)
        try:
            return reading.result(READ_S)
        except TimeoutError:
            raise AdapterError(f"{path} was not read within {READ_S:g} s") from None
