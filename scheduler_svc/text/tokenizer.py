"""Text to token ids and back, over the `tokenizers` library, from files in memory as a worker sends them.

No `transformers`: its import alone takes longer than a scheduler may take to be ready. A worker makes tokenizer.json
where its model has another format. `spaces_between_special_tokens` has no effect with these tokenizers, here as
elsewhere: it is a setting of the slow ones.
"""

from __future__ import annotations

import copy
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import tokenizers

from scheduler_svc.text.chat_template import ChatTemplate, TemplateError
from scheduler_svc.text.content_guard import ContentGuard
from scheduler_svc.text.quick_tokenizers import is_quick
from scheduler_svc.text.text_stream import StreamFactory, TextStream, stream_factory

_FILE_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
)
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerError(ValueError):
    """These files make no tokenizer. One line, names the file."""


class Tokenizer:
    """Thread-safe, and never changed after it is made. `load` and `from_folder` share equal ones."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """`files`: name -> content; others than those known are ignored. Raises `TokenizerError`."""
        if "tokenizer.json" not in files:
            raise TokenizerError(
                "tokenizer.json is missing: only models that have one, or that a worker can make one for, are served"
            )
        with _as_tokenizer_error("tokenizer.json is not readable"):
            self._tokenizer = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
        self._files = dict(files)
        # A file may carry the padding and truncation of its training; neither belongs to a prompt.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._config = {name: _read_json(files, name) for name in _FILE_NAMES[1:] if name.endswith(".json")}
        self.special_tokens = self._named_special_tokens()  # "bos_token" -> its text, as chat templates see them
        self._mark_special_tokens()
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_token_ids = frozenset(index for index, token in added.items() if token.special)
        self.eos_token_ids = self._find_eos_token_ids()
        source = _template_source(files, self._config["tokenizer_config.json"])
        self.chat_template = ChatTemplate(source, self.special_tokens) if source is not None else None
        self.control_tokens = self._find_control_tokens()  # text -> id
        self._stream_factory: StreamFactory = stream_factory(self._tokenizer)

    @staticmethod
    def load(files: Mapping[str, bytes]) -> Tokenizer:
        """The tokenizer of these files, from a small cache by their hash. Raises `TokenizerError`."""
        return _CACHE.get(files)

    @staticmethod
    def from_folder(folder: str | Path) -> Tokenizer:
        """The tokenizer in a model's folder. Raises `TokenizerError`."""
        folder = Path(folder)
        try:
            return _CACHE.get({name: (folder / name).read_bytes() for name in _FILE_NAMES if (folder / name).is_file()})
        except (OSError, TokenizerError) as error:
            raise TokenizerError(f"{folder}: {error}") from error

    def save(self, folder: Path) -> None:
        """Writes the files that it was made of, for `from_folder`."""
        folder.mkdir(parents=True)
        for name, data in self._files.items():
            (folder / name).write_bytes(data)

    @property
    def files(self) -> Mapping[str, bytes]:
        """What it was made of."""
        return self._files

    @cached_property
    def is_quick(self) -> bool:
        """Whether a short text takes it no time to speak of, whatever is in it."""
        return is_quick(self._tokenizer)

    @cached_property
    def sha256(self) -> str:
        """Of the files that it was made of, as a worker says it of those that it sends."""
        known = sorted(name for name in self._files if name in _FILE_NAMES)
        return hashlib.sha256(b"".join(self._files[name] for name in known)).hexdigest()

    @cached_property
    def content_guard(self) -> ContentGuard:
        """For a tokenizer with a chat template."""
        assert self.chat_template is not None
        return ContentGuard(
            self._tokenizer,
            self.control_tokens,
            self.chat_template.source,
            self.chat_template.looked_for,
            self.chat_template.words,
        )

    @property
    def vocab_size(self) -> int:
        """Tokens with text, added ones included. A model may have more rows of logits."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        """None where the tokenizer names no such token."""
        return self._id_of("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own; what ends an output is `eos_token_ids`."""
        return self._id_of("eos_token")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. `add_special_tokens` adds what tokenizer.json's post-processor adds (BOS, for some models);
        special tokens written out in `text` are recognised in any case. Raises `TokenizerError`."""
        with _as_tokenizer_error("the tokenizer fails over a text"):
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """All ids at once; for text as it comes there is `text_stream`. Raises `TokenizerError`."""
        with _as_tokenizer_error("the tokenizer fails over token ids"):
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str | list[int]:
        """The prompt for messages, as token ids or as text: what the method of this name does in `transformers`.

        Raises `TemplateError`, also without a template.
        """
        if self.chat_template is None:
            raise TemplateError("this tokenizer has no chat template")
        text = self.chat_template.with_variables(variables).render(
            conversation, add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def with_template_variables(self, variables: Mapping[str, Any]) -> Tokenizer:
        """The same with variables for its chat template. Raises `TemplateError`, also without a template."""
        if self.chat_template is None:
            raise TemplateError("this tokenizer has no chat template")
        other = copy.copy(self)
        other.chat_template = self.chat_template.with_variables(variables)
        return other

    def stream(self, skip_special_tokens: bool = True, *, continues_text: bool = False) -> TextStream:
        """An incremental `decode` for one output.

        `continues_text`: text stands before it, so a space that `decode` takes off the front of a text stays.
        """
        return self._stream_factory(skip_special_tokens, continues_text)

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling, such as "Ġthe"; None where there is no token."""
        return self._tokenizer.id_to_token(token_id)

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself, special ones shown, with U+FFFD for parts of characters."""
        stream = self.stream(False)
        return stream.push((token_id,)) + stream.finish()

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return self._tokenizer.token_to_id(token) if token is not None else None

    def _named_special_tokens(self) -> dict[str, str]:
        texts = {name: _token_content(self._said_of_tokens.get(name)) for name in _SPECIAL_NAMES}
        return {name: text for name, text in texts.items() if text is not None}

    @property
    def _said_of_tokens(self) -> dict[str, Any]:
        return self._config["special_tokens_map.json"] | self._config["tokenizer_config.json"]

    def _mark_special_tokens(self) -> None:
        """What the configs name is special and matched whole, whatever tokenizer.json says, as in `transformers`.

        A token without an id is not added: the model may have no row for it.
        """
        said = self._said_of_tokens
        named = [_token_content(value) for name, value in said.items() if name.endswith("_token")]
        for name in ("additional_special_tokens", "extra_special_tokens"):
            more = said.get(name)
            values = more.values() if isinstance(more, dict) else more if isinstance(more, list) else ()
            named += map(_token_content, values)
        added = {token.content: token for token in self._tokenizer.get_added_tokens_decoder().values()}
        known = [text for text in dict.fromkeys(named) if text and self._tokenizer.token_to_id(text) is not None]
        tokens = [added.get(text) or tokenizers.AddedToken(text, normalized=False) for text in known]
        plain = [token for token in tokens if not token.special]
        self._tokenizer.add_special_tokens(plain)  # all at once: each call is slow

    def _find_eos_token_ids(self) -> tuple[int, ...]:
        """From the generation config, else the model's config, else the tokenizer's EOS token."""
        for name in ("generation_config.json", "config.json"):
            found = self._config[name].get("eos_token_id")
            if found is not None:
                ids = tuple(found) if isinstance(found, list) else (found,)
                if not all(type(each) is int and 0 <= each < 1 << 31 for each in ids):
                    raise TokenizerError(f"{name}: eos_token_id is {found!r:.100}; accepted: token ids")
                return ids
        return (self.eos_token_id,) if self.eos_token_id is not None else ()

    def _find_control_tokens(self) -> dict[str, int]:
        """Special tokens, those with a name or that end an output, and added ones that only the chat template writes
        (some models have not marked them as special). What the template also looks for in messages is text there."""
        named, ends = set(self.special_tokens.values()), set(self.eos_token_ids)
        found = {text: self._tokenizer.token_to_id(text) for text in named}
        for index, token in self._tokenizer.get_added_tokens_decoder().items():
            if token.special or index in ends or self._is_of_template(token.content):
                found[token.content] = index
        return {text: index for text, index in found.items() if text and index is not None}

    def _is_of_template(self, text: str) -> bool:
        template = self.chat_template
        if template is None or not text.strip():  # Gemma's runs of newlines and spaces stand in any source
            return False
        return text in template.source and text not in template.looked_for


@contextmanager
def _as_tokenizer_error(what: str) -> Iterator[None]:
    """The library raises plain Exception, and where its Rust code panics something that is none."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{what}: {' '.join(str(error).split())}") from error


class _TokenizerCache:
    """Tokenizers in use, and the last that was asked for, by the hash of their files."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_use: WeakValueDictionary[str, Tokenizer] = WeakValueDictionary()
        self._last: Tokenizer | None = None  # an `LLM` may be made anew with the same

    def get(self, files: Mapping[str, bytes]) -> Tokenizer:
        known = {name: files[name] for name in _FILE_NAMES if name in files}
        key = _hash(known)
        with self._lock:
            tokenizer = self._in_use.get(key)
            if tokenizer is None:
                tokenizer = self._in_use[key] = Tokenizer(known)
            self._last = tokenizer
            return tokenizer


_CACHE = _TokenizerCache()


def _hash(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, data in files.items():
        digest.update(f"{name} {len(data)}\n".encode() + data)
    return digest.hexdigest()


def _read_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        content = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{name} is not a JSON object")
    return content


def _token_content(value: Any) -> str | None:
    """A special token stands as text, or as an object with its text in `content`."""
    found = value.get("content") if isinstance(value, dict) else value
    if not isinstance(found, str):
        return None
    try:
        found.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(f"a special token is no text: {error}") from error
    return found


def _template_source(files: Mapping[str, bytes], config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja wins; the tokenizer config has one template, or a list of named ones with a "default"."""
    if "chat_template.jinja" in files:
        try:
            return files["chat_template.jinja"].decode()
        except UnicodeDecodeError as error:
            raise TokenizerError(f"chat_template.jinja is not UTF-8: {error}") from error
    source = config.get("chat_template")
    if isinstance(source, list):
        entries = [entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default"]
        source = entries[0].get("template") if entries else None
    return source if isinstance(source, str) else None
