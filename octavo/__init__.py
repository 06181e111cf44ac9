"""Octavo serves language models with PagedAttention, as a scheduler and workers that talk over gRPC.

The names below are all a user needs. They are imported when first touched: `import octavo` by itself loads neither
grpc nor a model, so that the `octavo` command answers at once.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.beam_search import BeamSearchOutput, BeamSearchSequence
    from octavo.client import AsyncClient, Client
    from octavo.engine_args import EngineArgs
    from octavo.inputs import PromptType, TextPrompt, TokensPrompt
    from octavo.llm import LLM
    from octavo.llm_engine import LLMEngine
    from octavo.lora_request import LoRARequest
    from octavo.outputs import CompletionOutput, Logprob, RequestOutput
    from octavo.sampling_params import BeamSearchParams, SamplingParams

__all__ = [
    "LLM",
    "SamplingParams",
    "RequestOutput",
    "CompletionOutput",
    "Logprob",
    "LoRARequest",
    "TextPrompt",
    "TokensPrompt",
    "PromptType",
    "BeamSearchParams",
    "BeamSearchOutput",
    "BeamSearchSequence",
    "LLMEngine",
    "EngineArgs",
    "AsyncClient",
    "Client",
]

# gRPC reads it when it is imported. Its attempt to carry its threads over a fork was seen to crash or hang the child of
# a process that has an `LLM`, such as a data loader's; without it such a child runs, and does not touch the `LLM`.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

_HOMES = {
    "LLM": "octavo.llm",
    "LLMEngine": "octavo.llm_engine",
    "EngineArgs": "octavo.engine_args",
    "LoRARequest": "octavo.lora_request",
    "SamplingParams": "octavo.sampling_params",
    "BeamSearchParams": "octavo.sampling_params",
    "BeamSearchOutput": "octavo.beam_search",
    "BeamSearchSequence": "octavo.beam_search",
    "TextPrompt": "octavo.inputs",
    "TokensPrompt": "octavo.inputs",
    "PromptType": "octavo.inputs",
    "Client": "octavo.client",
    "AsyncClient": "octavo.client",
    "RequestOutput": "octavo.outputs",
    "CompletionOutput": "octavo.outputs",
    "Logprob": "octavo.outputs",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from octavo.shared.version import installed_version

        return installed_version()
    if name not in _HOMES:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
