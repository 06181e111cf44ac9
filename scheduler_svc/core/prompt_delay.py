"""How long prompts wait without chunked prefill, so that several queue up and one step computes them together."""

from __future__ import annotations

from scheduler_svc.core.step_plan import ScheduledRows


class PromptDelay:
    """Measures steps of prompts, one at a time, from being sent to being answered. Reads no clock.

    Args:
        factor: the earliest prompt waits until it has waited so many times as long as the last measured step took.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._took_ns = 0
        self._measured: ScheduledRows | None = None
        self._sent_ns = 0
        self._has_ended = False

    def sent(self, rows: ScheduledRows, now_ns: int) -> None:
        """A step of prompts is on its way."""
        if self._measured is None:
            self._measured, self._sent_ns = rows, now_ns

    def ended(self, rows: ScheduledRows) -> None:
        """A step, of whatever kind, was answered or has failed; the next look at the time says when."""
        self._has_ended |= rows is self._measured

    def look(self, now_ns: int) -> None:
        """To be called by every step that is made, for an answer that came since the last."""
        if self._has_ended:
            self._took_ns = now_ns - self._sent_ns
            self._measured, self._has_ended = None, False

    def is_over(self, earliest_ns: int, now_ns: int) -> bool:
        """Whether a prompt that arrived at `earliest_ns` has waited long enough."""
        return now_ns - earliest_ns >= self._factor * self._took_ns
