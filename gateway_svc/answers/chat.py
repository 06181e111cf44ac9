"""Answers to chats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gateway_svc.answers.gathered import FINISH_REASONS, Gathered, check, stop_reason
from gateway_svc.answers.json_text import DONE, event, quoted, text_of, token_ids
from gateway_svc.answers.logprobs import chat_entries, prompt_entries
from gateway_svc.answers.usage import usage_of
from gateway_svc.errors import HttpError
from gateway_svc.requests.asked import Asked
from protos import inference_pb2 as pb


class ChatAnswer:
    """An `Answer`."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._head = ""  # of every event
        self._tail = ',"usage":null}' if asked.includes_usage else "}"
        self._usage = pb.Usage()

    def begin(self, admissions: Sequence[pb.GenerateResponse]) -> bytes:
        """Who speaks, for each output."""
        (admission,) = admissions
        self._head = _head(self._asked, "chat.completion.chunk", admission.model, admission.model_fingerprint)
        ids = f',"token_ids":[],"prompt_token_ids":{token_ids(admission.prompt_token_ids)}'
        more = ids if self._asked.returns_token_ids else ""
        delta = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        parts = (
            event(f'{self._head},"choices":[{{"index":{index},{delta}}}]{more}{self._tail}')
            for index in range(self._asked.num_outputs)
        )
        return b"".join(parts)

    def events(self, prompt: int, response: pb.GenerateResponse) -> bytes:
        """A chunk an output that has something to show."""
        if response.HasField("usage"):
            self._usage = response.usage
        return b"".join(map(self._event, response.outputs))

    def _event(self, delta: pb.OutputDelta) -> bytes:
        reason = delta.finish_reason
        if not (reason or delta.logprobs or self._asked.returns_token_ids):  # of nearly all: text alone
            if not delta.text:
                return b""
            return (
                f'data: {self._head},"choices":[{{"index":{delta.index},"delta":{{"content":{quoted(delta.text)}}},'
                f'"logprobs":null,"finish_reason":null}}]{self._tail}\n\n'
            ).encode("ascii")
        if reason:
            check(delta)
        content = f'"content":{quoted(delta.text)}' if delta.text or not reason else ""
        logprobs = "".join(self._logprobs(delta)) if delta.logprobs else "null"
        finish = quoted(FINISH_REASONS[reason]) if reason else "null"
        return event(
            f'{self._head},"choices":[{{"index":{delta.index},"delta":{{{content}}},"logprobs":{logprobs},'
            f'"finish_reason":{finish}{self._extras(delta)}}}]{self._tail}'
        )

    def _extras(self, delta: pb.OutputDelta) -> str:
        reason = stop_reason(delta)
        more = f',"stop_reason":{text_of(reason)}' if reason is not None else ""
        return f'{more},"token_ids":{token_ids(delta.token_ids)}' if self._asked.returns_token_ids else more

    def _logprobs(self, delta: pb.OutputDelta) -> Iterator[str]:
        yield '{"content":'
        yield from chat_entries(delta.logprobs, self._asked.tokens_as_ids)
        yield ',"refusal":null}'

    def end(self) -> bytes:
        """The usage where it was asked for, and the end."""
        if not self._asked.includes_usage:
            return DONE
        return event(f'{self._head},"choices":[],"usage":{text_of(usage_of([self._usage]))}}}') + DONE

    def failed(self, error: HttpError) -> bytes:
        """The error in place of a chunk."""
        return event(text_of(error.body()))

    def whole(self, gathered: Sequence[Gathered]) -> Iterator[str]:
        """A `chat.completion`."""
        (found,) = gathered
        yield f'{_head(self._asked, "chat.completion", found.model, found.fingerprint)},"choices":['
        for index, delta in sorted(found.outputs.items()):
            yield "," if index else ""
            message = f'"message":{{"role":"assistant","content":{quoted(delta.text)},"refusal":null}}'
            yield f'{{"index":{index},{message},"logprobs":'
            yield from self._logprobs(delta) if self._asked.num_top is not None else iter(("null",))
            yield f',"finish_reason":{quoted(FINISH_REASONS[delta.finish_reason])}{self._extras(delta)}}}'
        yield f'],"usage":{text_of(usage_of([found.usage]))}'
        if self._asked.returns_prompt_logprobs:
            yield ',"prompt_logprobs":'
            yield from prompt_entries(found.prompt_logprobs)
        if self._asked.returns_token_ids:
            yield f',"prompt_token_ids":{token_ids(found.prompt_token_ids)}'
        yield "}"


def _head(asked: Asked, kind: str, model: str, fingerprint: str) -> str:
    return (
        f'{{"id":{quoted(asked.id)},"object":"{kind}","created":{asked.created},"model":{quoted(model)},'
        f'"system_fingerprint":{quoted(fingerprint)}'
    )
