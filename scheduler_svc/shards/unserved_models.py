"""Models that a shard has no worker of while another has one, and since when: a lost worker may be back at once."""

from __future__ import annotations

from collections.abc import Callable, Collection


class UnservedModels:
    """`serves`: whether a shard has a worker of a model; `patience_s`: that a lost one has to come back."""

    def __init__(self, serves: Callable[[int, str], bool], patience_s: float) -> None:
        self._serves = serves
        self._patience_s = patience_s
        self._since_s: dict[tuple[int, str], float] = {}

    def look(self, shards: Collection[int], models: Collection[str], now_s: float) -> list[tuple[int, str]]:
        """Shards, each with a model whose groups should go on elsewhere now."""
        served = {model: {shard for shard in shards if self._serves(shard, model)} for model in models}
        lacking = [
            (shard, model) for model in models if served[model] for shard in shards if shard not in served[model]
        ]
        self._since_s = {pair: self._since_s.get(pair, now_s) for pair in lacking}
        return [pair for pair in lacking if now_s - self._since_s[pair] >= self._patience_s]
