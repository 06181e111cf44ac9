"""All paths, and errors for what has none."""

from __future__ import annotations

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from gateway_svc import errors
from gateway_svc.answers.answer import Answer
from gateway_svc.answers.chat import ChatAnswer
from gateway_svc.answers.completions import CompletionAnswer
from gateway_svc.answers.responses import ResponseAnswer
from gateway_svc.config import GatewayConfig
from gateway_svc.errors import HttpError
from gateway_svc.http import asking
from gateway_svc.http.asking import AskingEndpoint
from gateway_svc.http.callers import LocalPages
from gateway_svc.http.generating import REQUEST_ID, Generating, Service
from gateway_svc.http.live_endpoint import PATH as LIVE
from gateway_svc.http.live_endpoint import WITHHOLD, LiveEndpoint, withholding
from gateway_svc.http.page_files import page_routes
from gateway_svc.requests.asked import Asked
from gateway_svc.requests.chat import read_chat
from gateway_svc.requests.completions import read_completion
from gateway_svc.requests.fields import Fields
from gateway_svc.requests.responses import read_response
from octavo.shared.ports import is_loopback

_GENERATING: dict[str, tuple[Callable[[Fields], Asked], Callable[[Asked], Answer]]] = {
    "/v1/chat/completions": (read_chat, ChatAnswer),
    "/v1/completions": (read_completion, CompletionAnswer),
    "/v1/responses": (read_response, ResponseAnswer),
}
_ASKING = {
    "/v1/models": ("GET", asking.list_models),
    "/v1/models/{model:path}": ("GET", asking.get_model),
    "/tokenize": ("POST", asking.tokenize),
    "/detokenize": ("POST", asking.detokenize),
    "/version": ("GET", asking.version),
}
_UPDATING = {"/v1/load_lora_adapter": asking.load_adapter, "/v1/unload_lora_adapter": asking.unload_adapter}
# Of answers, what a page of another origin may read as well: OpenAI's client tries again by them.
_EXPOSED = (
    REQUEST_ID,
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
)


def new_app(service: Service, config: GatewayConfig) -> Starlette:
    """With the paths that the options ask for."""
    is_local = is_loopback(config.host)
    routes: list[BaseRoute] = [
        Route(path, Generating(path, service, read, answer), methods=["POST"])
        for path, (read, answer) in _GENERATING.items()
    ]
    routes += [
        Route(path, AskingEndpoint(path, service, ask), methods=[method]) for path, (method, ask) in _ASKING.items()
    ]
    routes.append(Route("/health", asking.health(service)))
    routes.append(Route("/ready", asking.ready(service)))
    if config.page:
        routes += page_routes(live_panel=config.live_panel)
    if config.live_panel:
        routes.append(Route(LIVE, LiveEndpoint(service, is_local=is_local), methods=["GET"]))
        if config.demo:
            routes.append(
                Route(WITHHOLD, AskingEndpoint(WITHHOLD, service, withholding(is_local=is_local)), methods=["POST"])
            )
    if config.lora_updates:
        for path, ask in _UPDATING.items():
            routes.append(Route(path, AskingEndpoint(path, service, ask), methods=["POST"]))
    middleware: list[Middleware] = []
    if is_local and "*" not in config.allow_origin:
        middleware.append(Middleware(LocalPages, allowed=config.allow_origin))
    if config.allow_origin:
        origins = Middleware(
            CORSMiddleware,
            allow_origins=config.allow_origin,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # OpenAI's own client has a dozen, and others have theirs
            expose_headers=_EXPOSED,
        )
        middleware.append(origins)
    handlers = {HTTPException: _not_found, Exception: _failed}
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.router.redirect_slashes = False  # to a host that the request's own header names
    return app


async def _not_found(request: Request, error: Exception) -> Response:
    """No such path, or no such method there."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        found = HttpError(405, f"{what}: accepted there: {allowed}", code="method_not_allowed")
    else:
        found = HttpError(404, f"{what}: there is nothing here", type=errors.NOT_FOUND, code="unknown_url")
    return JSONResponse(found.body(), found.status, headers=error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    """A fault of our own; the log has it."""
    return JSONResponse(HttpError(500, "the gateway failed over this request", type=errors.SERVER).body(), 500)
