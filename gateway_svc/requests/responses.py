"""The body of `POST /v1/responses`: what needs nothing stored."""

from __future__ import annotations

import uuid

from gateway_svc.errors import InvalidField, UnsupportedField
from gateway_svc.requests.asked import Asked
from gateway_svc.requests.fields import Fields, is_list_of, shown
from gateway_svc.requests.guides import read_format, set_guide
from gateway_svc.requests.messages import new_message, read_input
from gateway_svc.requests.other_fields import read_other
from gateway_svc.requests.sampling import put, read_request, read_sampling
from gateway_svc.requests.stream_options import read_streaming
from protos import inference_pb2 as pb

_STORED = "nothing is stored here"
_BEYOND = {
    "previous_response_id": f"{_STORED}; send the whole conversation as input",
    "conversation": f"{_STORED}; send the whole conversation as input",
    "prompt": f"{_STORED}; send instructions and input",
    "background": _STORED,
    "background_options": _STORED,
    "context_management": _STORED,
    "reasoning": "this server does not part reasoning from the rest",
    "image": "text is accepted, no other media",
    "access_programs": "this server has none",
}
_PROMPTS = ("messages", "prompt")  # what a scheduler calls it, before and after it is rendered
_LOGPROBS = "message.output_text.logprobs"
_REPEATED = ("user", "safety_identifier", "prompt_cache_key")  # by the answer, like those that are read elsewhere:
_REPEATED_TOO = ("instructions", "temperature", "top_p", "max_output_tokens", "tool_choice")


def read_response(fields: Fields) -> Asked:
    """Raises InvalidField."""
    names = {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"} | dict.fromkeys(_PROMPTS, "input")
    settings = {name: fields.peek(name) for name in _REPEATED_TOO} | {name: fields.text(name) for name in _REPEATED}
    settings["metadata"] = _read_metadata(fields)
    settings["parallel_tool_calls"] = fields.switch("parallel_tool_calls")
    streaming = read_streaming(fields)
    params = read_sampling(fields, names)
    put(params, "max_tokens", fields.integer("max_output_tokens"), fields, "max_output_tokens")
    num_top = _read_logprobs(params, fields)
    settings["text"] = _read_text(params, fields, names)
    _read_truncation(fields)
    id = f"resp_{fields.id('request_id') or uuid.uuid4().hex}"
    request = pb.GenerateRequest(request_id=id, stream=streaming.streams)
    read_request(request, fields)
    request.messages.CopyFrom(pb.Messages(messages=_messages(fields)))
    fields.refuse(_BEYOND)
    read_other(fields)
    fields.finish(names)
    request.sampling_params.CopyFrom(params)
    return Asked(id=id, requests=[request], streams=streaming.streams, num_top=num_top, names=names, settings=settings)


def _messages(fields: Fields) -> list[pb.ChatMessage]:
    """Instructions stand before the conversation."""
    instructions = fields.text("instructions")
    first = [new_message("system", instructions, fields.param("instructions"))] if instructions else []
    return first + read_input(fields)


def _read_metadata(fields: Fields) -> dict[str, str] | None:
    """Notes of the client's own."""
    metadata = fields.take("metadata")
    if metadata is None or (isinstance(metadata, dict) and is_list_of([*metadata.values()], str)):
        return metadata
    raise InvalidField(fields.param("metadata"), f"got {shown(metadata)}; accepted: an object with texts as values")


def _read_logprobs(params: pb.SamplingParams, fields: Fields) -> int | None:
    include, num_top = fields.texts("include") or [], fields.integer("top_logprobs")
    if unknown := [each for each in include if each != _LOGPROBS]:
        raise UnsupportedField(fields.param("include"), f"got {unknown[0][:80]!r}; accepted: {_LOGPROBS}")
    if not include and num_top is None:
        return None
    put(params, "logprobs", num_top or 0, fields, "top_logprobs")
    return num_top or 0


def _read_text(params: pb.SamplingParams, fields: Fields, names: dict[str, str]) -> dict[str, object]:
    """`text.format`; gives what the answer repeats of it."""
    repeated = fields.peek("text") or {"format": {"type": "text"}}
    text = fields.object("text")
    if text is not None:
        for param, kind, value in read_format(text.object("format")):
            if params.HasField("guided"):
                raise InvalidField(param, "got this and another guide; accepted: one of them")
            set_guide(params, param, kind, value, names)
        text.refuse({"verbosity": "this server cannot choose it"})
        text.finish()
    return repeated


def _read_truncation(fields: Fields) -> None:
    if fields.choice("truncation", ("auto", "disabled")) == "auto":
        raise UnsupportedField(fields.param("truncation"), "got 'auto'; accepted: disabled")
