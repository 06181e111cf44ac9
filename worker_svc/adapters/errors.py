"""Why an adapter is not loaded: one line that names what is wrong."""

from __future__ import annotations


class AdapterError(Exception):
    """An adapter's folder is damaged, is for another model, or asks for what is not computed."""
