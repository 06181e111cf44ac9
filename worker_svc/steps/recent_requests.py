"""Ids of the requests that this worker has run, from any scheduler; only the latest are kept."""

from __future__ import annotations

from protos import worker_pb2

MAX_ID_CHARS = 256  # of what is kept


class RecentRequests:
    """Lives on the model thread. `most`: how many are kept."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._ids: dict[str, None] = {}

    def take(self, step: worker_pb2.Step) -> None:
        """Notes the groups that the step introduces."""
        for group in step.groups:
            if len(group.request_id) <= MAX_ID_CHARS:
                self._ids.pop(group.request_id, None)
                self._ids[group.request_id] = None
        while len(self._ids) > self._most:
            del self._ids[next(iter(self._ids))]

    def all(self) -> list[str]:
        """All ids, the latest last."""
        return list(self._ids)
