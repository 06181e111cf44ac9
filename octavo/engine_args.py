"""`EngineArgs`: a model and its options, kept for `LLMEngine.from_engine_args`, or read from a command line."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from octavo.embedded.options import NOT_EMBEDDED, read_options
from octavo.shared.options import KNOWN


class EngineArgs:
    """What `LLMEngine` and `LLM` take, checked when it is made.

    Raises OptionError (a ValueError): an unknown or impossible option.

    >>> EngineArgs(model="smollm2-135m-instruct", max_num_seqs=8).options
    {'max_num_seqs': 8}
    >>> EngineArgs("smollm2-135m-instruct", max_num_sequences=8)
    Traceback (most recent call last):
    octavo.shared.options.OptionError: no option is called max_num_sequences; did you mean max_num_seqs?
    """

    def __init__(self, model: str, **options: Any) -> None:
        read_options(model, options)
        self.model = model
        vars(self).update({name: value for name, value in options.items() if name != KNOWN})

    if TYPE_CHECKING:  # each option is an attribute

        def __getattr__(self, name: str) -> Any: ...

    @property
    def options(self) -> dict[str, Any]:
        """All that was given but the model, by name; each is an attribute, too."""
        return {name: value for name, value in vars(self).items() if name != "model"}

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """The parser with a flag for each option, as `octavo serve` has them; variables and `--config` count too."""
        from octavo.shared.options import add_arguments
        from scheduler_svc.config import SchedulerConfig
        from worker_svc.config import WorkerConfig

        for cls in (WorkerConfig, SchedulerConfig):
            add_arguments(parser, cls, without=NOT_EMBEDDED)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """What a parser that `add_cli_args` filled has read. Raises OptionError."""
        from octavo.shared.options import given_values
        from scheduler_svc.config import SchedulerConfig
        from worker_svc.config import WorkerConfig

        options = {
            name: value for each in (WorkerConfig, SchedulerConfig) for name, value in given_values(each, args).items()
        }
        return cls(options.pop("model", WorkerConfig().model), **options)

    def __repr__(self) -> str:
        given = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"EngineArgs(model={self.model!r}{given})"
