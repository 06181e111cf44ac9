"""The metrics of all shards as those of one scheduler, for `metrics_server` to tell.

Counters and histograms are added up; what a shard had counted by its end stays in the sums, so that they never fall.
Requests are added up, too. A share of something is told shard by shard, under a label. Of exemplars the latest is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample

READ_TIMEOUT_S = 4.0  # below what one connection to the metrics has
_IS_SHARE = "_perc"
_Labels = tuple[tuple[str, str], ...]
_Key = tuple[str, _Labels]
Texts = dict[tuple[int, str], str]  # OpenMetrics, by index and life of a shard


class ShardedCollector(Collector):
    """`read`: gives what every shard tells at this moment; run on `loop`, asked for on any other thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, read: Callable[[], Coroutine[Any, Any, Texts]]) -> None:
        self._loop = loop
        self._read = read
        self._sums = MetricSums()

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering asks no shard."""
        return ()  # there may be no shard yet

    def collect(self) -> Iterator[Metric]:
        """Asks all shards and adds up; raises TimeoutError after READ_TIMEOUT_S."""
        texts = asyncio.run_coroutine_threadsafe(self._read(), self._loop).result(READ_TIMEOUT_S)
        yield from self._sums.add(texts)


class MetricSums:
    """Keeps what ended shards told last."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, str], list[Metric]] = {}

    def add(self, texts: Texts) -> list[Metric]:
        """One family for all shards. A life that is not among the texts has ended, or does not answer now."""
        for life, text in texts.items():
            self._last[life] = list(text_string_to_metric_families(text))  # type: ignore[no-untyped-call]  # of the library
        merged: dict[str, Metric] = {}
        values: dict[str, dict[_Key, float]] = {}
        exemplars: dict[_Key, Exemplar] = {}  # the latest of each
        for told, families in self._last.items():
            for family in families:
                if family.type == "gauge" and told not in texts:
                    continue
                merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                sums = values.setdefault(family.name, {})
                for sample in family.samples:
                    own = {"shard": str(told[0])} if family.name.endswith(_IS_SHARE) else {}
                    key = sample.name, tuple({**sample.labels, **own}.items())
                    sums[key] = sums.get(key, 0.0) + sample.value
                    if sample.exemplar is not None:
                        exemplars[key] = max(exemplars.get(key, sample.exemplar), sample.exemplar, key=_when)
        for name, family in merged.items():
            family.samples = [
                Sample(key[0], dict(key[1]), value, exemplar=exemplars.get(key)) for key, value in values[name].items()
            ]
        self._join_ended(texts)
        return list(merged.values())

    def _join_ended(self, texts: Texts) -> None:
        """Lives of a shard that have ended are kept as one. The newest may only be slow, and tell its counts again."""
        for index in {index for index, _ in self._last}:
            *former, _ = (each for each in self._last if each[0] == index)
            ended = [each for each in former if each not in texts]
            if len(ended) > 1:
                first, *others = ended
                for other in others:
                    self._last[first] = _summed(self._last[first], self._last.pop(other))


def _when(exemplar: Exemplar) -> float:
    return float(exemplar.timestamp or 0)


def _summed(ones: list[Metric], others: list[Metric]) -> list[Metric]:
    by_name = {family.name: family for family in ones}
    for other in others:
        family = by_name.setdefault(other.name, Metric(other.name, other.documentation, other.type))
        sums = {(sample.name, tuple(sample.labels.items())): sample.value for sample in family.samples}
        for sample in other.samples:
            key = sample.name, tuple(sample.labels.items())
            sums[key] = sums.get(key, 0.0) + sample.value
        family.samples = [Sample(name, dict(labels), value) for (name, labels), value in sums.items()]
    return list(by_name.values())
