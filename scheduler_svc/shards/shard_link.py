"""A frontend's link to one shard: a `CoreLink` that keeps what was drawn, and takes the shard's reports."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import grpc
import numpy as np

from protos import frontend_pb2, shards_pb2
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup, SequenceStatus, adapter_version
from scheduler_svc.core.step_plan import NewTokens
from scheduler_svc.frontends.core_link import CoreLink
from scheduler_svc.models.served_model import ServedModel
from scheduler_svc.models.served_models import ServedModels
from scheduler_svc.output.mailboxes import Mailboxes
from scheduler_svc.shards.routing_table import LOAD_NAMES, KnownWorker, RoutingTable
from scheduler_svc.shards.shared_models import SharedModels


class DrawnTokens:
    """What clients' outputs have got since their group was sent to a shard, for the next one that goes on with it."""

    def __init__(self) -> None:
        self._token_ids: dict[Sequence, array[int]] = {}

    def take(self, tokens: NewTokens) -> None:
        """Keeps every token of the answer behind those of its sequence, and marks the sequences that end."""
        for sequence, token_id in zip(tokens.sequences.tolist(), tokens.token_ids.tolist(), strict=True):
            history = self._token_ids.get(sequence)
            if history is None:
                history = self._token_ids[sequence] = array("i")
            history.append(token_id)
        for entry in tokens.finish_reasons.nonzero()[0]:
            tokens.sequences[entry].status = SequenceStatus.FINISHED

    def give_to(self, group: SequenceGroup) -> None:
        """The group itself has them from now on."""
        for sequence in group.sequences:
            if (history := self._token_ids.pop(sequence, None)) is not None:
                sequence.extend(history)

    def forget(self, group: SequenceGroup) -> None:
        """Of a group that has ended."""
        for sequence in group.sequences:
            self._token_ids.pop(sequence, None)

    def __len__(self) -> int:
        return len(self._token_ids)


class ShardLink(CoreLink):
    """`ended` is called with each group that has ended by what the shard said."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        mailboxes: Mailboxes,
        shard: int,
        table: RoutingTable,
        drawn: DrawnTokens,
        models: SharedModels,
        ended: Callable[[SequenceGroup], None],
    ) -> None:
        super().__init__(channel, mailboxes)
        self.shard = shard
        self.is_ready = False
        self.has_told = False  # which models it has
        self.adapters_there: dict[str, str] = {}  # with their versions
        self.waiting_there: list[int] = []  # numbers of groups that have not begun, the latest first
        self._table = table
        self._drawn = drawn
        self._models_here = models
        self._ended = ended

    def _decode(self, message: frontend_pb2.ServedModels) -> ServedModels:
        with self._models_here.lock:  # one of all links reads a tokenizer's files
            models = super()._decode(message)
            self._models_here.add(models)
            return models

    def _find_model(self, fingerprint: str) -> ServedModel | None:
        return self._models_here.find(fingerprint)

    def _take(self, event: frontend_pb2.CoreEvent) -> None:
        if event.HasField("report"):
            self._take_report(event.report)
            return
        super()._take(event)
        if event.HasField("beams"):
            self._look_for_end(event.beams.counters.number)
        elif event.HasField("end"):
            self._look_for_end(event.end.counters.number)

    def _take_tokens(self, tokens: NewTokens, columns: frontend_pb2.TokenColumns) -> None:
        self._drawn.take(tokens)
        super()._take_tokens(tokens, columns)
        for entry in tokens.finish_reasons.nonzero()[0]:
            group = tokens.sequences[entry].group
            if group.output.is_finished:
                self._ended(group)

    def _look_for_end(self, number: int) -> None:
        group = self._groups.get(number)
        if group is not None and group.output.is_finished:
            self._ended(group)

    def _take_report(self, report: shards_pb2.ShardReport) -> None:
        shard, table = self.shard, self._table
        new = {worker.number: _known(worker.description) for worker in report.workers if worker.HasField("description")}
        table.set_workers(shard, [worker.number for worker in report.workers], new)
        for worker in report.workers:
            table.report(shard, worker.number, _load(worker))
            if worker.set_bits_u32 or worker.cleared_bits_u32:
                came, went = (np.frombuffer(each, "<u4") for each in (worker.set_bits_u32, worker.cleared_bits_u32))
                table.change_bits(shard, worker.number, came, went)
        table.contains(shard, report.last_number)
        self.waiting_there = np.frombuffer(report.waiting_u32, "<u4").tolist()
        self.adapters_there = {each.name: adapter_version(each.generation, report.process) for each in report.adapters}


def _load(worker: shards_pb2.ReportedWorker) -> dict[str, float]:
    load = {name: getattr(worker.load, name) for name in LOAD_NAMES}
    ahead = {"num_ahead_tokens": worker.num_ahead_tokens, "num_ahead_slots": worker.num_ahead_slots}
    return {**load, **ahead, "num_cached_blocks": worker.num_cached_blocks, "num_outputs": worker.num_outputs}


def _known(description: shards_pb2.WorkerDescription) -> KnownWorker:
    return KnownWorker(
        model=description.model_fingerprint,
        block_size=description.block_size,
        max_model_len=description.max_model_len,
        max_cached_tokens=description.max_cached_tokens,
        takes_adapters=description.takes_adapters,
        num_bits=description.num_bits,
        bits=np.frombuffer(description.bits, np.uint8),
    )
