"""Small endpoints that say what the server is: as vLLM, llama-server and load balancers have them."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from specdec.serve.errors import ApiError
from specdec.serve.service import Service
from specdec.version import __version__

__all__ = ["about_routes"]

_UNSERVED = {
    "/v1/embeddings": "embeddings are not served here, as the model writes texts; use a server of an embedding model",
    "/v1/fim/completions": "fill-in-the-middle is not served here; send the text before the place to /v1/completions",
    "/infill": "fill-in-the-middle is not served here; send the text before the place to /v1/completions",
}


def about_routes(service: Service) -> list[Route]:
    """The routes, for a service."""

    async def tokenizer_info(request: Request) -> Response:
        return JSONResponse(_tokenizer_info(service))

    async def props(request: Request) -> Response:
        return JSONResponse(_props(service))

    async def ping(request: Request) -> Response:
        service.check_ready()
        return Response()

    async def load(request: Request) -> Response:
        return JSONResponse({"server_load": service.answering})

    async def unserved(request: Request) -> Response:
        raise ApiError(_UNSERVED[request.url.path], status=501, code="not_implemented")

    return [
        Route("/tokenizer_info", tokenizer_info),
        Route("/props", props),
        Route("/ping", ping, methods=["GET", "POST"]),
        Route("/load", load),
        *(Route(path, unserved, methods=["POST"]) for path in _UNSERVED),
    ]


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
