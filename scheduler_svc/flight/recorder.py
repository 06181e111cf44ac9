"""The ring: the last entries of one step loop, in two halves, each with an image of the state that it began in.

Belongs to the step loop's thread. When a half is full, another begins with an image of the loop's state, and the older
of the two is dropped: so what is left always begins in a state that is known, also in the middle of requests. It keeps
references to what a step has anyway (the bytes of its messages), and turns nothing into a file's form: `record_file`
does, on another thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import structlog

from octavo.shared.log import trace
from protos import worker_pb2
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step_plan import Answer, NewTokens, ScheduledRows, SchedulerOutputs, introduced_groups
from scheduler_svc.flight.entries import ENTRY_BYTES, GROUP_BYTES, HASH_BYTES, Entry, GroupNote, Kind
from scheduler_svc.flight.image import Image, NoImage, TooLarge, image_of
from scheduler_svc.flight.where import where_of
from scheduler_svc.leases.worker_handle import WorkerHandle

log = structlog.get_logger()

Clock = Callable[[], int]


class NoRecorder:
    """Writes nothing down: what a step loop has where the recorder is off, and what it tells any recorder."""

    is_on = False

    def clock(self, clock: Clock) -> Clock:
        """The clock that the loop is to read."""
        return clock

    def pictures(self, state: Callable[[], dict[str, Any]]) -> None:
        """What images are made of: `Engine.state`."""

    def submitted(self, group: SequenceGroup, *, begins: bool) -> None:
        """A request comes to the loop; it begins, or is held until it is due."""

    def due(self, group: SequenceGroup) -> None:
        """A request that was held is not any longer."""

    def ended_above(self, group: SequenceGroup) -> None:
        """A caller ends a request."""

    def finished_above(self, sequence: Sequence) -> None:
        """A caller ends an output."""

    def has_ended(self, group: SequenceGroup) -> None:
        """A request is over, for whatever reason."""

    def joined(self, worker: WorkerHandle, lease: worker_pb2.LeaseGranted) -> None:
        """A worker comes."""

    def lost(self, worker: WorkerHandle, reason: str) -> None:
        """The stream of a worker has ended."""

    def silent(self, worker: WorkerHandle) -> None:
        """A worker is given up in this turn, for want of an answer."""

    def left(self, worker: WorkerHandle) -> None:
        """A worker is here no more, for whatever reason."""

    def said(self, worker: WorkerHandle, data: bytes) -> None:
        """A worker has said something."""

    def broken(self) -> None:
        """What it said last makes no sense."""

    def ended_by(self, tokens: NewTokens) -> None:
        """What it said last was an answer, and sequences have ended with its tokens."""

    def asks(self, rows: ScheduledRows, answer: Answer) -> None:
        """What it said last is an answer to rows of beams, and about to be taken."""

    def control(self, kind: Kind, *what: Any) -> None:
        """An operator changes something, or an adapter is dealt with."""

    def called(self) -> None:
        """Somebody's function is about to run on the loop's thread."""

    def turn(self) -> None:
        """Events are taken: time limits come, and steps."""

    def sent(self, worker: WorkerHandle, outputs: SchedulerOutputs, step_id: int, data: bytes) -> None:
        """A step is being sent."""

    def fault(self, kind: str, where: str, worker: str = "") -> None:
        """Something went wrong that a record is worth. `where`: alike for faults that are alike; no user's words.
        `worker`: the address of the one that it is a fault of."""

    def turned(self) -> None:
        """Everything that there was to do is done."""


@dataclass(slots=True, eq=False)
class Segment:
    """A half of the ring. `image`: None where the loop had just begun, or where `why_none` says why there is none."""

    image: Image | None
    why_none: str = ""
    entries: list[Entry] = field(default_factory=list)
    notes: dict[int, GroupNote] = field(default_factory=dict)  # requests that it may name, by their numbers
    num_steps: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a record is written."""

    kind: str
    where: str
    worker: str = ""


@dataclass(frozen=True, slots=True)
class Recording:
    """What the ring held at one moment, for whoever writes it down; `workers` by number: address and sizes."""

    segments: list[Segment]
    workers: dict[int, dict[str, Any]]
    fault: Fault | None = None


class FlightRecorder(NoRecorder):
    """Keeps at least half of `num_steps` steps a worker, and at most `max_bytes` of all that belongs to them.

    Args:
        on_fault: gets the recording at the end of the turn in which something went wrong. Must not block.
    """

    is_on = True

    def __init__(
        self,
        num_steps: int,
        max_bytes: int,
        on_fault: Callable[[Recording], None] = lambda recording: None,
    ) -> None:
        self._half_steps = max(1, num_steps // 2)
        self._half_bytes = max_bytes // 2
        self._state: Callable[[], dict[str, Any]] = dict
        self._on_fault = on_fault
        self._read: Clock = lambda: 0
        self._live: dict[int, GroupNote] = {}
        self._numbers: dict[WorkerHandle, int] = {}
        self._next_number = itertools.count(1)
        self._workers: dict[int, dict[str, Any]] = {}
        self._fault: Fault | None = None
        self._segment = Segment(None)
        self._segments = [self._segment]
        self._last = Entry(Kind.BEGIN)  # whose times are being read
        self._segment.entries.append(self._last)
        self._turn_at = -1  # the entry of the last turn
        self._is_idle = True  # since then nothing has happened but that workers are there
        self._is_incomplete = False  # something is missing among the entries: they cannot be played
        self._has_complained = False
        self.image_ns = 0  # what the last image took

    # ---- events -----------------------------------------------------------------------------------------------------

    def clock(self, clock: Clock) -> Clock:
        """See `NoRecorder`; the times are kept."""
        self._read = clock

        def read() -> int:
            now_ns = clock()
            self._last.times.append(now_ns)
            return now_ns

        return read

    def pictures(self, state: Callable[[], dict[str, Any]]) -> None:
        """See `NoRecorder`."""
        self._state = state

    def _add(self, kind: Kind, what: Any = None, num_bytes: int = 0) -> Entry:
        entry = self._last = Entry(kind, what)
        segment = self._segment
        segment.entries.append(entry)
        segment.num_bytes += ENTRY_BYTES + num_bytes
        self._is_idle = False
        return entry

    def submitted(self, group: SequenceGroup, *, begins: bool) -> None:
        """See `NoRecorder`."""
        try:
            note = GroupNote(group)
        except Exception as error:  # costs the record what it has so far, and the request nothing
            log.error("a request cannot be written down", request_id=group.request_id, exception=trace(error))
            self._is_incomplete = True
            return
        self._live[note.number] = self._segment.notes[note.number] = note
        self._add(Kind.REQUEST if begins else Kind.HELD, note.number, GROUP_BYTES)

    def due(self, group: SequenceGroup) -> None:
        """See `NoRecorder`. With its place in queues, which it got when it came."""
        self._add(Kind.DUE, (group.number, group.order))

    def ended_above(self, group: SequenceGroup) -> None:
        """See `NoRecorder`."""
        self._add(Kind.END, group.number)

    def finished_above(self, sequence: Sequence) -> None:
        """See `NoRecorder`."""
        self._add(Kind.FINISH, (sequence.group.number, sequence.index))

    def has_ended(self, group: SequenceGroup) -> None:
        """See `NoRecorder`."""
        note = self._live.pop(group.number, None)
        if note is not None:
            note.ended()
            self._segment.num_bytes += HASH_BYTES * note.num_hashes

    def joined(self, worker: WorkerHandle, lease: worker_pb2.LeaseGranted) -> None:
        """See `NoRecorder`."""
        number = next(self._next_number)
        self._numbers[worker] = number
        self._workers[number] = {"address": worker.link.address, "epoch": worker.epoch, "model": worker.model}
        cached = lease.cached_blocks
        self._add(Kind.JOIN, (number, worker.info, worker.sizes, worker.epoch, worker.model, cached), cached.ByteSize())

    def lost(self, worker: WorkerHandle, reason: str) -> None:
        """See `NoRecorder`."""
        self._add(Kind.LOST, (self._numbers[worker], reason))

    def silent(self, worker: WorkerHandle) -> None:
        """See `NoRecorder`."""
        self._last.what = (*(self._last.what or ()), self._numbers[worker])
        self._is_idle = False

    def left(self, worker: WorkerHandle) -> None:
        """See `NoRecorder`."""
        self._numbers.pop(worker, None)

    def said(self, worker: WorkerHandle, data: bytes) -> None:
        """See `NoRecorder`."""
        is_idle = self._is_idle and _is_heartbeat(data)
        self._add(Kind.ANSWER, [self._numbers[worker], data, None, None], len(data))
        self._is_idle = is_idle

    def broken(self) -> None:
        """See `NoRecorder`."""
        if self._last.kind is Kind.ANSWER:
            self._last.what[1] = None

    def asks(self, rows: ScheduledRows, answer: Answer) -> None:
        """See `NoRecorder`."""
        if rows.num_beam_rows and self._last.kind is Kind.ANSWER:
            self._last.what[3] = _stops_of_beams(rows, answer)

    def ended_by(self, tokens: NewTokens) -> None:
        """See `NoRecorder`."""
        stopped = np.flatnonzero(tokens.finish_reasons == FinishReason.STOP)
        if len(stopped) and self._last.kind is Kind.ANSWER:
            ended = tokens.sequences[stopped]
            self._last.what[2] = [(sequence.group.number, sequence.index) for sequence in ended]

    def control(self, kind: Kind, *what: Any) -> None:
        """See `NoRecorder`. Workers among `what` are written down by their numbers."""
        numbers = (self._numbers.get(each, 0) if isinstance(each, WorkerHandle) else each for each in what)
        self._add(kind, tuple(numbers))

    def called(self) -> None:
        """See `NoRecorder`: an entry that is dropped again unless the function reads the clock."""
        is_idle = self._is_idle
        self._add(Kind.LOOK)
        self._is_idle = is_idle

    def turn(self) -> None:
        """See `NoRecorder`. Of turns without news, while nobody has a request here, the last one is kept."""
        if self._is_idle and not self._live and self._turn_at >= 0:
            segment = self._segment
            segment.num_bytes -= ENTRY_BYTES * (len(segment.entries) - self._turn_at)
            del segment.entries[self._turn_at :]
        self._add(Kind.TURN)
        self._turn_at = len(self._segment.entries) - 1
        self._is_idle = True

    def sent(self, worker: WorkerHandle, outputs: SchedulerOutputs, step_id: int, data: bytes) -> None:
        """See `NoRecorder`."""
        groups = [group.number for group in introduced_groups(outputs.introductions)]
        self._add(Kind.STEP, (self._numbers[worker], step_id, data, groups), len(data))
        self._segment.num_steps += 1

    # ---- the ring ---------------------------------------------------------------------------------------------------

    def fault(self, kind: str, where: str, worker: str = "") -> None:
        """See `NoRecorder`; the first of a turn is what the record is for."""
        self._segment.entries.append(Entry(Kind.FAULT, (kind, where)))  # times go on with the entry before
        self._is_idle = False
        if self._fault is None:
            self._fault = Fault(kind, where, worker)

    def turned(self) -> None:
        """See `NoRecorder`."""
        if self._fault is not None:
            fault, self._fault = self._fault, None
            self._on_fault(self.recording(fault))
        if self._is_incomplete:
            self._is_incomplete = False
            self._begin()
            self._segments = [self._segment]
        segment = self._segment
        num_workers = max(1, len(self._numbers))
        if segment.num_steps >= self._half_steps * num_workers or segment.num_bytes > self._half_bytes:
            self._begin()

    def recording(self, fault: Fault | None = None) -> Recording:
        """What there is now. On the step loop's thread, between turns."""
        copies = [
            Segment(each.image, each.why_none, list(each.entries), dict(each.notes), each.num_steps, each.num_bytes)
            for each in self._segments
        ]
        return Recording(copies, dict(self._workers), fault)

    def _begin(self) -> None:
        began_ns = self._read()
        image, why = None, ""
        try:
            image = image_of(self._state(), self._numbers, self._half_bytes // 2)
        except TooLarge as error:
            why = str(error)
        except Exception as error:
            if not self._has_complained:
                log.error("the flight recorder has no image of the state", exception=trace(error))
            self._has_complained = True
            why = f"its state could not be written down: {error if isinstance(error, NoImage) else where_of(error)}"
        self.image_ns = self._read() - began_ns
        self._segment = Segment(image, why, notes=dict(self._live), num_bytes=image.num_bytes if image else 0)
        self._segments = [self._segments[-1], self._segment]
        held = {each.what[0] for each in self._segments[0].entries if each.kind is Kind.JOIN}
        for segment in self._segments:
            held.update(segment.image.workers if segment.image is not None else ())
        self._workers = {number: facts for number, facts in self._workers.items() if number in held}
        self._last, self._turn_at, self._is_idle = Entry(Kind.LOOK), -1, True


def _is_heartbeat(data: bytes) -> bool:
    """By the tags of a `StepResponse`, without a message made of it: they come twice a second, and are the most."""
    place = 0
    if data[:1] == b"\x08":  # the epoch, a number of any length
        place = 1
        while data[place : place + 1] >= b"\x80":
            place += 1
        place += 1
    return data[place : place + 1] == b"\x1a"


def _stops_of_beams(rows: ScheduledRows, answer: Answer) -> list[int]:
    """Which entries of an answer's beam rows are tokens that end a beam."""
    first = int(answer.num_tokens[: len(rows) - rows.num_beam_rows].sum())
    stops = []
    for row in range(len(rows) - rows.num_beam_rows, len(rows)):
        end = first + int(answer.num_tokens[row])
        search = rows.sequences[row].group.beam_search
        if search is not None:
            stops += (first + np.flatnonzero(search.is_stop(answer.token_ids[first:end]))).tolist()
        first = end
    return stops
