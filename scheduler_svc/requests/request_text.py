"""From a request to the token ids of its text: checked, rendered, tokenised. Synchronous and without state of its own.

The same in a text process and, for `LLM`, in the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from protos import inference_pb2 as pb
from scheduler_svc.errors import FieldViolation, InvalidRequest
from scheduler_svc.models.served_model import ServedModel
from scheduler_svc.models.served_models import ServedModels
from scheduler_svc.requests.request_checks import (
    TextSettings,
    check_fits,
    check_length,
    check_prompt_size,
    check_request,
    check_vocabulary,
    most_chars,
)
from scheduler_svc.text.chat_template import TemplateError
from scheduler_svc.text.content_guard import without_mark


class PreparedText(NamedTuple):
    """A checked request whose text has become token ids.

    Attributes:
        request: its prompt is not looked at any more, and may be missing.
        token_ids: of the prompt, truncated where that was asked for.
        bad_words: of each spelling that must not be drawn.
    """

    request: pb.GenerateRequest
    token_ids: Sequence[int]
    bad_words: Sequence[Sequence[int]]


class RequestTexts:
    """Of whichever model a request is for. Thread-safe. All methods raise RequestRefused."""

    def __init__(self, models: ServedModels, settings: TextSettings) -> None:
        self._models = models
        self._settings = settings

    def prepare(self, request: pb.GenerateRequest) -> PreparedText:
        """See `RequestText.prepare`."""
        return self._of(request.model, request.model_fingerprint).prepare(request)

    def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        """See `RequestText.tokenize`."""
        return self._of(request.model).tokenize(request)

    def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        """See `RequestText.detokenize`."""
        return self._of(request.model).detokenize(request)

    def _of(self, name: str, fingerprint: str = "") -> RequestText:
        return RequestText(self._models.resolve(name, fingerprint), self._settings)


class RequestText:
    """Of one model's requests. Thread-safe. All methods raise RequestRefused."""

    def __init__(self, model: ServedModel, settings: TextSettings) -> None:
        self._model = model
        self._settings = settings

    def prepare(self, request: pb.GenerateRequest) -> PreparedText:
        """Checks all of the request; writes into it which revision of the model its tokens are of, and whether its
        outputs are answers: both are read when the prompt is gone."""
        model = self._model
        check_request(request, model, self._settings)
        token_ids = self._prompt_token_ids(request)
        if request.WhichOneof("prompt_kind") == "messages":
            request.is_answer = not request.messages.continue_final_message
        if request.HasField("truncate_prompt_tokens"):
            token_ids = token_ids[-request.truncate_prompt_tokens :]
        check_vocabulary(request.WhichOneof("prompt_kind") or "prompt", token_ids, model)
        check_fits(len(token_ids), model.max_model_len)
        request.model_fingerprint = model.fingerprint  # of the one whose tokens these are
        return PreparedText(request, token_ids, self._bad_words(request.sampling_params))

    def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        """Ids and the text of each id alone, of a prompt or of messages in the chat template."""
        model = self._model
        check_prompt_size(request, model)
        token_ids = self._encode(request, "one of prompt and messages")
        texts = {token_id: model.tokenizer.token_text(token_id) for token_id in set(token_ids)}  # a long text has few
        tokens = [texts[token_id] for token_id in token_ids]
        return pb.TokenizeResponse(token_ids=token_ids, tokens=tokens, max_model_len=model.max_model_len)

    def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        """The text of these ids together."""
        model = self._model
        check_length("token_ids", len(request.token_ids), "ids", model)
        check_vocabulary("token_ids", request.token_ids, model, may_lack_row=True)
        text = model.tokenizer.decode(list(request.token_ids), skip_special_tokens=request.skip_special_tokens)
        return pb.DetokenizeResponse(text=text)

    def _prompt_token_ids(self, request: pb.GenerateRequest) -> list[int]:
        if request.WhichOneof("prompt_kind") == "prompt_token_ids":
            token_ids = list(request.prompt_token_ids.ids)
            if not token_ids:
                raise InvalidRequest(FieldViolation("prompt_token_ids", "got none; accepted: at least 1"))
            return token_ids
        return self._encode(request, "exactly one of prompt, prompt_token_ids and messages")

    def _encode(self, request: pb.GenerateRequest | pb.TokenizeRequest, accepted: str) -> list[int]:
        """Token ids of a request's text or conversation."""
        kind = request.WhichOneof("prompt_kind")
        if kind is None:
            raise InvalidRequest(FieldViolation("prompt", f"got none or several; accepted: {accepted}"))
        if kind == "messages":
            token_ids = self._encode_messages(request.messages)
        else:
            adds_special_tokens = not request.HasField("add_special_tokens") or request.add_special_tokens
            token_ids = self._model.tokenizer.encode(request.prompt, add_special_tokens=adds_special_tokens)
        if not token_ids:
            raise InvalidRequest(FieldViolation(kind, "got text which has no tokens; accepted: at least 1"))
        return token_ids

    def _encode_messages(self, messages: pb.Messages) -> list[int]:
        tokenizer = self._model.tokenizer
        _check_messages(messages, self._model)
        texts, mark = [text for each in messages.messages for text in _texts(each)], ""
        if not self._settings.allow_special_tokens_in_content:
            texts, mark = tokenizer.content_guard.mark(texts, roles=texts[::3])
        rendered = self._render(messages, texts, mark)
        if mark:
            return tokenizer.content_guard.encode(rendered, mark)
        return tokenizer.encode(rendered, add_special_tokens=False)

    def _render(self, messages: pb.Messages, texts: list[str], mark: str) -> str:
        template = self._model.tokenizer.chat_template
        assert template is not None
        most = most_chars(self._model)
        try:
            rendered = template.render(
                [_for_template(*each) for each in zip(texts[::3], texts[1::3], texts[2::3], strict=True)],
                add_generation_prompt=messages.add_generation_prompt
                if messages.HasField("add_generation_prompt")
                else None,
                continue_final_message=messages.continue_final_message,
                max_chars=2 * most if mark else most,  # there is at most one mark a character
            )
        except TemplateError as error:
            raise InvalidRequest(FieldViolation("messages", without_mark(str(error), mark))) from None
        check_length("messages", len(rendered) - (rendered.count(mark) if mark else 0), "characters", self._model)
        return rendered

    def _bad_words(self, params: pb.SamplingParams) -> list[tuple[int, ...]]:
        """Each word's tokens within a text and, unless it begins with whitespace, those after a space, after a newline
        and at the begin of a text. Llama 2 has others for each: its texts begin with a space that nobody has written.
        """
        if not params.bad_words:
            return []
        word_ids, line_ids = self._encode_text("a"), self._encode_text("\n")
        found: list[Sequence[int]] = []
        for word in params.bad_words:
            if word[0].isspace():
                found.append(self._ids_behind("a", word_ids, word))
            else:
                found.append(self._encode_text(word))
                found.append(self._ids_behind("a", word_ids, " " + word))
                found.append(self._ids_behind("\n", line_ids, word))
        return list(dict.fromkeys(tuple(ids) for ids in found if ids))

    def _ids_behind(self, text: str, text_ids: list[int], word: str) -> list[int]:
        """Of the word in "`text``word`"; those of the word alone where a token has a part of both."""
        ids = self._encode_text(text + word)
        return ids[len(text_ids) :] if ids[: len(text_ids)] == text_ids else self._encode_text(word)

    def _encode_text(self, text: str) -> list[int]:
        return self._model.tokenizer.encode(text, add_special_tokens=False)


def _texts(message: pb.ChatMessage) -> tuple[str, str, str]:
    return message.role, message.content, message.reasoning_content


def _for_template(role: str, content: str, reasoning: str) -> dict[str, str]:
    """Templates call what a model thought by either name, and ask whether it is there."""
    shown = {"role": role, "content": content}
    return shown | {"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else shown


def _check_messages(messages: pb.Messages, model: ServedModel) -> None:
    if model.tokenizer.chat_template is None:
        raise InvalidRequest(FieldViolation("messages", f"model {model.name!r} has no chat template; give a prompt"))
    if not messages.messages:
        raise InvalidRequest(FieldViolation("messages", "got none; accepted: at least 1"))
    for index, message in enumerate(messages.messages):
        if not message.role:
            what = "got none; accepted: system, user, assistant, ..."
            raise InvalidRequest(FieldViolation(f"messages[{index}].role", what))
