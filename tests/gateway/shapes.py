"""Answers held to the types of OpenAI's own client, strictly."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel

T = TypeVar("T", bound=BaseModel)


def strictly(cls: type[T], data: Any) -> T:
    """The object of that type; raises where a field is missing or of another type."""
    return cls.model_validate_json(json.dumps(data), strict=True)


def events(text: str) -> list[Any]:
    """The data of each event, as JSON but for the last word."""
    blocks = [block for block in text.split("\n\n") if block]
    data = [line.removeprefix("data: ") for block in blocks for line in block.split("\n") if line.startswith("data: ")]
    return [each if each == "[DONE]" else json.loads(each) for each in data]
