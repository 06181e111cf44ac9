"""The body of `POST /v1/completions`."""

from __future__ import annotations

from gateway_svc.errors import InvalidField
from gateway_svc.requests.asked import Asked, new_id
from gateway_svc.requests.fields import Fields
from gateway_svc.requests.other_fields import read_other
from gateway_svc.requests.prompts import Prompt, put_prompt, read_prompts
from gateway_svc.requests.sampling import put, read_outputs, read_request, read_sampling
from gateway_svc.requests.shown_tokens import read_prompt_logprobs, read_token_forms
from gateway_svc.requests.stream_options import read_streaming
from protos import inference_pb2 as pb

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_COPIED_BYTES = 16_777_216  # of one call


def read_completion(fields: Fields) -> Asked:
    """Raises InvalidField."""
    id = new_id("cmpl", fields.id("request_id"))
    names = {"prompt_token_ids": "prompt"}
    streaming = read_streaming(fields)
    params = read_sampling(fields, names)
    num_outputs = read_outputs(params, fields, streams=streaming.streams)
    prompts = read_prompts(fields)
    head = pb.GenerateRequest(stream=streaming.streams)
    read_request(head, fields)
    put(head, "add_special_tokens", fields.switch("add_special_tokens"), fields)
    asked = Asked(
        id=id,
        requests=[],
        num_outputs=num_outputs,
        streams=streaming.streams,
        includes_usage=streaming.includes_usage,
        echoes=bool(fields.switch("echo")),
        names=names,
    )
    _read_max_tokens(asked, params, fields)
    _read_logprobs(asked, params, fields)
    is_cut = head.HasField("truncate_prompt_tokens")
    head.return_prompt_token_ids = asked.echoes and (is_cut or asked.num_top is not None)
    read_prompt_logprobs(asked, params, fields)
    head.sampling_params.CopyFrom(params)
    _check_size(prompts, head, fields)
    for index, prompt in enumerate(prompts):
        request = pb.GenerateRequest()
        request.CopyFrom(head)
        request.request_id = id if len(prompts) == 1 else f"{id}-{index}"
        put_prompt(request, prompt, fields.param("prompt"))
        asked.requests.append(request)
    read_token_forms(asked, fields)
    read_other(fields)
    fields.finish()
    return asked


def _check_size(prompts: list[Prompt], head: pb.GenerateRequest, fields: Fields) -> None:
    """What is asked of all prompts is sent with each of them."""
    if len(prompts) * head.ByteSize() > MAX_COPIED_BYTES:
        what = (
            f"got {len(prompts)} prompts, and other fields of {head.ByteSize()} bytes, which each of them takes along"
        )
        raise InvalidField(fields.param("prompt"), f"{what}; accepted: at most {MAX_COPIED_BYTES} bytes together")


def _read_max_tokens(asked: Asked, params: pb.SamplingParams, fields: Fields) -> None:
    """0 scores a prompt: one token has to be generated, and is not shown."""
    max_tokens = fields.integer("max_tokens")
    if max_tokens == 0:
        if not asked.echoes:
            raise InvalidField(fields.param("max_tokens"), "got 0; accepted: at least 1, or 0 with echo")
        asked.shows_output, max_tokens = False, 1
    put(params, "max_tokens", DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens, fields)


def _read_logprobs(asked: Asked, params: pb.SamplingParams, fields: Fields) -> None:
    """Those of an echoed prompt come with those of the output."""
    asked.num_top = fields.integer("logprobs")
    put(params, "logprobs", asked.num_top, fields)
    if asked.echoes and asked.num_top is not None:
        put(params, "prompt_logprobs", asked.num_top, fields, "logprobs")
        asked.names["prompt_logprobs"] = "logprobs"
