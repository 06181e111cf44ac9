"""The fields of a JSON object, each read once and with its type; what nobody has read is refused.

`null` is the same as nothing, as with OpenAI.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from gateway_svc.errors import HttpError, InvalidField, UnsupportedField
from octavo.shared.command_line import did_you_mean

MAX_SHOWN_CHARS = 80  # of a value that is refused


class Fields:
    """Raises InvalidField for what has another type. `path` is where in the body the object is."""

    def __init__(self, values: Any, path: str = "") -> None:
        if not isinstance(values, dict):
            what = f"got {shown(values)}; accepted: an object"
            raise InvalidField(path, what) if path else HttpError(400, f"the body has to be a JSON object: {what}")
        self._left: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
        self._known: set[str] = set()
        self._path = path

    @property
    def known(self) -> frozenset[str]:
        """Names that have been read so far, whether they were there or not."""
        return frozenset(self._known)

    def param(self, name: str) -> str:
        """The field's name from the root of the body on."""
        return f"{self._path}.{name}" if self._path else name

    def take(self, name: str) -> Any:
        """Whatever is there, or None."""
        self._known.add(name)
        return self._left.pop(name, None)

    def peek(self, name: str) -> Any:
        """Whatever is there, without reading it."""
        return self._left.get(name)

    def text(self, name: str) -> str | None:
        """Text."""
        found: str | None = self._typed(name, lambda value: isinstance(value, str), "text")
        return found

    def id(self, name: str) -> str | None:
        """Text that a header of HTTP can have."""
        found: str | None = self._typed(name, is_header_text, "printable ASCII")
        return found

    def integer(self, name: str) -> int | None:
        """A whole number."""
        found: int | None = self._typed(name, is_integer, "a whole number")
        return found

    def number(self, name: str) -> float | None:
        """A number."""
        found: float | None = self._typed(name, is_number, "a number")
        return found

    def switch(self, name: str) -> bool | None:
        """True or false."""
        found: bool | None = self._typed(name, lambda value: isinstance(value, bool), "true or false")
        return found

    def integers(self, name: str) -> list[int] | None:
        """A list of whole numbers."""
        found: list[int] | None = self._typed(name, lambda value: is_list_of(value, int), "a list of whole numbers")
        return found

    def texts(self, name: str) -> list[str] | None:
        """A list of texts, or one alone."""
        value = self._typed(name, lambda value: isinstance(value, str) or is_list_of(value, str), "a text, or some")
        return [value] if isinstance(value, str) else value

    def object(self, name: str) -> Fields | None:
        """The fields of an object."""
        value = self.take(name)
        return None if value is None else Fields(value, self.param(name))

    def objects(self, name: str) -> list[Fields] | None:
        """Those of each object of a list."""
        values = self._typed(name, lambda value: isinstance(value, list), "a list of objects")
        if values is None:
            return None
        return [Fields(value, f"{self.param(name)}[{index}]") for index, value in enumerate(values)]

    def choice(self, name: str, accepted: Collection[str]) -> str | None:
        """One of these words."""
        found: str | None = self._typed(name, lambda value: value in accepted and is_text(value), ", ".join(accepted))
        return found

    def leave(self, *names: str) -> None:
        """Fields that are taken and change nothing here."""
        self._known.update(names)
        for name in names:
            self._left.pop(name, None)

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Fields that this server cannot do, each with why; what is empty or false asks for nothing."""
        self._known.update(reasons)
        for name, why in reasons.items():
            if self._left.pop(name, None):
                raise UnsupportedField(self.param(name), why)

    def finish(self, names: Mapping[str, str] = {}) -> None:
        """To be called at the end. Raises for a field that nobody knows. `names`: of fields that have another name here
        than in other bodies, by that name."""
        if self._left:
            name = next(iter(self._left))
            name = name[:MAX_SHOWN_CHARS]
            hint = f"; did you mean {names[name]}?" if name in names else did_you_mean(name, self._known)
            raise InvalidField(self.param(name), f"no field has this name{hint}", code="unknown_parameter")

    def _typed(self, name: str, is_accepted: Callable[[Any], bool], accepted: str) -> Any:
        value = self.take(name)
        if value is None or is_accepted(value):
            return value
        raise InvalidField(self.param(name), f"got {shown(value)}; accepted: {accepted}")


def is_integer(value: Any) -> bool:
    """JSON's true is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """JSON's 1e999 is none here: it would be infinite."""
    return is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def is_header_text(value: Any) -> bool:
    """No line of its own can begin in it."""
    return isinstance(value, str) and value.isascii() and value.isprintable()


def is_text(value: Any) -> bool:
    """No number, list or object."""
    return isinstance(value, str)


def is_list_of(value: Any, kind: type) -> bool:
    """Of these alone; an empty one is."""
    return isinstance(value, list) and set(map(type, value)) <= {kind}  # half a million of them in 8 ms


def shown(value: Any) -> str:
    """A value in a message, of whatever size it is."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value[:MAX_SHOWN_CHARS]) if isinstance(value, str) else str(value)
    return text[:MAX_SHOWN_CHARS]
