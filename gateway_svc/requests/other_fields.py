"""Fields that OpenAI's services have and this one takes for what they are: without effect here, or beyond it."""

from __future__ import annotations

from gateway_svc.errors import UnsupportedField
from gateway_svc.requests.fields import Fields, shown

# Of bookkeeping elsewhere: an answer is the same without them.
WITHOUT_EFFECT = (
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "parallel_tool_calls",
)
_NO_TOOLS = "this server has no tools"
_NO_TEMPLATE = "the model's own chat template is used, as it is"
_TEXT_ONLY = "text is accepted, no other media"
_NO_REASONING = "this server does not part reasoning from the rest"
BEYOND = {
    "tools": _NO_TOOLS,
    "functions": _NO_TOOLS,
    "web_search_options": _NO_TOOLS,
    "max_tool_calls": _NO_TOOLS,
    "audio": _TEXT_ONLY,
    "prediction": "this server has no predicted outputs",
    "moderation": "this server moderates nothing",
    "reasoning_effort": _NO_REASONING,
    "verbosity": _NO_REASONING,
    "store": "nothing is stored here",
    "chat_template": _NO_TEMPLATE,
    "chat_template_kwargs": _NO_TEMPLATE,
    "documents": _NO_TEMPLATE,
    "mm_processor_kwargs": _TEXT_ONLY,
    "suffix": "this server cannot fill in the middle of a text",
    "prompt_embeds": "text and token ids are accepted",
    "logits_processors": "clients bring no code here",
    "guided_decoding_backend": "the scheduler chooses",
}
_TIERS = ("auto", "default")
_TOOL_CHOICES = ("none", "auto")


def read_other(fields: Fields) -> None:
    """Raises UnsupportedField."""
    fields.leave(*WITHOUT_EFFECT)
    fields.refuse(BEYOND)
    _only(fields, "service_tier", _TIERS, "this server has one tier")
    _only(fields, "tool_choice", _TOOL_CHOICES, _NO_TOOLS)
    _only(fields, "function_call", _TOOL_CHOICES, _NO_TOOLS)
    modalities = fields.take("modalities")
    if modalities not in (None, ["text"]):
        raise UnsupportedField(fields.param("modalities"), _TEXT_ONLY)


def _only(fields: Fields, name: str, accepted: tuple[str, ...], why: str) -> None:
    value = fields.take(name)
    if value is not None and value not in accepted:
        raise UnsupportedField(fields.param(name), f"got {shown(value)}; {why}: accepted: {', '.join(accepted)}")
