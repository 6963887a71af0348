"""The ASGI application and its routes, for one engine. It runs under uvicorn and as a Ray Serve deployment."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from specdec.serve.about import about_routes
from specdec.serve.endpoints import Endpoint, GenerationEndpoint
from specdec.serve.errors import ApiError
from specdec.serve.fields import DetokenizeRequest, TokenizeRequest
from specdec.serve.guard import Guard
from specdec.serve.lanes import Lane
from specdec.serve.protocols import Protocols
from specdec.serve.reading import read
from specdec.serve.service import Service
from specdec.version import __version__

__all__ = ["make_app"]

_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def make_app(service: Service) -> Starlette:
    """The ASGI application of a service, whose threads it starts and ends."""
    config = service.config

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.thread.start()
        yield
        await service.close()

    guard = Middleware(
        Guard,
        keys=config.keys,
        origins=config.allow_origin,
        max_body_bytes=config.max_body_bytes,
        root_path=config.root_path,
    )
    middleware = [guard]
    if config.allow_origin:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=config.allow_origin,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
        middleware.insert(0, cors)
    return Starlette(
        routes=_routes(service),
        middleware=middleware,
        lifespan=lifespan,
        exception_handlers={HTTPException: _no_such_path, ApiError: _told, Exception: _failed},
    )


def _routes(service: Service) -> list[Route]:
    protocols = Protocols(service)

    def tokenize(lane: Lane, body: bytes) -> dict[str, Any]:
        return _tokenize(service, lane, body)

    def detokenize(lane: Lane, body: bytes) -> dict[str, Any]:
        return _detokenize(service, lane, body)

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(service, name) for name in service.names]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        service.check_model(name)
        return JSONResponse(_model(service, name))

    async def health(request: Request) -> Response:
        service.check_ready()
        return JSONResponse({"status": "ok"})

    async def version(request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def metrics(request: Request) -> Response:
        service.gauge()
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    routes = [
        Route("/v1/chat/completions", GenerationEndpoint(service, protocols.chat), methods=["POST"]),
        Route("/v1/completions", GenerationEndpoint(service, protocols.completion), methods=["POST"]),
        Route("/v1/responses", GenerationEndpoint(service, protocols.responses), methods=["POST"]),
        Route("/v1/responses/{name}", _response(service), methods=["GET", "DELETE"]),
        Route("/v1/messages", GenerationEndpoint(service, protocols.messages), methods=["POST"]),
        Route("/v1/messages/count_tokens", Endpoint(service, protocols.count), methods=["POST"]),
        Route("/tokenize", Endpoint(service, tokenize), methods=["POST"]),
        Route("/detokenize", Endpoint(service, detokenize), methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/health", health),
        Route("/version", version),
        Route("/metrics", metrics),
        *about_routes(service),
    ]
    page = files("specdec.serve") / "page.html"
    if page.is_file():
        html = page.read_text("utf-8")

        async def show(request: Request) -> Response:
            return HTMLResponse(html, headers={"Content-Security-Policy": _PAGE_POLICY})

        routes.append(Route("/", show))
    return routes


def _response(service: Service) -> Callable[[Request], Awaitable[Response]]:
    async def stored(request: Request) -> Response:
        owner, name = request.scope.get("specdec.owner", ""), request.path_params["name"]
        if request.method == "DELETE":
            service.responses.delete(owner, name)
            return JSONResponse({"id": name, "object": "response", "deleted": True})
        return JSONResponse(service.responses.get(owner, name).response)

    return stored


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "specdec",
        "max_model_len": service.context,
        "specdec": {
            "drafters": list(service.drafters),
            "default_drafter": service.engine.drafter.name,
            "max_rows": service.engine.max_rows,
        },
    }


def _tokenize(service: Service, lane: Lane, body: bytes) -> dict[str, Any]:
    fields, _ = read(TokenizeRequest, body, ignores=service.config.unknown_fields == "ignore")
    service.check_model(fields.model)
    text, special = fields.prompt, fields.add_special_tokens
    if fields.content is not None and text is None:  # llama-server's names, and its default
        text, special = fields.content, bool(fields.add_special)
    if (text is None) == (fields.messages is None):
        raise ApiError("a prompt, or messages, are to be tokenized; give one of them", param="prompt")
    if text is not None:
        tokens = lane.encoder.prompt(text, special=special is not False)
    else:
        continues, begins = bool(fields.continue_final_message), fields.add_generation_prompt is not False
        more = fields.chat_template_kwargs
        tokens = lane.encoder.chat(fields.messages or [], fields.tools, continues=continues, begins=begins, more=more)
    found: dict[str, Any] = {"tokens": tokens, "count": len(tokens), "max_model_len": service.context}
    if fields.return_token_strs:
        found["token_strs"] = lane.encoder.pieces(tokens)
    if fields.with_pieces:
        found["tokens"] = [{"id": token, "piece": lane.encoder.text([token])} for token in tokens]
    return found


def _detokenize(service: Service, lane: Lane, body: bytes) -> dict[str, Any]:
    fields, _ = read(DetokenizeRequest, body, ignores=service.config.unknown_fields == "ignore")
    service.check_model(fields.model)
    text = lane.encoder.text(fields.tokens)
    return {"prompt": text, "content": text}  # vLLM's name, and llama-server's


async def _no_such_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    served = {route.path: route for route in request.app.routes if isinstance(route, Route)}
    if path in served:
        remedy = f"call it by {' or '.join(sorted(served[path].methods or ()))}"
    else:
        tail = path.removeprefix("/v1")
        near = next((one for one in (f"/v1{path}", tail, f"/v1{tail.removeprefix('/v1')}") if one in served), None)
        remedy = f"call {near}" if near else "see docs/serving.md for what is"
    what = f"{request.method} {path} is not served here"
    told = ApiError(f"{what}; {remedy}", status=error.status_code, code="not_found")
    return JSONResponse(told.body, told.status, error.headers)


async def _told(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body_of(request.url.path), error.status, error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    from specdec.serve.errors import told_to_client

    told = told_to_client(error)
    return JSONResponse(told.body, told.status)
