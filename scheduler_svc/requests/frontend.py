"""From a `GenerateRequest` to a `SequenceGroup`: everything is checked before anything is queued.

Synchronous and without state, so that it runs on any thread. The request's text has been turned into token ids before,
for a server in other processes. Knows the served models and the limits, nothing of queues and sockets.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from protos import inference_pb2 as pb
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.errors import FieldViolation, InvalidRequest, NotReady
from scheduler_svc.models.served_model import ServedModel
from scheduler_svc.models.served_models import ServedModels
from scheduler_svc.output.request_stream import RequestStream
from scheduler_svc.output.resumed_outputs import read_resumed, resumed_outputs
from scheduler_svc.requests.group_limits import GroupLimits, best_of, new_beam_search, num_outputs
from scheduler_svc.requests.request_checks import TextSettings
from scheduler_svc.requests.request_text import PreparedText, RequestTexts
from scheduler_svc.text.tokenizer import Tokenizer

# Of a prompt, each with its alternatives: they are one message, some 2.5 MB, where plain clients take 4 MiB.
MAX_PROMPT_LOGPROBS = 131_072
# Of all outputs of a request for one token each: some 32 MB from its worker, at every step.
MAX_LOGPROBS = 1 << 22


class Frontend:
    """Checks and prepares requests for the models that `served_models` gives.

    Args:
        finish_sequence: called when a stop string ends a sequence that still has steps in flight.
        settings: what the server allows beside the model's own limits.
        enable_chunked_prefill: False refuses prompts that no step takes whole.
    """

    def __init__(
        self,
        served_models: Callable[[], ServedModels],
        finish_sequence: Callable[[Sequence], None],
        settings: TextSettings | None = None,
        *,
        enable_chunked_prefill: bool = True,
    ) -> None:
        self.models = served_models
        self._finish_sequence = finish_sequence
        self._settings = settings or TextSettings()
        self._enable_chunked_prefill = enable_chunked_prefill

    def model(self, name: str = "") -> ServedModel:
        """What requests with this name get. Raises NotReady before there is any model, UnknownName for a stranger."""
        return self.models().resolve(name)

    def with_chat_template(self, source: str | None, variables: Mapping[str, Any] | None = None) -> Frontend:
        """For requests whose messages this template renders, None being the model's own, with `variables` of the
        caller's. Raises TemplateError."""
        tokenizer = self.model().tokenizer
        if source is not None:
            tokenizer = Tokenizer.load({**tokenizer.files, "chat_template.jinja": source.encode()})
            assert tokenizer.chat_template is not None
            tokenizer.chat_template.check()
        if variables:
            tokenizer = tokenizer.with_template_variables(variables)
        return Frontend(
            lambda: self.models().with_tokenizer(tokenizer),
            self._finish_sequence,
            self._settings,
            enable_chunked_prefill=self._enable_chunked_prefill,
        )

    def prepare(self, request: pb.GenerateRequest, arrival_ns: int | None = None) -> SequenceGroup:
        """A group ready to be submitted, its text tokenised on this thread. Raises RequestRefused."""
        arrival_ns = time.monotonic_ns() if arrival_ns is None else arrival_ns
        return self.new_group(RequestTexts(self.models(), self._settings).prepare(request), arrival_ns)

    def new_group(self, prepared: PreparedText, arrival_ns: int) -> SequenceGroup:
        """A group ready to be submitted, its `RequestStream` in `output`. Raises RequestRefused.

        The caller has given the request an id. A seed is drawn here where the client named none. A stream that
        `is_behind` has to catch up before the group is submitted.
        """
        request, token_ids = prepared.request, prepared.token_ids
        model = self.models().find(request.model_fingerprint)
        if model is None:
            raise NotReady("its model is not served here any more; try again")
        params = request.sampling_params
        limits = GroupLimits(
            max_model_len=model.max_model_len,
            max_cached_tokens=model.max_cached_tokens,
            block_size=model.block_size,
            max_prompt_tokens=None if self._enable_chunked_prefill else model.max_num_batched_tokens,
        )
        max_num_tokens = limits.max_num_tokens(len(token_ids), params)
        _check_logprobs(params, model)
        _check_prompt_logprobs(params, len(token_ids), model)
        streams = not request.HasField("stream") or request.stream
        is_gathered = not streams or params.use_beam_search or best_of(params) > num_outputs(params)
        resumed = read_resumed(request, model.vocab_size, num_outputs(params), is_gathered)
        if not params.HasField("seed"):
            params.seed = secrets.randbits(64)
        eos_token_ids = () if params.ignore_eos else model.eos_token_ids
        stop_token_ids = frozenset([*eos_token_ids, *params.stop_token_ids])
        group = SequenceGroup(
            request.request_id,
            token_ids,
            params,
            max_num_tokens=max_num_tokens,
            arrival_ns=arrival_ns,
            eos_token_id=eos_token_ids[0] if eos_token_ids else None,
            stop_token_ids=stop_token_ids.difference(eos_token_ids[:1]),
            num_outputs=num_outputs(params),
            best_of=best_of(params),
            beam_search=new_beam_search(params, len(token_ids), max_num_tokens, stop_token_ids, model.vocab_size),
            priority=request.priority,
            tenant=request.tenant,
            adapter=request.adapter,
            cache_salt=request.cache_salt,
            model=model.fingerprint,
            bad_words=prepared.bad_words,
            resumed_token_ids=resumed,
        )
        is_answer = request.is_answer or any(output.is_answer for output in request.resume)
        group.output = stream = RequestStream(
            group,
            model.tokenizer,
            model.name,
            streams=streams,
            returns_prompt=request.return_prompt_token_ids,
            finish_sequence=self._finish_sequence,
            # Behind a special token another part of a text begins.
            continues_text=not is_answer and token_ids[-1] not in model.tokenizer.special_token_ids,
        )
        if resumed:
            stream.resume(resumed_outputs(request, group))
        return group


def _check_logprobs(params: pb.SamplingParams, model: ServedModel) -> None:
    if not params.HasField("logprobs"):
        return
    num_top = model.vocab_size if params.logprobs < 0 else params.logprobs
    if (got := best_of(params) * (1 + num_top)) > MAX_LOGPROBS:
        what = f"{got} logprobs of {best_of(params)} outputs for each token; accepted: at most {MAX_LOGPROBS}"
        raise InvalidRequest(FieldViolation("sampling_params.logprobs", what))


def _check_prompt_logprobs(params: pb.SamplingParams, num_prompt_tokens: int, model: ServedModel) -> None:
    if not params.HasField("prompt_logprobs"):
        return
    num_top = model.vocab_size if params.prompt_logprobs < 0 else params.prompt_logprobs
    if (got := num_prompt_tokens * (1 + num_top)) > MAX_PROMPT_LOGPROBS:
        what = f"{got} logprobs of {num_prompt_tokens} tokens; accepted: at most {MAX_PROMPT_LOGPROBS}"
        raise InvalidRequest(FieldViolation("sampling_params.prompt_logprobs", what), is_too_long=True)
