"""The application as a Ray Serve deployment: several replicas, each with its own engine."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import asdict
from threading import Event
from typing import Any

import ray
import yaml
from ray import serve as ray_serve
from starlette.applications import Starlette

from specdec.engine.load import load
from specdec.errors import ConfigError, first_line, shown
from specdec.serve.app import make_app
from specdec.serve.config import ServeConfig
from specdec.serve.service import Service
from specdec.settings.parsing import read_value

__all__ = ["deployment", "serve_replicas"]

NAME = "specdec"

try:
    # Routes all requests of one X-Session-Id to the replica that has cached their prefix.
    from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
except ImportError:  # this version of Ray can route by load only
    ConsistentHashRouter = None


def deployment(config: ServeConfig) -> Any:
    """The Ray Serve application for a server's options; ``ray.serve.run`` starts it.

    Raises:
        ConfigError: Ray refuses an option of the deployment.
    """
    options = asdict(config)

    def build() -> Starlette:
        own = ServeConfig(**options)
        return make_app(Service(load(own, own.drafter, own.policy), own))

    class Replica:
        """One replica; it serves the application over HTTP."""

    chosen: dict[str, Any] = {"num_replicas": config.replicas, "graceful_shutdown_timeout_s": config.grace}
    chosen["max_ongoing_requests"] = config.max_num_seqs + config.max_queue + 1  # each replica has its own queue
    if ConsistentHashRouter is not None:
        chosen["request_router_config"] = {"request_router_class": ConsistentHashRouter}
    try:
        more = {} if config.ray_options is None else read_value(config.ray_options)
    except yaml.YAMLError:
        more = None
    if not isinstance(more, dict):
        raise ConfigError(f"ray_options is {shown(config.ray_options)}; give a YAML mapping of a deployment's options")
    if "autoscaling_config" in more:
        del chosen["num_replicas"]
    try:
        made = ray_serve.deployment(name=NAME, **{**chosen, **more})(ray_serve.ingress(build)(Replica))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"Ray Serve does not take these options: {first_line(error)}; change --ray-options"
        ) from error
    return made.bind()


def serve_replicas(config: ServeConfig, on_ready: Callable[[str], None]) -> None:
    """Serve with Ray Serve, on this machine or on the cluster that Ray connects to, until a signal ends it."""
    application = deployment(config)
    ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level="error")
    ray_serve.start(http_options={"host": config.host, "port": config.port})
    ray_serve.run(application, name=NAME)
    ended = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    on_ready(f"http://{config.host}:{config.port}")
    while not ended.wait(3600):
        pass
    ray_serve.shutdown()
    ray.shutdown()
