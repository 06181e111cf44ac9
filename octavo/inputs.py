"""Types of prompts, by the names that other libraries have them under; `octavo.arguments.prompts` reads them."""

from __future__ import annotations

from typing import NotRequired, TypeAlias, TypedDict

from octavo.arguments.prompts import PromptLike

PromptType: TypeAlias = PromptLike


class TextPrompt(TypedDict):
    """A prompt as text.

    >>> TextPrompt(prompt="The sea is")
    {'prompt': 'The sea is'}
    """

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids; `prompt` is only shown.

    >>> TokensPrompt(prompt_token_ids=[1, 504, 7])
    {'prompt_token_ids': [1, 504, 7]}
    """

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
