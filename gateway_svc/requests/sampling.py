"""Fields that say how tokens are drawn and when they end: OpenAI's, and those that vLLM takes beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gateway_svc.errors import InvalidField
from gateway_svc.requests.fields import Fields, is_number, shown
from gateway_svc.requests.guides import read_guide
from octavo.sampling_params import MAX_TOKEN_ENTRIES
from protos import inference_pb2 as pb

Reader = Callable[[Fields, str], Any]

_SCALARS: dict[str, Reader] = {
    **dict.fromkeys(("temperature", "top_p", "presence_penalty", "frequency_penalty"), Fields.number),
    **dict.fromkeys(("min_p", "repetition_penalty", "length_penalty"), Fields.number),
    **dict.fromkeys(("top_k", "min_tokens"), Fields.integer),
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "use_beam_search"), Fields.switch),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), Fields.switch),
}
_LISTS: dict[str, Reader] = {
    "stop": Fields.texts,
    "bad_words": Fields.texts,
    "stop_token_ids": Fields.integers,
    "allowed_token_ids": Fields.integers,
}
_EARLY_STOPPING = {
    False: pb.EARLY_STOPPING_NO,
    True: pb.EARLY_STOPPING_YES,
    "never": pb.EARLY_STOPPING_NEVER,
}
# Of a scheduler's request itself, beside the prompt.
_REQUEST_TEXTS = ("cache_salt", "adapter")


def read_sampling(fields: Fields, names: dict[str, str]) -> pb.SamplingParams:
    """All but how many outputs, how many tokens, and logprobs. `names` learns where a guide came from."""
    params = pb.SamplingParams()
    for name, read in _SCALARS.items():
        put(params, name, read(fields, name), fields)
    for name, read in _LISTS.items():
        value = read(fields, name)
        if name == "allowed_token_ids" and value == []:  # which a scheduler cannot tell from none at all
            raise InvalidField(fields.param(name), "got []; accepted: at least one token id, or null for any")
        if value:
            _extend(params, name, value, fields)
    if (seed := fields.integer("seed")) is not None:
        put(params, "seed", seed % (1 << 64), fields)  # OpenAI's may be negative
    if (early := fields.take("early_stopping")) is not None:
        if not isinstance(early, bool | str) or early not in _EARLY_STOPPING:
            raise InvalidField(fields.param("early_stopping"), f'got {shown(early)}; accepted: true, false, "never"')
        params.early_stopping = _EARLY_STOPPING[early]
    _read_logit_bias(params, fields)
    read_guide(params, fields, names)
    return params


def read_outputs(params: pb.SamplingParams, fields: Fields, *, streams: bool) -> int:
    """How many there are to be; `best_of` more than that cannot be ranked before all have ended."""
    n, best_of = fields.integer("n"), fields.integer("best_of")
    put(params, "n", n, fields)
    put(params, "best_of", best_of, fields)
    num_outputs = 1 if n is None else n
    if streams and best_of is not None and best_of > num_outputs and not params.use_beam_search:
        raise InvalidField(
            fields.param("best_of"), f"got {shown(best_of)} with stream; accepted: n, which is {shown(num_outputs)}"
        )
    return num_outputs


def read_request(request: pb.GenerateRequest, fields: Fields) -> None:
    """What else a scheduler's request has: the model, and vLLM's extras."""
    put(request, "model", fields.text("model"), fields)
    put(request, "priority", fields.integer("priority"), fields)
    put(request, "truncate_prompt_tokens", fields.integer("truncate_prompt_tokens"), fields)
    for name in _REQUEST_TEXTS:
        put(request, name, fields.text(name), fields)


def put(message: Any, name: str, value: Any, fields: Fields, given: str = "") -> None:
    """Sets a field; None leaves it unset. `given`: its name in the body, where that is another one."""
    if value is None:
        return
    try:
        setattr(message, name, value)
    except (ValueError, TypeError, OverflowError):  # a number that the wire cannot hold, or half of a character
        raise InvalidField(fields.param(given or name), f"got {shown(value)}, which no scheduler takes") from None


def _extend(params: pb.SamplingParams, name: str, values: list[Any], fields: Fields) -> None:
    try:
        getattr(params, name).extend(values)
    except (ValueError, TypeError):
        raise InvalidField(fields.param(name), "has an entry that no scheduler takes") from None


def _read_logit_bias(params: pb.SamplingParams, fields: Fields) -> None:
    """Token ids are keys there, which JSON has as text."""
    biases = fields.take("logit_bias")
    if biases is None:
        return
    param, accepted = fields.param("logit_bias"), "an object with token ids as names and numbers as values"
    if not isinstance(biases, dict):
        raise InvalidField(param, f"got {shown(biases)}; accepted: {accepted}")
    if len(biases) > MAX_TOKEN_ENTRIES:
        raise InvalidField(param, f"got {len(biases)} entries; accepted: at most {MAX_TOKEN_ENTRIES}")
    for token_id, bias in biases.items():
        if not (token_id.isdecimal() and len(token_id) <= 10 and is_number(bias)):
            raise InvalidField(param, f"got {shown(token_id)}: {shown(bias)}; accepted: {accepted}")
        try:
            params.logit_bias[int(token_id)] = bias
        except (ValueError, TypeError, OverflowError):
            raise InvalidField(param, f"got {shown(token_id)}: {shown(bias)}; accepted: {accepted}") from None
