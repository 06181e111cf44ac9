"""The bodies of `POST /tokenize` and `POST /detokenize`, which are vLLM's."""

from __future__ import annotations

from typing import NamedTuple

from gateway_svc.errors import InvalidField
from gateway_svc.requests.fields import Fields
from gateway_svc.requests.messages import read_messages
from gateway_svc.requests.other_fields import BEYOND
from gateway_svc.requests.prompts import put_prompt
from gateway_svc.requests.sampling import put
from protos import inference_pb2 as pb


class AskedTokens(NamedTuple):
    """A message for a scheduler, and what is shown of its answer."""

    request: pb.TokenizeRequest
    shows_texts: bool  # of each token


def read_tokenize(fields: Fields) -> AskedTokens:
    """Raises InvalidField."""
    request = pb.TokenizeRequest()
    put(request, "model", fields.text("model"), fields)
    if (prompt := fields.text("prompt")) is not None:
        put_prompt(request, prompt, fields.param("prompt"))
        put(request, "add_special_tokens", fields.switch("add_special_tokens"), fields)
        fields.refuse({"messages": "prompt is given as well; accepted: one of them"})
    elif fields.peek("messages") is not None:
        request.messages.CopyFrom(pb.Messages(messages=read_messages(fields, "messages")))
        put(request.messages, "add_generation_prompt", fields.switch("add_generation_prompt"), fields)
        put(request.messages, "continue_final_message", fields.switch("continue_final_message"), fields)
        fields.refuse({"add_special_tokens": "the template adds them"})
    else:
        raise InvalidField(fields.param("prompt"), "got none; accepted: prompt, or messages")
    shows_texts = bool(fields.switch("return_token_strs"))
    fields.refuse(BEYOND)
    fields.finish()
    return AskedTokens(request, shows_texts)


def read_detokenize(fields: Fields) -> pb.DetokenizeRequest:
    """Raises InvalidField."""
    request = pb.DetokenizeRequest()
    put(request, "model", fields.text("model"), fields)
    tokens = fields.integers("tokens")
    if tokens is None:
        raise InvalidField(fields.param("tokens"), "got none; accepted: a list of token ids")
    try:
        request.token_ids.extend(tokens)
    except ValueError:
        raise InvalidField(fields.param("tokens"), "holds what is no token id") from None
    fields.finish()
    return request
