"""A model's chat template: messages in, prompt text out, as `transformers` renders it.

Templates come with a model and are programs: they run in jinja2's immutable sandbox. Whatever goes wrong in one is a
`TemplateError` of one line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

_OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_WRITERS = frozenset({"append", "d", "default", "format", "join"})  # filters and methods: what they take is written
_CUT = "OCTAVO_CUTS_HERE "  # the space shows whether the template trims the end of a message


class TemplateError(ValueError):
    """The messages do not fit the template, or the template is broken. One line, fit for the client."""


class ChatTemplate:
    """Thread-safe. A broken template is known when something is first rendered with it.

    `special_tokens` (`bos_token`, `eos_token`, ...) are visible in the template by name, and so are `variables` of the
    caller's, such as `enable_thinking`.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], variables: Mapping[str, Any] | None = None
    ) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._variables = dict(variables or {})

    def with_variables(self, variables: Mapping[str, Any]) -> ChatTemplate:
        """The same template with these variables. Raises `TemplateError` for names that mean something already."""
        for name in variables:
            if name in _OWN_VARIABLES or name in self._special_tokens:
                raise TemplateError(f"the chat template has {name!r} from elsewhere: it is no variable of the caller's")
        return ChatTemplate(self._source, self._special_tokens, variables)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        max_chars: int | None = None,
    ) -> str:
        """The prompt for `messages` (`role`, `content`, and whatever else the template reads).

        `add_generation_prompt` begins the assistant's answer (default: unless the final message is continued).
        `continue_final_message` ends the prompt within the final message, so that the model goes on with it.
        Raises `TemplateError`, also for more than `max_chars` characters, as soon as there are more.
        """
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        if not messages:
            raise TemplateError("there are no messages")
        if not continue_final_message:
            return self._render(messages, add_generation_prompt, max_chars)
        if add_generation_prompt:
            raise TemplateError("add_generation_prompt and continue_final_message exclude each other")
        content = messages[-1].get("content")
        if not isinstance(content, str):
            raise TemplateError("continue_final_message: the final message has no text to continue")
        marked = [*messages[:-1], {**messages[-1], "content": content + _CUT}]
        return _cut(self._render(marked, add_generation_prompt, max_chars), content)

    @property
    def source(self) -> str:
        """The template as the model brought it, for a process that is to compile it again."""
        return self._source

    def check(self) -> None:
        """Raises `TemplateError` where it cannot be rendered at all."""
        try:
            _ = self._template
        except jinja2.TemplateError as error:
            raise _one_line(error) from error

    @cached_property
    def looked_for(self) -> frozenset[str]:
        """Texts that the template compares with, or hands to a method or filter: it may look for them in messages.

        What a macro takes, or a filter is put behind, or that joins texts, is what the template writes itself.
        """
        try:
            tree = _environment().parse(self._source)
        except jinja2.TemplateSyntaxError:
            return frozenset()
        asked = list[nodes.Node](tree.find_all((nodes.Compare, nodes.Test)))
        for call in tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Getattr) and call.node.attr not in _WRITERS:
                asked += [*call.args, *call.kwargs]
        for each in tree.find_all(nodes.Filter):
            if each.name not in _WRITERS:
                asked += [*each.args, *each.kwargs]
        constants = (
            constant.value
            for node in asked
            for constant in ([node] if isinstance(node, nodes.Const) else node.find_all(nodes.Const))
        )
        return frozenset(value for value in constants if isinstance(value, str))

    @cached_property
    def words(self) -> frozenset[str]:
        """Texts of a single word that stand in its code: roles that it knows, among others."""
        try:
            constants = _environment().parse(self._source).find_all(nodes.Const)
        except jinja2.TemplateSyntaxError:
            return frozenset()
        return frozenset(each.value for each in constants if isinstance(each.value, str) and each.value.isidentifier())

    def _render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, max_chars: int | None) -> str:
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
                **self._variables,
            ):
                pieces.append(piece)
                num_chars += len(piece)
                if max_chars is not None and num_chars > max_chars:
                    break
        except Exception as error:  # a template is a program: it may raise anything
            raise _one_line(error) from error
        if max_chars is not None and num_chars > max_chars:
            raise TemplateError(f"rendered, the messages have more than {max_chars} characters")
        return "".join(pieces)

    @cached_property
    def _template(self) -> jinja2.Template:
        return _environment().from_string(self._source)


def _cut(rendered: str, content: str) -> str:
    """`rendered` up to the mark that was put behind the final message."""
    position = rendered.rfind(_CUT.strip())
    if position < 0 or content.strip() not in rendered:
        raise TemplateError("continue_final_message: the chat template does not show the final message as it is")
    is_kept_as_is = rendered.startswith(_CUT, position)
    return rendered[:position] if is_kept_as_is else rendered[:position].rstrip()


def _one_line(error: Exception) -> TemplateError:
    text = " ".join(str(error).split()) or type(error).__name__
    where = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    return TemplateError(f"chat template: {text}{where}")


def _environment() -> ImmutableSandboxedEnvironment:
    """What templates of the hub are written for: block trimming, `tojson` without HTML escapes, two functions."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's part for training; here it only shows what is in it."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_show"), [], [], body).set_lineno(line)

    def _show(self, caller: Macro) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
