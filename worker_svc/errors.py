"""What can go wrong in a worker, one class a kind of answer; every message is one line that names the values."""

from __future__ import annotations


class ProtocolError(Exception):
    """A step or a metadata message contradicts the mirror, or asks for what this worker cannot do."""


class StartupError(Exception):
    """The worker cannot start as it is configured; the message is what the user reads."""


class GroupError(StartupError):
    """All ranks of a parallel group raise it together, and need not tell each other."""
