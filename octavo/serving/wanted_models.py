"""What the workers of this machine are to load, fetched before they start."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker_svc.config import WorkerConfig


def fetch_models(worker: WorkerConfig) -> str:
    """Fetches what the workers are to load and is not here: once, with its progress on this terminal. Gives the
    workers' own name for their model.

    Raises FetchError; what is neither here nor anywhere else is the worker's to say.
    """
    from octavo.models.fetch import available
    from octavo.models.hub_cache import TOKENIZER, served_name
    from octavo.models.resolve import ModelNotFound

    download_dir = worker.download_dir or None
    with contextlib.suppress(ModelNotFound):
        if worker.tokenizer:
            available(worker.tokenizer, load_format=TOKENIZER, download_dir=download_dir)
    with contextlib.suppress(ModelNotFound):
        path = available(worker.model, load_format=worker.load_format, download_dir=download_dir)
        return served_name(worker.model, path)
    return worker.model
