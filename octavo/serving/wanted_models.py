"""What the workers of this machine are to load, fetched before they start."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker_svc.config import WorkerConfig


def fetch_models(worker: WorkerConfig) -> None:
    """Fetches what the workers are to load and is not here: once, with its progress on this terminal.

    Raises FetchError; what is neither here nor anywhere else is the worker's to say.
    """
    from octavo.models.fetch import available
    from octavo.models.hub_cache import TOKENIZER
    from octavo.models.resolve import ModelNotFound

    for name, load_format in ((worker.model, worker.load_format), (worker.tokenizer, TOKENIZER)):
        with contextlib.suppress(ModelNotFound):
            if name:
                available(name, load_format=load_format, download_dir=worker.download_dir or None)
