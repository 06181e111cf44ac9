"""The outputs of one prompt as they come, put together; and what is wrong with one that failed."""

from __future__ import annotations

from gateway_svc import errors
from gateway_svc.errors import HttpError
from protos import inference_pb2 as pb

FINISH_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


class Gathered:
    """Everything that came for one prompt."""

    def __init__(self) -> None:
        self.model = self.fingerprint = ""
        self.prompt_token_ids: list[int] = []
        self.outputs: dict[int, pb.OutputDelta] = {}  # by index, whole
        self.prompt_logprobs: list[pb.TokenLogprobs] = []
        self.usage = pb.Usage()

    def take(self, response: pb.GenerateResponse) -> None:
        """Raises HttpError for an output that failed."""
        if response.HasField("admission"):
            self.model, self.fingerprint = response.model, response.model_fingerprint
            self.prompt_token_ids = list(response.prompt_token_ids) or self.prompt_token_ids
        self.prompt_logprobs.extend(response.prompt_logprobs)
        for delta in response.outputs:
            check(delta)
            if (whole := self.outputs.get(delta.index)) is None:
                self.outputs[delta.index] = whole = pb.OutputDelta()
                whole.CopyFrom(delta)
            else:
                text = whole.text + delta.text
                whole.MergeFrom(delta)
                whole.text = text
        if response.HasField("usage"):
            self.usage = response.usage


def check(delta: pb.OutputDelta) -> None:
    """Raises HttpError for an output that ended without its end."""
    if delta.finish_reason == pb.FINISH_REASON_ERROR and delta.error.code == "INVALID_ARGUMENT":
        raise HttpError(400, delta.error.message)
    if delta.finish_reason == pb.FINISH_REASON_ERROR:
        status = 503 if delta.error.retryable else 500
        kind = errors.UNAVAILABLE if delta.error.retryable else errors.SERVER
        raise HttpError(status, delta.error.message, type=kind, code=delta.error.code.lower() or None)
    if delta.finish_reason == pb.FINISH_REASON_ABORT:
        raise HttpError(409, "the request was aborted on the server", code="aborted", headers=_NO_RETRY)


_NO_RETRY = (("x-should-retry", "false"),)  # OpenAI's clients would send it again after a 409


def stop_reason(delta: pb.OutputDelta) -> str | int | None:
    """The stop string or token that ended it; None for the model's own end."""
    kind = delta.matched_stop.WhichOneof("stop")
    found: str | int | None = getattr(delta.matched_stop, kind) if kind else None
    return found
