"""The body of `POST /v1/chat/completions`."""

from __future__ import annotations

from gateway_svc.errors import InvalidField
from gateway_svc.requests.asked import Asked, new_id
from gateway_svc.requests.fields import Fields, shown
from gateway_svc.requests.messages import read_messages
from gateway_svc.requests.other_fields import read_other
from gateway_svc.requests.sampling import put, read_outputs, read_request, read_sampling
from gateway_svc.requests.shown_tokens import read_prompt_logprobs, read_token_forms
from gateway_svc.requests.stream_options import read_streaming
from protos import inference_pb2 as pb


def read_chat(fields: Fields) -> Asked:
    """Raises InvalidField."""
    id = new_id("chatcmpl", fields.id("request_id"))
    names = {"logprobs": "top_logprobs", "prompt": "messages"}
    streaming = read_streaming(fields)
    params = read_sampling(fields, names)
    num_outputs = read_outputs(params, fields, streams=streaming.streams)
    names["max_tokens"] = read_max_tokens(params, fields)
    num_top = read_top_logprobs(params, fields)
    request = pb.GenerateRequest(request_id=id, stream=streaming.streams)
    read_request(request, fields)
    request.messages.CopyFrom(pb.Messages(messages=read_messages(fields, "messages")))
    put(request.messages, "add_generation_prompt", fields.switch("add_generation_prompt"), fields)
    put(request.messages, "continue_final_message", fields.switch("continue_final_message"), fields)
    if fields.switch("add_special_tokens"):
        raise InvalidField(fields.param("add_special_tokens"), "got true; accepted: false, as the template adds them")
    asked = Asked(
        id=id,
        requests=[request],
        num_outputs=num_outputs,
        streams=streaming.streams,
        includes_usage=streaming.includes_usage,
        num_top=num_top,
        names=names,
    )
    read_prompt_logprobs(asked, params, fields)
    read_token_forms(asked, fields)
    read_other(fields)
    fields.finish()
    request.sampling_params.CopyFrom(params)
    return asked


def read_max_tokens(params: pb.SamplingParams, fields: Fields) -> str:
    """Either name, the newer one first; gives the one that is used."""
    newer, older = fields.integer("max_completion_tokens"), fields.integer("max_tokens")
    if newer is not None and older is not None and newer != older:
        raise InvalidField(
            fields.param("max_tokens"), f"got {shown(older)}, and max_completion_tokens {shown(newer)}; accepted: one"
        )
    name = "max_tokens" if newer is None else "max_completion_tokens"
    put(params, "max_tokens", older if newer is None else newer, fields, name)
    return name


def read_top_logprobs(params: pb.SamplingParams, fields: Fields) -> int | None:
    """How many to show at each position; None: no logprobs."""
    wanted, num_top = fields.switch("logprobs"), fields.integer("top_logprobs")
    if not wanted:
        if num_top:
            raise InvalidField(fields.param("top_logprobs"), f"got {shown(num_top)}; accepted: only with logprobs")
        return None
    put(params, "logprobs", num_top or 0, fields, "top_logprobs")
    return num_top or 0
