"""`LLM`: the scheduler core in the caller's process, a worker beside it, and one call from prompts to outputs."""

from __future__ import annotations

import dataclasses
import queue
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from octavo.generation import Generation, RetryPolicy, build_request
from octavo.options import OptionError
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from scheduler_svc.tokenizer import Tokenizer

READY_TIMEOUT_S = 600.0
POLL_S = 0.02


class LLM:
    """A model to generate with, offline: everything is submitted at once, steps are kept in flight.

    Args:
        model: a folder, or a name that `octavo model fetch` knows.
        options: any option of `octavo serve`, by its Python name (`max_num_seqs=64`, `steps_in_flight=1`).

    Raises:
        OptionError: an unknown or impossible option.
        RuntimeError: the worker did not start; its own message is in it.
    """

    def __init__(self, model: str, **options: Any) -> None:
        import structlog

        from octavo import log
        from octavo.worker_process import WorkerProcess
        from scheduler_svc.config import SchedulerConfig
        from scheduler_svc.serving import Serving
        from worker_svc.config import WorkerConfig

        if not structlog.is_configured():
            log.configure(options.get("log_level", "warning"))
        worker_options = {"log_level": "warning", **options, "model": model}
        config = _build(WorkerConfig, worker_options, besides=SchedulerConfig)
        self._worker = WorkerProcess(config)
        scheduler_options = {
            name: value for name, value in options.items() if name not in ("port", "host", "tokenizer")
        }
        self._deliveries: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._serving = Serving(
            _build(SchedulerConfig, {**scheduler_options, "worker": (self._worker.address,)}, besides=WorkerConfig),
            self._deliveries.put,
        )
        self._serving.start()
        try:
            self._wait_until_ready()
        except BaseException:
            self.shutdown()
            raise

    def generate(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Outputs of all prompts, in their order.

        Args:
            prompts: one text or several; or `prompt_token_ids`: the ids of one prompt or of several.
            sampling_params: for all of them, or one each.
            use_tqdm: shows progress with tokens a second in and out.

        Raises:
            ValueError: a prompt or parameter that this model does not take; nothing is generated then.
        """
        requests = _requests(prompts, prompt_token_ids)
        params = _one_each(sampling_params, len(requests))
        generations = [
            Generation(
                build_request(text, parameters, prompt_token_ids=ids), RetryPolicy(retries=0), time.monotonic_ns()
            )
            for (text, ids), parameters in zip(requests, params, strict=True)
        ]
        return self._run(generations, use_tqdm)

    def _run(self, generations: list[Generation], use_tqdm: bool) -> list[RequestOutput]:
        from scheduler_svc.errors import QueueFull, RequestRefused

        engine, frontend = self._serving.engine, self._serving.frontend
        try:
            groups = [frontend.prepare(generation.request) for generation in generations]
        except RequestRefused as error:
            raise ValueError(str(error)) from error
        gathered = {
            group.request_id: _Gathered(generation) for group, generation in zip(groups, generations, strict=True)
        }
        unsent = list(reversed(groups))
        progress = _Progress(len(groups), use_tqdm)
        num_unfinished = len(groups)
        try:
            while num_unfinished:
                while unsent:
                    try:
                        engine.submit(unsent[-1])
                    except QueueFull:
                        break
                    sent = unsent.pop()
                    if (admission := sent.output.admission()) is not None:
                        gathered[sent.request_id].take(admission)
                for stream, response in self._next_delivery():
                    request = gathered.get(stream.group.request_id)
                    if request is not None and request.take(response):
                        num_unfinished -= 1
                        progress.finished(request.output)
        except BaseException:
            for group in groups:
                engine.abort_group(group)
            raise
        finally:
            progress.close()
        return [gathered[group.request_id].output for group in groups]

    def _next_delivery(self) -> list[Any]:
        """Waits for messages; notices when the worker that should make them is gone for good."""
        while True:
            try:
                return self._deliveries.get(timeout=1.0)
            except queue.Empty:
                self._worker.check()

    def get_tokenizer(self) -> Tokenizer:
        return self._model().tokenizer

    def set_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Encodes and decodes with another tokenizer from the next request on."""
        self._serving.pool.model = dataclasses.replace(self._model(), tokenizer=tokenizer)

    def statistics(self) -> dict[str, Any]:
        """Sums since the start over answered steps: counts, bytes, and nanoseconds by phase (`StepStatistics`)."""
        (worker,) = self._serving.engine.call(lambda: list(self._serving.engine.workers)).result()
        return dataclasses.asdict(worker.statistics)

    def shutdown(self) -> None:
        """Ends the worker. The object cannot be used afterwards."""
        self._serving.stop()
        self._worker.stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _model(self) -> Any:
        return self._serving.frontend.model()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not self._serving.is_ready:
            self._worker.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"the worker was not ready after {READY_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)


class _Gathered:
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
        self.output.seed, self.output.model, self.output.metrics = delta.seed, delta.model, delta.metrics
        self.output.finished = delta.finished
        return delta.finished


def _join(whole: CompletionOutput, part: CompletionOutput) -> None:
    whole.text += part.text
    cast(list[int], whole.token_ids).extend(part.token_ids)
    if part.logprobs:
        whole.logprobs = [*(whole.logprobs or []), *part.logprobs]
    whole.cumulative_logprob = part.cumulative_logprob
    whole.finish_reason, whole.stop_reason, whole.error = part.finish_reason, part.stop_reason, part.error


class _Progress:
    """A tqdm bar over requests, or nothing."""

    def __init__(self, num_requests: int, use_tqdm: bool) -> None:
        self._bar = None
        self._tokens_in = self._tokens_out = 0
        self._started = time.monotonic()
        if use_tqdm:
            from tqdm import tqdm

            self._bar = tqdm(total=num_requests, desc="requests", dynamic_ncols=True)

    def finished(self, output: RequestOutput) -> None:
        if self._bar is None:
            return
        self._tokens_in += output.metrics.num_prompt_tokens
        self._tokens_out += output.metrics.num_output_tokens
        seconds = time.monotonic() - self._started
        self._bar.set_postfix_str(
            f"in {self._tokens_in / seconds:.0f}, out {self._tokens_out / seconds:.0f} tokens/s", refresh=False
        )
        self._bar.update()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _build(cls: type, options: dict[str, Any], besides: type) -> Any:
    """The options of one dataclass out of those of both. Raises OptionError for a name that neither knows."""
    own, other = ({field.name for field in dataclasses.fields(each)} for each in (cls, besides))
    if unknown := options.keys() - own - other:
        raise OptionError(f"no option is called {min(unknown)}")
    try:
        return cls(**{name: value for name, value in options.items() if name in own})
    except ValueError as error:
        raise OptionError(str(error)) from error


def _requests(prompts: Any, prompt_token_ids: Any) -> list[tuple[str | None, list[int] | None]]:
    if (prompts is None) == (prompt_token_ids is None):
        raise ValueError("give either prompts or prompt_token_ids")
    if prompts is not None:
        return [(text, None) for text in ([prompts] if isinstance(prompts, str) else prompts)]
    if len(prompt_token_ids) and not isinstance(prompt_token_ids[0], Sequence):
        prompt_token_ids = [prompt_token_ids]
    return [(None, list(ids)) for ids in prompt_token_ids]


def _one_each(sampling_params: Any, count: int) -> list[SamplingParams]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * count
    if len(sampling_params) != count:
        raise ValueError(f"{len(sampling_params)} sampling_params for {count} prompts")
    return list(sampling_params)
