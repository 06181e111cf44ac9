"""Token ids of one output become text piece by piece, equal in the end to the tokenizer's `decode` of all ids.

`push` gives the text that no later token can change, so the text after k tokens depends on the first k ids alone;
`finish` gives the rest. Three decoders, chosen by the `decoder` part of tokenizer.json:

- `ByteLevel` (GPT-2, Llama 3, SmolLM, Qwen): bytes by id from a table and an incremental UTF-8 decoder. The fast path:
  exact, and one join for any number of tokens. Holds back at most three bytes.
- Replace, ByteFallback, Fuse, Strip, or Metaspace (Llama 2, Mistral, Gemma, T5): text or byte by id from a table.
  Exact. `decode` makes a run of byte tokens into U+FFFD as a whole when any part of it is not UTF-8, so a run is held
  back until it ends. `peek` shows it before, to who might end the output there.
- Anything else (WordPiece, CTC, no decoder): a window of the last ids is decoded with and without the new ones, as
  serving engines do. Exact where a token's text depends on no more than its neighbour; at most `_WINDOW_TOKENS` ids
  are held back.

`tokenizers.decoders.DecodeStream` takes one id at a time, 140 us for 256 that come together, where the first of these
takes 8 (`python -m benchmarks.beside_libraries`); and at the end of a text it has no way to give what it holds back.

Decoders of the second kind take a space off the front of a text. An output that continues a text begins in the middle
of it, and keeps that space.

Knows nothing of stop strings.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import tokenizers

_WINDOW_TOKENS = 16
_CHARACTER_BYTES = 4  # at most, in UTF-8
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TextStream(Protocol):
    """The decoder of one output. Not thread-safe."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with these ids."""

    def peek(self) -> str:
        """Whole characters that are held back, without those that it has given before. Called after every id.

        They are text if the output ends here; with ids that follow they may become U+FFFD.
        """

    def finish(self) -> str:
        """What was held back; incomplete characters as U+FFFD. Nothing may be pushed after it."""


StreamFactory = Callable[[bool, bool], TextStream]  # arguments: skip_special_tokens, continues_text


def stream_factory(tokenizer: tokenizers.Tokenizer) -> StreamFactory:
    """Chooses the decoder for `tokenizer` and builds its tables once, to be shared by all streams."""
    decoder = tokenizer.decoder
    steps = _steps(json.loads(decoder.__getstate__())) if decoder is not None else []
    tokens = _tokens_by_id(tokenizer)
    special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_factory(tokens, special)
    if kinds == ["Metaspace"]:
        return _metaspace_factory(tokens, special, steps[0])
    if _is_sentencepiece(steps):
        return _sentencepiece_factory(tokens, special, steps)
    return lambda skip_special_tokens, _: WindowStream(tokenizer, skip_special_tokens)


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """The decoder's steps; a decoder that is no sequence is one step."""
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _steps(inner)]
    return [decoder]


def _tokens_by_id(tokenizer: tokenizers.Tokenizer) -> list[str | None]:
    """Token texts by id; None where the vocabulary has a hole. Added tokens win over the model's, as in `decode`."""
    by_id = {index: token for token, index in tokenizer.get_vocab(with_added_tokens=False).items()}
    by_id |= {index: token.content for index, token in tokenizer.get_added_tokens_decoder().items()}
    return [by_id.get(index) for index in range(max(by_id, default=-1) + 1)]


# ---- Byte level -----------------------------------------------------------------------------------------------------


def _byte_level_factory(tokens: list[str | None], special: set[int]) -> StreamFactory:
    alphabet = _byte_alphabet()
    shown = [_token_bytes(token, alphabet) if token is not None else b"" for token in tokens]
    skipped = [b"" if index in special else piece for index, piece in enumerate(shown)]
    return lambda skip_special_tokens, _: ByteLevelStream(skipped if skip_special_tokens else shown)


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's letters for bytes: code point of the letter -> byte. Printable ones stand for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + rank: byte for rank, byte in enumerate(others)}


def _token_bytes(token: str, alphabet: Mapping[int, int]) -> bytes:
    """A token with a letter outside the alphabet (an added one) is its own UTF-8."""
    try:
        return bytes([alphabet[ord(letter)] for letter in token])
    except KeyError:
        return token.encode()


class ByteLevelStream:
    """`pieces`: bytes by id. An id beyond them (rows of the logits without a token) has no text, as in `decode`."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """See `TextStream.push`; at most three bytes of an unfinished character are held back."""
        pieces = self._pieces
        try:
            data = b"".join([pieces[index] for index in token_ids])
        except IndexError:
            data = b"".join([pieces[index] for index in token_ids if index < len(pieces)])
        return self._utf8.decode(data)

    def peek(self) -> str:
        """See `TextStream.peek`: half a character is none."""
        return ""

    def finish(self) -> str:
        """See `TextStream.finish`."""
        return self._utf8.decode(b"", final=True)


# ---- Sentencepiece style --------------------------------------------------------------------------------------------

Piece = str | int | None  # text, byte, or nothing at all (a hole, a skipped special token)


def _is_sentencepiece(steps: list[dict[str, Any]]) -> bool:
    """Replace (of strings), ByteFallback, Fuse, Strip (on the left): in this order, all but Fuse may be missing."""
    for step in steps:
        if step["type"] == "Replace" and "String" not in step["pattern"]:
            return False
        if step["type"] == "Strip" and step["stop"] != 0:
            return False
    return re.fullmatch(r"R*B?FS?", "".join(_LETTERS.get(step["type"], "?") for step in steps)) is not None


_LETTERS = {"Replace": "R", "ByteFallback": "B", "Fuse": "F", "Strip": "S"}


def _sentencepiece_factory(tokens: list[str | None], special: set[int], steps: list[dict[str, Any]]) -> StreamFactory:
    replacements = [(step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"]
    has_bytes = any(step["type"] == "ByteFallback" for step in steps)
    no_strip: dict[str, Any] = {"content": "", "start": 0}
    strip = next((step for step in steps if step["type"] == "Strip"), no_strip)

    def piece(token: str) -> Piece:
        for old, new in replacements:
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(token) if has_bytes else None
        return int(byte[1], 16) if byte else token

    shown = [piece(token) if token is not None else None for token in tokens]
    skipped = [None if index in special else entry for index, entry in enumerate(shown)]

    def make(skip_special_tokens: bool, continues_text: bool) -> TextStream:
        pieces = skipped if skip_special_tokens else shown
        return SentencePieceStream(pieces, pieces, strip["content"], 0 if continues_text else strip["start"])

    return make


def _metaspace_factory(tokens: list[str | None], special: set[int], step: dict[str, Any]) -> StreamFactory:
    mark = step["replacement"]
    first_mark = " " if step["prepend_scheme"] == "never" else ""

    def pieces_with(mark_text: str, skip: bool) -> list[Piece]:
        return [
            None if token is None or (skip and index in special) else token.replace(mark, mark_text)
            for index, token in enumerate(tokens)
        ]

    tables = {skip: (pieces_with(first_mark, skip), pieces_with(" ", skip)) for skip in (False, True)}

    def make(skip_special_tokens: bool, continues_text: bool) -> TextStream:
        first_pieces, pieces = tables[skip_special_tokens]
        return SentencePieceStream(pieces if continues_text else first_pieces, pieces)

    return make


class SentencePieceStream:
    """`first_pieces` for the first token that has a piece, `pieces` for all others. Up to `strip_count` times
    `strip_letter` is taken off the front of what comes."""

    def __init__(
        self, first_pieces: list[Piece], pieces: list[Piece], strip_letter: str = "", strip_count: int = 0
    ) -> None:
        self._next_pieces = first_pieces
        self._pieces = pieces
        self._run = bytearray()  # byte tokens since the last text
        self._num_peeked = 0  # of its bytes: whole characters, as `peek` knows
        self._strip_letter = strip_letter
        self._strip_count = strip_count
        self._peeked_strip_count = 0  # what would be left of it behind those characters

    def push(self, token_ids: Sequence[int]) -> str:
        """See `TextStream.push`; a run of byte tokens is held back until it ends."""
        texts: list[str] = []
        for index in token_ids:
            piece = self._next_pieces[index] if index < len(self._next_pieces) else None
            if piece is None:
                continue
            self._next_pieces = self._pieces
            if isinstance(piece, int):
                self._run.append(piece)
                continue
            if self._run:
                texts.append(self._end_run())
            texts.append(piece)
        text, self._strip_count = self._strip("".join(texts), self._strip_count)
        return text

    def peek(self) -> str:
        """See `TextStream.peek`: of the run of byte tokens."""
        end = self._run[self._num_peeked :] if len(self._run) <= self._num_peeked + _CHARACTER_BYTES else b""
        try:
            text = end.decode()
        except UnicodeDecodeError:
            return ""
        if not self._num_peeked:
            self._peeked_strip_count = self._strip_count
        self._num_peeked += len(end)
        text, self._peeked_strip_count = self._strip(text, self._peeked_strip_count)
        return text

    def finish(self) -> str:
        """See `TextStream.finish`."""
        text, self._strip_count = self._strip(self._end_run(), self._strip_count)
        return text

    def _end_run(self) -> str:
        run, self._run, self._num_peeked = self._run, bytearray(), 0
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\N{REPLACEMENT CHARACTER}" * len(run)

    def _strip(self, text: str, count: int) -> tuple[str, int]:
        """The text without up to `count` letters in front, and how many may go from what follows."""
        while count and text:
            if text[0] != self._strip_letter:
                count = 0
            else:
                count -= 1
                text = text[1:]
        return text, count


# ---- Any decoder ----------------------------------------------------------------------------------------------------


class WindowStream:
    """Decodes `context + new ids` and takes off the text of `context`, the ids released last."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._context: list[int] = []
        self._new: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """See `TextStream.push`; decodes once an id, with those before it."""
        return "".join([self._push_one(index) for index in token_ids])

    def peek(self) -> str:
        """See `TextStream.peek`: whole characters are not held back."""
        return ""

    def finish(self) -> str:
        """See `TextStream.finish`."""
        return self._new_text()

    def _push_one(self, token_id: int) -> str:
        self._new.append(token_id)
        text = self._new_text()
        is_certain = text and not text.endswith("\N{REPLACEMENT CHARACTER}")
        if not is_certain and len(self._new) < _WINDOW_TOKENS:
            return ""
        self._context, self._new = self._new, []
        return text

    def _new_text(self) -> str:
        return self._decode(self._context + self._new)[len(self._decode(self._context)) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
