"""One request as a client follows it, over as many attempts as it takes.

A scheduler that goes away takes no request with it: the client holds the seed and every token it was given, and any
scheduler goes on from there. This file is that bookkeeping and nothing else: no channel, no clock, no sleeping.
"""

from __future__ import annotations

import random
import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from octavo.errors import RequestFailed
from octavo.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, TokenLogprobs
from octavo.sampling_params import SamplingParams
from protos import inference_pb2 as pb

# What an admitted stream ends with when its server or the way there is lost: INTERNAL and UNKNOWN are what resets of an
# HTTP/2 stream become, CANCELLED is a server that stops, RESOURCE_EXHAUSTED the queue of the one tried next.
_LOST = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)


@dataclass(frozen=True)
class RetryPolicy:
    """How often and how soon a request is sent again; the count starts afresh with every message that arrives."""

    retries: int = 8  # of a request that was admitted once
    retries_before_admission: int = 3
    first_delay_s: float = 0.1
    max_delay_s: float = 2.0

    def delay_s(self, failures: int) -> float:
        """The pause after so many failures in a row: doubling, bounded, spread so that clients do not return as one."""
        return min(self.first_delay_s * 2 ** (failures - 1), self.max_delay_s) * random.uniform(0.5, 1.0)


def build_request(
    prompt: str | None,
    sampling_params: SamplingParams | None,
    *,
    prompt_token_ids: Sequence[int] | None = None,
    messages: Sequence[Mapping[str, str]] | None = None,
    request_id: str | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    **fields: Any,
) -> pb.GenerateRequest:
    """The message for one request, with an id and a seed of its own where none is given.

    `fields` are further scalar fields of `GenerateRequest`, None meaning unset. Raises ValueError for what cannot be
    put on the wire.
    """
    if sum(given is not None for given in (prompt, prompt_token_ids, messages)) != 1:
        raise ValueError("give exactly one of prompt, prompt_token_ids and messages")
    sampling = (sampling_params or SamplingParams()).to_proto()
    if not sampling.HasField("seed"):
        sampling.seed = secrets.randbits(64)
    try:
        request = pb.GenerateRequest(
            request_id=request_id or uuid.uuid4().hex,
            sampling_params=sampling,
            **{name: value for name, value in fields.items() if value is not None},
        )
        if prompt is not None:
            request.prompt = prompt
        elif prompt_token_ids is not None:
            request.prompt_token_ids.SetInParent()
            request.prompt_token_ids.ids.extend(prompt_token_ids)
        else:
            request.messages.CopyFrom(build_messages(messages or (), add_generation_prompt, continue_final_message))
    except TypeError as error:
        raise ValueError(str(error)) from None
    return request


def build_messages(
    messages: Sequence[Mapping[str, str]],
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
) -> pb.Messages:
    """A conversation for the model's chat template."""
    flags = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
    return pb.Messages(
        messages=[pb.ChatMessage(**message) for message in messages],
        **{name: flag for name, flag in flags.items() if flag is not None},
    )


class Generation:
    """The state of one request: what was sent, what has arrived, and what to send after a loss."""

    def __init__(self, request: pb.GenerateRequest, policy: RetryPolicy, now_ns: int) -> None:
        self._request = request
        self._policy = policy
        self._held: dict[int, pb.ResumedOutput] = {}  # by output index
        self._sums_of_logprobs: dict[int, float] = {}
        self._failures = 0  # since the last message
        self._first_loss: RequestFailed | None = None  # of those
        self._admitted = False
        self._prompt_token_ids: tuple[int, ...] = ()
        self._model = ""
        self._metrics = RequestMetrics(arrival_ns=now_ns)
        self.finished = False
        params = request.sampling_params
        # Ranked outputs come at the end, long ones in several messages, and begin anew after a loss between these.
        self._is_ranked = params.use_beam_search or params.best_of > max(params.n, 1)
        self._ranked = pb.GenerateResponse()
        self._model_fingerprint = ""
        # A template may render another prompt tomorrow: what goes on has to go on after the same tokens.
        self._shows_prompt = request.return_prompt_token_ids
        streams = not request.HasField("stream") or request.stream
        if request.WhichOneof("prompt_kind") == "messages" and streams and not self._is_ranked:
            request.return_prompt_token_ids = True

    @property
    def request(self) -> pb.GenerateRequest:
        """The message for the next attempt."""
        return self._request

    def receive(self, response: pb.GenerateResponse, now_ns: int) -> RequestOutput | None:
        """Takes one message of the stream; returns what it brings to the caller, if anything."""
        self._failures, self._first_loss = 0, None
        if response.HasField("admission"):
            self._admitted = True
            self._model, self._model_fingerprint = response.model, response.model_fingerprint
            self._prompt_token_ids = tuple(response.prompt_token_ids) or self._prompt_token_ids
            self._metrics.num_prompt_tokens = response.admission.num_prompt_tokens
        if self._is_ranked:
            self._ranked.MergeFrom(response)
            response = self._ranked if response.HasField("usage") else pb.GenerateResponse()
        for delta in response.outputs:
            self._hold(delta, now_ns)
        if response.HasField("usage"):
            self._finish(response, now_ns)
        if not (response.outputs or response.prompt_logprobs or self.finished):
            return None
        return RequestOutput(
            request_id=self._request.request_id,
            prompt=self._request.prompt or None,
            prompt_token_ids=self._prompt_token_ids if self._shows_prompt else (),
            outputs=[_completion(delta, self._cumulative_logprob(delta)) for delta in response.outputs],
            finished=self.finished,
            metrics=self._metrics,
            prompt_logprobs=[
                _token_logprobs(entry) if entry.HasField("token") else None for entry in response.prompt_logprobs
            ]
            or None,
            seed=self._request.sampling_params.seed,
            model=self._model,
        )

    def retry_delay_s(self, failure: RequestFailed) -> float:
        """How long to wait before `request` is sent again; raises when it must not be.

        A server that does not know how to resume answers UNIMPLEMENTED: what is raised then is the loss before it.
        """
        if self._first_loss is not None and failure.code is grpc.StatusCode.UNIMPLEMENTED:
            raise self._first_loss
        if failure.code is not grpc.StatusCode.UNAVAILABLE and not (self._admitted and failure.code in _LOST):
            raise failure
        self._failures += 1
        self._first_loss = self._first_loss or failure
        limit = self._policy.retries if self._admitted else self._policy.retries_before_admission
        if self._failures > limit:
            raise self._first_loss
        self._ranked.Clear()
        self._request.attempt += 1
        del self._request.resume[:]
        self._request.resume.extend(self._held[index] for index in sorted(self._held))
        if self._held and not self._is_ranked:
            self._pin()
        return max(self._policy.delay_s(self._failures), failure.retry_after_s or 0.0)

    def _pin(self) -> None:
        """What goes on goes on with the model, and after the very prompt, that it began with, or is refused."""
        request = self._request
        request.model, request.model_fingerprint = self._model, self._model_fingerprint
        if request.WhichOneof("prompt_kind") == "messages" and self._prompt_token_ids:
            request.prompt_token_ids.ids[:] = self._prompt_token_ids
            request.ClearField("truncate_prompt_tokens")  # they are what was left
            request.return_prompt_token_ids = self._shows_prompt

    def _hold(self, delta: pb.OutputDelta, now_ns: int) -> None:
        held = self._held.setdefault(delta.index, pb.ResumedOutput(index=delta.index))
        held.token_ids.extend(delta.token_ids)
        held.finish_reason = delta.finish_reason
        sum_before = self._sums_of_logprobs.get(delta.index, 0.0)
        self._sums_of_logprobs[delta.index] = sum_before + sum(entry.token.logprob for entry in delta.logprobs)
        if delta.token_ids and delta.index == 0:
            self._metrics.token_times_ns.append(now_ns)
        if delta.token_ids and self._metrics.first_token_ns is None:
            self._metrics.first_token_ns = now_ns

    def _cumulative_logprob(self, delta: pb.OutputDelta) -> float | None:
        """The server's own sum, or where it saw only the end of a resumed output, that of everything that arrived."""
        if delta.HasField("cumulative_logprob"):
            return delta.cumulative_logprob
        asked = self._request.sampling_params.HasField("logprobs")
        return self._sums_of_logprobs[delta.index] if delta.finish_reason and asked and self._request.resume else None

    def _finish(self, response: pb.GenerateResponse, now_ns: int) -> None:
        self.finished = True
        metrics = self._metrics
        metrics.finished_ns = now_ns
        metrics.queue_ns = response.timings.queue_ns
        metrics.num_prompt_tokens = response.usage.prompt_tokens
        metrics.num_output_tokens = response.usage.completion_tokens
        metrics.num_cached_tokens = response.usage.cached_tokens
        metrics.times_preempted = response.timings.times_preempted
        metrics.times_moved = response.timings.times_moved


def _completion(delta: pb.OutputDelta, cumulative_logprob: float | None) -> CompletionOutput:
    stop_kind = delta.matched_stop.WhichOneof("stop")
    return CompletionOutput(
        index=delta.index,
        text=delta.text,
        token_ids=list(delta.token_ids),
        cumulative_logprob=cumulative_logprob,
        logprobs=[_token_logprobs(entry) for entry in delta.logprobs] or None,
        finish_reason=_FINISH_REASONS.get(delta.finish_reason),
        stop_reason=getattr(delta.matched_stop, stop_kind) if stop_kind else None,
        score=delta.score if delta.HasField("score") else None,
        error=delta.error.message if delta.HasField("error") else None,
    )


_FINISH_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORT: "abort",
    pb.FINISH_REASON_ERROR: "error",
}


def _token_logprobs(entry: pb.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(_logprob(entry.token), tuple(map(_logprob, entry.top)))


def _logprob(entry: pb.Logprob) -> Logprob:
    return Logprob(entry.token_id, entry.logprob, entry.rank, entry.text)
