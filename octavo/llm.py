"""`LLM`: the scheduler core in the caller's process, a worker beside it, and one call from prompts to outputs."""

from __future__ import annotations

import contextlib
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from octavo.arguments.asked import Asked
from octavo.arguments.conversations import Conversation, ConversationLike, read_conversations
from octavo.arguments.one_each import one_each
from octavo.arguments.prompts import Prompt, PromptLike, read_prompts, shown
from octavo.arguments.vllm_arguments import why_missing
from octavo.beam_search import BeamSearchOutput, beams_of
from octavo.embedded.batch import Batch, Callers
from octavo.embedded.embedded import Embedded
from octavo.embedded.preparing import log_refused, prepare
from octavo.embedded.progress import Progress
from octavo.engine_args import EngineArgs
from octavo.lora_request import LoRARequest
from octavo.outputs import RequestOutput
from octavo.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from scheduler_svc.requests.frontend import Frontend
    from scheduler_svc.text.chat_template import ChatTemplate
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
            `octavo.embedded.request_seeds` derives from both, unless its `SamplingParams` have one; without it seeds
            are drawn.
            `log_level` is "warning" here, and `disable_log_stats` True: False shows throughput every 5 seconds.

    Raises:
        OptionError: an unknown or impossible option.
        WorkerEnded: the worker did not start; its own message is in it.

    >>> llm = LLM("smollm2-135m-instruct", seed=0)
    >>> params = SamplingParams(temperature=0.8, max_tokens=8, ignore_eos=True)
    >>> outputs = llm.generate(["The sea is", [1, 2, 3]], params, use_tqdm=False)
    >>> [len(output.outputs[0].token_ids) for output in outputs]
    [8, 8]
    """

    def __init__(self, model: str, **options: Any) -> None:
        self._callers = Callers()
        self._embedded = Embedded(model, options, self._callers.deliver)
        weakref.finalize(self, self._embedded.let_go)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """An `LLM` with this model and these options."""
        return cls(engine_args.model, **engine_args.options)

    def generate(
        self,
        prompts: PromptLike | Iterable[PromptLike] | None = None,
        sampling_params: SamplingParams | Iterable[SamplingParams | None] | None = None,
        prompt_token_ids: PromptLike | Iterable[PromptLike] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Iterable[LoRARequest | None] | None = None,
        *,
        priority: int | Iterable[int | None] | None = None,
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
            lora_request: the adapter for all of them, or one each (None: none), which is loaded before anything runs.
            priority: lower first, for all of them or one each; with `scheduling_policy="priority"`.

        Raises:
            ValueError: what is no prompt (`InvalidPrompt`), or parameters that this model does not take, with the
                argument, index and field; nothing is generated then.
            WorkerEnded: the worker is gone.
        """
        asked = read_prompts(prompts, prompt_token_ids)
        return self._run("prompts", asked, sampling_params, lora_request, priority, use_tqdm)

    def chat(
        self,
        messages: ConversationLike | Sequence[ConversationLike],
        sampling_params: SamplingParams | Iterable[SamplingParams | None] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Iterable[LoRARequest | None] | None = None,
        *,
        priority: int | Iterable[int | None] | None = None,
        chat_template: str | ChatTemplate | None = None,
        chat_template_content_format: str = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
    ) -> list[RequestOutput]:
        """What the model answers to one conversation or to each of several, in their order.

        Args:
            messages: `{"role": "user", "content": text}` and so on, or a list of such lists.
            chat_template: in place of the model's own, as `transformers` writes them, or that of another tokenizer.
            chat_template_content_format: without effect: parts of text are joined, whatever the template expects.
            chat_template_kwargs: variables for the template, such as `{"enable_thinking": False}`.
            add_generation_prompt: begins the answer (default: unless the final message is continued).
            continue_final_message: the model goes on with the final message.
            tools: refused: no model is told of tools.

        The other arguments, what is raised, and prompts that end alone: see `generate`. An output's `prompt` is None,
        and `prompt_token_ids` are those of the rendered conversation.

        >>> question = [{"role": "user", "content": "Name a river."}]
        >>> (answer,) = llm.chat(question, SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
        >>> answer.outputs[0].finish_reason
        'length'
        """
        if tools:
            raise ValueError("tools: not supported: no model here is told of tools; accepted: None")
        if continue_final_message and add_generation_prompt:
            raise ValueError("add_generation_prompt and continue_final_message exclude each other")
        conversations = read_conversations(messages)
        self._embedded.check()
        frontend = self._embedded.chat_frontend(chat_template, chat_template_kwargs)
        asked = [Conversation(each, add_generation_prompt, continue_final_message) for each in conversations]
        return self._run("messages", asked, sampling_params, lora_request, priority, use_tqdm, frontend)

    def beam_search(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        params: BeamSearchParams,
        lora_request: LoRARequest | Iterable[LoRARequest | None] | None = None,
        use_tqdm: bool | Callable[..., Any] = False,
        concurrency_limit: int | None = None,
        priority: int | Iterable[int | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest sequences that follow each prompt, best first: those that `transformers` finds.

        Args:
            prompts: see `generate`.
            params: how many sequences, and how long.
            concurrency_limit: without effect: as many prompts are searched at once as the cache has blocks for.

        The other arguments, what is raised, and prompts that end alone: see `generate`.

        >>> params = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)
        >>> (found,) = llm.beam_search([TokensPrompt(prompt_token_ids=[1, 2, 3])], params)
        >>> [len(sequence.tokens) for sequence in found.sequences]
        [7, 7]
        """
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params is {shown(params)}; accepted: BeamSearchParams")
        asked, sampling_params = read_prompts(prompts), params.sampling_params()
        outputs = self._run("prompts", asked, sampling_params, lora_request, priority, use_tqdm)
        tokenizer = self.get_tokenizer()
        decode = partial(tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
        return [beams_of(output, decode) for output in outputs]

    def _run(
        self,
        name: str,
        prompts: Sequence[Prompt | Conversation],
        sampling_params: Any,
        lora_request: Any,
        priority: Any,
        use_tqdm: bool | Callable[..., Any],
        frontend: Frontend | None = None,
    ) -> list[RequestOutput]:
        count = len(prompts)
        asked = [
            Asked(f"{name}[{index}]", prompt, params or SamplingParams(), lora, first)
            for index, (prompt, params, lora, first) in enumerate(
                zip(
                    prompts,
                    one_each(sampling_params, SamplingParams, "sampling_params", count),
                    one_each(lora_request, LoRARequest, "lora_request", count),
                    one_each(priority, int, "priority", count),
                    strict=True,
                )
            )
        ]
        self._embedded.check()
        self._embedded.load_adapters(each.lora_request for each in asked)
        batch, outputs = Batch(self._embedded, self._callers), []
        for each, seed in zip(asked, self._embedded.seeds.take(count), strict=True):
            prepared = prepare(self._embedded, frontend or self._embedded.frontend, each, seed)
            if not isinstance(prepared, RequestOutput):
                batch.add(*prepared)
            outputs.append(prepared if isinstance(prepared, RequestOutput) else prepared[1].output)
        log_refused(outputs)
        progress = Progress(batch.groups, use_tqdm)
        with contextlib.closing(progress):
            batch.run(progress)
        return outputs

    def get_tokenizer(self) -> Tokenizer:
        """The scheduler's own, which every prompt goes through; it is not a `transformers` tokenizer."""
        return self._embedded.model.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What a prompt without any is sampled with: Octavo's own, whatever the model suggests."""
        return SamplingParams()

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

    def unload_adapter(self, lora_name: str) -> None:
        """Unloads an adapter, where `max_cpu_loras` of them are loaded and another one is to be. Returns when the
        requests that use it have ended. Raises ValueError for a name that is not loaded."""
        self._embedded.check()
        self._embedded.unload_adapter(lora_name)

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

    if not TYPE_CHECKING:  # for which any attribute would be there

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"an LLM has no {name}{why_missing(name)}", name=name, obj=self)

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LLM holds threads and a worker process and cannot be pickled: make it where it is used")


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
