"""The file: lines of JSON, packed with gzip, so that `zcat` shows it and its end proves that it is whole."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.shared.version import installed_version
from protos import SCHEMA_REVISION
from scheduler_svc.flight.errors import BadRecord
from scheduler_svc.flight.hidden import Hidden
from scheduler_svc.flight.record_lines import FORMAT, Line, lines_of
from scheduler_svc.flight.recorder import Recording

PIECE_BYTES = 262_144  # that are packed at once
MAX_LINE_CHARS = 1 << 28  # of one line that is read: more is no record
SUFFIX = ".jsonl.gz"


def header_of(settings: Any) -> Line:
    """What stands in the first line: `settings` are the `EngineSettings`, whose names are hidden."""
    # Limits of tenants are not played: which requests they held is among the entries, as are weights that changed.
    values, hidden = dataclasses.asdict(dataclasses.replace(settings, tenants=None)), Hidden()
    del values["tenants"], values["has_tenant_limits"], values["counts_refusals"]
    values["tenant_weights"] = {hidden.name(name): weight for name, weight in settings.tenant_weights.items()}
    values["adapters"] = {hidden.name(name): hidden.name(path) for name, path in settings.adapters.items()}
    return {
        "version": installed_version(),
        "schema_revision": SCHEMA_REVISION,
        "process": os.getpid(),
        "settings": values,
    }


def packed(recording: Recording, header: Line) -> Iterator[bytes]:
    """The bytes of a file, piece by piece."""
    packer = zlib.compressobj(6, zlib.DEFLATED, zlib.MAX_WBITS | 16)  # as gzip does
    count, pending, size = 0, list[bytes](), 0
    written = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    for line in lines_of(recording, {**header, "written": written}):
        pending.append(_data_of(line))
        size += len(pending[-1])
        count += 1
        if size > PIECE_BYTES:
            yield packer.compress(b"".join(pending))
            pending, size = [], 0
    yield packer.compress(b"".join([*pending, _data_of({"end": count})])) + packer.flush()


def _data_of(line: Line) -> bytes:
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


@dataclass(slots=True)
class Record:
    """What a file holds. `image`: its roots by name, and its nodes; None without one."""

    header: Line
    requests: dict[int, Line] = field(default_factory=dict)
    image: Line | None = None
    entries: list[Line] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        """Of all workers."""
        return sum(entry["entry"] == "step" for entry in self.entries)


def read(path: Path) -> Record:
    """Raises BadRecord, in one line, for what is no whole record of this format; OSError."""
    try:
        with gzip.open(path) as lines:
            return _read(lines, path)
    except (EOFError, zlib.error) as error:
        raise BadRecord(f"{path}: it is cut off or damaged ({error})") from None
    except gzip.BadGzipFile:
        raise BadRecord(f"{path}: it is damaged, or no flight record") from None
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise BadRecord(f"{path}: it is damaged ({type(error).__name__}: {error})") from None


def _read(lines: gzip.GzipFile, path: Path) -> Record:
    first = _line(lines, path)
    if "octavo_flight_record" not in first:
        raise BadRecord(f"{path}: it is no flight record")
    if (number := first["octavo_flight_record"]) != FORMAT:
        raise BadRecord(f"{path}: it has format {number}, and this version of Octavo reads {FORMAT}")
    record, count = Record(first), 1
    while "end" not in (line := _line(lines, path)):
        count += 1
        if "entry" in line:
            record.entries.append({**line, "t": _times(line["t"])})
        elif "request" in line:
            record.requests[line["request"]] = line
        elif "image" in line:
            record.image = {"roots": line["image"], "nodes": []}
        else:
            assert record.image is not None
            record.image["nodes"].append(line["node"])
    if line["end"] != count or lines.read(1):
        raise BadRecord(f"{path}: it is damaged: {count} lines, and it says {line['end']}")
    return record


def _line(lines: gzip.GzipFile, path: Path) -> Line:
    data = lines.readline(MAX_LINE_CHARS)
    if not data.endswith(b"\n"):
        raise BadRecord(f"{path}: it is cut off, or no flight record")
    line = json.loads(data)
    if not isinstance(line, dict):
        raise BadRecord(f"{path}: it is no flight record")
    return line


def _times(differences: list[int]) -> list[int]:
    times, now_ns = [], 0
    for difference in differences:
        now_ns += difference
        times.append(now_ns)
    return times
