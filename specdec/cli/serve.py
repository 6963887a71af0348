"""``specdec serve``: an OpenAI-compatible server."""

from __future__ import annotations

from rich.console import Console

from specdec.engine.config import resolve
from specdec.errors import ConfigError, pip_line
from specdec.serve.config import ServeConfig
from specdec.settings.options import Given, with_options

__all__ = ["serve"]

_EXTRA = ("jinja2", "prometheus_client", "ray", "starlette", "uvicorn", "llguidance")  # what only this command needs


@with_options(ServeConfig, without=["parallel"], file="configs/drafter/lookahead.yaml", setting="lookahead.window=15")
def serve(given: Given) -> None:
    """Serve a model over HTTP as OpenAI's API has it, on http://127.0.0.1:8000 unless told otherwise.

    Clients set the base URL to ADDRESS/v1. What is served, and how: docs/serving.md.
    """
    config = resolve(ServeConfig, given)
    config.key  # noqa: B018  (a key that cannot be read is told before a model is loaded)
    try:
        if config.ray:
            from specdec.serve.ray_serve import serve_replicas
        from specdec.serve.server import serve as run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        extra = "serve,ray" if config.ray else "serve"
        raise ConfigError(f"specdec serve needs {error.name}, which is not installed; run {pip_line(extra)}") from error
    from specdec.engine.load import load

    def ready(address: str) -> None:
        drafter = config.drafter if isinstance(config.drafter, str) else config.drafter.get("name")
        line = f"{address} serves {config.name}, drafted by {drafter}"
        Console(stderr=True).print(line, soft_wrap=True, highlight=False)

    if config.ray:
        serve_replicas(config, ready)
    else:
        run(lambda: load(config, config.drafter, config.policy), config, ready)
