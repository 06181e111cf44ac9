"""`LLM`: the scheduler core in the caller's process, a worker beside it, and one call from prompts to outputs."""

from __future__ import annotations

import contextlib
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from octavo.batch import Batch, Callers
from octavo.embedded import Embedded
from octavo.gathered_output import GatheredOutput
from octavo.generation import Generation
from octavo.outputs import CompletionOutput, RequestMetrics, RequestOutput
from octavo.progress import Progress
from octavo.prompts import Prompt, read_prompts
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from scheduler_svc.errors import InvalidRequest
    from scheduler_svc.text.tokenizer import Tokenizer


class LLM:
    """A model to generate with, offline: everything is submitted at once, steps are kept in flight.

    Threads may share one: their calls run together, each gets its own outputs, and what ends one call leaves the others
    alone. The worker ends with `shutdown`, at the end of a `with`, when the object is garbage-collected, or with the
    process.

    Args:
        model: a folder, or a name that `octavo model fetch` knows.
        options: any option of `octavo serve` that is not about sockets, by its Python name (`max_num_seqs=64`,
            `steps_in_flight=1`); text is read as the command line reads it, and None is the default. Besides:
            `seed` makes runs equal: request number k of this object, from 0 and over all calls, gets the seed that
            `octavo.request_seeds` derives from both, unless its `SamplingParams` have one; without it seeds are drawn.
            `log_level` is "warning" here, and `disable_log_stats` True: False shows throughput every 5 seconds.

    Raises:
        OptionError: an unknown or impossible option.
        WorkerEnded: the worker did not start; its own message is in it.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self._callers = Callers()
        self._embedded = Embedded(model, options, self._callers.deliver)
        weakref.finalize(self, self._embedded.let_go)

    def generate(
        self,
        prompts: Any = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Any = None,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[RequestOutput]:
        """Outputs of all prompts, in their order.

        A prompt that cannot be served, too long above all, ends alone: its outputs have finish reason "length" where it
        is too long and "error" otherwise, no tokens, and say why in `error`.

        Args:
            prompts: one or several, each a text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`.
            sampling_params: for all of them, or one each. Without `max_tokens` an output ends where the model ends it,
                or at the model's length: that is the default here as over the network (16 in other libraries).
            prompt_token_ids: the ids of one prompt or of several, in place of `prompts`.
            use_tqdm: shows a bar over tokens, with tokens a second in and out; or a function that makes one as `tqdm`.

        Raises:
            ValueError: what is no prompt (`InvalidPrompt`), or parameters that this model does not take; nothing is
                generated then.
            WorkerEnded: the worker is gone.
        """
        asked = read_prompts(prompts, prompt_token_ids)
        params = _one_each(sampling_params, len(asked))
        self._embedded.check()
        seeds = self._embedded.seeds.take(len(asked))
        batch = Batch(self._embedded, self._callers)
        outputs = [self._prepare(batch, *each) for each in zip(asked, params, seeds, strict=True)]
        _log_refused(outputs)
        progress = Progress(batch.groups, use_tqdm)
        with contextlib.closing(progress):
            batch.run(progress)
        return outputs

    def _prepare(self, batch: Batch, prompt: Prompt, params: SamplingParams, seed: int) -> RequestOutput:
        """Adds a request to the batch; its output, which is filled as it runs, or final where it was refused."""
        from scheduler_svc.errors import FieldViolation, InvalidRequest, RequestRefused

        generation = self._embedded.generation(prompt, params, seed, stream=False)
        try:
            group = self._embedded.frontend.prepare(generation.request)
            if group.num_prompt_tokens > self._embedded.max_waiting_tokens:
                limit = f"at most {self._embedded.max_waiting_tokens} may wait (max_waiting_tokens)"
                what = f"{group.num_prompt_tokens} tokens are too many: {limit}"
                raise InvalidRequest(FieldViolation("prompt", what), is_too_long=True)
        except InvalidRequest as refusal:
            if not self._embedded.takes_other_prompts(generation.request):
                raise ValueError(str(refusal)) from refusal
            return _refused(generation, prompt, params.n, refusal)
        except RequestRefused as refusal:
            raise ValueError(str(refusal)) from refusal
        token_ids = group.sequences[0].token_ids[: group.num_prompt_tokens].tolist()
        gathered = GatheredOutput(generation, prompt.text, token_ids)
        batch.add(group, gathered)
        return gathered.output

    def get_tokenizer(self) -> Tokenizer:
        """The scheduler's own, which every prompt goes through; it is not a `transformers` tokenizer."""
        return self._embedded.model.tokenizer

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Encodes and decodes with another tokenizer from the next request on.

        Args:
            tokenizer: what `get_tokenizer` of any `LLM` gives, a folder that has one, or a tokenizer of `transformers`.

        Raises:
            ValueError: none of these, or one with tokens that the model has not.
        """
        tokenizer, model = _read_tokenizer(tokenizer), self._embedded.model
        if tokenizer.vocab_size > model.vocab_size:
            raise ValueError(f"the tokenizer has {tokenizer.vocab_size} tokens, the model only {model.vocab_size}")
        self._embedded.use_tokenizer(tokenizer)

    def reset_prefix_cache(self) -> int:
        """Lets the worker forget what prompts it has computed; how many cache blocks could be found before."""
        self._embedded.check()
        return self._embedded.engine.flush_prefix_cache().result()

    def worker_peak_bytes(self) -> int:
        """The most memory that the worker process has had at once; 0 if unknown."""
        return self._embedded.worker.peak_bytes()

    def statistics(self) -> dict[str, Any]:
        """Sums since the start over answered steps: counts, bytes, and nanoseconds by phase (`StepStatistics`)."""
        return self._embedded.statistics()

    def shutdown(self) -> None:
        """Ends the worker, and with "abort" what other threads still generate. The object cannot be used afterwards."""
        self._embedded.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LLM holds threads and a worker process and cannot be pickled: make it where it is used")


def _one_each(sampling_params: Any, count: int) -> list[SamplingParams]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * count
    is_list = isinstance(sampling_params, Iterable) and not isinstance(sampling_params, (str, Mapping))
    given = list(sampling_params) if is_list else [sampling_params]
    for params in given:
        if not isinstance(params, SamplingParams):
            got = type(params).__name__
            raise ValueError(f"sampling_params: got {got}; accepted: one SamplingParams, or one for each prompt")
    if len(given) != count:
        raise ValueError(f"{len(given)} sampling_params for {count} prompts")
    return given


def _refused(generation: Generation, prompt: Prompt, num_outputs: int, refusal: InvalidRequest) -> RequestOutput:
    """The outputs of a prompt that ended before it began."""
    request, now_ns = generation.request, time.monotonic_ns()
    reason = "length" if refusal.is_too_long else "error"
    outputs = [
        CompletionOutput(index, token_ids=[], finish_reason=reason, error=str(refusal)) for index in range(num_outputs)
    ]
    return RequestOutput(
        request.request_id,
        prompt.text,
        prompt.token_ids or [],
        outputs,
        finished=True,
        metrics=RequestMetrics(arrival_ns=now_ns, finished_ns=now_ns),
        seed=request.sampling_params.seed,
    )


def _log_refused(outputs: list[RequestOutput]) -> None:
    """One line for those that ended before they began. It does not quote them: prompts do not belong into a log."""
    refused = [number for number, output in enumerate(outputs) if output.finished]
    if not refused:
        return
    import structlog

    too_long = sum(outputs[number].outputs[0].finish_reason == "length" for number in refused)
    log = structlog.get_logger()
    log.warning("prompts refused", count=len(refused), too_long=too_long, first=refused[0], why="see outputs[0].error")


def _read_tokenizer(given: Any) -> Tokenizer:
    from scheduler_svc.text.tokenizer import Tokenizer

    if isinstance(given, Tokenizer):
        return given
    if isinstance(given, (str, Path)):
        return Tokenizer.from_folder(given)
    if not hasattr(given, "save_pretrained"):
        accepted = "one of Octavo or of transformers, or a folder"
        raise ValueError(f"tokenizer: got {type(given).__name__}; accepted: {accepted}")
    with tempfile.TemporaryDirectory() as folder:
        given.save_pretrained(folder)
        return Tokenizer.from_folder(folder)
