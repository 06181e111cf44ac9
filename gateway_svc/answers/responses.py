"""Answers of the responses API: one message with one text, whose stream has a typed event for every step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gateway_svc.answers.gathered import Gathered, check
from gateway_svc.answers.json_text import event, quoted, text_of
from gateway_svc.answers.logprobs import chat_entries
from gateway_svc.answers.usage import usage_of_response
from gateway_svc.errors import HttpError
from gateway_svc.requests.asked import Asked
from protos import inference_pb2 as pb

_PLACE = '"output_index":0'
_PART = '"content_index":0'
_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # OpenAI's, of which none is nearer to the first


class ResponseAnswer:
    """An `Answer`."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._item_id = asked.id.replace("resp", "msg", 1)
        self._number = 0  # of the next event
        self._text: list[str] = []
        self._logprobs: list[str] = []
        self._model = ""
        self._usage = pb.Usage()
        self._finish_reason = pb.FINISH_REASON_UNSPECIFIED

    def begin(self, admissions: Sequence[pb.GenerateResponse]) -> bytes:
        """The response, its message and its text, all of them empty."""
        self._model = admissions[0].model
        response = text_of(self._response("in_progress", []))
        item = text_of(self._item("in_progress", []))
        part = text_of(_part("", self._asked.num_top))
        return b"".join(
            (
                self._event("response.created", f'"response":{response}'),
                self._event("response.in_progress", f'"response":{response}'),
                self._event("response.output_item.added", f'{_PLACE},"item":{item}'),
                self._event("response.content_part.added", f'{self._where()},"part":{part}'),
            )
        )

    def events(self, prompt: int, response: pb.GenerateResponse) -> bytes:
        """A piece of the text, where there is one."""
        if response.HasField("usage"):
            self._usage = response.usage
        return b"".join(map(self._delta, response.outputs))

    def _delta(self, delta: pb.OutputDelta) -> bytes:
        if delta.finish_reason:
            check(delta)
            self._finish_reason = delta.finish_reason
        if not (delta.text or delta.logprobs):
            return b""
        self._text.append(delta.text)
        entries = "".join(chat_entries(delta.logprobs)) if delta.logprobs else "[]"
        if delta.logprobs:
            self._logprobs.append(entries[1:-1])
        data = f'{self._where()},"delta":{quoted(delta.text)},"logprobs":{entries}'
        return self._event("response.output_text.delta", data)

    def end(self) -> bytes:
        """All of them as they have become."""
        text, logprobs = "".join(self._text), f"[{','.join(self._logprobs)}]"
        status = _status(self._finish_reason)
        part = _part_json(text, logprobs, self._asked.num_top)
        item = self._item_json(status, part)
        whole = self._response_json(status, item, self._usage)
        kind = "response.completed" if status == "completed" else "response.incomplete"
        return b"".join(
            (
                self._event(
                    "response.output_text.done", f'{self._where()},"text":{quoted(text)},"logprobs":{logprobs}'
                ),
                self._event("response.content_part.done", f'{self._where()},"part":{part}'),
                self._event("response.output_item.done", f'{_PLACE},"item":{item}'),
                self._event(kind, f'"response":{whole}'),
            )
        )

    def failed(self, error: HttpError) -> bytes:
        """The response, with what went wrong."""
        what = {"code": _ERROR_CODES.get(error.status, "server_error"), "message": error.message}
        response = self._response("failed", []) | {"error": what}
        return self._event("response.failed", f'"response":{text_of(response)}')

    def whole(self, gathered: Sequence[Gathered]) -> Iterator[str]:
        """A `response`."""
        (found,) = gathered
        self._model = found.model
        delta = found.outputs[0]
        status = _status(delta.finish_reason)
        part = _part_json(delta.text, "[]", self._asked.num_top)
        response = self._response_json(status, self._item_json(status, part), found.usage)
        if self._asked.num_top is None:
            yield response
            return
        end = "[]}]}]}"  # of logprobs, part, item and response: each of them is last in the next
        yield response.removesuffix(end)
        yield from chat_entries(delta.logprobs)
        yield end.removeprefix("[]")

    def _event(self, kind: str, data: str) -> bytes:
        number = self._number
        self._number += 1
        return event(f'{{"type":"{kind}","sequence_number":{number},{data}}}', kind)

    def _where(self) -> str:
        return f'"item_id":{quoted(self._item_id)},{_PLACE},{_PART}'

    def _item(self, status: str, content: list[Any]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _item_json(self, status: str, part: str) -> str:
        return f"{text_of(self._item(status, []))[:-3]}[{part}]}}"  # the list is last

    def _response(self, status: str, output: list[Any]) -> dict[str, Any]:
        given = self._asked.settings
        return {
            "id": self._asked.id,
            "object": "response",
            "created_at": self._asked.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": given.get("instructions"),
            "max_output_tokens": given.get("max_output_tokens"),
            "metadata": given.get("metadata") or {},
            "model": self._model,
            "parallel_tool_calls": _or(given.get("parallel_tool_calls"), True),
            "previous_response_id": None,
            "prompt_cache_key": given.get("prompt_cache_key"),
            "reasoning": None,
            "safety_identifier": given.get("safety_identifier"),
            "service_tier": "default",
            "store": False,
            "temperature": _or(given.get("temperature"), 1.0),
            "text": given["text"],
            "tool_choice": _or(given.get("tool_choice"), "auto"),
            "tools": [],
            "top_logprobs": self._asked.num_top or 0,
            "top_p": _or(given.get("top_p"), 1.0),
            "truncation": "disabled",
            "user": given.get("user"),
            "usage": None,
            "output": output,
        }

    def _response_json(self, status: str, item: str, usage: pb.Usage) -> str:
        response = self._response(status, []) | {"usage": usage_of_response([usage])}
        return f"{text_of(response)[:-3]}[{item}]}}"  # the list is last


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _status(reason: pb.FinishReason) -> str:
    return "incomplete" if reason == pb.FINISH_REASON_LENGTH else "completed"


def _part(text: str, num_top: int | None) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []} | ({"logprobs": []} if num_top is not None else {})


def _part_json(text: str, logprobs: str, num_top: int | None) -> str:
    more = f',"logprobs":{logprobs}' if num_top is not None else ""
    return f'{{"type":"output_text","text":{quoted(text)},"annotations":[]{more}}}'
