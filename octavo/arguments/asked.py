"""What a caller of `LLM` or `LLMEngine` asks for, read and with its place in the call."""

from __future__ import annotations

from typing import NamedTuple

from octavo.arguments.conversations import Conversation
from octavo.arguments.prompts import Prompt
from octavo.lora_request import LoRARequest
from octavo.sampling_params import SamplingParams


class Asked(NamedTuple):
    """One request of a call."""

    place: str  # as errors name it
    prompt: Prompt | Conversation
    params: SamplingParams
    lora_request: LoRARequest | None = None
    priority: int | None = None
