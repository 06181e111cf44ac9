"""How requests name models: `--served-model-name`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ModelNames:
    """From a worker's own name for its model to the one that requests give.

    Attributes:
        for_all: the name of every model that has none in `by_own_name`; empty: the worker's own.
        default: what a request without a name gets in any case; empty: see `ServedModels`.
    """

    for_all: str = ""
    by_own_name: Mapping[str, str] = field(default_factory=dict)
    default: str = ""

    @classmethod
    def parse(cls, entries: Sequence[str]) -> ModelNames:
        """From NAME, at most once, and ALIAS=NAME, of which the first is the default. Raises ValueError."""
        for_all, by_own_name = "", {}
        for entry in entries:
            alias, equals, name = entry.partition("=")
            if not alias or (equals and not name):
                raise ValueError(f"served_model_name has {entry!r}; NAME for all models, or ALIAS=NAME, is accepted")
            if (equals and name in by_own_name) or (for_all and not equals):
                raise ValueError(f"served_model_name has {entry!r} beside another name for the same")
            if equals:
                by_own_name[name] = alias
            else:
                for_all = alias
        return cls(for_all, by_own_name, next(iter(by_own_name.values()), ""))

    def model(self, own_name: str) -> str:
        """`own_name`: what the worker calls its model."""
        return self.by_own_name.get(own_name, self.for_all or own_name)
