"""Plays a flight record: the real engine is told again what happened, at the same times, and its decisions compared.

Workers are links that keep what they are sent. Their answers are those of the record, with tokens that stand for those
that were drawn. The clock gives the times that the recorded step loop read. So whatever differs is a decision: of other
code, of another version, or of a state that was not what it should have been.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from octavo.bench.fleet.replayed_worker import ReplayedLink

if TYPE_CHECKING:
    from protos import worker_pb2
    from scheduler_svc.core.sequences.beam_search import BeamHypothesis
    from scheduler_svc.core.sequences.finish_reason import FinishReason
    from scheduler_svc.core.sequences.sequence import SequenceGroup
    from scheduler_svc.core.step_plan import NewTokens
    from scheduler_svc.engine.engine import Engine
    from scheduler_svc.flight.record_file import Record
    from scheduler_svc.flight.record_lines import Line
    from scheduler_svc.leases.worker_handle import WorkerHandle

UNBOUNDED = 1 << 60


@dataclass(frozen=True, slots=True)
class Difference:
    """The first decision that came out otherwise; None: there was none on that side.

    `place`: how many steps had come out the same.
    """

    place: int
    recorded: Line | None
    replayed: Line | None


@dataclass(slots=True)
class Outcome:
    """What a replay found. `faults`: that it met itself, as (kind, where)."""

    num_steps: int
    num_same: int = 0
    difference: Difference | None = None
    faults: list[tuple[str, str]] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        """Whether all decisions are those of the record."""
        return self.difference is None


class Replay:
    """One record, to be played once. Raises BadRecord for one that cannot be.

    Attributes:
        engine: to be changed before the run, if at all.
    """

    def __init__(self, record: Record) -> None:
        from scheduler_svc.engine.engine import Engine
        from scheduler_svc.engine.engine_settings import EngineSettings
        from scheduler_svc.flight.errors import BadRecord

        if not record.header["can_be_replayed"]:
            raise BadRecord(f"it can be shown and not be played: {record.header['begins']}")
        self._record = record
        self._outcome = Outcome(record.num_steps)
        self._links: dict[int, ReplayedLink] = {}
        self._groups: dict[int, SequenceGroup] = {}
        self._times: list[int] = []
        self._now_ns = 0
        self._expected: list[Line] = []  # steps of this turn
        self._num_sent = 0  # of them
        known = {each.name for each in dataclasses.fields(EngineSettings)}
        settings = {name: value for name, value in record.header["settings"].items() if name in known}
        bounds = {"max_waiting_requests": UNBOUNDED, "max_waiting_tokens": UNBOUNDED}
        if record.entries and record.entries[0]["entry"] == "begin":
            self._supply(record.entries[0])
        notes = _notes_faults(self._outcome.faults)
        self.engine: Engine = Engine(
            EngineSettings(**{**settings, **bounds}), _Nobody(), clock=self._clock, recorder=notes
        )
        if record.image is not None:
            self._restore(record)

    def run(self) -> Outcome:
        """Until the first difference, or the end."""
        entries, place = self._record.entries, 0
        while place < len(entries) and self._outcome.difference is None:
            entry = entries[place]
            place += 1
            kind = entry["entry"]
            if kind == "stop":
                break
            if kind == "turn":
                steps = []
                while place < len(entries) and entries[place]["entry"] in ("step", "fault"):
                    steps += [entries[place]] if entries[place]["entry"] == "step" else []
                    place += 1
                self._turn(entry, steps)
            elif kind not in ("begin", "fault"):
                self._supply(entry)
                self._events[kind](self, entry)
                self.engine.take_waiting()
        return self._outcome

    # ---- the beginning ----------------------------------------------------------------------------------------------

    def _restore(self, record: Record) -> None:
        from scheduler_svc.core.queues.policy import POLICIES
        from scheduler_svc.flight.restored_image import RestoredImage

        hashes = {number: line["hashes"] for number, line in record.requests.items()}
        policy = POLICIES[self.engine.settings.scheduling_policy]
        assert record.image is not None
        restored = RestoredImage(record.image, self.engine.state(), self._link, hashes, policy)
        held = [group for group in restored.groups if self._is_held(group)]
        self._groups = {group.number: group for group in held}
        self.engine.goes_on(held)

    def _is_held(self, group: SequenceGroup) -> bool:
        return group in self.engine.router.queues or self.engine.router.worker_of(group) is not None

    def _link(self, number: int) -> ReplayedLink:
        link = self._links.get(number)
        if link is None:
            link = self._links[number] = ReplayedLink(number, self._was_sent)
        return link

    # ---- time -------------------------------------------------------------------------------------------------------

    def _supply(self, entry: Line) -> None:
        self._times = list(reversed(entry["t"]))

    def _clock(self) -> int:
        if self._times:
            self._now_ns = self._times.pop()
        return self._now_ns

    # ---- turns ------------------------------------------------------------------------------------------------------

    def _turn(self, turn: Line, steps: list[Line]) -> None:
        self._supply(turn)
        self._expected, self._num_sent = steps, 0
        for number in turn.get("silent", ()):
            self._link(number).last_heard_ns = 0
        self.engine.watch()
        self.engine.send_steps()
        if self._outcome.difference is None and self._num_sent < len(steps):
            self._differs(steps[self._num_sent], None)

    def _was_sent(self, number: int, step: worker_pb2.Step) -> None:
        from scheduler_svc.flight.decisions import decision_of

        decision = decision_of(step, [int(group.request_id) for group in step.groups])
        replayed: Line = {"worker": number, "step": step.step_id, "decision": decision}
        recorded = self._expected[self._num_sent] if self._num_sent < len(self._expected) else None
        self._num_sent += 1
        if recorded is None or any(recorded[name] != value for name, value in replayed.items()):
            self._differs(recorded, replayed)
        elif self._outcome.difference is None:
            self._outcome.num_same += 1
        if recorded is not None:
            self._supply(recorded)

    def _differs(self, recorded: Line | None, replayed: Line | None) -> None:
        if self._outcome.difference is None:
            self._outcome.difference = Difference(self._outcome.num_same, recorded, replayed)

    # ---- events -----------------------------------------------------------------------------------------------------

    def _on_request(self, entry: Line) -> None:
        self.engine.submit(self._new_group(entry["request"]))

    def _new_group(self, number: int) -> SequenceGroup:
        from scheduler_svc.flight.replayed_groups import group_of

        facts = self._record.requests[number]
        group = self._groups[number] = group_of({**facts, "number": number}, facts["hashes"])
        return group

    def _on_held(self, entry: Line) -> None:
        """It counts among those that have come, for its place in queues alone."""
        if entry["request"] not in self._groups:  # its turn may have come before it was written down
            self.engine.router.queues.number(self._new_group(entry["request"]))

    def _on_due(self, entry: Line) -> None:
        group = self._groups.get(entry["request"])
        if group is None:  # it was held before the record began
            group = self._new_group(entry["request"])
        group.order = entry["order"]
        if not group.is_finished:
            self.engine.submit(group)

    def _on_weigh(self, entry: Line) -> None:
        self.engine.call(lambda: self.engine.weigh(entry["weights"]))

    def _on_end(self, entry: Line) -> None:
        if (group := self._groups.get(entry["request"])) is not None:
            self.engine.abort_group(group)

    def _on_finish(self, entry: Line) -> None:
        group = self._groups.get(entry["request"])
        for sequence in group.sequences if group is not None else ():
            if sequence.index == entry["index"]:
                self.engine.finish_sequence(sequence)

    def _on_join(self, entry: Line) -> None:
        from google.protobuf import json_format

        from protos import worker_pb2
        from scheduler_svc.flight.replayed_worker_messages import lease_of

        info = json_format.ParseDict(entry["info"], worker_pb2.WorkerInfo(), ignore_unknown_fields=True)
        sizes = json_format.ParseDict(entry["sizes"], worker_pb2.InitializeResponse(), ignore_unknown_fields=True)
        self.engine.worker_joined(self._link(entry["worker"]), info, sizes, lease_of(entry), entry["model"])

    def _on_lost(self, entry: Line) -> None:
        self.engine.worker_lost(self._link(entry["worker"]), entry["why"])

    def _on_answer(self, entry: Line) -> None:
        from scheduler_svc.flight.replayed_worker_messages import response_of

        if (worker := self._worker(entry["worker"])) is not None:
            self.engine.worker_said(worker.link, response_of(entry, worker))

    def _on_flush(self, entry: Line) -> None:
        for number in entry["workers"]:
            self.engine.flush_prefix_cache(self._link(number).address)

    def _on_withhold(self, entry: Line) -> None:
        self.engine.withhold_blocks(self._link(entry["worker"]).address, entry["value"])

    def _on_drain(self, entry: Line) -> None:
        if (worker := self._worker(entry["worker"])) is not None:
            self.engine.call(lambda: self.engine.drain_worker(worker, may_finish=entry["value"]))

    def _on_load(self, entry: Line) -> None:
        self.engine.load_adapter(entry["adapter"], entry["path"])

    def _on_unload(self, entry: Line) -> None:
        self.engine.unload_adapter(entry["adapter"])

    def _on_adapter(self, entry: Line) -> None:
        self._link(entry["worker"]).is_done(entry["adapter"], "it failed" if entry["problem"] else "")

    def _on_look(self, entry: Line) -> None:
        self.engine.call(self.engine.router.look)

    def _worker(self, number: int) -> WorkerHandle | None:
        link = self._link(number)
        return next((worker for worker in self.engine.workers if worker.link is link), None)

    _events: ClassVar[dict[str, Callable[[Replay, Line], None]]] = {
        "request": _on_request,
        "held": _on_held,
        "due": _on_due,
        "weigh": _on_weigh,
        "end": _on_end,
        "finish": _on_finish,
        "join": _on_join,
        "lost": _on_lost,
        "answer": _on_answer,
        "flush": _on_flush,
        "withhold": _on_withhold,
        "drain": _on_drain,
        "load": _on_load,
        "unload": _on_unload,
        "adapter": _on_adapter,
        "look": _on_look,
    }


def _notes_faults(found: list[tuple[str, str]]) -> Any:
    from scheduler_svc.flight.recorder import NoRecorder

    class NotesFaults(NoRecorder):
        """Takes note of faults, and of nothing else."""

        def fault(self, kind: str, where: str, worker: str = "") -> None:
            found.append((kind, where))

    return NotesFaults()


class _Nobody:
    """Where tokens go."""

    def put_tokens(self, tokens: NewTokens, outputs: worker_pb2.SequenceOutputs) -> None:
        """Nobody reads them."""

    def put_end(self, group: SequenceGroup, reason: FinishReason, message: str, is_invalid: bool) -> None:
        """Likewise."""

    def put_prompt_logprobs(self, group: SequenceGroup, logprobs: worker_pb2.SequenceOutputs) -> None:
        """Likewise."""

    def put_beams(self, group: SequenceGroup, hypotheses: list[BeamHypothesis]) -> None:
        """Likewise."""
