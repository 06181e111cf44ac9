"""A recording as objects for JSON, a line each: what stands in a file, and what of a recording does not get there.

A line says what it is by its first key:

    octavo_flight_record    the first: the format's version, of whom and when, settings, workers, why it was written
    image, node             the state that it begins with, where it does not begin with an empty server
    request                 what is known of a request, and the numbers of its blocks' hashes
    entry                   what happened, with the times that the step loop read from then on, as differences
    end                     the last: how many lines stand before it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from protos import worker_pb2
from scheduler_svc.flight.decisions import decision_of
from scheduler_svc.flight.entries import Entry, GroupNote, Kind
from scheduler_svc.flight.hidden import Hidden
from scheduler_svc.flight.image_form import ImageForm, message_form
from scheduler_svc.flight.recorder import Recording

FORMAT = 2
HASH_BYTES = 32
_NAMES = ("tenant", "share", "adapter", "model")  # of a request
Line = dict[str, Any]


def lines_of(recording: Recording, header: Line) -> Iterator[Line]:
    """All lines of a file. `header`: what is to stand in the first one beside."""
    hidden, first = Hidden(), recording.segments[0]
    workers = [
        {"worker": number, **facts, "model": hidden.name(facts["model"])}
        for number, facts in sorted(recording.workers.items())
    ]
    fault = recording.fault
    yield {
        "octavo_flight_record": FORMAT,
        **header,
        "fault": None if fault is None else {"kind": fault.kind, "where": fault.where},
        "workers": workers,
        "begins": "with its state" if first.image else first.why_none or "as an empty server",
        "can_be_replayed": not first.why_none,
    }
    yield from _body(recording, hidden)


def _body(recording: Recording, hidden: Hidden) -> Iterator[Line]:
    first = recording.segments[0]
    notes: dict[int, GroupNote] = {}
    for segment in recording.segments:
        notes |= segment.notes
    for note in notes.values():
        yield _request(note, hidden)
    if first.image is not None:
        yield from ImageForm(hidden).lines(first.image)
    for segment in recording.segments:
        for entry in segment.entries:
            if entry.kind is not Kind.LOOK or entry.times:
                yield _entry(entry, hidden)


def _request(note: GroupNote, hidden: Hidden) -> Line:
    facts = note.facts
    facts |= {name: hidden.name(facts[name]) for name in _NAMES}
    of_prompt, own = note.hashes()
    hashes = {
        "prompt": hidden.numbers(list(of_prompt)),
        "own": [[index, hidden.numbers(list(own_hashes))] for index, own_hashes in own if own_hashes],
    }
    return {"request": note.number, **facts, "beams": note.beams, "sequences": note.lengths, "hashes": hashes}


def _entry(entry: Entry, hidden: Hidden) -> Line:
    what = _FORMS[entry.kind](entry.what, hidden)
    times = entry.times.tolist()
    differences = [times[0], *(later - former for former, later in pairwise(times))] if times else []
    return {"entry": entry.kind.value, **what, "t": differences}


def _of_request(what: Any, hidden: Hidden) -> Line:
    return {"request": what}


def _of_finish(what: Any, hidden: Hidden) -> Line:
    return {"request": what[0], "index": what[1]}


def _of_join(what: Any, hidden: Hidden) -> Line:
    number, info, sizes, epoch, model, cached = what
    hashes = [cached.hashes[start : start + HASH_BYTES] for start in range(0, len(cached.hashes), HASH_BYTES)]
    return {
        "worker": number,
        "info": message_form(info),
        "sizes": message_form(sizes),
        "epoch": epoch,
        "model": hidden.name(model),
        "cached": np.frombuffer(cached.block_ids_u32, "<u4").tolist(),
        "hashes": hidden.numbers(hashes),
    }


def _of_lost(what: Any, hidden: Hidden) -> Line:
    return {"worker": what[0], "why": what[1]}


def _of_worker(what: Any, hidden: Hidden) -> Line:
    return dict(zip(("worker", "value"), what, strict=False))


def _of_due(what: Any, hidden: Hidden) -> Line:
    return {"request": what[0], "order": what[1]}


def _of_weigh(what: Any, hidden: Hidden) -> Line:
    return {"weights": {hidden.name(name): weight for name, weight in what[0].items()}}


def _of_flush(what: Any, hidden: Hidden) -> Line:
    return {"workers": list(what)}


def _of_adapter(what: Any, hidden: Hidden) -> Line:
    """A name; and, from a worker, its number and what went wrong, which is told by its being anything."""
    name, *rest = what
    line: Line = {"adapter": hidden.name(name)}
    if len(rest) == 1:
        line["path"] = hidden.name(rest[0])
    elif rest:
        line |= {"worker": rest[0], "unloads": rest[1], "problem": bool(rest[2])}
    return line


def _of_turn(what: Any, hidden: Hidden) -> Line:
    return {"silent": list(what)} if what else {}


def _of_step(what: Any, hidden: Hidden) -> Line:
    number, step_id, data, groups = what
    step = worker_pb2.StepRequest.FromString(data).step
    return {"worker": number, "step": step_id, "decision": decision_of(step, groups)}


def _of_fault(what: Any, hidden: Hidden) -> Line:
    return {"kind": what[0], "where": what[1]}


def _of_answer(what: Any, hidden: Hidden) -> Line:
    number, data, stopped, stops = what
    if data is None:
        return {"worker": number, "broken": True}
    response = worker_pb2.StepResponse.FromString(data)
    kind = response.WhichOneof("kind")
    line: Line = {"worker": number, "says": kind, "epoch": response.epoch}
    if kind == "notice":
        line |= _notice(response.notice, hidden)
    elif kind == "result":
        line |= _result(response.result)
        if stopped:
            line["stopped"] = stopped
        if stops is not None:
            logprobs = np.frombuffer(response.result.outputs.logprobs_f32, "<f4")
            line["candidates"] = {"stops": stops, "logprobs": logprobs.astype(float).tolist()}
    return line


def _notice(notice: worker_pb2.Notice, hidden: Hidden) -> Line:
    kind = notice.WhichOneof("notice")
    values: Line = {"notice": kind}
    if kind == "draining":
        values["finishes_within_ms"] = notice.draining.finishes_within_ms
    elif kind == "budget":
        values["max_num_batched_tokens"] = notice.budget.max_num_batched_tokens
    elif kind == "adapter_loaded":
        values["adapter"] = hidden.name(notice.adapter_loaded.name)
        values["generation"] = notice.adapter_loaded.generation
    return values


def _result(result: worker_pb2.StepResult) -> Line:
    outputs, timings = result.outputs, result.timings
    line: Line = {"step": result.step_id, "status": worker_pb2.StepStatus.Name(result.status)}
    line["tokens"] = len(outputs.token_ids_i32) // 4
    if outputs.num_tokens_u16:
        line["counts"] = np.frombuffer(outputs.num_tokens_u16, "<u2").tolist()
    if outputs.row_errors:
        line["row_errors"] = [[error.row, error.kind] for error in outputs.row_errors]
    if outputs.logprobs_f32:
        line["logprobs"] = len(outputs.logprobs_f32) // 4
    if outputs.prompt_logprobs:
        line["prompt_logprobs"] = [
            [each.row, each.first_position, len(each.logprobs.logprobs_f32) // 4] for each in outputs.prompt_logprobs
        ]
    if result.status == worker_pb2.STEP_STATUS_FAILED:
        line["code"] = worker_pb2.StepErrorCode.Name(result.error.code)
    line["took_ns"] = timings.total_ns
    return line


_FORMS: dict[Kind, Callable[[Any, Hidden], Line]] = {
    Kind.BEGIN: _of_turn,
    Kind.REQUEST: _of_request,
    Kind.HELD: _of_request,
    Kind.DUE: _of_due,
    Kind.END: _of_request,
    Kind.FINISH: _of_finish,
    Kind.JOIN: _of_join,
    Kind.LOST: _of_lost,
    Kind.ANSWER: _of_answer,
    Kind.FLUSH: _of_flush,
    Kind.WITHHOLD: _of_worker,
    Kind.WEIGH: _of_weigh,
    Kind.DRAIN: _of_worker,
    Kind.LOAD: _of_adapter,
    Kind.UNLOAD: _of_adapter,
    Kind.ADAPTER: _of_adapter,
    Kind.LOOK: _of_turn,
    Kind.TURN: _of_turn,
    Kind.STEP: _of_step,
    Kind.FAULT: _of_fault,
    Kind.STOP: _of_turn,
}
