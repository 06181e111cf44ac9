"""One step with rows of traced requests, from its sending to its answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from octavo.shared.tracing.context import TraceContext
from octavo.shared.tracing.span import MAX_LINKS, own
from scheduler_svc.tracing.group_trace import GroupTrace


@dataclass(slots=True)
class Chunk:
    """Known tokens of a request that the step computes, `context_len` being in the cache before."""

    group: GroupTrace
    num_tokens: int
    context_len: int
    draws: bool


@dataclass(slots=True)
class StepTrace:
    """`context`: the span that the worker makes of the step; None where it makes none."""

    worker: str
    step_id: int
    sent_ns: int
    context: TraceContext | None
    chunks: list[Chunk] = field(default_factory=list)
    decodes: list[GroupTrace] = field(default_factory=list)

    def requests(self) -> bytes:
        """Contexts of the requests, for the worker: at most so many as its span may have links."""
        groups = dict.fromkeys((*(chunk.group for chunk in self.chunks), *self.decodes))
        return b"".join(group.key for group in list(groups)[:MAX_LINKS])

    def answered(self, now_ns: int) -> Iterator[tuple[GroupTrace, int]]:
        """It went well. Gives requests with the ns from their last token to the one that came now; of several that have
        waited equally long, as most have, the first."""
        for chunk in self.chunks:
            self._end_chunk(chunk, now_ns)
            if chunk.draws:
                chunk.group.drawn(None, now_ns)
        told_ns = 0
        for group in self.decodes:
            if not group.is_over and (gap_ns := group.drawn(self.context, now_ns)) != told_ns:
                told_ns = gap_ns
                yield group, gap_ns

    def failed(self, now_ns: int, error: str) -> None:
        """Nothing of it counts: it failed, or its worker is lost."""
        for chunk in self.chunks:
            self._end_chunk(chunk, now_ns, error)

    def _end_chunk(self, chunk: Chunk, now_ns: int, error: str = "") -> None:
        num_tokens, context_len = chunk.num_tokens, chunk.context_len
        attributes = own(worker=self.worker, step=self.step_id, num_tokens=num_tokens, context_len=context_len)
        chunk.group.prefilled(self.sent_ns, now_ns, self.context, attributes, error)
