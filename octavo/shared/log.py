"""Logging of every Octavo process: structlog to stderr, for people on a terminal, as JSON lines otherwise.

`structlog.get_logger().info("event name", key=value)`; bind `request_id` with `structlog.contextvars` and every line of
that task carries it. Lines of the standard library's loggers (asyncio, grpc) come out in the same shape.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import traceback
from collections.abc import MutableMapping
from typing import Any, TextIO

from octavo.shared.terminal_text import harmless, is_terminal

LEVELS = ("debug", "info", "warning", "error", "critical")
NOT_SENT = 'Failed "execute_batch"'  # so grpc's error begins where the other end of a call is gone


def configure(level: str = "info", **fields: object) -> None:
    """Sets up logging of this process, once, before its first line. Raises ValueError for a level that is not one.

    `fields` are on every line.
    """
    number = _number_of(level)
    import structlog  # here: options name the levels, and a command line is parsed sooner without it

    shared, rendering = _processors()
    if fields:
        shared.insert(0, lambda logger, method, line: fields | line)
    _configure_structlog(number, [*shared, *rendering])
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    handler.addFilter(_is_news)
    logging.basicConfig(handlers=[handler], level=max(number, logging.WARNING), force=True)


def configure_library(level: str) -> None:
    """For Octavo within another program: only its own lines; the program's handlers stay untouched.

    Nothing is changed where the program has set structlog up. Called again, the most detailed level holds.
    """
    import structlog

    global _library
    number = _number_of(level)
    if structlog.is_configured():
        processors, current = _library
        if structlog.get_config()["processors"] is not processors:
            return
        number = min(number, current)
    shared, rendering = _processors()
    _library = [*shared, *rendering], number
    _configure_structlog(number, _library[0])


_library: tuple[list[Any], int] = [], 0  # what `configure_library` has set up, by its list of processors, and the level


def _number_of(level: str) -> int:
    if level.lower() not in LEVELS:
        raise ValueError(f"log level {level!r} is none of {', '.join(LEVELS)}")
    return logging.getLevelNamesMapping()[level.upper()]


def _processors() -> tuple[list[Any], list[Any]]:
    """What lines of every origin pass through, and what makes text of them."""
    import structlog

    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if is_terminal():
        # Plain tracebacks: the fancy ones print the values of locals, and prompts belong to users.
        console = structlog.dev.ConsoleRenderer(exception_formatter=_harmless_traceback)
        return shared, [_harmless_values, console, _over_the_row]
    return shared, [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]


def _harmless_values(logger: Any, method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Lines quote clients and workers, and the renderer writes words as they are."""
    return {name: harmless(value) if isinstance(value, str) else value for name, value in line.items()}


def _harmless_traceback(file: TextIO, error: Any) -> None:
    import structlog

    text = io.StringIO()
    structlog.dev.plain_traceback(text, error)
    file.write(harmless(text.getvalue()))


def _over_the_row(logger: Any, method: str, line: str) -> str:
    """The line in place of a row that may be drawn at the end of the terminal (`terminal_row`)."""
    return f"\r\x1b[K{line}"


def _configure_structlog(number: int, processors: list[Any]) -> None:
    import structlog

    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(_Unread(sys.stderr)),  # type: ignore[arg-type]  # all it uses
    )


class _Unread:
    """A file whose reader may be gone, or None: a line that nobody reads ends nobody who logs it."""

    def __init__(self, file: TextIO | None) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            if self._file is not None:
                return self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            if self._file is not None:
                self._file.flush()


def trace(error: BaseException) -> str:
    """Where an exception came from, and its notes, without its message, which may quote a client.

    For `exception=` of a line about a request.
    """
    parts: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        parts.append("".join([*traceback.format_tb(cause.__traceback__), type(cause).__name__]))
        parts += reversed(getattr(cause, "__notes__", []))
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return "\n".join(reversed(parts))


def _is_news(record: logging.LogRecord) -> bool:
    """False for grpc's traceback of a call whose client left, or whose deadline passed, with an answer on its way.

    Calls end so every day, and grpc says nothing of it itself where it learns of the end before the answer fails.
    """
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__name__ != "ExecuteBatchError" or not str(error).startswith(NOT_SENT)
