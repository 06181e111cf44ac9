"""One traced request as the step loop sees it: when it waited, ran, gave way and moved.

Each of these is a span below the request's own, which whoever took the request makes (`api/request_trace.py`), maybe in
another process. Times are ns on the monotonic clock, and come from callers.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.shared.tracing.context import TraceContext
from octavo.shared.tracing.span import Attribute, Span, own

MAX_DECODE_LINKS = 32  # of a request: a link costs 5 us to export, as much as the whole rest of a token's trace


class GroupTrace:
    """`context`: the request's span. `emit` takes spans, on the thread that calls here.

    Attributes:
        key: the context as workers are told it.
        is_away: it is in no step: it waits for its first, was preempted, or is on its way to a worker.
        is_over: it has ended; what still comes of steps in flight is not written down.
        links: to the spans of steps that computed its outputs' first tokens.
    """

    __slots__ = (
        "_emit",
        "_last_token_ns",
        "_left_ns",
        "_left_worker",
        "_num_drawn",
        "_num_preemptions",
        "_preempted_ns",
        "_preemption_mode",
        "_queued_ns",
        "_why_left",
        "context",
        "is_away",
        "is_over",
        "key",
        "links",
    )

    def __init__(self, context: TraceContext, emit: Callable[[Span], None]) -> None:
        self.context, self.key = context, context.to_bytes()
        self._emit = emit
        self.is_away, self.is_over = True, False
        self.links: list[TraceContext] = []
        self._queued_ns = self._preempted_ns = self._left_ns = self._last_token_ns = 0  # 0: it is not, or not yet
        self._num_preemptions = self._num_drawn = 0
        self._preemption_mode = self._left_worker = self._why_left = ""

    def record(self, name: str, start_ns: int, end_ns: int, error: str = "", **more: Attribute) -> None:
        """A span below the request's, with attributes of ours; a worker is named by its address."""
        self._emit(Span(name, self.context.child(), self.context, start_ns, end_ns, own(**more), error=error))

    # ---- waiting and running ----------------------------------------------------------------------------------------

    def queued(self, now_ns: int) -> None:
        """It was taken, and waits for its first step."""
        self._queued_ns = now_ns

    def preempted(self, num_preemptions: int, mode: str, now_ns: int) -> None:
        """It was preempted so often in all, the last time now; `mode`: swap or recompute. Does nothing where known."""
        if num_preemptions != self._num_preemptions:
            self._num_preemptions, self._preemption_mode = num_preemptions, mode
            if not self._preempted_ns:
                self._preempted_ns = now_ns
            self.is_away = True

    def moved(self, worker: str, why: str, now_ns: int) -> None:
        """It is at that worker no more, and goes on at another one."""
        if not self._left_ns:
            self._left_ns = now_ns
        self._left_worker, self._why_left = worker, why
        self.is_away = True

    def returned(self, worker: str, first_ns: int, now_ns: int) -> None:
        """It has a row in a step again, or for the first time, `first_ns` being when it first had."""
        self.is_away = False
        if self._queued_ns:
            self.record("queue", self._queued_ns, max(self._queued_ns, min(first_ns, now_ns)), worker=worker)
        self.came_to(worker, now_ns)
        self._queued_ns = 0

    def came_to(self, worker: str, now_ns: int) -> None:
        """It pauses no more: neither preempted nor on its way. `worker`: empty where that is not known."""
        if self._preempted_ns:
            self.record("preemption", self._preempted_ns, now_ns, mode=self._preemption_mode)
        if self._left_ns:
            of_move = {"from_worker": self._left_worker, "worker": worker, "reason": self._why_left}
            self.record("move", self._left_ns, now_ns, **of_move)
        self._preempted_ns = self._left_ns = 0

    # ---- steps ------------------------------------------------------------------------------------------------------

    def prefilled(
        self,
        sent_ns: int,
        now_ns: int,
        step: TraceContext | None,
        attributes: dict[str, Attribute],
        error: str = "",
    ) -> None:
        """Known tokens of it were computed, or were to be; `step`: the worker's span of that."""
        if not self.is_over:
            links = (step,) if step is not None else ()
            context = self.context.child()
            self._emit(Span("prefill", context, self.context, sent_ns, now_ns, attributes, links, error))

    def drawn(self, step: TraceContext | None, now_ns: int) -> int:
        """A token of an output came. How long after the one before, in ns; 0: it is the first, or nobody knows."""
        if step is not None and len(self.links) < MAX_DECODE_LINKS and (not self.links or self.links[-1] is not step):
            self.links.append(step)
        self._num_drawn += 1
        gap_ns = now_ns - self._last_token_ns if self._last_token_ns else 0
        self._last_token_ns = now_ns
        return gap_ns

    @property
    def has_enough(self) -> bool:
        """Whether further tokens of it need not be looked at."""
        return self._num_drawn >= MAX_DECODE_LINKS

    def ended(self, first_token_ns: int | None, now_ns: int, num_tokens: int) -> None:
        """Nothing of it is computed any more; `num_tokens`: of all outputs."""
        if self.is_over:
            return
        self.is_over = True
        if self._queued_ns:
            self.record("queue", self._queued_ns, now_ns)
        self.came_to("", now_ns)
        if first_token_ns is not None:
            attributes, links = own(num_tokens=num_tokens), tuple(self.links)
            self._emit(Span("decode", self.context.child(), self.context, first_token_ns, now_ns, attributes, links))
