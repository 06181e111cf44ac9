"""Log lines: JSON off a terminal, text on one, with bound values, levels held, and other libraries' lines alike."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import random
from collections.abc import Iterator

import grpc
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


async def test_calls_that_end_while_an_answer_is_on_its_way_are_no_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls whose deadline passes about when they are answered, until gRPC has failed to send both kinds of answer."""
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    log.configure("info")
    counting = CountingHandler()
    logger = logging.getLogger("grpc._cython.cygrpc")
    logger.addHandler(counting)
    chance = random.Random(1)

    async def answer(request: bytes, context: grpc.aio.ServicerContext) -> None:
        for _ in range(chance.randrange(6)):
            await context.write(bytes(100))
            await asyncio.sleep(chance.uniform(0, 0.001))

    server = grpc.aio.server()
    handlers = {"Answer": grpc.unary_stream_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Ends", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with asyncio.timeout(60), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            ask = channel.unary_stream("/test.Ends/Answer")

            async def call_until_counted() -> None:
                while not counting.has_both:
                    try:
                        async for _ in ask(b"", timeout=chance.uniform(0.0005, 0.0065)):
                            pass
                    except grpc.aio.AioRpcError as error:
                        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED

            await asyncio.gather(*(call_until_counted() for _ in range(16)))
    finally:
        logger.removeHandler(counting)
        await server.stop(None)
    assert stream.getvalue() == ""


class CountingHandler(logging.Handler):
    """Sees what a logger is told, whatever is shown of it."""

    def __init__(self) -> None:
        super().__init__()
        self._texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        assert record.exc_info
        self._texts.append(str(record.exc_info[1]))

    @property
    def has_both(self) -> bool:
        return all(any(kind in text for text in self._texts) for kind in ("SendMessage", "SendStatus"))
