"""From a `GenerateRequest` to a `SequenceGroup`: everything is checked here, before anything is queued.

Synchronous and without state of its own, so that it runs on any thread; tokenising is most of its time. Knows the
served model and the limits, nothing of queues and sockets.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from google.protobuf.unknown_fields import UnknownFieldSet

from octavo.sampling_params import SamplingLimits, validate
from protos import inference_pb2 as pb
from scheduler_svc.chat_template import TemplateError
from scheduler_svc.errors import FieldViolation, InvalidRequest, NotReady, UnknownName, Unsupported
from scheduler_svc.group_limits import GroupLimits, best_of, new_beam_search, num_outputs
from scheduler_svc.request_stream import RequestStream
from scheduler_svc.resumed_outputs import read_resumed, resumed_outputs
from scheduler_svc.sequence import Sequence, SequenceGroup
from scheduler_svc.served_model import ServedModel

MAX_REQUEST_ID_CHARS = 256
_MAX_CHARS = {"request_id": MAX_REQUEST_ID_CHARS, "cache_salt": 256, "tenant": 256}
MAX_CHARS_PER_TOKEN = 100  # a prompt with more for each token that the model takes is refused before it is tokenised
# Scalars of SamplingParams that do something only at another value than this, and nothing in a beam search.
_NEUTRAL = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
}
_NOT_OF_BEAMS = ("logit_bias", "allowed_token_ids", "bad_words")
# Of a prompt, each with its alternatives: they are one message, some 2.5 MB, where plain clients take 4 MiB.
MAX_PROMPT_LOGPROBS = 131_072
_ABSENT = ("guided",)  # that no worker here can do yet


class Frontend:
    """Checks and prepares requests for the model that `served_model` gives (None until a worker has joined).

    Args:
        finish_sequence: called when a stop string ends a sequence that still has steps in flight.
        max_logprobs: the server's own limit; the worker has another.
        scheduling_policy: priorities are refused by any but `priority`.
        enable_chunked_prefill: False refuses prompts that no step takes whole.
        max_stop_string_chars: characters of one stop string.
    """

    def __init__(
        self,
        served_model: Callable[[], ServedModel | None],
        finish_sequence: Callable[[Sequence], None],
        max_logprobs: int = 20,
        *,
        scheduling_policy: str = "fcfs",
        enable_chunked_prefill: bool = True,
        max_stop_string_chars: int = 1024,
    ) -> None:
        self._served_model = served_model
        self._finish_sequence = finish_sequence
        self._max_logprobs = max_logprobs
        self._scheduling_policy = scheduling_policy
        self._enable_chunked_prefill = enable_chunked_prefill
        self._max_stop_string_chars = max_stop_string_chars

    def model(self, name: str = "") -> ServedModel:
        """The served model. Raises NotReady before there is one, UnknownName when the client wants another."""
        model = self._served_model()
        if model is None:
            raise NotReady("no worker has joined this scheduler yet")
        if name and name != model.name:
            raise UnknownName(f"model {name!r} is not served here; {model.name!r} is")
        return model

    def prepare(self, request: pb.GenerateRequest, arrival_ns: int | None = None) -> SequenceGroup:
        """A group ready to be submitted, its `RequestStream` in `output`. Raises RequestRefused.

        The caller has given the request an id. A seed is drawn here where the client named none. A stream that
        `is_behind` has to catch up before the group is submitted.
        """
        arrival_ns = time.monotonic_ns() if arrival_ns is None else arrival_ns
        model = self.model(request.model)
        params = request.sampling_params
        _check_sizes(request, model)
        _check_known_fields(request)
        self._check_sampling_params(params, model)
        self._check_supported(request)
        token_ids = self._prompt_token_ids(request, model)
        if request.HasField("truncate_prompt_tokens"):
            token_ids = token_ids[-request.truncate_prompt_tokens :]
        limits = GroupLimits(
            max_model_len=model.max_model_len,
            max_cached_tokens=model.max_cached_tokens,
            block_size=model.block_size,
            max_prompt_tokens=None if self._enable_chunked_prefill else model.max_num_batched_tokens,
        )
        max_num_tokens = limits.max_num_tokens(len(token_ids), params)
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
            bad_words=_bad_words(params, model),
            resumed_token_ids=resumed,
        )
        group.output = stream = RequestStream(
            group,
            model.tokenizer,
            model.name,
            streams=streams,
            returns_prompt=request.return_prompt_token_ids,
            finish_sequence=self._finish_sequence,
        )
        if resumed:
            stream.resume(resumed_outputs(request, group))
        return group

    def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        model = self.model(request.model)
        _check_prompt_size(request, model)
        token_ids = _encode_prompt(request, model, "one of prompt and messages")
        tokens = [model.tokenizer.token_text(token_id) for token_id in token_ids]
        return pb.TokenizeResponse(token_ids=token_ids, tokens=tokens, max_model_len=model.max_model_len)

    def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        model = self.model(request.model)
        _check_length("token_ids", len(request.token_ids), "ids", model)
        _check_vocabulary("token_ids", request.token_ids, model)
        text = model.tokenizer.decode(list(request.token_ids), skip_special_tokens=request.skip_special_tokens)
        return pb.DetokenizeResponse(text=text)

    def _check_sampling_params(self, params: pb.SamplingParams, model: ServedModel) -> None:
        limits = SamplingLimits(
            vocab_size=model.vocab_size,
            max_num_seqs=model.max_num_seqs,
            max_model_len=model.max_model_len,
            max_logprobs=min(self._max_logprobs, model.max_logprobs),
            max_stop_string_chars=self._max_stop_string_chars,
        )
        if violations := validate(params, limits):
            raise InvalidRequest(
                *(
                    FieldViolation(f"sampling_params.{field}", f"got {_shown(value)}; accepted: {accepted}")
                    for field, value, accepted in violations
                )
            )

    def _check_supported(self, request: pb.GenerateRequest) -> None:
        params = request.sampling_params
        for name in _set_fields(params, _ABSENT):
            raise Unsupported(f"sampling_params.{name} is not implemented by this server")
        if params.use_beam_search:
            _check_beams_supported(params)
        if request.priority and self._scheduling_policy != "priority":
            raise Unsupported(
                f"priority: got {request.priority}; this server runs with --scheduling-policy "
                f"{self._scheduling_policy}, accepted: only with --scheduling-policy priority"
            )

    def _prompt_token_ids(self, request: pb.GenerateRequest, model: ServedModel) -> list[int]:
        if request.WhichOneof("prompt_kind") == "prompt_token_ids":
            token_ids = list(request.prompt_token_ids.ids)
            _check_vocabulary("prompt_token_ids", token_ids, model)
            if not token_ids:
                raise InvalidRequest(FieldViolation("prompt_token_ids", "got none; accepted: at least 1"))
            return token_ids
        return _encode_prompt(request, model, "exactly one of prompt, prompt_token_ids and messages")


def _set_fields(params: pb.SamplingParams, names: tuple[str, ...]) -> list[str]:
    given = {field.name for field, _ in params.ListFields()}
    return [name for name in names if name in given]


def _bad_words(params: pb.SamplingParams, model: ServedModel) -> list[tuple[int, ...]]:
    """Each word as it is written at the begin of a text and after a space, where that is one token sequence."""
    spellings = dict.fromkeys(spelling for word in params.bad_words for spelling in (word, " " + word.lstrip()))
    encoded = (tuple(model.tokenizer.encode(spelling, add_special_tokens=False)) for spelling in spellings)
    return list(dict.fromkeys(word for word in encoded if word))


def _check_beams_supported(params: pb.SamplingParams) -> None:
    """Refuses what a beam search would silently leave out."""
    asked = [name for name, value in _NEUTRAL.items() if params.HasField(name) and getattr(params, name) != value]
    for name in asked + _set_fields(params, _NOT_OF_BEAMS):
        raise Unsupported(f"sampling_params.{name} is not implemented by this server with use_beam_search")
    if params.logprobs:
        raise Unsupported(
            f"sampling_params.logprobs: got {params.logprobs}; with use_beam_search this server gives those of the "
            "tokens themselves: 0 is accepted"
        )


def _check_prompt_logprobs(params: pb.SamplingParams, num_prompt_tokens: int, model: ServedModel) -> None:
    if not params.HasField("prompt_logprobs"):
        return
    num_top = model.vocab_size if params.prompt_logprobs < 0 else params.prompt_logprobs
    if (got := num_prompt_tokens * (1 + num_top)) > MAX_PROMPT_LOGPROBS:
        what = f"{got} logprobs of {num_prompt_tokens} tokens; accepted: at most {MAX_PROMPT_LOGPROBS}"
        raise InvalidRequest(FieldViolation("sampling_params.prompt_logprobs", what), is_too_long=True)


def _check_sizes(request: pb.GenerateRequest, model: ServedModel) -> None:
    """What is too large to look at any closer."""
    for field, most in _MAX_CHARS.items():
        if (got := len(getattr(request, field))) > most:
            raise InvalidRequest(FieldViolation(field, f"got {got} characters; accepted: at most {most}"))
    if request.HasField("truncate_prompt_tokens") and not request.truncate_prompt_tokens:
        raise InvalidRequest(FieldViolation("truncate_prompt_tokens", "got 0; accepted: at least 1"))
    _check_prompt_size(request, model)


def _check_prompt_size(request: pb.GenerateRequest | pb.TokenizeRequest, model: ServedModel) -> None:
    """Even where the prompt is going to be truncated: it has to be tokenised first, and that takes its time."""
    kind = request.WhichOneof("prompt_kind")
    if kind == "prompt_token_ids":
        _check_length(kind, len(request.prompt_token_ids.ids), "ids", model)
    elif kind == "messages":
        messages = request.messages.messages
        _check_length(kind, len(messages), "messages", model)
        _check_length(kind, sum(len(each.content) + len(each.role) for each in messages), "characters", model)
    else:
        _check_length("prompt", len(request.prompt), "characters", model)


def _check_length(field: str, got: int, what: str, model: ServedModel) -> None:
    most = MAX_CHARS_PER_TOKEN * model.max_model_len
    if got > most:
        limit = f"{most} are the most for a model of {model.max_model_len} tokens"
        raise InvalidRequest(FieldViolation(field, f"{got} {what} are too many: {limit}"), is_too_long=True)


def _check_known_fields(request: pb.GenerateRequest) -> None:
    """A field that this server does not know asks for something that it would silently leave out: an image, say."""
    for message in (request, request.sampling_params, request.messages, *request.messages.messages):
        if unknown := list(UnknownFieldSet(message)):
            what = f"field {unknown[0].field_number} of {message.DESCRIPTOR.name} is not known here"
            raise InvalidRequest(FieldViolation(message.DESCRIPTOR.name, f"{what}; text is accepted, no other media"))


def _encode_prompt(request: pb.GenerateRequest | pb.TokenizeRequest, model: ServedModel, accepted: str) -> list[int]:
    """Token ids of a request's text or conversation."""
    kind = request.WhichOneof("prompt_kind")
    if kind is None:
        raise InvalidRequest(FieldViolation("prompt", f"got none or several; accepted: {accepted}"))
    if kind == "messages":
        text, add_special_tokens = _render(request.messages, model), False
    else:
        text = request.prompt
        add_special_tokens = not request.HasField("add_special_tokens") or request.add_special_tokens
    token_ids = model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    if not token_ids:
        raise InvalidRequest(FieldViolation(kind, f"got {text!r}, which has no tokens; accepted: at least 1"))
    return token_ids


def _render(messages: pb.Messages, model: ServedModel) -> str:
    template = model.tokenizer.chat_template
    if template is None:
        raise InvalidRequest(FieldViolation("messages", f"model {model.name!r} has no chat template; give a prompt"))
    if not messages.messages:
        raise InvalidRequest(FieldViolation("messages", "got none; accepted: at least 1"))
    for index, message in enumerate(messages.messages):
        if not message.role:
            raise InvalidRequest(
                FieldViolation(f"messages[{index}].role", "got none; accepted: system, user, assistant, ...")
            )
    try:
        return template.render(
            [{"role": message.role, "content": message.content} for message in messages.messages],
            add_generation_prompt=messages.add_generation_prompt
            if messages.HasField("add_generation_prompt")
            else None,
            continue_final_message=messages.continue_final_message,
        )
    except TemplateError as error:
        raise InvalidRequest(FieldViolation("messages", str(error))) from error


def _shown(value: object) -> str:
    """A value as the client wrote it: floats come from the wire with float32's noise."""
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def _check_vocabulary(field: str, token_ids: list[int], model: ServedModel) -> None:
    outside = next((token_id for token_id in token_ids if token_id >= model.vocab_size), None)
    if outside is not None:
        raise InvalidRequest(FieldViolation(field, f"got {outside}; accepted: 0 to {model.vocab_size - 1}"))
