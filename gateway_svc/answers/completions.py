"""Answers to completions, of one prompt or several: choice k * n + i is output i of prompt k."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gateway_svc.answers.gathered import FINISH_REASONS, Gathered, check, stop_reason
from gateway_svc.answers.json_text import DONE, event, quoted, text_of, token_ids
from gateway_svc.answers.logprobs import CompletionLogprobs, prompt_entries
from gateway_svc.answers.usage import usage_of
from gateway_svc.errors import HttpError
from gateway_svc.requests.asked import Asked
from protos import inference_pb2 as pb


class CompletionAnswer:
    """An `Answer`."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._prompts: Sequence[str] = ()
        self._first_tokens: Sequence[pb.Logprob] = ()
        self._head = ""  # of every event
        self._tail = ',"usage":null}' if asked.includes_usage else "}"
        self._usages: list[pb.Usage] = []
        self._logprobs: dict[int, CompletionLogprobs] = {}  # by choice
        self._prompt_ids: list[Sequence[int]] = []
        self._prompt_logprobs: dict[int, Sequence[pb.TokenLogprobs]] = {}  # by prompt
        self._begun: set[int] = set()  # choices that have shown their prompt

    def learn_prompts(self, prompts: Sequence[str], first_tokens: Sequence[pb.Logprob]) -> None:
        """To be called first where prompts are echoed: their texts, and ids and texts of their first tokens; these are
        read where there are logprobs."""
        self._prompts, self._first_tokens = prompts, first_tokens

    def begin(self, admissions: Sequence[pb.GenerateResponse]) -> bytes:
        """Nothing: a completion begins with its text."""
        first = admissions[0]
        self._head = _head(self._asked, first.model, first.model_fingerprint)
        self._prompt_ids = [each.prompt_token_ids for each in admissions]
        return b""

    def events(self, prompt: int, response: pb.GenerateResponse) -> bytes:
        """A chunk a choice that has something to show."""
        if response.HasField("usage"):
            self._usages.append(response.usage)
        if response.prompt_logprobs:
            self._prompt_logprobs[prompt] = response.prompt_logprobs
        return b"".join(self._event(prompt, delta) for delta in response.outputs)

    def _event(self, prompt: int, delta: pb.OutputDelta) -> bytes:
        index = prompt * self._asked.num_outputs + delta.index
        reason = delta.finish_reason
        is_first = self._asked.echoes and index not in self._begun
        if not (reason or delta.logprobs or self._asked.returns_token_ids or is_first):  # of nearly all: text alone
            if not delta.text:
                return b""
            return (
                f'data: {self._head},"choices":[{{"index":{index},"text":{quoted(delta.text)},"logprobs":null,'
                f'"finish_reason":null}}]{self._tail}\n\n'
            ).encode("ascii")
        if reason:
            check(delta)
        of_prompt = self._prompt_logprobs.get(prompt, ()) if is_first else ()
        choice = "".join(self._choice(prompt, index, delta, of_prompt))
        if is_first:
            self._begun.add(index)
        return event(f'{self._head},"choices":[{choice}]{self._tail}')

    def _choice(
        self, prompt: int, index: int, delta: pb.OutputDelta, of_prompt: Sequence[pb.TokenLogprobs]
    ) -> Iterator[str]:
        """Of a part, or of a whole output, in parts of its JSON."""
        asked, reason = self._asked, delta.finish_reason
        text = delta.text if asked.shows_output else ""
        if asked.echoes and index not in self._begun:
            text = self._prompts[prompt] + text
        yield f'{{"index":{index},"text":{quoted(text)},"logprobs":'
        if asked.num_top is None:
            yield "null"
        else:
            shown = [*(of_prompt if asked.echoes else ()), *(delta.logprobs if asked.shows_output else ())]
            yield from self._logprobs_of(prompt, index).part(shown, text, self._first_token(prompt))
        if reason in (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH) and not asked.shows_output:
            reason = pb.FINISH_REASON_LENGTH  # of none, whatever the token that is not shown would have ended
        finish = quoted(FINISH_REASONS[reason]) if reason else "null"
        yield f',"finish_reason":{finish}{self._extras(prompt, index, delta)}'
        if asked.returns_prompt_logprobs:
            yield ',"prompt_logprobs":'
            yield from prompt_entries(of_prompt)
        yield "}"

    def _extras(self, prompt: int, index: int, delta: pb.OutputDelta) -> str:
        reason = stop_reason(delta) if self._asked.shows_output else None
        more = f',"stop_reason":{text_of(reason)}' if reason is not None else ""
        if self._asked.returns_token_ids:
            more += f',"token_ids":{token_ids(delta.token_ids if self._asked.shows_output else ())}'
            if index not in self._begun and self._prompt_ids:
                self._begun.add(index)
                more += f',"prompt_token_ids":{token_ids(self._prompt_ids[prompt])}'
        return more

    def _logprobs_of(self, prompt: int, index: int) -> CompletionLogprobs:
        if (found := self._logprobs.get(index)) is None:
            self._logprobs[index] = found = CompletionLogprobs(self._asked.tokens_as_ids)
        return found

    def _first_token(self, prompt: int) -> pb.Logprob:
        return self._first_tokens[prompt] if self._first_tokens else pb.Logprob()

    def end(self) -> bytes:
        """The usage where it was asked for, and the end."""
        if not self._asked.includes_usage:
            return DONE
        usage = usage_of(self._usages, self._asked.shows_output)
        return event(f'{self._head},"choices":[],"usage":{text_of(usage)}}}') + DONE

    def failed(self, error: HttpError) -> bytes:
        """The error in place of a chunk."""
        return event(text_of(error.body()))

    def whole(self, gathered: Sequence[Gathered]) -> Iterator[str]:
        """A `text_completion`."""
        yield f'{_head(self._asked, gathered[0].model, gathered[0].fingerprint)},"choices":['
        self._prompt_ids = [found.prompt_token_ids for found in gathered]
        for prompt, found in enumerate(gathered):
            for output, delta in sorted(found.outputs.items()):
                index = prompt * self._asked.num_outputs + output
                yield "," if index else ""
                yield from self._choice(prompt, index, delta, found.prompt_logprobs)
        usage = usage_of((found.usage for found in gathered), self._asked.shows_output)
        yield f'],"usage":{text_of(usage)}}}'


def _head(asked: Asked, model: str, fingerprint: str) -> str:
    return (
        f'{{"id":{quoted(asked.id)},"object":"text_completion","created":{asked.created},"model":{quoted(model)},'
        f'"system_fingerprint":{quoted(fingerprint)}'
    )
