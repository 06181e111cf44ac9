"""Prefix caches emptied before a run, so that none finds the prompts of one before."""

from __future__ import annotations

import grpc

from octavo.client import AsyncClient
from octavo.errors import RequestFailed

_WITHOUT = {
    grpc.StatusCode.PERMISSION_DENIED: "a key that has this role and inference",
    grpc.StatusCode.UNIMPLEMENTED: "a server without --control-port",
}


async def empty_caches(client: AsyncClient) -> None:
    """Raises RequestFailed; where the server does not let this client do it, with what it takes."""
    try:
        await client.flush_prefix_cache()
    except RequestFailed as failure:
        if (needed := _WITHOUT.get(failure.code)) is None:
            raise
        what = f"prefix caches are emptied before a run, which takes {needed}: {failure.message}"
        raise RequestFailed(failure.code, what) from None
