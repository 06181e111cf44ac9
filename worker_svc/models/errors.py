"""What is wrong with a model."""

from __future__ import annotations


class ModelError(Exception):
    """A model cannot be used; the message is one line that says why and names the file, key or tensor."""
