"""`LLM`: the scheduler core in the caller's process, a worker beside it, and one call from prompts to outputs."""

from __future__ import annotations

import dataclasses
import queue
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from octavo.embedded import POLL_S, Embedded, GatheredOutput
from octavo.generation import Generation, RetryPolicy, build_request
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from scheduler_svc.output_processor import Delivery
    from scheduler_svc.tokenizer import Tokenizer

CHECK_S = 1.0  # between two looks whether the worker is there


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
        self._deliveries: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        self._embedded = Embedded(model, options, self._deliveries.put)

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
                build_request(text, parameters, prompt_token_ids=ids, stream=False),
                RetryPolicy(retries=0),
                time.monotonic_ns(),
            )
            for (text, ids), parameters in zip(requests, params, strict=True)
        ]
        return self._run(generations, use_tqdm)

    def _run(self, generations: list[Generation], use_tqdm: bool) -> list[RequestOutput]:
        from scheduler_svc.errors import QueueFull, RequestRefused

        engine, frontend = self._embedded.engine, self._embedded.frontend
        try:
            groups = [frontend.prepare(generation.request) for generation in generations]
        except RequestRefused as error:
            raise ValueError(str(error)) from error
        gathered = {
            group.request_id: GatheredOutput(generation) for group, generation in zip(groups, generations, strict=True)
        }
        self._embedded.reads_along = any(group.sampling_params.stop for group in groups)
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
                    unsent.pop()
                for stream, response in self._next_delivery(POLL_S if unsent else CHECK_S):
                    request = gathered.get(stream.group.request_id)
                    if request is not None and request.take(response):
                        request.note_times(stream.token_times_ns)
                        num_unfinished -= 1
                        progress.finished(request.output)
        except BaseException:
            for group in groups:
                engine.abort_group(group)
            raise
        finally:
            progress.close()
        return [gathered[group.request_id].output for group in groups]

    def _next_delivery(self, timeout_s: float) -> Delivery:
        """Waits for messages, one for each request, or for so long; notices when the worker is gone for good."""
        try:
            return self._deliveries.get(timeout=timeout_s)
        except queue.Empty:
            self._embedded.worker.check()
            return []

    def get_tokenizer(self) -> Tokenizer:
        return self._embedded.model.tokenizer

    def set_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Encodes and decodes with another tokenizer from the next request on."""
        self._embedded.model = dataclasses.replace(self._embedded.model, tokenizer=tokenizer)

    def reset_prefix_cache(self) -> int:
        """Lets the worker forget what prompts it has computed; how many cache blocks could be found before."""
        return self._embedded.engine.flush_prefix_cache()

    def worker_peak_bytes(self) -> int:
        """The most memory that the worker process has had at once; 0 if unknown."""
        return self._embedded.worker.peak_bytes()

    def statistics(self) -> dict[str, Any]:
        """Sums since the start over answered steps: counts, bytes, and nanoseconds by phase (`StepStatistics`)."""
        return self._embedded.statistics()

    def shutdown(self) -> None:
        """Ends the worker. The object cannot be used afterwards."""
        self._embedded.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()


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
