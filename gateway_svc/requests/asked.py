"""What one call asks for: messages for a scheduler, and how their answers are to be shown."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from protos import inference_pb2 as pb


@dataclass(slots=True, kw_only=True)
class Asked:
    """Attributes:
    requests: one a prompt; request k of several has the call's id and `-k`.
    num_outputs: of each prompt.
    num_top: most likely tokens to show at each position; None: no logprobs at all.
    names: a field of the scheduler's messages to the one of the body that it came from, where they differ.
    settings: what the answer repeats of the request (responses).
    """

    id: str
    requests: list[pb.GenerateRequest]
    created: int = field(default_factory=lambda: int(time.time()))
    num_outputs: int = 1
    streams: bool = False
    includes_usage: bool = False
    num_top: int | None = None
    tokens_as_ids: bool = False
    returns_token_ids: bool = False
    returns_prompt_logprobs: bool = False
    echoes: bool = False
    shows_output: bool = True  # False: a prompt is scored, and the one token that has to be generated is dropped
    names: dict[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


def new_id(kind: str, given: str | None) -> str:
    """Of an answer: its kind, and what the client gave or a number of ours."""
    return f"{kind}-{given or uuid.uuid4().hex}"
