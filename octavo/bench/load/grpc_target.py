"""Octavo's own `Generate`. Without a retry window a broken stream is an error: taken up again it only looks slow."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from octavo.bench.emptied_caches import empty_caches
from octavo.bench.load.record import Record
from octavo.bench.load.requests import PlannedRequest
from octavo.bench.load.runner import Clock, RequestError
from octavo.client import AsyncClient
from octavo.errors import RequestFailed
from octavo.retrying import RetryPolicy
from protos import inference_pb2 as pb

if TYPE_CHECKING:
    import grpc

NUM_CONNECTIONS = 8  # a scheduler takes 1,024 calls at once over each


class GrpcTarget:
    """`address` as `AsyncClient` takes it; `ignore_eos` False lets answers end by themselves."""

    def __init__(
        self,
        address: str,
        *,
        model: str = "",
        api_key: str | None = None,
        plaintext_key: bool = False,
        credentials: grpc.ChannelCredentials | None = None,
        ignore_eos: bool = True,
        retry_window_s: float = 0.0,
    ) -> None:
        retry = RetryPolicy(window_s=retry_window_s)
        self._clients = [
            AsyncClient(
                address,
                api_key=api_key,
                plaintext_key=plaintext_key,
                credentials=credentials,
                retry=retry,
                own_connection=True,
            )
            for _ in range(NUM_CONNECTIONS)
        ]
        self._turns = itertools.cycle(self._clients)
        self._model, self._ignore_eos = model, ignore_eos

    async def prepare(self) -> None:
        """Prompts of a run before are forgotten. Raises RequestFailed."""
        await empty_caches(self._clients[0])

    async def send(self, request: PlannedRequest, record: Record, clock: Clock) -> None:
        """See `Target`."""
        params = pb.SamplingParams(max_tokens=request.max_tokens, temperature=0, ignore_eos=self._ignore_eos)
        asked = pb.GenerateRequest(model=self._model, sampling_params=params)
        if request.prompt_token_ids:
            asked.prompt_token_ids.ids.extend(request.prompt_token_ids)
        else:
            asked.prompt = request.text
        failed = False
        try:
            async for response in next(self._turns).stream(asked):
                tokens = sum(len(output.token_ids) for output in response.outputs)
                if tokens:
                    record.times_s.append(clock())
                    record.output_tokens += tokens
                failed |= any(output.finish_reason == pb.FINISH_REASON_ERROR for output in response.outputs)
                if response.HasField("usage"):
                    record.prompt_tokens = response.usage.prompt_tokens
        except RequestFailed as error:
            raise RequestError(error.code.name) from None
        if failed:
            raise RequestError("ended with an error")

    async def close(self) -> None:
        """Closes all connections."""
        for client in self._clients:
            await client.close()
