"""What is wrong with a record: one line for whoever wants to read it."""

from __future__ import annotations


class BadRecord(Exception):
    """It cannot be read, or not be played; the message says why."""
