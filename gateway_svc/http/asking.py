"""The endpoints that generate nothing: models and their adapters, tokens, health."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import octavo
from gateway_svc.errors import NOT_FOUND, HttpError
from gateway_svc.http.bodies import ClientGone, read_json
from gateway_svc.http.generating import Service
from gateway_svc.http.replies import send_error, send_json
from gateway_svc.requests.fields import Fields
from gateway_svc.requests.tokens import read_detokenize, read_tokenize
from gateway_svc.upstream.statuses import http_error
from octavo.client import Metadata
from octavo.errors import RequestFailed
from octavo.shared.command_line import listed
from protos import inference_pb2 as pb

Asking = Callable[[Service, Request, Any, Metadata], Awaitable[Mapping[str, Any]]]
_STARTED = int(time.time())  # for `created` of models, which nobody knows better


class AskingEndpoint:
    """An ASGI application for one path, whose answer is a JSON object. `ask` raises HttpError, RequestFailed."""

    def __init__(self, path: str, service: Service, ask: Asking) -> None:
        self._path, self._service, self._ask = path, service, ask

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, whatever becomes of it."""
        headers, service = Headers(scope=scope), self._service
        with service.metrics.request(self._path) as told:
            try:
                is_post = scope["method"] == "POST"
                body = await read_json(headers, receive, service.max_body_bytes) if is_post else None
                metadata = service.schedulers.metadata(headers.raw)
                answer = await self._ask(service, Request(scope), body, metadata)
                told.status = 200
                await send_json(send, answer)
            except ClientGone:
                pass
            except RequestFailed as failure:
                error = http_error(failure, {"prompt_token_ids": "tokens", "token_ids": "tokens"})
                told.status = error.status
                await send_error(send, error)
            except HttpError as error:
                told.status = error.status
                await send_error(send, error)


async def list_models(service: Service, request: Request, body: Any, metadata: Metadata) -> Mapping[str, Any]:
    """Every name that a request may give, once: of several revisions of a model, the one that it gets."""
    states = (await service.schedulers.list_models(metadata)).models
    found: dict[str, pb.ModelState] = {}
    for state in states:
        if state.name not in found or state.is_current:
            found[state.name] = state
    data = [_model(state) for state in found.values()]
    for base in [state for state in states if state.is_default]:
        adapters = await service.schedulers.list_adapters(metadata)
        data += [_adapter(name, base) for name in adapters if name not in found]
    return {"object": "list", "data": data}


async def get_model(service: Service, request: Request, body: Any, metadata: Metadata) -> Mapping[str, Any]:
    """By its name, which may have slashes in it, or NAME@FINGERPRINT."""
    name = request.path_params["model"]
    models = (await list_models(service, request, body, metadata))["data"]
    for model in models:
        if name in (model["id"], f"{model['id']}@{model['fingerprint']}"):
            found: Mapping[str, Any] = model
            return found
    names = [model["id"] for model in models if model["parent"] is None]  # adapters may be many
    what = f"model {name[:256]!r} is not served here{f'; {listed(names)}' if names else ''}"
    raise HttpError(404, what, type=NOT_FOUND, param="model", code="model_not_found")


def _model(state: pb.ModelState) -> dict[str, Any]:
    return {
        "id": state.name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "octavo",
        "root": state.name,
        "parent": None,
        "max_model_len": state.max_model_len,
        "fingerprint": state.fingerprint,
    }


def _adapter(name: str, base: pb.ModelState) -> dict[str, Any]:
    return _model(base) | {"id": name, "root": name, "parent": base.name}


async def load_adapter(service: Service, request: Request, body: Any, metadata: Metadata) -> Mapping[str, Any]:
    """Into all workers that take adapters, from a path as they see it."""
    fields = Fields(body)
    name, path = fields.text("lora_name"), fields.text("lora_path")
    fields.finish()
    await service.schedulers.load_adapter(name or "", path or "", metadata)
    return {"status": "loaded", "lora_name": name}


async def unload_adapter(service: Service, request: Request, body: Any, metadata: Metadata) -> Mapping[str, Any]:
    """Answers when no request uses it any more."""
    fields = Fields(body)
    name = fields.text("lora_name")
    fields.take("lora_int_id")  # of clients that number their adapters
    fields.finish()
    await service.schedulers.unload_adapter(name or "", metadata)
    return {"status": "unloaded", "lora_name": name}


async def tokenize(service: Service, request: Request, body: Any, metadata: Metadata) -> Mapping[str, Any]:
    """Ids of a text's tokens, or of a conversation's."""
    asked = read_tokenize(Fields(body))
    await service.schedulers.find_adapter(asked.request, metadata)
    answer = await service.schedulers.tokenize(asked.request, metadata)
    return {
        "count": len(answer.token_ids),
        "max_model_len": answer.max_model_len,
        "tokens": list(answer.token_ids),
        "token_strs": list(answer.tokens) if asked.shows_texts else None,
    }


async def detokenize(service: Service, request: Request, body: Any, metadata: Metadata) -> Mapping[str, Any]:
    """The text of some ids."""
    answer = await service.schedulers.detokenize(read_detokenize(Fields(body)), metadata)
    return {"prompt": answer.text}


async def version(service: Service, request: Request, body: Any, metadata: Metadata) -> Mapping[str, Any]:
    """Of this package."""
    return {"version": octavo.__version__}


def health(service: Service) -> Callable[[Request], Awaitable[Response]]:
    """200 while a scheduler serves, 503 otherwise."""

    async def respond(request: Request) -> Response:
        return Response(status_code=200 if await service.schedulers.are_ready() else 503)

    return respond


def ready(service: Service) -> Callable[[Request], Awaitable[Response]]:
    """200 from when on a scheduler was found to serve, 503 before: requests can wait here for one that starts anew."""
    has_served = False

    async def respond(request: Request) -> Response:
        nonlocal has_served
        has_served = has_served or await service.schedulers.are_ready()
        return Response(status_code=200 if has_served else 503)

    return respond
