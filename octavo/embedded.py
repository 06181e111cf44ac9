"""The scheduler core in the caller's process with a worker beside it: what `LLM` and `LLMEngine` share."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from octavo.generation import Generation
from octavo.options import OptionError
from octavo.outputs import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from scheduler_svc.output_processor import Delivery
    from scheduler_svc.served_model import ServedModel

READY_TIMEOUT_S = 600.0
POLL_S = 0.01
PATIENCE_TOKENS = 512  # half a millisecond of work, by which nothing else is held up for long


class Embedded:
    """Starts a worker process and everything that `octavo scheduler` has but its sockets.

    Args:
        model: a folder, or a name that `octavo model fetch` knows.
        options: options of `octavo serve` by their Python names.
        deliver: gets messages, on the output thread, or in `take_turn` without threads.
        runs_itself: False leaves the step loop to the caller, who calls `take_turn` and `engine.send_steps`.

    Raises:
        OptionError: an unknown or impossible option.
        RuntimeError: the worker did not start; its own message is in it.
    """

    def __init__(
        self, model: str, options: dict[str, Any], deliver: Callable[[Delivery], None], *, runs_itself: bool = True
    ) -> None:
        from octavo.worker_process import WorkerProcess
        from scheduler_svc.config import SchedulerConfig
        from worker_svc.config import WorkerConfig

        options = {"log_level": "warning", **options, "model": model}
        worker_config = _build(WorkerConfig, options, besides=SchedulerConfig)
        scheduler_config = _build(SchedulerConfig, options, besides=WorkerConfig)
        self.worker = WorkerProcess(worker_config)
        # What takes time comes after: the worker imports torch meanwhile.
        import structlog

        from octavo import log
        from scheduler_svc.output_processor import OutputProcessor
        from scheduler_svc.serving import Serving

        if not structlog.is_configured():
            log.configure(scheduler_config.log_level)
        scheduler_config = dataclasses.replace(
            scheduler_config,
            worker=(self.worker.address,),
            tokenizer=None,  # that of the worker, which finds it by name, too
        )
        self._outputs = OutputProcessor(deliver)
        self.serving = Serving(scheduler_config, self._outputs)
        self.engine, self.frontend = self.serving.engine, self.serving.frontend
        self._runs_itself = runs_itself
        if runs_itself:
            self.serving.start()
        else:
            self.serving.pool.start()
        try:
            self._wait_until_ready()
        except BaseException:
            self.shutdown()
            raise

    @property
    def model(self) -> ServedModel:
        return self.frontend.model()

    @model.setter
    def model(self, model: ServedModel) -> None:
        self.serving.pool.model = model

    @property
    def reads_along(self) -> bool:
        """Whether outputs are made as their tokens come; False: of many tokens together, in far less time."""
        return self._outputs.patience == 1

    @reads_along.setter
    def reads_along(self, reads_along: bool) -> None:
        self._outputs.patience = 1 if reads_along else PATIENCE_TOKENS

    def take_turn(self) -> None:
        """Takes what has happened and delivers what it gave; for an engine that does not run itself."""
        self.engine.take_events()
        self._outputs.run_pending()

    def statistics(self) -> dict[str, Any]:
        """Sums since the start over answered steps (`StepStatistics`)."""
        return dataclasses.asdict(self.engine.workers[0].statistics)

    def shutdown(self) -> None:
        self.serving.stop()
        self.worker.stop()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not self.serving.is_ready:
            self.worker.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"the worker was not ready after {READY_TIMEOUT_S:.0f} s")
            if self._runs_itself:
                time.sleep(POLL_S)
            else:
                self.take_turn()


class GatheredOutput:
    """One request's deltas put together."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        request = generation.request
        self.output = RequestOutput(request.request_id, prompt=request.prompt or None)
        self.output.prompt_token_ids = list(request.prompt_token_ids.ids)

    def take(self, response: Any) -> bool:
        """Adds one message; True with the last."""
        delta = self._generation.receive(response, time.monotonic_ns())
        if delta is None:
            return False
        for part in delta.outputs:
            while len(self.output.outputs) <= part.index:
                self.output.outputs.append(CompletionOutput(len(self.output.outputs), token_ids=[]))
            _join(self.output.outputs[part.index], part)
        self.output.prompt_logprobs = delta.prompt_logprobs or self.output.prompt_logprobs
        self.output.seed, self.output.model, self.output.metrics = delta.seed, delta.model, delta.metrics
        self.output.finished = delta.finished
        return delta.finished

    def note_times(self, token_times_ns: list[int]) -> None:
        """When tokens came, of a request whose only message comes at its end."""
        if token_times_ns:
            self.output.metrics.token_times_ns = token_times_ns
            self.output.metrics.first_token_ns = token_times_ns[0]


def _join(whole: CompletionOutput, part: CompletionOutput) -> None:
    whole.text += part.text
    cast(list[int], whole.token_ids).extend(part.token_ids)
    if part.logprobs:
        whole.logprobs = [*(whole.logprobs or []), *part.logprobs]
    whole.cumulative_logprob, whole.score = part.cumulative_logprob, part.score
    whole.finish_reason, whole.stop_reason, whole.error = part.finish_reason, part.stop_reason, part.error


def _build(cls: type, options: dict[str, Any], besides: type) -> Any:
    """The options of one dataclass out of those of both. Raises OptionError for a name that neither knows, and for a
    value that is not accepted."""
    own, other = ({field.name for field in dataclasses.fields(each)} for each in (cls, besides))
    if unknown := options.keys() - own - other:
        raise OptionError(f"no option is called {min(unknown)}")
    for field in dataclasses.fields(cls):
        choices, value = field.metadata["choices"], options.get(field.name, field.default)
        if choices and value not in choices:
            raise OptionError(f"{field.name} is {value!r}, not one of: {', '.join(choices)}")
    try:
        return cls(**{name: value for name, value in options.items() if name in own})
    except ValueError as error:
        raise OptionError(str(error)) from error
