"""Quantised weights that a thread writes beside what a test does."""

from __future__ import annotations

import threading

from worker_svc.models.products.quantized_store import KEEPING


def wait_until_kept() -> None:
    """Until all files of this process are written."""
    for thread in threading.enumerate():
        if thread.name == KEEPING:
            thread.join()
