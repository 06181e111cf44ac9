"""What a client already has of a request that it sends again: it is checked, and each output goes on after it."""

from __future__ import annotations

from dataclasses import dataclass

from protos import inference_pb2 as pb
from scheduler_svc.core.sequences.finish_reason import FinishReason
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.errors import FieldViolation, InvalidRequest


@dataclass(frozen=True, slots=True)
class ResumedOutput:
    """One output's earlier life.

    `finish_reason` is NONE for an output that goes on; `is_told`: the client has been told of the end already.
    """

    token_ids: list[int]
    finish_reason: FinishReason = FinishReason.NONE
    is_told: bool = False


def read_resumed(request: pb.GenerateRequest, vocab_size: int, num_outputs: int, is_gathered: bool) -> list[list[int]]:
    """Tokens of each output, in order of index; empty where nothing is resumed.

    `is_gathered`: nothing is sent of the request before its end, so no client can have anything. Raises InvalidRequest.
    """
    if not request.resume:
        return []
    if is_gathered:
        raise _invalid("resume", "got some; accepted: none with best_of > n, beams or stream = false, which begin anew")
    if not request.sampling_params.HasField("seed") and _draws(request.sampling_params):
        raise _invalid("sampling_params.seed", "got none; accepted: with resume, the seed that the first answer named")
    token_ids: list[list[int]] = [[] for _ in range(num_outputs)]
    seen: set[int] = set()
    for entry, output in enumerate(request.resume):
        if output.index >= num_outputs or output.index in seen:
            what = f"got {output.index}; accepted: each of 0 to {num_outputs - 1} at most once"
            raise _invalid(f"resume[{entry}].index", what)
        if (outside := max(output.token_ids, default=0)) >= vocab_size:
            raise _invalid(f"resume[{entry}].token_ids", f"got {outside}; accepted: 0 to {vocab_size - 1}")
        seen.add(output.index)
        token_ids[output.index] = list(output.token_ids)
    return token_ids


def resumed_outputs(request: pb.GenerateRequest, group: SequenceGroup) -> list[ResumedOutput]:
    """How each of the group's outputs stands, by index. Raises InvalidRequest for more tokens than it can have."""
    most = group.max_num_tokens - group.num_prompt_tokens
    told = {output.index: _reason(output) for output in request.resume if output.finish_reason}
    outputs = []
    for sequence in group.sequences:
        token_ids = sequence.token_ids[group.num_prompt_tokens :].tolist()
        if len(token_ids) > most:
            what = f"output {sequence.index} has {len(token_ids)} tokens; accepted: at most {most}"
            raise _invalid("resume", what)
        if sequence.index in told:
            outputs.append(ResumedOutput(token_ids, told[sequence.index], is_told=True))
        else:
            outputs.append(ResumedOutput(token_ids, _end_of(token_ids, sequence.index, group)))
    return outputs


def _end_of(token_ids: list[int], index: int, group: SequenceGroup) -> FinishReason:
    """Whether the last of the tokens ends an output that nobody called ended."""
    if not set(group.all_stop_token_ids()).isdisjoint(token_ids):
        first = next(position for position, token_id in enumerate(token_ids) if group.is_stop_token(token_id))
        if first != len(token_ids) - 1:
            raise _invalid("resume", f"output {index} goes on after token {token_ids[first]}, which ends it")
        return FinishReason.STOP
    is_longest = group.num_prompt_tokens + len(token_ids) == group.max_num_tokens
    return FinishReason.LENGTH if is_longest else FinishReason.NONE


def _reason(output: pb.ResumedOutput) -> FinishReason:
    try:
        return FinishReason(output.finish_reason)
    except ValueError:
        raise _invalid(
            "resume", f"output {output.index} has finish_reason {output.finish_reason}, which is none"
        ) from None


def _draws(params: pb.SamplingParams) -> bool:
    return not params.HasField("temperature") or params.temperature > 0


def _invalid(field: str, what: str) -> InvalidRequest:
    return InvalidRequest(FieldViolation(field, what))
