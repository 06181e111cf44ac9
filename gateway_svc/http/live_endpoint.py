"""`GET /live`: what the scheduler does, as a stream of events; for a demonstration also what makes it do more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from gateway_svc.errors import HttpError
from gateway_svc.http.asking import Asking
from gateway_svc.http.bodies import ClientGone
from gateway_svc.http.callers import check_caller
from gateway_svc.http.generating import Service
from gateway_svc.http.replies import EventStream, send_error, while_connected
from gateway_svc.requests.fields import Fields
from gateway_svc.requests.sampling import put
from gateway_svc.upstream.statuses import http_error
from octavo.client import Metadata
from octavo.errors import RequestFailed
from protos import inference_pb2 as pb

PATH, WITHHOLD = "/live", "/live/withhold"


class LiveEndpoint:
    """An ASGI application. `is_local`: it is there for this machine alone."""

    def __init__(self, service: Service, *, is_local: bool) -> None:
        self._service, self._is_local = service, is_local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, until its client goes or the service ends."""
        service, headers = self._service, Headers(scope=scope)
        with service.metrics.request(PATH) as told:
            try:
                check_caller(headers, self._is_local)
                if scope["method"] != "GET":  # HEAD, whose answer would never end
                    raise HttpError(405, "GET is answered", code="method_not_allowed", headers=(("allow", "GET"),))
                key = [field for field in service.schedulers.metadata(headers.raw) if field[0] == "authorization"]
                stream = EventStream(send, {"x-comment-interval": str(service.silence_s)})  # by it a page knows silence
                async with (
                    while_connected(receive),
                    stream.kept_alive(service.silence_s),
                    service.live.frames(key) as frames,
                ):
                    await stream.begin()
                    told.status = 200
                    async for frame in frames:
                        await stream.write(b"data: " + frame + b"\n\n")
                await stream.end(b"")
            except ClientGone:
                pass
            except (HttpError, RequestFailed) as failure:
                error = failure if isinstance(failure, HttpError) else _refusal(failure)
                told.status = error.status
                await send_error(send, error)


def _refusal(failure: RequestFailed) -> HttpError:
    if failure.code is grpc.StatusCode.UNIMPLEMENTED:
        what = "the scheduler answers Control on a port of its own (--control-port), where no gateway asks"
        return HttpError(400, what, code="unsupported_parameter")
    return http_error(failure, {})


def withholding(*, is_local: bool) -> Asking:
    """`POST /live/withhold`: a worker's cache gets smaller by `num_blocks`, so that it can be seen to run out."""

    async def ask(service: Service, request: Request, body: Any, metadata: Metadata) -> Mapping[str, Any]:
        check_caller(request.headers, is_local)
        fields, asked = Fields(body), pb.WithholdBlocksRequest()
        put(asked, "worker", fields.text("worker"), fields)
        put(asked, "num_blocks", fields.integer("num_blocks"), fields)
        fields.finish()
        return {"num_withheld": (await service.schedulers.withhold_blocks(asked, metadata)).num_withheld}

    return ask
