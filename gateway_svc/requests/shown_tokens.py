"""vLLM's fields that show tokens beside the text: their ids, and logprobs of the prompt."""

from __future__ import annotations

from gateway_svc.errors import InvalidField
from gateway_svc.requests.asked import Asked
from gateway_svc.requests.fields import Fields, shown
from gateway_svc.requests.sampling import put
from protos import inference_pb2 as pb


def read_token_forms(asked: Asked, fields: Fields) -> None:
    """`return_tokens_as_token_ids` and `return_token_ids`."""
    asked.tokens_as_ids = bool(fields.switch("return_tokens_as_token_ids"))
    asked.returns_token_ids = bool(fields.switch("return_token_ids"))
    if asked.returns_token_ids:
        for request in asked.requests:
            request.return_prompt_token_ids = True


def read_prompt_logprobs(asked: Asked, params: pb.SamplingParams, fields: Fields) -> None:
    """`prompt_logprobs`, which come with a whole answer alone. Raises InvalidField."""
    count = fields.integer("prompt_logprobs")
    if count is None:
        return
    if asked.streams or asked.echoes:
        what = "with stream" if asked.streams else "with echo, whose logprobs are those of the prompt, too"
        raise InvalidField(fields.param("prompt_logprobs"), f"got {shown(count)}; accepted: none {what}")
    put(params, "prompt_logprobs", count, fields)
    asked.returns_prompt_logprobs = True
