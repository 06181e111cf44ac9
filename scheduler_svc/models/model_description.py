"""Served models as a frontend is told of them: all that is known, and where their tokenizers' files are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from protos import frontend_pb2
from scheduler_svc.models.served_model import ServedModel
from scheduler_svc.models.served_models import AwaitedModel, KnownModel, ServedModels
from scheduler_svc.text.tokenizer import Tokenizer

_NAMES = [field.name for field in dataclasses.fields(ServedModel) if field.name != "tokenizer"]


def encode_model(model: ServedModel, tokenizer_folder: Path | None = None) -> frontend_pb2.ModelDescription:
    """`tokenizer_folder` has what `model.tokenizer.save` wrote; None for a reader that gets the files otherwise."""
    values = {name: getattr(model, name) for name in _NAMES}
    return frontend_pb2.ModelDescription(**values, tokenizer_folder=str(tokenizer_folder or ""))


def decode_model(description: frontend_pb2.ModelDescription) -> ServedModel:
    """Reads the tokenizer, unless it is in use already: not for the event loop. Raises TokenizerError."""
    return decode_model_with(description, Tokenizer.from_folder(description.tokenizer_folder))


def decode_model_with(description: frontend_pb2.ModelDescription, tokenizer: Tokenizer) -> ServedModel:
    """The model of a description, where its tokenizer has been read already."""
    values = {name: getattr(description, name) for name in _NAMES}
    values["eos_token_ids"] = tuple(values["eos_token_ids"])
    return ServedModel(**values, tokenizer=tokenizer)


def encode_models(
    models: ServedModels, folder_of: Callable[[ServedModel], Path | None] = lambda model: None
) -> frontend_pb2.ServedModels:
    """`folder_of`: as `tokenizer_folder` in `encode_model`."""
    message = frontend_pb2.ServedModels(default_name=models.default_name)
    for each in models.known:
        message.models.add(
            model=encode_model(each.model, folder_of(each.model)),
            num_workers_serving=each.num_serving,
            num_workers_draining=each.num_draining,
        )
    for awaited in models.awaited:
        message.awaited.add(name=awaited.name, fingerprint=awaited.fingerprint)
    return message


def decode_models(
    message: frontend_pb2.ServedModels, decode: Callable[[frontend_pb2.ModelDescription], ServedModel | None]
) -> ServedModels:
    """`decode` is asked for each model, and leaves out those for which it gives None. Raises what it raises."""
    known = [
        KnownModel(model, each.num_workers_serving, each.num_workers_draining)
        for each in message.models
        if (model := decode(each.model)) is not None
    ]
    awaited = frozenset(AwaitedModel(each.name, each.fingerprint) for each in message.awaited)
    return ServedModels(tuple(known), message.default_name, awaited)
