"""A look at a server as one JSON object, small enough to be sent ten times a second. No text of anybody, no tenant.

Blocks are a character each: `.` free, `c` free with content that can still be found, 1 to 9 how many tables have it in
use, `+` more of them, `w` withheld from use.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any

from protos import inference_pb2 as pb

FREE, CACHED, MANY, WITHHELD = ".", "c", "+", "w"
MAX_REQUESTS, MAX_BLOCKS = 32, 4096  # of all requests, and of each pool
_SECRET = secrets.token_bytes(16)  # of this process: without it nobody can try which tenant makes which key


def frame(view: pb.View, steps: dict[str, Any]) -> dict[str, Any]:
    """`steps`: see `StepTally.shown`."""
    pools: dict[str, list[dict[str, Any]]] = {}
    for pool in view.pools:
        if pool.num_blocks:
            pools.setdefault(pool.worker, []).append(_pool(pool))
    return {
        "running": view.load.num_requests_running,
        "waiting": view.load.num_requests_waiting,
        "waiting_tokens": view.load.num_tokens_waiting,
        "steps": steps,
        "workers": [_worker(worker, pools.get(worker.address, [])) for worker in view.load.workers],
        "requests": [
            {"key": key, **_request(request)} for key, request in zip(_keys(view.requests), view.requests, strict=True)
        ],
        "more_requests": view.has_more_requests,
    }


def _worker(worker: pb.WorkerState, pools: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "address": worker.address,
        "state": pb.WorkerHealth.Name(worker.health).removeprefix("WORKER_HEALTH_").lower(),
        "problem": worker.problem,
        "model": worker.model,
        "running": worker.num_running,
        "away": worker.num_preempted,
        "block_size": worker.block_size_tokens,
        "pools": pools,
    }


def _pool(pool: pb.BlockPool) -> dict[str, Any]:
    blocks = [FREE if count == 0 else str(count) if count < 10 else MANY for count in pool.ref_counts]
    for block in pool.cached_blocks:
        if blocks[block] == FREE:
            blocks[block] = CACHED
    for block in pool.withheld_blocks:
        blocks[block] = WITHHELD
    shown = "".join(blocks)
    return {
        "on_host": pool.on_host,
        "num_blocks": pool.num_blocks,
        "blocks": shown.rstrip(FREE) if pool.on_host else shown,  # of a host's many, few are ever used: those in front
        "to_withhold": pool.num_to_withhold,
        "max_withheld": pool.max_withheld,
    }


def _keys(requests: Iterable[pb.RequestState]) -> Iterator[str]:
    """Of each request one that no other of the frame has. Ids are unique per tenant only, so it keeps its key but for a
    moment in which two of one tenant have the same: one has ended, and the next has come."""
    seen: Counter[str] = Counter()
    for request in requests:
        owned = f"{request.tenant}\0{request.request_id}".encode()
        name = blake2b(owned, key=_SECRET, digest_size=8).hexdigest()
        seen[name] += 1
        yield f"{name}-{seen[name]}"


def _request(request: pb.RequestState) -> dict[str, Any]:
    return {
        "id": request.request_id,
        "state": pb.RequestPhase.Name(request.phase).removeprefix("REQUEST_PHASE_").lower(),
        "worker": request.worker,
        "prompt_tokens": request.num_prompt_tokens,
        "times_preempted": request.times_preempted,
        "times_moved": request.times_moved,
        "sequences": [
            {
                "index": sequence.index,
                "tokens": sequence.num_tokens,
                "computed": sequence.num_computed_tokens,
                "cached": sequence.num_cached_tokens,
                "table": list(sequence.block_table),
                "host_table": list(sequence.host_block_table),
            }
            for sequence in request.sequences
        ],
    }
