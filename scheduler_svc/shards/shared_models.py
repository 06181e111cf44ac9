"""The models of all shards as those of one scheduler, each tokenizer read once."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace

from scheduler_svc.models.served_model import ServedModel
from scheduler_svc.models.served_models import AwaitedModel, KnownModel, ServedModels


class SharedModels:
    """Those that a link has told of, by fingerprint, until no link does.

    `lock`: to be held by whoever reads the files of one that is not here, until it is added.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._models: dict[str, ServedModel] = {}
        self._order: dict[str, int] = {}  # in which they came, of all shards

    def find(self, fingerprint: str) -> ServedModel | None:
        """None for a model that no link has told of."""
        return self._models.get(fingerprint)

    def add(self, models: ServedModels) -> None:
        """What one link tells of; a model that is here already is replaced by its newest description."""
        for each in models.known:
            self._models[each.model.fingerprint] = each.model
            self._order.setdefault(each.model.fingerprint, len(self._order))

    def merged(self, shards: Iterable[ServedModels], *, awaits_shards: bool = False) -> ServedModels:
        """Workers are counted over all shards; lengths are those of the largest worker of any.

        `awaits_shards`: some have not told yet, and may have any model.
        """
        known: dict[str, KnownModel] = {}
        default_name = ""
        awaited = {AwaitedModel()} if awaits_shards else set()
        for models in shards:
            default_name = default_name or models.default_name
            awaited |= models.awaited
            for each in models.known:
                key = each.model.fingerprint
                known[key] = _together(known[key], each) if key in known else each
        self._models = {key: each.model for key, each in known.items()}  # one that is being added is read once more
        in_order = sorted(known, key=lambda key: self._order.get(key, len(self._order)))
        return ServedModels(tuple(known[key] for key in in_order), default_name, frozenset(awaited))


def _together(one: KnownModel, other: KnownModel) -> KnownModel:
    model = replace(
        one.model,
        max_model_len=max(one.model.max_model_len, other.model.max_model_len),
        max_num_seqs=max(one.model.max_num_seqs, other.model.max_num_seqs),
        max_num_batched_tokens=max(one.model.max_num_batched_tokens, other.model.max_num_batched_tokens),
        max_cached_tokens=max(one.model.max_cached_tokens, other.model.max_cached_tokens),
    )
    return KnownModel(model, one.num_serving + other.num_serving, one.num_draining + other.num_draining)
