"""Moments in the work of a device, to tell how long each part of a step took there."""

from __future__ import annotations

import torch


class DeviceMarks:
    """Marks of one step on a GPU's current stream. Marking costs the device nothing and waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Marks the moment when the device has done all work queued so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        self._events.append(event)

    def gaps_ns(self) -> list[int]:
        """From each mark to the next; after the device has passed the last one."""
        pairs = zip(self._events, self._events[1:], strict=False)
        return [round(first.elapsed_time(second) * 1e6) for first, second in pairs]
