"""The web application: routes, what every request passes through, and errors as answers.

`create_app` makes the ASGI application of one process. The outermost layer (`edge.py`) sees to disconnects, HEAD and
request metrics, whatever server runs it.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable
from typing import Any

import falcon
import falcon.asgi
from falcon.asgi import Request, Response

from frontend import lmstudio, native, openai, ops
from frontend.edge import Edge
from frontend.errors import ApiError
from frontend.metrics import HttpMetrics
from frontend.service import Engine, Service
from frontend.streaming import set_json
from scheduler.client import Client
from scheduler.config import Settings

_log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
_MAX_AGE_S = "600"


def create_app(
    settings: Settings,
    *,
    multiproc_dir: str | None = None,
    make_engine: Callable[[Settings], Engine] = Client,
) -> Edge:
    """The application. `multiproc_dir` is prometheus-client's directory where several processes serve together.

    Raises:
        BadSetting: the API keys file cannot be used.
    """
    service = Service(settings, make_engine)
    metrics = HttpMetrics(multiproc_dir)
    app: falcon.asgi.App[Request, Response] = falcon.asgi.App(middleware=[Gate(service)])
    app.req_options.strip_url_path_trailing_slash = True
    app.add_error_handler(Exception, _on_bug)
    app.add_error_handler(falcon.HTTPError, _on_http_error)
    app.add_error_handler(ApiError, _on_api_error)
    _add_routes(app, service, metrics)
    return Edge(app, metrics)


def _add_routes(
    app: falcon.asgi.App[Request, Response], service: Service, metrics: HttpMetrics
) -> None:
    for prefix in ("/v1", ""):
        app.add_route(f"{prefix}/models", openai.Models(service))
        app.add_route(f"{prefix}/models/{{name:path}}", openai.Model(service))
        app.add_route(f"{prefix}/chat/completions", openai.ChatCompletions(service))
        app.add_route(f"{prefix}/completions", openai.Completions(service))
    app.add_route("/api/v0/models", lmstudio.Models(service))
    app.add_route("/api/v0/models/{name:path}", lmstudio.Model(service))
    app.add_route("/api/v0/chat/completions", lmstudio.ChatCompletions(service))
    app.add_route("/api/v0/completions", lmstudio.Completions(service))
    app.add_route("/generate", native.Generate(service))
    app.add_route("/generate/speculative", native.Generate(service, "chain"))
    app.add_route("/generate/tree_speculative", native.Generate(service, "tree"))
    prefixes = native.Prefixes(service)
    app.add_route("/prefixes", prefixes)
    app.add_route("/prefixes/{name}", prefixes, suffix="named")
    for path in ("/healthz", "/health", "/ping"):
        app.add_route(path, ops.Health(service))
    app.add_route("/version", ops.Version(service))
    app.add_route("/metrics", ops.Metrics(service, metrics))
    app.add_route("/load", ops.Load(service))
    app.add_route("/tokenize", ops.Tokenize(service))
    app.add_route("/detokenize", ops.Detokenize(service))
    app.add_route("/tokenizer_info", ops.TokenizerInfo(service))
    app.add_route("/", ops.ChatPage())


class Gate:
    """What every request passes: its id, CORS, its API key. Owns the service's life, too."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def process_startup(self, scope: dict[str, Any], event: dict[str, Any]) -> None:
        await self._service.start()

    async def process_shutdown(self, scope: dict[str, Any], event: dict[str, Any]) -> None:
        await self._service.close()

    async def process_request(self, req: Request, resp: Response) -> None:
        given = req.get_header("X-Request-Id") or ""
        req.context.request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        req.context.salt = ""
        resp.set_header("X-Request-Id", req.context.request_id)
        self._allow_origin(req, resp)
        if req.method == "OPTIONS":  # browsers send a preflight without the key
            resp.status = falcon.HTTP_204
            resp.set_header("Allow", "GET, HEAD, POST, DELETE, OPTIONS")
            resp.complete = True
        elif req.path not in ops.OPEN_PATHS:
            req.context.salt = self._service.tenant_salt(req.get_header("Authorization"))

    async def process_resource(
        self, req: Request, resp: Response, resource: object, params: dict[str, Any]
    ) -> None:
        req.scope["tinyloop.route"] = req.uri_template

    def _allow_origin(self, req: Request, resp: Response) -> None:
        origins = self._service.settings.cors_origins
        origin = req.get_header("Origin")
        if not origin or not origins:
            return
        if "*" not in origins:
            resp.append_header("Vary", "Origin")
            if origin not in origins:
                return
        resp.set_header("Access-Control-Allow-Origin", "*" if "*" in origins else origin)
        resp.set_header("Access-Control-Expose-Headers", "X-Request-Id, Retry-After")
        if req.method == "OPTIONS":
            asked = req.get_header("Access-Control-Request-Headers")
            resp.set_header("Access-Control-Allow-Methods", "GET, HEAD, POST, DELETE, OPTIONS")
            allowed = asked or "Authorization, Content-Type, X-Request-Id"
            resp.set_header("Access-Control-Allow-Headers", allowed)
            resp.set_header("Access-Control-Max-Age", _MAX_AGE_S)


async def _on_api_error(
    req: Request, resp: Response, error: ApiError, params: dict[str, Any]
) -> None:
    resp.status = falcon.code_to_http_status(error.status)
    for name, value in error.headers.items():
        resp.set_header(name, value)
    set_json(resp, error.body())


async def _on_http_error(
    req: Request, resp: Response, error: falcon.HTTPError, params: dict[str, Any]
) -> None:
    """Falcon's own refusals (no such path, no such method, a bad header) in our shape."""
    status = error.status_code
    message = error.description or error.title or str(error.status)
    if status == 404:
        message = f"there is no {req.path:.200} here"
    elif status == 405:
        message = f"{req.path} does not take {req.method}"
    headers = dict(error.headers or {})
    if "GET" in headers.get("Allow", ""):
        headers["Allow"] = headers["Allow"].replace("GET", "GET, HEAD", 1)
    code = _HTTP_CODES.get(status, "invalid_request")
    await _on_api_error(req, resp, ApiError(status, message, code=code, headers=headers), params)


async def _on_bug(req: Request, resp: Response, error: Exception, params: dict[str, Any]) -> None:
    _log.exception("%s %s %s failed", req.context.request_id, req.method, req.path, exc_info=error)
    await _on_api_error(req, resp, ApiError(500, "internal error", code="internal_error"), params)
