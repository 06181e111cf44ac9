"""What the client's clock saw of one request. Times are seconds from the start of its run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Record:
    """`times_s` are of deliveries that brought tokens, `output_tokens` by the server's own count where it tells one."""

    planned_s: float
    sent_s: float = 0.0
    end_s: float = 0.0
    times_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None  # its kind: a gRPC status, "HTTP 429", "timeout"
    reason: str = ""  # the server's own words for it, where it gave any

    @property
    def first_s(self) -> float | None:
        """When the first tokens came."""
        return self.times_s[0] if self.times_s else None

    @property
    def late_s(self) -> float:
        """Sent so long after the plan."""
        return self.sent_s - self.planned_s

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first token."""
        return self.times_s[0] - self.sent_s if self.times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None where there is only one."""
        if self.output_tokens < 2 or len(self.times_s) < 2:
            return None
        return (self.times_s[-1] - self.times_s[0]) / (self.output_tokens - 1)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, to the microsecond; gaps between deliveries are left out."""
        numbers = {"planned_s": self.planned_s, "sent_s": self.sent_s, "first_s": self.first_s, "end_s": self.end_s}
        return {
            **{name: None if value is None else round(value, 6) for name, value in numbers.items()},
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "error": self.error,
        }
