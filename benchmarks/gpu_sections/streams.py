"""Requests over `Generate`, all at once; messages are read no further than their token ids, which costs little."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import grpc

from octavo.bench.streaming import GENERATE
from octavo.bench.workloads import BenchRequest
from octavo.shared.rpc import CHANNEL_OPTIONS
from protos import inference_pb2 as pb

_NUM_CHANNELS = 8
Delivery = tuple[int, int]  # monotonic ns, tokens that came


async def generate_all(address: str, requests: Sequence[BenchRequest]) -> list[list[Delivery]]:
    """What came for each request and when. Raises RuntimeError when one gets another number of tokens than it wants."""
    options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]  # a connection a channel
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(min(_NUM_CHANNELS, len(requests)))]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_generate(channels[number % len(channels)], request))
                for number, request in enumerate(requests)
            ]
    finally:
        for channel in channels:
            await channel.close()
    return [task.result() for task in tasks]


async def _generate(channel: grpc.aio.Channel, request: BenchRequest) -> list[Delivery]:
    message = pb.GenerateRequest(
        prompt_token_ids=pb.TokenIds(ids=request.prompt_token_ids),
        sampling_params=pb.SamplingParams(max_tokens=request.max_tokens, ignore_eos=True, temperature=0),
    ).SerializeToString()
    deliveries = []
    async for data in channel.unary_stream(GENERATE)(message):
        outputs = pb.GenerateResponse.FromString(data).outputs
        if num_tokens := sum(len(output.token_ids) for output in outputs):
            deliveries.append((time.monotonic_ns(), num_tokens))
    if (came := sum(count for _, count in deliveries)) != request.max_tokens:
        raise RuntimeError(f"{came} tokens came of {request.max_tokens}")
    return deliveries


def tokens_per_s(requests: Sequence[Sequence[Delivery]], started_ns: int) -> float:
    """The rate of all tokens, from the start to the last one."""
    last_ns = max(deliveries[-1][0] for deliveries in requests)
    return 1e9 * sum(count for deliveries in requests for _, count in deliveries) / (last_ns - started_ns)


def steady_tokens_per_s(requests: Sequence[Sequence[Delivery]]) -> float:
    """While every request decodes: from the last one's first token to the first one's last.

    Raises RuntimeError where there is no such time.
    """
    begin_ns = max(deliveries[0][0] for deliveries in requests)
    end_ns = min(deliveries[-1][0] for deliveries in requests)
    if begin_ns >= end_ns:
        raise RuntimeError("there was no time in which all requests decoded: outputs are too short")
    came = sum(count for deliveries in requests for at_ns, count in deliveries if begin_ns < at_ns <= end_ns)
    return 1e9 * came / (end_ns - begin_ns)
