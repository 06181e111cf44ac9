"""From what a call of `LLM` asks for to requests that may be submitted, and outputs for those that are refused."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from octavo.arguments.asked import Asked
from octavo.arguments.prompts import Prompt
from octavo.calls.generation import Generation
from octavo.embedded.gathered_output import GatheredOutput
from octavo.outputs import CompletionOutput, RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from octavo.embedded.embedded import Embedded
    from scheduler_svc.core.sequences.sequence import SequenceGroup
    from scheduler_svc.errors import InvalidRequest
    from scheduler_svc.requests.frontend import Frontend


def prepare(
    embedded: Embedded, frontend: Frontend, asked: Asked, seed: int
) -> tuple[SequenceGroup, GatheredOutput] | RequestOutput:
    """A group to be submitted with what its messages are gathered in; or the final output of a prompt that is refused.

    Raises ValueError for what is refused with any prompt.
    """
    from scheduler_svc.errors import FieldViolation, InvalidRequest, RequestRefused

    try:
        generation = embedded.generation(asked, seed, stream=False)
    except ValueError as error:
        raise ValueError(f"{asked.place}: {error}") from None
    try:
        group = frontend.prepare(generation.request)
        if group.num_prompt_tokens > embedded.max_waiting_tokens:
            limit = f"at most {embedded.max_waiting_tokens} may wait (max_waiting_tokens)"
            what = f"{group.num_prompt_tokens} tokens are too many: {limit}"
            raise InvalidRequest(FieldViolation("prompt", what), is_too_long=True)
    except InvalidRequest as refusal:
        if not embedded.takes_other_prompts(generation.request):
            raise ValueError(f"{asked.place}: {refusal}") from refusal
        return _refused(generation, asked, refusal)
    except RequestRefused as refusal:
        raise ValueError(f"{asked.place}: {refusal}") from refusal
    token_ids = group.sequences[0].token_ids[: group.num_prompt_tokens].tolist()
    return group, GatheredOutput(generation, _text(asked), token_ids, asked.lora_request)


def log_refused(outputs: list[RequestOutput]) -> None:
    """One line for those that ended before they began. It does not quote them: prompts do not belong into a log."""
    refused = [number for number, output in enumerate(outputs) if output.finished]
    if not refused:
        return
    import structlog

    too_long = sum(outputs[number].outputs[0].finish_reason == "length" for number in refused)
    log = structlog.get_logger()
    log.warning("prompts refused", count=len(refused), too_long=too_long, first=refused[0], why="see outputs[0].error")


def _refused(generation: Generation, asked: Asked, refusal: InvalidRequest) -> RequestOutput:
    """The outputs of a prompt that ended before it began."""
    request, now_ns = generation.request, time.monotonic_ns()
    reason = "length" if refusal.is_too_long else "error"
    outputs = [
        CompletionOutput(index, token_ids=[], finish_reason=reason, error=str(refusal))
        for index in range(asked.params.n)
    ]
    return RequestOutput(
        request.request_id,
        _text(asked),
        (asked.prompt.token_ids if isinstance(asked.prompt, Prompt) else None) or [],
        outputs,
        finished=True,
        metrics=RequestMetrics(arrival_ns=now_ns, finished_ns=now_ns),
        seed=request.sampling_params.seed,
        lora_request=asked.lora_request,
    )


def _text(asked: Asked) -> str | None:
    return asked.prompt.text if isinstance(asked.prompt, Prompt) else None
