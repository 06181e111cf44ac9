"""Control tokens that a client has spelled out in a message: found before a template sees them, and encoded as text.

A template's own control tokens must stay what they are, and only the template knows which these are. So what a client
wrote is broken before it is rendered, a mark after the first character of every control token in it:

    content    hi<|im_end|>          rendered   <|im_start|>user\n hi<M|im_end|> <|im_end|>\n
    marked     hi<M|im_end|>                    ^ the template's, whole   ^ broken    ^ the template's

Whatever is whole afterwards is the template's. It is given another spelling, one that nobody can guess, the marks are
taken out, and a second tokenizer that knows control tokens by these spellings alone encodes the text in one piece: it
splits where the first would, and cannot make a control token of anything else, not even through its vocabulary.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from functools import cache, cached_property
from typing import Any

import tokenizers

# Of Unicode's last plane, for private use: the first that a request does not have itself is its mark.
_MARKS = tuple(map(chr, range(0x10F000, 0x10F400)))
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"  # noncharacters: no normalizer changes them
# By these a template can put a control token together from text that has none: then every first letter is broken.
_TRANSFORMS = re.compile(
    r"\b(batch|capitalize|format|join|lower|map|partition|removeprefix|removesuffix|replace|reverse|rpartition|rsplit"
    r"|slice|split|splitlines|striptags|swapcase|title|translate|truncate|upper|wordwrap)\b"
)
# Whose control tokens a template may put together: '<|' + role + '|>'. So it may with those that it has words for.
_ROLES = frozenset({"assistant", "developer", "function", "observation", "system", "tool", "user"})
_NEUTRAL_NORMALIZERS = {"Prepend", "Replace", "Sequence"}  # change nothing but spaces, as tokenizers use them


class ContentGuard:
    """Thread-safe. Its second tokenizer is made when a text is encoded first.

    Args:
        tokenizer: is not changed any more.
        control_tokens: text -> id; all of them added tokens, which text is split at.
        template: source of the chat template, and `looked_for` what it looks for in messages, which stays whole.
        words: that the template has; a role that is one of them stays whole.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        control_tokens: Mapping[str, int],
        template: str,
        looked_for: Iterable[str] = (),
        words: Iterable[str] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._control_tokens = dict(control_tokens)
        self._template = template
        self._is_always_needed = _hides_control_tokens(tokenizer, self._control_tokens)
        whole = _any_of(self._control_tokens)
        self._genuine = re.compile(f"(?>{whole})")
        looked_for = frozenset(looked_for)
        self._known_roles = _ROLES | {word.lower() for word in (*looked_for, *words)}
        self._middles, self._endings = _lacking([text.lower() for text in control_tokens], template.lower())
        if _TRANSFORMS.search(template):
            firsts = {case for text in control_tokens for case in (text[0], text[0].lower(), text[0].upper())}
            kept = _any_of(text for text in looked_for if not any(each.startswith(text) for each in control_tokens))
            self._risky = re.compile(f"{_not(kept)}[{''.join(map(re.escape, sorted(firsts)))}]")
        else:
            self._risky = re.compile(f"(?={whole}|{_any_beginning_of(self._control_tokens)}).", re.DOTALL)

    def mark(self, texts: Iterable[str], roles: Iterable[str] = ()) -> tuple[list[str], str]:
        """The texts with every control token broken, and the mark that breaks them; none where none is needed.

        `roles`: which texts are roles. One that with the template's text around it could be a control token is broken.
        """
        texts = list(texts)
        broken = {role for role in roles if self._may_complete(role)}
        if not self._is_always_needed and not broken and not any(map(self._risky.search, texts)):
            return texts, ""
        taken = "".join([*texts, self._template])
        mark = next((mark for mark in _MARKS if mark not in taken and _in_json(mark) not in taken), None)
        if mark is None:
            raise ValueError(f"the messages have all of {len(_MARKS)} characters for private use")
        begins = [text[0] + mark if text in broken else "" for text in texts]
        rests = (text[1:] if begin else text for text, begin in zip(texts, begins, strict=True))
        marked = (self._risky.sub(lambda found: found[0] + mark, rest) for rest in rests)
        return list(map(str.__add__, begins, marked)), mark

    def _may_complete(self, role: str) -> bool:
        """Whether it is, or begins with, what a text of the template lacks of a control token.

        A template that does more with a role than write it would see another word, so no other role is broken.
        """
        role = role.lower()
        completes = role in self._middles or any(role.startswith(ending) for ending in self._endings)
        return completes and role not in self._known_roles

    def encode(self, rendered: str, mark: str) -> list[int]:
        """Token ids of what was rendered from marked texts: control tokens where the template wrote them alone."""
        tokenizer, spellings = self._second
        parts: list[str] = []
        end = 0
        for found in self._genuine.finditer(rendered):
            if rendered.startswith(mark, found.end()):
                continue  # its last character is a client's
            parts += [rendered[end : found.start()], spellings[found[0]]]
            end = found.end()
        parts.append(rendered[end:])
        text = without_mark("".join(parts), mark)
        return tokenizer.encode(text, add_special_tokens=False).ids

    @cached_property
    def _second(self) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
        """A tokenizer that knows control tokens by other spellings alone, and these by the texts."""
        key = secrets.token_hex(16)
        spellings = {text: f"{_OPEN}{key}{index}{_CLOSE}" for index, text in enumerate(self._control_tokens)}
        content = json.loads(self._tokenizer.to_str())
        content["post_processor"] = None  # a chat has no tokens but those of its template
        for token in content.get("added_tokens") or ():
            token["content"] = spellings.get(token["content"], token["content"])
        model = content["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {spellings.get(text, text): index for text, index in model["vocab"].items()}
        else:
            model["vocab"] = [[spellings.get(text, text), score] for text, score in model["vocab"]]
        if model.get("merges"):
            model["merges"] = _without(model["merges"], spellings.keys())
        if model.get("unk_token") is not None:
            model["unk_token"] = spellings.get(model["unk_token"], model["unk_token"])
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        for text, index in self._control_tokens.items():
            if index not in tokenizer.encode(spellings[text], add_special_tokens=False).ids:
                raise ValueError(f"the tokenizer does not find another spelling of {text!r}")
        return tokenizer, spellings


def _lacking(control_tokens: Iterable[str], template: str) -> tuple[frozenset[str], frozenset[str]]:
    """What a template that has the beginning of a control token lacks of it: but for an end that it has, and in all."""
    middles, endings = set[str](), set[str]()
    has = cache(template.__contains__)  # reserved tokens begin and end alike, and may be a thousand
    for text in control_tokens:
        begins = [place for place in range(1, len(text)) if has(text[:place])]
        ends = [place for place in range(1, len(text)) if has(text[place:])]
        middles.update(text[start:end] for start in begins for end in ends if start < end)
        endings.update(text[start:] for start in begins)
    return frozenset(middles), frozenset(endings)


def _without(merges: list[Any], texts: AbstractSet[str]) -> list[Any]:
    """The merges that neither take nor make one of `texts`."""
    return [[left, right] for left, right in merges if texts.isdisjoint((left, right, left + right))]


def without_mark(text: str, mark: str) -> str:
    """Also where a template has written the mark as JSON does."""
    return text.replace(mark, "").replace(_in_json(mark), "") if mark else text


def _in_json(mark: str) -> str:
    return json.dumps(mark)[1:-1]


def _hides_control_tokens(tokenizer: tokenizers.Tokenizer, control_tokens: Mapping[str, int]) -> bool:
    """Whether its normalizer may make a control token of text that does not look like one."""
    if tokenizer.normalizer is None:
        return False
    steps = _steps(json.loads(tokenizer.normalizer.__getstate__()))
    texts = list(control_tokens)
    takes_away = any(step["type"] == "Replace" and not step["content"] for step in steps)
    # Of others only what they write is new: a mark for a space.
    if {step["type"] for step in steps} <= _NEUTRAL_NORMALIZERS and not takes_away:
        written = [text for step in steps if (text := step.get("content") or step.get("prepend"))]
        texts = [text for text in texts if any(each in text for each in written)]
    is_normalized = {token.content: token.normalized for token in tokenizer.get_added_tokens_decoder().values()}
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    return any(is_normalized.get(text, True) or text in vocabulary for text in texts)


def _steps(normalizer: dict[str, Any]) -> list[dict[str, Any]]:
    """The normalizer and those that it is made of."""
    return [normalizer, *(step for inner in normalizer.get("normalizers") or () for step in _steps(inner))]


def _not(pattern: str) -> str:
    return f"(?!{pattern})" if pattern else ""


def _any_of(texts: Iterable[str]) -> str:
    """A pattern of all of them, the longer before its beginning, that looks at each character once."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for letter in text:
            node = node.setdefault(letter, {})
        node[""] = {}
    return _pattern(tree)


def _pattern(node: dict[str, Any]) -> str:
    longer = [re.escape(letter) + _pattern(below) for letter, below in sorted(node.items()) if letter]
    if not longer:
        return ""
    return f"(?:{'|'.join(longer)})" + ("?" if "" in node else "")


def _any_beginning_of(texts: Iterable[str]) -> str:
    """A pattern of every beginning of one that stands at the end of a text: what comes next could complete it."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for letter in text[:-1]:
            node = node.setdefault(letter, {})
            node[""] = {}
    return _pattern(tree) + r"\s*\Z" if tree else r"(?!)"
