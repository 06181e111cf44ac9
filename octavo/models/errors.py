"""What can go wrong while a model is fetched or converted. Messages are one line, fit for a terminal."""

from __future__ import annotations


class FetchError(RuntimeError):
    """The model could not be fetched; says from where and why."""


class SourceUnavailable(FetchError):
    """This source cannot be reached from here; another may be tried."""


class GGUFError(FetchError):
    """This GGUF file cannot be converted; says what in it is the reason."""


class SentencePieceError(ValueError):
    """This sentencepiece model cannot be converted; says what in it is the reason."""


class TekkenError(ValueError):
    """This tekken.json cannot be converted; says what in it is the reason."""
