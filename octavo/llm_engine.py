"""`LLMEngine`: requests in, one step at a time, under the caller's control."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from octavo.embedded import Embedded, GatheredOutput
from octavo.generation import Generation, RetryPolicy, build_request
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from scheduler_svc.output_processor import Delivery
    from scheduler_svc.served_model import ServedModel


class LLMEngine:
    """The scheduler core without a loop: nothing happens between calls of `step`, on no other thread.

    Takes the arguments of `LLM`. Steps are in lock-step: `step` waits for the answer to what it sent.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self._unfinished: dict[str, GatheredOutput] = {}
        self._changed: dict[str, RequestOutput] = {}
        self._embedded = Embedded(model, {**options, "steps_in_flight": 1}, self._take, runs_itself=False)

    def add_request(
        self,
        request_id: str,
        prompt: str | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        priority: int | None = None,
    ) -> None:
        """Queues a request for the next step.

        Raises:
            ValueError: a prompt or parameter that this model does not take, a live id, or a full queue.
        """
        from scheduler_svc.errors import RequestRefused

        request = build_request(
            prompt, sampling_params, prompt_token_ids=prompt_token_ids, request_id=request_id, priority=priority
        )
        try:
            group = self._embedded.frontend.prepare(request)
            self._embedded.engine.submit(group)
        except RequestRefused as error:
            raise ValueError(str(error)) from error
        gathered = GatheredOutput(Generation(request, RetryPolicy(retries=0), time.monotonic_ns()))
        gathered.take(group.output.admission())
        self._unfinished[request_id] = gathered

    def abort_request(self, request_id: str) -> None:
        """Ends a request; `step` gives it back once more, with finish reason "abort". Unknown ids are ignored."""
        self._embedded.engine.abort(request_id)

    def step(self) -> list[RequestOutput]:
        """One round of schedule and answer: the requests that it brought on, each with all it has so far."""
        while self._unfinished and not self._changed:
            self._embedded.engine.send_steps()
            self._embedded.take_turn()
            self._embedded.worker.check()
        changed, self._changed = list(self._changed.values()), {}
        return changed

    def has_unfinished_requests(self) -> bool:
        return bool(self._unfinished)

    def get_num_unfinished_requests(self) -> int:
        return len(self._unfinished)

    def get_model_config(self) -> ServedModel:
        """Name, architecture, lengths and vocabulary of the model."""
        return self._embedded.model

    def shutdown(self) -> None:
        """Ends the worker. The object cannot be used afterwards."""
        self._embedded.shutdown()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _take(self, delivery: Delivery) -> None:
        for stream, response in delivery:
            request_id = stream.group.request_id
            if (gathered := self._unfinished.get(request_id)) is not None:
                if gathered.take(response):
                    del self._unfinished[request_id]
                self._changed[request_id] = gathered.output
