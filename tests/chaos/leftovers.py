"""What a scheduler must not keep once its clients have all gone: requests, sequences, blocks, open calls."""

from __future__ import annotations

import time

import grpc
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc

IDLE_WITHIN_S = 20.0


def wait_until_nothing_is_left(address: str, counts_calls: bool = True) -> None:
    """Raises AssertionError that names what still lives after a while.

    `counts_calls`: False where connections were broken off by the thousand. Of calls whose connection ends as they
    begin gRPC's core counts some as started that never reach a server, and never as ended: without Octavo, too.
    """
    with grpc.insecure_channel(address) as channel:
        control = inference_pb2_grpc.ControlStub(channel)
        deadline = time.monotonic() + IDLE_WITHIN_S
        while left := _left(control) or (counts_calls and _open_calls(channel)):
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.05)


def _left(control: inference_pb2_grpc.ControlStub) -> str:
    load = control.GetLoad(pb.GetLoadRequest(), timeout=10)
    held = [
        block
        for block in control.GetBlocks(pb.GetBlocksRequest(page_size=10_000), timeout=10).blocks
        if block.ref_count
    ]
    requests = control.ListRequests(pb.ListRequestsRequest(), timeout=10).requests
    busy = [worker for worker in load.workers if worker.num_running or worker.num_preempted]
    free = all(worker.num_free_device_blocks == worker.num_device_blocks for worker in load.workers)
    waiting = load.num_requests_waiting or load.num_tokens_waiting
    found = {"requests": requests, "held blocks": held, "busy workers": busy, "waiting": waiting, "not free": not free}
    return ", ".join(f"{name}: {what}" for name, what in found.items() if what)


def _open_calls(channel: grpc.Channel) -> str:
    """Calls that the server has begun and not ended, but for the one that asks."""
    answer = channelz_pb2_grpc.ChannelzStub(channel).GetServers(channelz_pb2.GetServersRequest(), timeout=10)
    (server,) = answer.server
    data = server.data
    num_open = data.calls_started - data.calls_succeeded - data.calls_failed - 1
    return f"{num_open} open calls" if num_open else ""
