"""Logging of every Octavo process: structlog to stderr, for people on a terminal, as JSON lines otherwise.

`structlog.get_logger().info("event name", key=value)`; bind `request_id` with `structlog.contextvars` and every line of
that task carries it. Lines of the standard library's loggers (asyncio, grpc) come out in the same shape.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

LEVELS = ("debug", "info", "warning", "error", "critical")
NOT_SENT = 'Failed "execute_batch"'  # so grpc's error begins where the other end of a call is gone


def configure(level: str = "info") -> None:
    """Sets up logging of this process, once, before its first line. Raises ValueError for a level that is not one."""
    if level.lower() not in LEVELS:
        raise ValueError(f"log level {level!r} is none of {', '.join(LEVELS)}")
    import structlog  # here: options name the levels, and a command line is parsed sooner without it

    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    rendering: list[Any]
    if sys.stderr.isatty():
        # Plain tracebacks: the fancy ones print the values of locals, and prompts belong to users.
        rendering = [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    else:
        rendering = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]

    structlog.configure(
        processors=[*shared, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    handler.addFilter(_is_news)
    logging.basicConfig(handlers=[handler], level=max(number, logging.WARNING), force=True)


def _is_news(record: logging.LogRecord) -> bool:
    """False for grpc's traceback of a call whose client left, or whose deadline passed, with an answer on its way.

    Calls end so every day, and grpc says nothing of it itself where it learns of the end before the answer fails.
    """
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__name__ != "ExecuteBatchError" or not str(error).startswith(NOT_SENT)
