"""The ASGI application and its routes, for one engine. It runs under uvicorn and as a Ray Serve deployment."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
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

from specdec.serve.endpoints import Endpoint, GenerationEndpoint
from specdec.serve.errors import ApiError, told_to_client
from specdec.serve.guard import Guard
from specdec.serve.protocols import Protocols
from specdec.serve.service import Service
from specdec.version import __version__

__all__ = ["make_app"]

_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

_UNSERVED = {
    "/v1/embeddings": "embeddings are not served here, as the model writes texts; use a server of an embedding model",
    "/v1/fim/completions": "fill-in-the-middle is not served here; send the text before the place to /v1/completions",
    "/infill": "fill-in-the-middle is not served here; send the text before the place to /v1/completions",
}


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
        exception_handlers={HTTPException: _no_such_path, ApiError: _refused, Exception: _failed},
    )


def _routes(service: Service) -> list[Route]:
    protocols = Protocols(service)

    def stored(request: Request) -> Any:
        owner, name = request.scope.get("specdec.owner", ""), request.path_params["name"]
        if request.method == "DELETE":
            service.responses.delete(owner, name)
            return {"id": name, "object": "response", "deleted": True}
        return service.responses.get(owner, name).response

    async def metrics(request: Request) -> Response:
        service.gauge()
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    routes = [
        Route("/v1/chat/completions", GenerationEndpoint(service, protocols.chat), methods=["POST"]),
        Route("/v1/completions", GenerationEndpoint(service, protocols.completion), methods=["POST"]),
        Route("/v1/responses", GenerationEndpoint(service, protocols.responses), methods=["POST"]),
        _told("/v1/responses/{name}", stored, "GET", "DELETE"),
        Route("/v1/messages", GenerationEndpoint(service, protocols.messages), methods=["POST"]),
        Route("/v1/messages/count_tokens", Endpoint(service, protocols.count), methods=["POST"]),
        Route("/tokenize", Endpoint(service, protocols.tokenize), methods=["POST"]),
        Route("/detokenize", Endpoint(service, protocols.detokenize), methods=["POST"]),
        Route("/metrics", metrics),
        *_about(service),
    ]
    page = files("specdec.serve") / "page.html"
    if page.is_file():
        html = page.read_text("utf-8")

        async def show(request: Request) -> Response:
            return HTMLResponse(html, headers={"Content-Security-Policy": _PAGE_POLICY})

        routes.append(Route("/", show))
    return routes


def _told(path: str, value: Callable[[Request], Any], *methods: str) -> Route:
    """The route of a path that answers with a JSON value, by GET unless methods are given."""

    async def answer(request: Request) -> Response:
        return JSONResponse(value(request))

    return Route(path, answer, methods=methods or ("GET",))


def _about(service: Service) -> list[Route]:
    """Routes that say what the server is, as vLLM, llama-server and load balancers have them."""

    def model(request: Request) -> Any:
        service.check_model(name := request.path_params["name"])
        return _model(service, name)

    def health(request: Request) -> Any:
        service.check_ready()
        return {"status": "ok"}

    async def ping(request: Request) -> Response:
        service.check_ready()
        return Response()

    async def unserved(request: Request) -> Response:
        raise ApiError(_UNSERVED[request.url.path], status=501, code="not_implemented")

    return [
        _told("/v1/models", lambda _: {"object": "list", "data": [_model(service, name) for name in service.names]}),
        _told("/v1/models/{name:path}", model),
        _told("/health", health),
        _told("/version", lambda _: {"version": __version__}),
        _told("/tokenizer_info", lambda _: _tokenizer_info(service)),
        _told("/props", lambda _: _props(service)),
        _told("/load", lambda _: {"server_load": service.answering}),
        Route("/ping", ping, methods=["GET", "POST"]),
        *(Route(path, unserved, methods=["POST"]) for path in _UNSERVED),
    ]


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


def _tokenizer_info(service: Service) -> dict[str, Any]:
    """The tokenizer's class, template and special tokens, by vLLM's names."""
    tokenizer: Any = service.engine.tokenizer
    tokens = {f"{name}_token": getattr(tokenizer, f"{name}_token", None) for name in ("bos", "eos", "pad", "unk")}
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "chat_template": getattr(tokenizer, "chat_template", None),
        **tokens,
        "model_max_length": service.context,
        "vocab_size": service.engine.target.vocab_size,
    }


def _props(service: Service) -> dict[str, Any]:
    """What llama-server says of itself."""
    info = _tokenizer_info(service)
    return {
        "default_generation_settings": {"n_ctx": service.context},
        "total_slots": service.config.max_num_seqs,
        "model_alias": service.name,
        **{name: info[name] or "" for name in ("chat_template", "bos_token", "eos_token")},
        "modalities": {"vision": False, "audio": False},
        "build_info": f"specdec {__version__}",
    }


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
    missing = ApiError(f"{what}; {remedy}", status=error.status_code, code="not_found")
    return JSONResponse(missing.body, missing.status, error.headers)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body_of(request.url.path), error.status, error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    failed = told_to_client(error)
    return JSONResponse(failed.body, failed.status)
