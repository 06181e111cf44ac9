"""The served model on its way to a frontend: all that is known of it, and where its tokenizer's files are."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from protos import frontend_pb2
from scheduler_svc.served_model import ServedModel
from scheduler_svc.tokenizer import Tokenizer

_NAMES = [field.name for field in dataclasses.fields(ServedModel) if field.name != "tokenizer"]


def encode_model(model: ServedModel, tokenizer_folder: Path | None = None) -> frontend_pb2.ModelDescription:
    """`tokenizer_folder` has what `model.tokenizer.save` wrote; None for a reader that gets the files otherwise."""
    values = {name: getattr(model, name) for name in _NAMES}
    return frontend_pb2.ModelDescription(**values, tokenizer_folder=str(tokenizer_folder or ""))


def decode_model(description: frontend_pb2.ModelDescription) -> ServedModel:
    """Reads the tokenizer, unless it is in use already: not for the event loop. Raises TokenizerError."""
    return decode_model_with(description, Tokenizer.from_folder(description.tokenizer_folder))


def decode_model_with(description: frontend_pb2.ModelDescription, tokenizer: Tokenizer) -> ServedModel:
    values = {name: getattr(description, name) for name in _NAMES}
    values["eos_token_ids"] = tuple(values["eos_token_ids"])
    return ServedModel(**values, tokenizer=tokenizer)
