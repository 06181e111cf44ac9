"""A model's `config.json`, read key by key with checks: what is missing or wrong is one line that names file and key.

A default stands for an absent key, as `transformers` has it for the family; a key that is there and null is `None`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from worker_svc.models.errors import ModelError


class RawConfig:
    """The keys of one JSON object; `path` is where it was read."""

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        self._values, self.path = values, path

    @classmethod
    def read(cls, path: Path, required: bool = True) -> RawConfig:
        """Raises ModelError for a file that cannot be read or holds no object; without `required` it may be absent."""
        if not path.exists() and not required:
            return cls({}, path)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:  # the latter for brackets in brackets
            raise ModelError(f"{path} is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise ModelError(f"{path} is not a JSON object")
        return cls(values, path)

    def error(self, what: str) -> ModelError:
        """What is wrong, with the file in front."""
        return ModelError(f"{self.path}: {what}")

    def get(self, key: str, default: Any = None) -> Any:
        """Unchecked; `default` where the key is absent."""
        return self._values.get(key, default)

    def integer(self, key: str, default: int | None = None) -> int:
        """At least 1; null counts as absent."""
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(f"{key} must be a positive integer, not {value!r}")
        if value > sys.maxsize:
            raise self.error(f"{key} is larger than {sys.maxsize}")
        return value

    def count(self, key: str, default: int = 0) -> int:
        """At least 0; null counts as absent."""
        value = self.get(key)
        return 0 if (default if value is None else value) == 0 else self.integer(key, default)

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        """At least 1, or None where the key is null."""
        return None if self.get(key, default) is None else self.integer(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        """Null counts as absent."""
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{key} must be a number, not {value!r}")
        if not _is_finite(value):
            raise self.error(f"{key} must be a finite number, not {value!r:.40}")
        return float(value)

    def positive_number(self, key: str, default: float | None = None, above: float = 0.0) -> float:
        """More than `above` and less than 10^15, so that what is computed with it stays finite; null counts as
        absent."""
        value = self.number(key, default)
        if not above < value < 1e15:
            raise self.error(f"{key} must be more than {above:g} and less than 1e15, not {value!r}")
        return value

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        """None where the key is null."""
        return None if self.get(key, default) is None else self.number(key, default)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of exactly `count` numbers."""
        value = self.get(key)
        if not isinstance(value, list) or not all(isinstance(each, int | float) and _is_finite(each) for each in value):
            raise self.error(f"{key} must be a list of numbers, not {value!r:.40}")
        if len(value) != count:
            raise self.error(f"{key} has {len(value)} numbers, {count} are needed")
        return tuple(map(float, value))

    def text(self, key: str, default: str) -> str:
        """Null counts as absent."""
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.error(f"{key} must be a string, not {value!r:.40}")
        return value

    def list_of(self, kind: type, key: str) -> list[Any]:
        """A list of such values; an empty one where the key is absent or null."""
        value = self.get(key)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
            raise self.error(f"{key} must be a list of {kind.__name__}, not {value!r:.40}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """Null counts as absent."""
        value = self.get(key)
        return default if value is None else bool(value)

    def part(self, key: str) -> RawConfig:
        """The object under a key; an empty one where it is absent or null."""
        value = self.get(key) or {}
        if not isinstance(value, dict):
            raise self.error(f"{key} must be an object, not {value!r}")
        return RawConfig(value, self.path)

    def items(self) -> Iterable[tuple[str, Any]]:
        """All keys and their values, unchecked."""
        return self._values.items()

    def merged(self, **defaults: Any) -> RawConfig:
        """The same keys, with defaults for those that are absent or null."""
        return RawConfig(defaults | {key: value for key, value in self._values.items() if value is not None}, self.path)

    def __contains__(self, key: str) -> bool:
        return self.get(key) is not None

    def __bool__(self) -> bool:
        return bool(self._values)


def _is_finite(value: float) -> bool:
    """Python's JSON has NaN and Infinity, and integers that no float holds."""
    return abs(value) <= sys.float_info.max
