"""What an output has to look like: `response_format`, and vLLM's `structured_outputs` and `guided_*`.

They are handed on; whether they can be done is the scheduler's to say.
"""

from __future__ import annotations

import json
from typing import Any

from gateway_svc.errors import InvalidField
from gateway_svc.requests.fields import Fields, is_list_of, shown
from protos import inference_pb2 as pb

_KINDS = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
}
_FORMATS = ("text", "json_object", "json_schema")


def read_guide(params: pb.SamplingParams, fields: Fields, names: dict[str, str]) -> None:
    """Raises InvalidField where two ask for something."""
    found: list[tuple[str, str, Any]] = []  # the field, the kind of guide, and the guide
    for name, kind in _KINDS.items():
        if (value := fields.take(f"guided_{name}")) is not None and value is not False:
            found.append((fields.param(f"guided_{name}"), kind, value))
    if (structured := fields.object("structured_outputs")) is not None:
        for name, kind in _KINDS.items():
            if (value := structured.take(name)) is not None and value is not False:
                found.append((structured.param(name), kind, value))
        structured.finish()
    found += read_format(fields.object("response_format"))
    if len(found) > 1:
        raise InvalidField(found[1][0], f"got this and {found[0][0]}; accepted: one of them")
    for param, kind, value in found:
        set_guide(params, param, kind, value, names)


def read_format(format: Fields | None) -> list[tuple[str, str, Any]]:
    """Of `response_format`, or of `text.format` (responses), where the schema is not in an object of its own."""
    if format is None:
        return []
    kind, param = format.choice("type", _FORMATS), format.param("type")
    if kind is None:
        raise InvalidField(param, f"got none; accepted: {', '.join(_FORMATS)}")
    found: list[tuple[str, str, Any]] = []
    if kind == "json_object":
        found = [(param, "json_object", True)]
    elif kind == "json_schema":
        holder = format.object("json_schema") or format
        holder.leave("name", "description", "strict")
        schema = holder.take("schema")
        if schema is None:
            raise InvalidField(holder.param("schema"), "got none; accepted: a JSON schema")
        if holder is not format:
            holder.finish()
        found = [(holder.param("schema"), "json_schema", schema)]
    format.finish()
    return found


def set_guide(params: pb.SamplingParams, param: str, kind: str, value: Any, names: dict[str, str]) -> None:
    """Puts it into the message; `names` learns where it came from. Raises InvalidField."""
    names["guided"] = names[f"guided.{kind}"] = param
    try:
        if kind == "json_schema" and isinstance(value, dict):
            value = json.dumps(value, allow_nan=False)
        if kind == "choice":
            if not is_list_of(value, str):
                raise TypeError
            params.guided.choice.choices.extend(value)
        else:
            setattr(params.guided, kind, value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise InvalidField(param, f"got {shown(value)}, which is no such guide") from None
