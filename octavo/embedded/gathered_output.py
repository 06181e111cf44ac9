"""One request of an `LLM` or `LLMEngine`: its deltas put together into the output so far."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, cast

from octavo.calls.generation import Generation
from octavo.lora_request import LoRARequest
from octavo.outputs import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from protos import inference_pb2 as pb


class GatheredOutput:
    """`output` grows with every message; `snapshot` does not."""

    def __init__(
        self,
        generation: Generation,
        prompt: str | None,
        prompt_token_ids: list[int],
        lora_request: LoRARequest | None = None,
    ) -> None:
        self._generation = generation
        request_id = generation.request.request_id
        self.output = RequestOutput(request_id, prompt, prompt_token_ids, lora_request=lora_request)

    def take(self, response: pb.GenerateResponse) -> bool:
        """Adds one message; True with the last."""
        delta = self._generation.receive(response, time.monotonic_ns())
        if delta is None:
            return False
        for part in delta.outputs:
            while len(self.output.outputs) <= part.index:
                self.output.outputs.append(CompletionOutput(len(self.output.outputs), token_ids=[]))
            _join(self.output.outputs[part.index], part)
        self.output.prompt_logprobs = delta.prompt_logprobs or self.output.prompt_logprobs
        self.output.seed, self.output.model, self.output.metrics = delta.seed, delta.model, delta.metrics
        self.output.finished = delta.finished
        return delta.finished

    def note_times(self, token_times_ns: list[int]) -> None:
        """When tokens came, of a request whose only message comes at its end."""
        if token_times_ns:
            self.output.metrics.token_times_ns = token_times_ns
            self.output.metrics.first_token_ns = token_times_ns[0]

    def snapshot(self) -> RequestOutput:
        """The output as it is now: nothing that comes later changes it.

        Lists of tokens are copied, 8 bytes a token: a fraction of a microsecond for hundreds of them.
        """
        if self.output.finished:
            return self.output
        metrics = self.output.metrics
        return dataclasses.replace(
            self.output,
            outputs=[_copy(part) for part in self.output.outputs],
            metrics=dataclasses.replace(metrics, token_times_ns=metrics.token_times_ns.copy()),
        )


def _join(whole: CompletionOutput, part: CompletionOutput) -> None:
    whole.text += part.text
    cast(list[int], whole.token_ids).extend(part.token_ids)
    if part.logprobs:
        whole.logprobs = whole.logprobs or []
        whole.logprobs.extend(part.logprobs)
    whole.cumulative_logprob, whole.score = part.cumulative_logprob, part.score
    whole.finish_reason, whole.stop_reason, whole.error = part.finish_reason, part.stop_reason, part.error


def _copy(part: CompletionOutput) -> CompletionOutput:
    return dataclasses.replace(part, token_ids=list(part.token_ids), logprobs=part.logprobs and list(part.logprobs))
