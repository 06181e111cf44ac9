"""What API.md says of a request, written down a second time: which statuses a server with these limits may answer.

Of the fake worker's sizes, and exact but for prompts whose length depends on a template and for parts that a server may
lack: those may be refused or served.
"""

from __future__ import annotations

import grpc

from protos import inference_pb2 as pb

VOCAB_SIZE, MAX_MODEL_LEN, MAX_CACHED_TOKENS, MAX_NUM_SEQS, MAX_LOGPROBS = 400, 256, 192, 8, 20
MODEL, MAX_REQUEST_BYTES = "fake-model", 1_048_576

OK, INVALID, MISSING = grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
_LACKING = {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.FAILED_PRECONDITION}
_EARLY_STOPPING = (pb.EARLY_STOPPING_NO, pb.EARLY_STOPPING_YES, pb.EARLY_STOPPING_NEVER)


def expected(request: pb.GenerateRequest) -> set[grpc.StatusCode]:
    """Statuses that `Generate` may end with."""
    if request.ByteSize() > MAX_REQUEST_BYTES:
        return {grpc.StatusCode.RESOURCE_EXHAUSTED}
    if request.model not in ("", MODEL) or request.model_fingerprint:  # nobody draws the right one
        return {MISSING}
    is_wrong = _is_wrong(request.sampling_params) or _has_wrong_prompt(request)
    statuses = {INVALID} if is_wrong else {OK}
    if _may_lack(request):
        statuses |= {OK, *_LACKING} if not is_wrong else _LACKING
    if request.adapter:
        statuses |= {MISSING, *_LACKING}
    return statuses | {INVALID, OK} if not is_wrong and _is_doubtful(request) else statuses


def _is_wrong(params: pb.SamplingParams) -> bool:
    n = params.n if params.HasField("n") else 1
    best_of = params.best_of if params.HasField("best_of") else n
    temperature = params.temperature if params.HasField("temperature") else 1.0
    beams = params.use_beam_search
    lists = (params.logit_bias, params.allowed_token_ids, params.stop_token_ids, params.bad_words)
    token_ids = [*params.logit_bias, *params.allowed_token_ids, *params.stop_token_ids]
    return (
        not 1 <= n <= best_of <= MAX_NUM_SEQS
        or not (temperature == 0 or 1e-30 <= temperature <= 2)
        or (params.HasField("top_p") and not 1e-30 <= params.top_p <= 1)
        or params.top_k < -1
        or not (params.min_p == 0 or 1e-30 <= params.min_p <= 1)
        or not all(-2 <= value <= 2 for value in (params.presence_penalty, params.frequency_penalty))
        or (params.HasField("repetition_penalty") and not 0.00999999 <= params.repetition_penalty <= 100)
        or len(params.stop) > 16
        or not all([*params.stop, *params.bad_words])
        or (params.HasField("max_tokens") and params.max_tokens < 1)
        or (params.HasField("max_tokens") and params.min_tokens > params.max_tokens)
        or params.min_tokens > MAX_MODEL_LEN
        or not all(0 <= value <= MAX_LOGPROBS for value in (params.logprobs, params.prompt_logprobs))
        or any(len(entries) > 1024 for entries in lists)
        or any(len(word) > 1024 for word in params.bad_words)
        or sum(len(word.encode()) for word in params.bad_words) > 64 * 1024
        or any(token_id >= VOCAB_SIZE for token_id in token_ids)
        or not all(-100 <= bias <= 100 for bias in params.logit_bias.values())
        or (bool(params.stop) and params.HasField("detokenize") and not params.detokenize)
        or params.early_stopping not in _EARLY_STOPPING
        or (beams and (best_of < 2 or temperature != 0 or not -100 <= params.length_penalty <= 100))
        or (not beams and best_of > 1 and temperature == 0)
        or (not beams and params.HasField("length_penalty") and params.length_penalty != 1)
        or (not beams and params.early_stopping != pb.EARLY_STOPPING_NO)
        or (params.HasField("guided") and _is_empty(params.guided))
    )


def _is_empty(guided: pb.GuidedDecoding) -> bool:
    kind = guided.WhichOneof("guide")
    if kind == "choice":
        return not guided.choice.choices or not all(guided.choice.choices)
    return kind is None or not getattr(guided, kind)


def _has_wrong_prompt(request: pb.GenerateRequest) -> bool:
    """Or another field of the request itself that no server takes."""
    if request.HasField("truncate_prompt_tokens") and not request.truncate_prompt_tokens:
        return True
    if max(len(request.request_id), len(request.cache_salt), len(request.tenant)) > 256:
        return True
    kind = request.WhichOneof("prompt_kind")
    if kind == "messages":
        return not request.messages.messages or not all(message.role for message in request.messages.messages)
    if kind == "prompt_token_ids":
        token_ids, num_tokens = request.prompt_token_ids.ids, len(request.prompt_token_ids.ids)
        if any(token_id >= VOCAB_SIZE for token_id in token_ids):
            return True
    else:
        num_tokens = len(request.prompt.replace("<|im_start|>", "x").encode())
        if len(request.prompt) > 100 * MAX_MODEL_LEN:
            return True
    if num_tokens and request.HasField("truncate_prompt_tokens"):
        num_tokens = min(num_tokens, request.truncate_prompt_tokens)
    return not 1 <= num_tokens <= MAX_CACHED_TOKENS


def _may_lack(request: pb.GenerateRequest) -> bool:
    params = request.sampling_params
    return bool(
        request.priority
        or request.resume
        or params.HasField("guided")
        or (params.use_beam_search and (params.logprobs or _adjusts_logits(params)))
    )


def _adjusts_logits(params: pb.SamplingParams) -> bool:
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or (params.HasField("repetition_penalty") and params.repetition_penalty != 1)
        or params.min_tokens
        or params.logit_bias
        or params.allowed_token_ids
        or params.bad_words
    )


def _is_doubtful(request: pb.GenerateRequest) -> bool:
    """Whether it fits depends on what is not written down here a second time."""
    params = request.sampling_params
    many_tokens = len(request.prompt) > 100 or len(request.prompt_token_ids.ids) > 100
    return bool(
        request.resume
        or (request.messages.ByteSize() > 100)
        or request.messages.continue_final_message
        or (many_tokens and (params.n > 1 or params.best_of > 1))
        or (params.use_beam_search and len(params.stop_token_ids) > 100)
    )
