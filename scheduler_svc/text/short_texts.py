"""Prompts that are prepared where they come in: so short that even the worst of them costs less than its call does.

A text process costs a request two hops and a wake-up, a quarter of all that a scheduler does for a short one. What it
is for, to be killed, is of no use where nothing can take long: token ids, and up to a kilobyte of text for a tokenizer
whose parts all take time that grows with the text, or little worse. A conversation is rendered by a program, its
model's template, which may do anything: it never comes here, however short.
"""

from __future__ import annotations

from collections.abc import Callable

from scheduler_svc.request_reader import parse, read_generate_request
from scheduler_svc.served_models import ServedModels
from scheduler_svc.text.request_checks import TextSettings
from scheduler_svc.text.request_text import PreparedText, RequestText

SHORT_BYTES = 1024  # of a request: 1.5 ms for the worst text that was found, 0.03 ms for a line of an ordinary one


class ShortTexts:
    """For one event loop."""

    def __init__(self, served_models: Callable[[], ServedModels], settings: TextSettings) -> None:
        self._served_models = served_models
        self._settings = settings

    def prepare(self, data: bytes) -> PreparedText | None:
        """As a text process would; None: it is for such a one. Raises RequestRefused."""
        if len(data) > SHORT_BYTES:
            return None
        request = parse(read_generate_request, data, "/octavo.v1.Inference/Generate")
        if request.HasField("messages"):
            return None
        model = self._served_models().resolve(request.model, request.model_fingerprint)
        has_text = request.HasField("prompt") or bool(request.sampling_params.bad_words)
        if has_text and not model.tokenizer.is_quick:
            return None
        return RequestText(model, self._settings).prepare(request)
