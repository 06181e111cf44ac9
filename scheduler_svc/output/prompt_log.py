"""`--log-prompts`: what each request asked and what its client was sent, as one line of the log.

The only place that puts content into a log, and off unless it is asked for. Lines are made and written by a thread: the
event loop appends references. What that thread cannot keep up with is left out, and counted in the next line.
"""

from __future__ import annotations

import queue
import threading
from types import TracebackType
from typing import Any, Self

import structlog
from google.protobuf.message import DecodeError

from octavo.shared import log as logging
from protos import inference_pb2 as pb
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.errors import RequestRefused
from scheduler_svc.output.request_stream import RequestStream

log = structlog.get_logger()

MAX_CHARS = 8192  # of a prompt, and of the answers to it together
MAX_MESSAGES = 256  # of a conversation
_CHARS_OF_MESSAGE = 16  # that a line has of each, besides what is in it
MAX_NAME_CHARS = 256  # of a tenant, a model and an adapter, which a refused request may have of any length
MAX_IDS = 2048  # likewise, where there are token ids and no text
MAX_WAITING = 1024  # requests whose lines are not written yet
MAX_WAITING_BYTES = 1 << 26  # of requests that nobody has read yet
STOP_S = 2.0  # that the last lines have when the service ends


class Exchange:
    """One request and its answer. For the event loop, within a `with` of the whole request."""

    def __init__(self, prompts: PromptLog, data: bytes, request_id: str, head: pb.GenerateRequest) -> None:
        self._prompts = prompts
        self._head = head
        self._tenant: str | None = None
        self._has_text = True
        self._texts: dict[int, list[str]] = {}
        self._ids: dict[int, list[int]] = {}
        self._room, self._room_of_ids, self._num_cut = MAX_CHARS, MAX_IDS, 0
        self._finish: dict[int, str] = {}
        self._ending: dict[str, object] = {}
        self._asked: dict[str, object] = {}
        self.data = data
        self.request_id = request_id

    def follow(self, group: SequenceGroup) -> None:
        """It was taken: what its stream says from here on is its answer."""
        stream: RequestStream = group.output
        self._tenant = group.tenant
        params = group.sampling_params
        self._has_text = not params.HasField("detokenize") or params.detokenize
        stream.told = self.told

    def told(self, message: pb.GenerateResponse) -> None:
        """What its client is sent next."""
        for output in message.outputs:
            if self._has_text:
                text, texts = output.text, self._texts.setdefault(output.index, [])
                if self._room:
                    texts.append(text[: self._room])
                self._num_cut += max(0, len(text) - self._room)
                self._room = max(0, self._room - len(text))
            elif self._room_of_ids:
                ids = output.token_ids[: self._room_of_ids]
                self._ids.setdefault(output.index, []).extend(ids)
                self._room_of_ids -= len(ids)
            if output.finish_reason:
                self._finish[output.index] = pb.FinishReason.Name(output.finish_reason).removeprefix("FINISH_REASON_")
        if message.HasField("usage"):
            usage = message.usage
            self._ending |= {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, RequestRefused):
            self._ending |= {"refused": type(error).__name__, "why": str(error)[:MAX_CHARS]}
        elif error is not None:
            self._ending["broken_off"] = True
        self._prompts.ended(self)

    def leave_out_request(self) -> None:
        """Too much waits to be read already."""
        self.data, self._asked = b"", {"prompt_left_out": True}

    def read(self) -> None:
        """On the thread: keeps of the request what its line shows."""
        data, self.data = self.data, b""
        try:
            request = pb.GenerateRequest.FromString(data)
        except DecodeError:
            self._asked = {"unreadable_bytes": len(data)}
            return
        kind = request.WhichOneof("prompt_kind")
        if kind == "messages":
            self._asked["messages"] = _cut_messages(request.messages)
        elif kind == "prompt_token_ids":
            self._asked["prompt_token_ids"] = list(request.prompt_token_ids.ids[:MAX_IDS])
        else:
            self._asked["prompt"] = _cut(request.prompt, MAX_CHARS)
        for name in ("model", "adapter"):
            if value := getattr(request, name):
                self._asked[name] = value[:MAX_NAME_CHARS]
        if resumed := sum(len(output.token_ids) for output in request.resume):
            self._asked["resumed_tokens"] = resumed

    def line(self) -> dict[str, Any]:
        """On the thread, after `read`: the fields of its line."""
        line: dict[str, Any] = {"request_id": self.request_id}
        if self._tenant is not None:
            line["tenant"] = self._tenant[:MAX_NAME_CHARS]
        elif self._head.tenant:  # refused before anybody looked whether that is true
            line["claimed_tenant"] = self._head.tenant[:MAX_NAME_CHARS]
        line |= self._asked
        line["answers"] = ["".join(self._texts[index]) for index in sorted(self._texts)]
        if self._num_cut:
            line["answers_cut_by_chars"] = self._num_cut
        if not self._has_text:
            line["answers_token_ids"] = [self._ids[index] for index in sorted(self._ids)]
        line["finish"] = [self._finish[index] for index in sorted(self._finish)]
        return line | self._ending


class PromptLog:
    """Writes lines of exchanges; `start` before the first, `stop` after the last. Otherwise for the event loop."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Exchange, bool] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_bytes, self._num_left_out = 0, 0
        self._thread = threading.Thread(target=self._run, name="prompt-log", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Writes what there is, within STOP_S."""
        self._waiting.put(None)
        self._thread.join(STOP_S)

    @property
    def num_waiting(self) -> int:
        """Steps of the thread that are not begun yet."""
        return self._waiting.qsize()

    def asked(self, data: bytes, request_id: str, head: pb.GenerateRequest) -> Exchange:
        """`data`: a GenerateRequest as it came; `head`: of it, what is known already."""
        exchange = Exchange(self, data, request_id, head)
        with self._lock:
            has_room = self._num_bytes + len(data) <= MAX_WAITING_BYTES
            self._num_bytes += len(data) if has_room else 0
        if has_room:
            self._waiting.put((exchange, False))
        else:
            exchange.leave_out_request()
        return exchange

    def ended(self, exchange: Exchange) -> None:
        """Its line is complete."""
        if self.num_waiting < MAX_WAITING:
            self._waiting.put((exchange, True))
        else:
            with self._lock:
                self._num_left_out += 1

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            exchange, is_over = item
            try:
                if is_over:
                    self._write(exchange)
                else:
                    self._read(exchange)
            except Exception as error:  # the next one may be written
                log.error("a request cannot be logged", request_id=exchange.request_id, exception=logging.trace(error))

    def _read(self, exchange: Exchange) -> None:
        num_bytes = len(exchange.data)
        try:
            exchange.read()
        finally:
            with self._lock:
                self._num_bytes -= num_bytes

    def _write(self, exchange: Exchange) -> None:
        line = exchange.line()
        with self._lock:
            left_out, self._num_left_out = self._num_left_out, 0
        log.info("prompt and answer", **line, **({"left_out": left_out} if left_out else {}))


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]} ... ({len(text)} characters)"


def _cut_messages(messages: pb.Messages) -> list[dict[str, str]]:
    """The newest are kept, as the older ones of a conversation are in the lines before."""
    kept: list[dict[str, str]] = []
    room = MAX_CHARS
    for message in reversed(messages.messages):
        if room <= 0 or len(kept) >= MAX_MESSAGES:
            kept.append({"role": "...", "content": f"({len(messages.messages) - len(kept)} earlier messages)"})
            break
        kept.append({"role": message.role[:64], "content": _cut(message.content, room)})
        room -= len(message.content) + len(message.role) + _CHARS_OF_MESSAGE
        if message.reasoning_content:
            kept[-1]["reasoning_content"] = _cut(message.reasoning_content, max(room, 0))
            room -= len(message.reasoning_content)
    return kept[::-1]
