"""Log lines: JSON off a terminal, text on one, with bound values, levels held, and other libraries' lines alike."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import logging
import random
import time

import grpc
import pytest
import structlog
from grpc._cython import cygrpc

from octavo.embedded.progress import Progress
from octavo.shared import log, terminal_text
from octavo.shared.processes.child_output import Screen
from octavo.shared.terminal_row import ByteBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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


def test_what_lines_quote_steers_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    log.configure("info")
    quoted = "\x1b]52;c;eA==\x07\x1b[8m"
    logger = structlog.get_logger()
    with structlog.contextvars.bound_contextvars(request_id=quoted):
        logger.info("request admitted", problem=f"two words {quoted}", exception=f"where\n{quoted}")
    try:
        raise RuntimeError(quoted)
    except RuntimeError:
        logger.exception("request failed")
    logging.getLogger("asyncio").error("task was destroyed\n%s", quoted)
    text = stream.getvalue()
    assert "\x1b]" not in text and "\x1b[8m" not in text and "\x07" not in text
    assert text.count("eA==") == 5 and "\nRuntimeError: \\u001b]52" in text and "destroyed\n\\u001b" in text


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="'loud' is none of debug, info"):
        log.configure("loud")


async def test_calls_that_end_while_an_answer_is_on_its_way_are_no_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls whose deadline passes about when they are answered, until gRPC has failed to send an answer."""
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    log.configure("info")
    seen = SeenRecords()
    logger = logging.getLogger("grpc._cython.cygrpc")
    logger.addHandler(seen)
    chance = random.Random(1)

    async def answer(request: bytes, context: grpc.aio.ServicerContext) -> None:
        for _ in range(3):
            await context.write(bytes(100))
            await asyncio.sleep(chance.uniform(0, 0.001))

    server = grpc.aio.server()
    handlers = {"Answer": grpc.unary_stream_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Ends", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with asyncio.timeout(120), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            ask = channel.unary_stream("/test.Ends/Answer")

            async def call_until_seen() -> None:
                usual_s = 0.0
                for number in itertools.count():
                    if seen.records:
                        return
                    started_s = time.monotonic()
                    if number % 20 == 0:  # how long it takes now, as this machine may have other things to do
                        _ = [each async for each in ask(b"")]
                        usual_s = time.monotonic() - started_s
                        continue
                    try:
                        _ = [each async for each in ask(b"", timeout=chance.uniform(0.2, 1.2) * usual_s)]
                    except grpc.aio.AioRpcError as error:
                        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED

            await asyncio.gather(*(call_until_seen() for _ in range(16)))
    finally:
        logger.removeHandler(seen)
        await server.stop(None)
    assert all("ExecuteBatchError raised in core" in record.getMessage() for record in seen.records)
    assert stream.getvalue() == ""


class SeenRecords(logging.Handler):
    """What a logger is told, whatever is shown of it."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.mark.parametrize(("text", "is_shown"), [('Failed "execute_batch": (x,)', False), ("too many operations", True)])
def test_only_answers_that_nobody_takes_are_left_out(
    monkeypatch: pytest.MonkeyPatch, text: str, is_shown: bool
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    log.configure("info")
    try:
        raise cygrpc.ExecuteBatchError(text)
    except cygrpc.ExecuteBatchError:
        logging.getLogger("grpc._cython.cygrpc").exception("of a call")
    assert ("of a call" in stream.getvalue()) is is_shown


class Unread(io.StringIO):
    """Whose reader is gone."""

    num_tried = 0

    def write(self, text: str) -> int:
        self.num_tried += 1
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


def test_a_line_that_nobody_reads_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Unread()
    monkeypatch.setattr("sys.stderr", stream)
    log.configure("info")
    structlog.get_logger().info("into the void")
    assert stream.num_tried == 1
    logging.getLogger("asyncio").error("and this")
    assert stream.num_tried > 1


class Tee:
    """What scripts put in the place of standard error to copy it."""

    def __init__(self) -> None:
        self.written: list[str] = []

    def write(self, text: str) -> int:
        self.written.append(text)
        return len(text)

    def flush(self) -> None:
        pass


def test_lines_go_to_what_can_only_be_written_to_and_nowhere_without_a_console(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (tee := Tee(), None):
        structlog.reset_defaults()
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setenv(terminal_text.TERMINAL, "1")
        assert terminal_text.is_terminal() is (stream is not None)
        log.configure_library("warning")
        structlog.get_logger().warning("said")
        Screen().line("of a child")
        ByteBar("fetching", 5).add(5)
        Progress([], use_tqdm=True).close()
    said = "".join(tee.written)
    assert "said" in said and "of a child\n" in said
