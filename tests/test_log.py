"""Log lines: JSON off a terminal, text on one, with bound values, levels held, and other libraries' lines alike."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from octavo import log


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_lines_are_json_off_a_terminal_and_carry_what_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    log.configure("info")
    logger = structlog.get_logger()
    with structlog.contextvars.bound_contextvars(request_id="r-1"):
        logger.info("request admitted", prompt_tokens=5)
        logger.debug("not shown")
        try:
            raise RuntimeError("inside")
        except RuntimeError:
            logger.exception("request failed")
        logging.getLogger("asyncio").error("task was destroyed: %s", "x")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(line["event"], line["level"], line["request_id"]) for line in lines] == [
        ("request admitted", "info", "r-1"),
        ("request failed", "error", "r-1"),
        ("task was destroyed: x", "error", "r-1"),
    ]
    assert lines[0]["prompt_tokens"] == 5 and lines[0]["timestamp"].endswith("Z")
    assert "RuntimeError: inside" in lines[1]["exception"]


def test_lines_are_text_on_a_terminal_and_tracebacks_show_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    log.configure("warning")
    secret = "words of a " + "user"
    try:
        raise RuntimeError("inside")
    except RuntimeError:
        structlog.get_logger().exception("request failed", request_id="r-2")
    text = stream.getvalue()
    assert "request failed" in text and "r-2" in text and "RuntimeError: inside" in text
    assert secret not in text and not text.startswith("{")


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="'loud' is none of debug, info"):
        log.configure("loud")
