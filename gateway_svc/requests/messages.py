"""Conversations: `messages` of a chat, and `input` of a response, as the messages that a template renders."""

from __future__ import annotations

from typing import Any

from gateway_svc.errors import InvalidField, UnsupportedField
from gateway_svc.requests.fields import Fields, shown
from gateway_svc.requests.sampling import put
from protos import inference_pb2 as pb

_TOOLS = "this server has no tools"
_OF_TOOLS = dict.fromkeys(("tool_calls", "tool_call_id", "function_call"), _TOOLS)
_OF_MEDIA = {"audio": "text is accepted, no other media"}
MAX_MESSAGES = 8192  # of one call, with their parts: some 100 ms to read, in which nobody else is served
# What a client sends back of an answer that it got, from here with nothing in it.
_PASSED_OVER = ("refusal", "annotations", "name", "phase")
_TEXT_PARTS = ("text", "input_text", "output_text")
_TOOL_ROLES = ("tool", "function")
_ROLES = {"developer": "system"}  # the newer word, which few templates know


def read_messages(fields: Fields, name: str) -> list[pb.ChatMessage]:
    """Raises InvalidField for anything but text."""
    _check_number(fields.peek(name), fields.param(name))
    messages = fields.objects(name)
    if not messages:
        raise InvalidField(fields.param(name), "got none; accepted: at least 1 message")
    return [_message(message) for message in messages]


def _check_number(messages: Any, param: str) -> None:
    """Before any of them is looked at."""
    if not isinstance(messages, list):
        return
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    number = len(messages) + sum(len(content) for content in contents if isinstance(content, list))
    if number > MAX_MESSAGES:
        raise InvalidField(param, f"got {number} messages and parts of them; accepted: at most {MAX_MESSAGES}")


def _message(message: Fields) -> pb.ChatMessage:
    role = message.text("role")
    if not role:
        raise InvalidField(message.param("role"), "got none; accepted: system, user, assistant, ...")
    if role in _TOOL_ROLES:
        raise UnsupportedField(message.param("role"), _TOOLS)
    message.refuse(_OF_TOOLS | _OF_MEDIA)
    content, reasoning = _content(message), _reasoning(message)
    message.leave(*_PASSED_OVER)
    message.finish()
    new_message(role, "", message.param("role"))
    made = new_message(_ROLES.get(role, role), content, message.param("content"))
    put(made, "reasoning_content", reasoning or None, message)
    return made


def _reasoning(message: Fields) -> str | None:
    """Under its older name or its newer one: servers of vLLM answer with either, or with both."""
    older, newer = message.text("reasoning_content"), message.text("reasoning")
    if older and newer and older != newer:
        raise InvalidField(message.param("reasoning"), "got another text than in reasoning_content; accepted: one")
    return older or newer


def new_message(role: str, content: str, param: str) -> pb.ChatMessage:
    """Raises InvalidField for text that is none."""
    try:
        return pb.ChatMessage(role=role, content=content)
    except ValueError:
        raise InvalidField(param, "holds half of a character (a lone surrogate)") from None


def _content(message: Fields) -> str:
    """Text, or parts of it, which are lines."""
    content, param = message.take("content"), message.param("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidField(
            param, f"got {'none' if content is None else shown(content)}; accepted: text, or parts of text"
        )
    return "\n".join(_part(part, f"{param}[{index}]") for index, part in enumerate(content))


def _part(part: Any, param: str) -> str:
    fields = Fields(part, param)
    kind = fields.text("type")
    if kind not in _TEXT_PARTS:
        what = f"got {shown(kind) if kind else 'none'}; text is accepted, no other media"
        raise UnsupportedField(fields.param("type"), what)
    text = fields.text("text")
    if text is None:
        raise InvalidField(fields.param("text"), "got none; accepted: text")
    fields.leave("annotations", "logprobs")
    fields.finish()
    return text


def read_input(fields: Fields) -> list[pb.ChatMessage]:
    """`input` of a response: a text, which a user says, or items, of which messages are taken."""
    given, param = fields.take("input"), fields.param("input")
    if isinstance(given, str):
        return [new_message("user", given, param)]
    if not isinstance(given, list) or not given:
        raise InvalidField(param, f"got {'none' if given is None else shown(given)}; accepted: a text, or messages")
    _check_number(given, param)
    return [_item(Fields(item, f"{param}[{index}]")) for index, item in enumerate(given)]


def _item(item: Fields) -> pb.ChatMessage:
    kind = item.text("type")
    if kind not in (None, "message"):
        raise UnsupportedField(item.param("type"), f"got {shown(kind)}; accepted: message")
    item.leave("id", "status")
    return _message(item)
