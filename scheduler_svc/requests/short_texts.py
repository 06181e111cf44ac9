"""Prompts that are prepared in the process they come to: so short that even the worst of them costs less than its call.

A text process costs a request two hops and a wake-up, a quarter of all that a scheduler does for a short one. Its use
is that it can be killed, which nothing needs that cannot take long: token ids, and up to a kilobyte of text for a
tokenizer whose parts all take time that grows about with the text. A conversation is rendered by its model's template,
a program that may do anything: it never comes here, however short.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from scheduler_svc.models.served_models import ServedModels
from scheduler_svc.requests.request_checks import TextSettings
from scheduler_svc.requests.request_reader import parse, read_generate_request
from scheduler_svc.requests.request_text import PreparedText, RequestText

SHORT_BYTES = 1024  # of a request: at most 1.7 ms, and 0.05 ms for an ordinary line (`benchmarks/short_texts.py`)
SHARE = 0.2  # of the event loop's time that all of them together may take,
BURST_S = 0.01  # and at once; more of them go to text processes like any other request


class ShortTexts:
    """For one event loop.

    `clock`: seconds, rising. `cpu_clock`: those that this thread has computed.
    """

    def __init__(
        self,
        served_models: Callable[[], ServedModels],
        settings: TextSettings,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._served_models = served_models
        self._settings = settings
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._left_s = BURST_S  # that may be spent now
        self._spent_s = clock()  # when that was so

    def prepare(self, data: bytes) -> PreparedText | None:
        """As a text process would; None: it is for such a one. Raises RequestRefused."""
        if len(data) > SHORT_BYTES or not self._may_spend():
            return None
        started_s = self._cpu_clock()
        try:
            return self._prepare(data)
        finally:
            self._left_s -= self._cpu_clock() - started_s

    def _may_spend(self) -> bool:
        now_s = self._clock()
        self._left_s = min(BURST_S, self._left_s + SHARE * (now_s - self._spent_s))
        self._spent_s = now_s
        return self._left_s > 0

    def _prepare(self, data: bytes) -> PreparedText | None:
        request = parse(read_generate_request, data, "/octavo.v1.Inference/Generate")
        if request.HasField("messages"):
            return None
        model = self._served_models().resolve(request.model, request.model_fingerprint)
        has_text = request.HasField("prompt") or bool(request.sampling_params.bad_words)
        if has_text and not model.tokenizer.is_quick:
            return None
        return RequestText(model, self._settings).prepare(request)
