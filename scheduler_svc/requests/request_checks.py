"""What is checked of a request before any of its text is looked at; cheap, and the same wherever it runs.

Everything here is bounded by the request's bytes, and raises RequestRefused with the field, what it has and what is
accepted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from google.protobuf.unknown_fields import UnknownFieldSet

from octavo.sampling_params import MAX_OUTPUTS, SamplingLimits, validate
from protos import inference_pb2 as pb
from scheduler_svc.errors import FieldViolation, InvalidRequest, Unsupported
from scheduler_svc.models.served_model import ServedModel
from scheduler_svc.requests.tenants import MAX_TENANT_CHARS

MAX_REQUEST_ID_CHARS = 256
_MAX_CHARS = {"request_id": MAX_REQUEST_ID_CHARS, "cache_salt": 256, "tenant": MAX_TENANT_CHARS}
MAX_CHARS_PER_TOKEN = 100  # text with more for each token that the model takes is refused before it is tokenised
# Scalars of SamplingParams that do something only at another value than this, and nothing in a beam search.
_NEUTRAL = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
}
_NOT_OF_BEAMS = ("logit_bias", "allowed_token_ids", "bad_words")
_ABSENT = ("guided",)  # that no worker here can do yet


@dataclass(frozen=True, slots=True)
class TextSettings:
    """What a server allows beside its model's own limits.

    Attributes:
        max_logprobs: the server's own limit; the worker has another.
        max_stop_string_chars: characters of one stop string.
        scheduling_policy: priorities are refused by any but `priority`.
        allow_special_tokens_in_content: control tokens spelled out in a message are control tokens.
    """

    max_logprobs: int = 20
    max_stop_string_chars: int = 1024
    scheduling_policy: str = "fcfs"
    allow_special_tokens_in_content: bool = False


def check_request(request: pb.GenerateRequest, model: ServedModel, settings: TextSettings) -> None:
    """Everything about a GenerateRequest but its text and its length in tokens."""
    _check_sizes(request, model)
    _check_known_fields(request)
    _check_resume(request, model)
    _check_sampling_params(request.sampling_params, model, settings)
    _check_supported(request, settings)


def most_chars(model: ServedModel) -> int:
    """Of a prompt, or of all messages together, before and after they are rendered."""
    return MAX_CHARS_PER_TOKEN * model.max_model_len


def _check_sampling_params(params: pb.SamplingParams, model: ServedModel, settings: TextSettings) -> None:
    limits = SamplingLimits(
        vocab_size=model.vocab_size,
        max_num_seqs=model.max_num_seqs,
        max_model_len=model.max_model_len,
        max_logprobs=min(settings.max_logprobs, model.max_logprobs),
        max_stop_string_chars=settings.max_stop_string_chars,
    )
    if violations := validate(params, limits):
        raise InvalidRequest(
            *(
                FieldViolation(f"sampling_params.{field}", f"got {_shown(value)}; accepted: {accepted}")
                for field, value, accepted in violations
            )
        )


def _check_supported(request: pb.GenerateRequest, settings: TextSettings) -> None:
    params = request.sampling_params
    for name in _set_fields(params, _ABSENT):
        raise Unsupported(
            f"sampling_params.{name} is not implemented by this server: there is no guided decoding yet; "
            "allowed_token_ids and bad_words are what there is"
        )
    if params.use_beam_search:
        _check_beams_supported(params)
    if request.priority and settings.scheduling_policy != "priority":
        raise Unsupported(
            f"priority: got {request.priority}; this server runs with --scheduling-policy "
            f"{settings.scheduling_policy}, accepted: only with --scheduling-policy priority"
        )


def _set_fields(params: pb.SamplingParams, names: tuple[str, ...]) -> list[str]:
    given = {field.name for field, _ in params.ListFields()}
    return [name for name in names if name in given]


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


def _check_sizes(request: pb.GenerateRequest, model: ServedModel) -> None:
    """What is too large to look at any closer."""
    for field, most in _MAX_CHARS.items():
        if (got := len(getattr(request, field))) > most:
            raise InvalidRequest(FieldViolation(field, f"got {got} characters; accepted: at most {most}"))
    if not request.request_id.isprintable():  # it stands in lists, logs and terminals
        what = f"got {request.request_id!r}; accepted: characters that can be printed"
        raise InvalidRequest(FieldViolation("request_id", what))
    if request.HasField("truncate_prompt_tokens") and not request.truncate_prompt_tokens:
        raise InvalidRequest(FieldViolation("truncate_prompt_tokens", "got 0; accepted: at least 1"))
    check_prompt_size(request, model)


def check_prompt_size(request: pb.GenerateRequest | pb.TokenizeRequest, model: ServedModel) -> None:
    """Even where the prompt is going to be truncated: it has to be tokenised first, and that takes its time."""
    kind = request.WhichOneof("prompt_kind")
    if kind == "prompt_token_ids":
        assert isinstance(request, pb.GenerateRequest)
        check_length(kind, len(request.prompt_token_ids.ids), "ids", model)
    elif kind == "messages":
        messages = request.messages.messages
        check_length(kind, len(messages), "messages", model, most=model.max_model_len)  # each has a token at least
        num_chars = sum(len(each.role) + len(each.content) + len(each.reasoning_content) for each in messages)
        check_length(kind, num_chars, "characters", model)
    else:
        check_length("prompt", len(request.prompt), "characters", model)


def check_length(field: str, got: int, what: str, model: ServedModel, most: int | None = None) -> None:
    """Of characters, bytes or ids, before they are counted in tokens; `most`: by default what the model can use."""
    most = most_chars(model) if most is None else most
    if got > most:
        limit = f"{most} are the most for a model of {model.max_model_len} tokens"
        raise InvalidRequest(FieldViolation(field, f"{got} {what} are too many: {limit}"), is_too_long=True)


def _check_known_fields(request: pb.GenerateRequest) -> None:
    """A field that this server does not know asks for something that it would silently leave out: an image, say."""
    for message in (request, request.sampling_params, request.messages, *request.messages.messages):
        if unknown := UnknownFieldSet(message):
            what = f"field {unknown[0].field_number} of {message.DESCRIPTOR.name} is not known here"
            raise InvalidRequest(FieldViolation(message.DESCRIPTOR.name, f"{what}; text is accepted, no other media"))


def _check_resume(request: pb.GenerateRequest, model: ServedModel) -> None:
    """What is resumed has no other bound than the request's bytes, and is looked at again where others wait."""
    if (got := len(request.resume)) > MAX_OUTPUTS:
        raise InvalidRequest(FieldViolation("resume", f"got {got} outputs; accepted: at most {MAX_OUTPUTS}"))
    for output in request.resume:
        if (got := len(output.token_ids)) > model.max_model_len:
            what = f"output {output.index} has {got} tokens; accepted: at most {model.max_model_len}"
            raise InvalidRequest(FieldViolation("resume", what))


def check_fits(num_prompt_tokens: int, max_model_len: int) -> None:
    """Whether there is room for the prompt and one more token."""
    if num_prompt_tokens + 1 > max_model_len:
        limit = f"the model takes {max_model_len} tokens, prompt and output together"
        what = f"{num_prompt_tokens} tokens and 1 to generate are too many: {limit}"
        raise InvalidRequest(FieldViolation("prompt", what), is_too_long=True)


def _shown(value: object) -> str:
    """A value as the client wrote it: floats come from the wire with float32's noise."""
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def check_vocabulary(field: str, token_ids: Iterable[int], model: ServedModel, *, may_lack_row: bool = False) -> None:
    """That the model has all these ids. Those of a text, too: a tokenizer may have tokens added that the model has no
    rows for, and one of them fails a step for all who are in it. `may_lack_row`: such tokens are taken."""
    if (outside := max(token_ids, default=0)) >= model.vocab_size:
        text = model.tokenizer.token(outside)
        if may_lack_row and text is not None:
            return
        got = f"{outside}" if text is None else f"token {outside} ({text!r})"
        raise InvalidRequest(FieldViolation(field, f"got {got}; accepted: 0 to {model.vocab_size - 1}"))
