"""`LLMEngine`: requests in, one step at a time, under the caller's control."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from octavo.arguments.asked import Asked
from octavo.arguments.one_each import one_each
from octavo.arguments.prompts import PromptLike, read_prompt
from octavo.embedded.embedded import Embedded
from octavo.embedded.gathered_output import GatheredOutput
from octavo.engine_args import EngineArgs
from octavo.errors import InvalidPrompt
from octavo.lora_request import LoRARequest
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.shared.options import OptionError

if TYPE_CHECKING:
    from scheduler_svc.models.served_model import ServedModel
    from scheduler_svc.output.output_processor import Delivery


class LLMEngine:
    """The scheduler core without a loop: nothing happens between calls of `step`, on no other thread.

    Takes the arguments of `LLM`, with the same meaning, `seed` included. Steps are in lock-step: `step` waits for the
    answer to what it sent. One thread at a time may use it: a call during another thread's raises RuntimeError.

    >>> engine = LLMEngine("smollm2-135m-instruct")
    >>> engine.add_request("first", "The sea is", SamplingParams(max_tokens=2, ignore_eos=True))
    >>> while engine.has_unfinished_requests():
    ...     print([(output.request_id, output.finished) for output in engine.step()])
    [('first', False)]
    [('first', True)]
    """

    def __init__(self, model: str, **options: Any) -> None:
        if options.get("steps_in_flight") not in (None, 1, "1"):
            raise OptionError(f"steps_in_flight: {options['steps_in_flight']!r} is not 1, the only one for LLMEngine")
        self._requests = _Requests()
        self._in_use = threading.Lock()
        self._embedded = Embedded(model, {**options, "steps_in_flight": 1}, self._requests.take, runs_itself=False)
        weakref.finalize(self, self._embedded.let_go)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLMEngine:
        """An engine with this model and these options."""
        return cls(engine_args.model, **engine_args.options)

    def add_request(
        self,
        request_id: str,
        prompt: PromptLike | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        prompt_token_ids: PromptLike | None = None,
        lora_request: LoRARequest | None = None,
        priority: int | None = None,
    ) -> None:
        """Queues a request for the next step.

        Args:
            request_id: of the caller's choice and not empty, for `abort_request` and in outputs.
            prompt: a text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`.
            sampling_params: see `LLM.generate`.
            prompt_token_ids: in place of `prompt`.
            lora_request: the adapter, which is loaded before this returns.
            priority: lower first, with `scheduling_policy="priority"`.

        Raises:
            ValueError: a prompt or parameter that this model does not take, no id or a live one, or a full queue.
        """
        from scheduler_svc.errors import RequestRefused

        if not request_id:  # one that is made up for it would be known to nobody
            raise ValueError("request_id is empty; outputs are told apart by it")
        if (prompt is None) == (prompt_token_ids is None):
            raise InvalidPrompt("give either prompt or prompt_token_ids")
        given = read_prompt({"prompt_token_ids": prompt_token_ids} if prompt is None else prompt)
        (params,) = one_each(sampling_params, SamplingParams, "sampling_params", 1)
        (lora,) = one_each(lora_request, LoRARequest, "lora_request", 1)
        with self._alone():
            self._embedded.load_adapters([lora])
            (seed,) = self._embedded.seeds.take(1)
            asked = Asked("prompt", given, params or SamplingParams(), lora, priority)
            generation = self._embedded.generation(asked, seed, request_id=request_id)
            try:
                group = self._embedded.frontend.prepare(generation.request)
                self._embedded.submit(group)
            except RequestRefused as error:
                raise ValueError(str(error)) from error
            token_ids = group.sequences[0].token_ids[: group.num_prompt_tokens].tolist()
            gathered = GatheredOutput(generation, given.text, token_ids, lora)
            gathered.take(group.output.admission())
            self._requests.unfinished[request_id] = gathered

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """Ends requests; `step` gives each back once more, with finish reason "abort". Unknown ids are ignored."""
        with self._alone():
            for each in [request_id] if isinstance(request_id, str) else request_id:
                self._embedded.engine.abort(each)

    def unload_adapter(self, lora_name: str) -> None:
        """See `LLM.unload_adapter`. Takes the steps that requests need which still use it: the next `step` gives their
        outputs."""
        with self._alone():
            self._embedded.unload_adapter(lora_name)

    def step(self) -> list[RequestOutput]:
        """One round of schedule and answer: the requests that it brought on, each with all it has so far.

        What is returned stays as it is; the next step gives new objects.
        """
        requests = self._requests
        with self._alone():
            while requests.unfinished and not requests.changed:
                self._embedded.send_steps()
                self._embedded.take_turn()
                self._embedded.worker.check()
            changed, requests.changed = requests.changed, {}
            return [gathered.snapshot() for gathered in changed.values()]

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Raises what keeps a call from being made: the end of the engine, or another thread in a call."""
        self._embedded.check()
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError(
                "another thread is in a call of this LLMEngine, which takes one at a time; LLM takes many"
            )
        try:
            yield
        finally:
            self._in_use.release()

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do."""
        return bool(self._requests.unfinished)

    def get_num_unfinished_requests(self) -> int:
        """Requests that were added and whose last output `step` has not returned yet."""
        return len(self._requests.unfinished)

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

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LLMEngine holds a worker process and cannot be pickled: make it where it is used")


class _Requests:
    """What has been added and has not ended, and what a step changed. Apart from the engine, which threads must not
    hold: nobody could let go of it then."""

    def __init__(self) -> None:
        self.unfinished: dict[str, GatheredOutput] = {}
        self.changed: dict[str, GatheredOutput] = {}

    def take(self, delivery: Delivery) -> None:
        for stream, response in delivery:
            request_id = stream.group.request_id
            if (gathered := self.unfinished.get(request_id)) is not None:
                if gathered.take(response):
                    del self.unfinished[request_id]
                self.changed[request_id] = gathered
