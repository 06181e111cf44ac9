"""One request as a client follows it, over as many attempts as it takes.

A scheduler that goes away takes no request with it: the client holds the seed and every token it was given, and any
scheduler goes on from there. This file is that bookkeeping and nothing else: no channel, no clock, no sleeping.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import RequestFailed
from octavo.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestMetrics, RequestOutput
from octavo.retrying import Outages, RetryPolicy
from octavo.sampling_params import SamplingParams
from protos import inference_pb2 as pb


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
    try:
        request = pb.GenerateRequest(
            request_id=request_id,
            sampling_params=(sampling_params or SamplingParams()).to_proto(),
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
    return repeatable(request)


def repeatable(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """The same message, with an id and a seed where it has none: whoever gets it again gives the same tokens."""
    request.request_id = request.request_id or uuid.uuid4().hex
    if not request.sampling_params.HasField("seed"):
        request.sampling_params.seed = secrets.randbits(64)
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
    """The state of one request: what was sent, what has arrived, and what to send after a loss.

    What streams goes on with the tokens that the caller has been shown. What comes whole at its end (`stream` = false,
    beams, `best_of` > `n`) begins again: nothing of it was shown, and the same seed gives the same tokens.
    """

    def __init__(self, request: pb.GenerateRequest, policy: RetryPolicy, now_ns: int, num_addresses: int = 1) -> None:
        self._request = request
        self._outages = Outages(policy, request.request_id, num_addresses)
        self._held: dict[int, pb.ResumedOutput] = {}  # by output index
        self._sums_of_logprobs: dict[int, float] = {}
        self._prompt_token_ids: tuple[int, ...] = ()
        self._model = ""
        self._metrics = RequestMetrics(arrival_ns=now_ns)
        self.finished = False
        params = request.sampling_params
        # Long ones come in several messages, and begin again after a loss between these.
        streams = not request.HasField("stream") or request.stream
        self._comes_whole = not streams or params.use_beam_search or params.best_of > max(params.n, 1)
        self._whole = pb.GenerateResponse()
        self._model_fingerprint = ""
        # A template may render another prompt tomorrow: a resumed output must follow the same prompt tokens.
        self._shows_prompt = request.return_prompt_token_ids
        is_chat = request.WhichOneof("prompt_kind") == "messages"
        if is_chat and not self._comes_whole:
            request.return_prompt_token_ids = True
        self._is_answer = is_chat and not request.messages.continue_final_message  # which ids do not tell

    @property
    def request(self) -> pb.GenerateRequest:
        """The message for the next attempt."""
        return self._request

    def receive(self, response: pb.GenerateResponse, now_ns: int) -> RequestOutput | None:
        """Takes one message of the stream; returns what it brings to the caller, if anything."""
        return self.output_of(self.take(response, now_ns))

    def take(self, response: pb.GenerateResponse, now_ns: int) -> pb.GenerateResponse:
        """Notes what a message of the stream brings, and returns it: what comes whole all at once, with the last one.

        Every attempt begins with an admission; what follows goes on where the attempt before ended.
        """
        if response.HasField("admission"):
            self._outages.admitted(now_ns / 1e9)
            self._model, self._model_fingerprint = response.model, response.model_fingerprint
            self._prompt_token_ids = tuple(response.prompt_token_ids) or self._prompt_token_ids
            self._metrics.num_prompt_tokens = response.admission.num_prompt_tokens
        if response.outputs or response.prompt_logprobs:
            self._outages.progressed()
        is_last = response.HasField("usage")
        if self._comes_whole:
            self._whole.MergeFrom(response)
            if is_last:
                response = self._whole
            elif not response.HasField("admission"):
                return pb.GenerateResponse()
        for delta in response.outputs:
            self._hold(delta, now_ns)
        if is_last:
            self._finish(response, now_ns)
        return response

    def output_of(self, taken: pb.GenerateResponse) -> RequestOutput | None:
        """What a message that was taken brings to a caller in Python, if anything."""
        if not (taken.outputs or taken.prompt_logprobs or self.finished):
            return None
        return RequestOutput(
            request_id=self._request.request_id,
            prompt=self._request.prompt or None,
            prompt_token_ids=self._prompt_token_ids if self._shows_prompt else (),
            outputs=[_completion(delta, self._cumulative_logprob(delta)) for delta in taken.outputs],
            finished=self.finished,
            metrics=self._metrics,
            prompt_logprobs=[_position(entry) if entry.HasField("token") else None for entry in taken.prompt_logprobs]
            or None,
            seed=self._request.sampling_params.seed,
            model=self._model,
        )

    def retry_delay_s(self, failure: RequestFailed, now_ns: int, remaining_s: float | None = None) -> float:
        """How long to wait before `request` is sent again; raises when it must not be. See `Outages.delay_s`."""
        delay_s = self._outages.delay_s(failure, now_ns / 1e9, remaining_s)
        self._whole.Clear()
        self._request.attempt += 1
        del self._request.resume[:]
        self._request.resume.extend(self._held[index] for index in sorted(self._held))
        if self._held:
            self._pin()
        return delay_s

    def _pin(self) -> None:
        """What goes on goes on with the model, and after the very prompt, that it began with, or is refused."""
        request = self._request
        request.model, request.model_fingerprint = self._model, self._model_fingerprint
        if request.WhichOneof("prompt_kind") == "messages" and self._prompt_token_ids:
            request.prompt_token_ids.ids[:] = self._prompt_token_ids
            request.ClearField("truncate_prompt_tokens")  # they are what was left
            request.return_prompt_token_ids = self._shows_prompt

    def _hold(self, delta: pb.OutputDelta, now_ns: int) -> None:
        held = self._held.get(delta.index)
        if held is None:
            held = self._held[delta.index] = pb.ResumedOutput(index=delta.index, is_answer=self._is_answer)
        if delta.finish_reason:
            held.finish_reason = delta.finish_reason
        if delta.logprobs:
            sum_before = self._sums_of_logprobs.get(delta.index, 0.0)
            self._sums_of_logprobs[delta.index] = sum_before + sum(entry.token.logprob for entry in delta.logprobs)
        if token_ids := delta.token_ids:
            held.token_ids.extend(token_ids)
            if delta.index == 0:
                self._metrics.token_times_ns.append(now_ns)
            if self._metrics.first_token_ns is None:
                self._metrics.first_token_ns = now_ns

    def _cumulative_logprob(self, delta: pb.OutputDelta) -> float | None:
        """The server's own sum, or where it saw only the end of a resumed output, that of everything that arrived."""
        if delta.HasField("cumulative_logprob"):
            return delta.cumulative_logprob
        asked = self._request.sampling_params.HasField("logprobs")
        return (
            self._sums_of_logprobs.get(delta.index, 0.0)
            if delta.finish_reason and asked and self._request.resume
            else None
        )

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
        logprobs=[_position(entry) for entry in delta.logprobs] or None,
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


def _position(entry: pb.TokenLogprobs) -> PositionLogprobs:
    return {each.token_id: _logprob(each) for each in (entry.token, *entry.top)}


def _logprob(entry: pb.Logprob) -> Logprob:
    return Logprob(entry.logprob, entry.rank, entry.text)
