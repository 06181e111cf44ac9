"""`prompt` of a completion: a text, token ids, or a list of either."""

from __future__ import annotations

from typing import Any

from gateway_svc.errors import InvalidField
from gateway_svc.requests.fields import Fields, is_list_of, is_text, shown
from protos import inference_pb2 as pb

MAX_PROMPTS = 1024  # of one call
_ACCEPTED = "a text, a list of token ids, or a list of either"

Prompt = str | list[int]


def read_prompts(fields: Fields) -> list[Prompt]:
    """At least one. Raises InvalidField."""
    given, param = fields.take("prompt"), fields.param("prompt")
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list) or not given:
        raise InvalidField(param, f"got {'none' if given is None else shown(given)}; accepted: {_ACCEPTED}")
    if is_list_of(given, int):
        return [given]
    if len(given) > MAX_PROMPTS:
        raise InvalidField(param, f"got {len(given)} prompts; accepted: at most {MAX_PROMPTS}")
    for index, prompt in enumerate(given):
        if not (is_text(prompt) or is_list_of(prompt, int)):
            raise InvalidField(f"{param}[{index}]", f"got {shown(prompt)}; accepted: {_ACCEPTED}")
    return given


def put_prompt(request: Any, prompt: Prompt, param: str) -> None:
    """Into a message that has `prompt` and, for ids, `prompt_token_ids`. Raises InvalidField."""
    try:
        if isinstance(prompt, str):
            request.prompt = prompt
        else:
            request.prompt_token_ids.CopyFrom(pb.TokenIds(ids=prompt))
    except ValueError:
        what = (
            "holds half of a character (a lone surrogate)" if isinstance(prompt, str) else "holds what is no token id"
        )
        raise InvalidField(param, what) from None
