"""An image as lines of JSON, a node each, with names hidden and no token in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf import json_format

from scheduler_svc.core.sequences.beam_search import BeamSearch
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.flight.hidden import Hidden
from scheduler_svc.flight.image import GROUP_FIELDS, SEQUENCE_FIELDS, Image, Inline, Node, Ref

_NAMES = frozenset(("tenant", "share", "adapter", "model"))  # of groups
_MESSAGE_FIELDS = (
    "max_loras", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "parallel",
    "device", "dtype", "num_device_blocks", "num_host_blocks", "prefill_tokens_per_s", "swap_bytes_per_s",
    "block_bytes",
)  # fmt: skip


class ImageForm:
    """Writes the nodes of images."""

    def __init__(self, hidden: Hidden) -> None:
        self._hidden = hidden

    def lines(self, image: Image) -> Iterator[dict[str, Any]]:
        """Objects for JSON: the roots, and then every node."""
        yield {"image": image.roots, "nodes": len(image.nodes)}
        for node in image.nodes:
            yield {"node": self._node(node)}

    def _node(self, node: Node) -> list[Any]:
        kind, what = node
        if kind is SequenceGroup:
            fields, sequences, beams = what
            named = dict(zip(GROUP_FIELDS, fields, strict=True))
            named |= {name: self._hidden.name(named[name]) for name in _NAMES}
            return ["group", named, self._value(sequences), self._value(beams)]
        if kind is Sequence:
            fields, columns, group, status, host_table = what
            named = {**dict(zip(SEQUENCE_FIELDS, fields, strict=True)), "status": status}
            return ["sequence", named, self._value(columns), self._value(group), host_table]
        if kind in ("dict", "OrderedDict"):
            keys, values = what
            return [kind, self._values(keys), self._values(values)]
        if kind == "array":
            return [kind, what.dtype.str, list(what.shape), what.ravel().tolist()]
        if kind == "token_lines":
            return [kind, what.tolist()]
        if kind == "random":
            version, state, gauss = what
            return [kind, version, list(state), gauss]
        if isinstance(kind, str):
            return [kind, self._values(what) if isinstance(what, list) else what]
        return ["object", f"{kind.__module__}.{kind.__qualname__}", self._attributes(kind, what)]

    def _attributes(self, kind: type, attributes: dict[str, Any]) -> dict[str, Any]:
        form: dict[str, Any] = {}
        for name, value in attributes.items():
            if kind is BeamSearch and name == "_stop_token_ids":
                form[name] = ["stops", kind.__name__]
            elif name == "tables":
                form[name] = ["tables", [[slot, blocks.tolist()] for slot, blocks in value]]
            else:
                form[name] = self._value(value)
        return form

    def _values(self, values: list[Any]) -> list[Any]:
        return [self._value(each) for each in values]

    def _value(self, value: Any) -> Any:
        """Plain values as they are, all others as a list that begins with what it is."""
        if isinstance(value, str):
            return self._hidden.name(value)
        if isinstance(value, bytes):
            return ["hash", self._hidden.number(value)]
        if isinstance(value, Ref):
            return ["ref", int(value)]
        if not isinstance(value, Inline):
            return value
        kind, what = value
        if kind == "many":
            return ["many", self._values(what[1])]
        if kind == "enum":
            return ["enum", _name_of(what[0]), what[1]]
        if kind == "named":
            return ["named", _name_of(what[0]), self._values(what[1])]
        if kind == "scalar":
            return ["scalar", *what]
        if kind == "message":
            return ["message", what[0], message_form(what[1])]
        if isinstance(what, list):
            return [kind, self._values(what)]
        return [kind, what]


def message_form(message: Any) -> dict[str, Any]:
    """Of what a worker says of itself: the numbers that decisions depend on, and what it runs on."""
    whole = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return {name: value for name, value in whole.items() if name in _MESSAGE_FIELDS}


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
