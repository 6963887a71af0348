"""The server's options, checked. The module imports neither torch nor the extra's packages: ``--help`` stays quick."""

from __future__ import annotations

import ipaddress
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le, Lt

from specdec.engine.config import EngineOptions
from specdec.errors import ConfigError, check_choice, shown
from specdec.settings.options import option
from specdec.settings.validation import AtLeast1, check_fields

__all__ = ["API_KEY", "TOOL_PARSERS", "ServeConfig", "is_loopback"]

API_KEY = "SPECDEC_API_KEY"
"""The environment variable that can hold the API key."""

TOOL_PARSERS = ("auto", "hermes", "qwen3_coder", "llama3_json", "mistral", "none")
"""Names of ways to write tool calls."""

_PANEL = "Server"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")
_ROOT = re.compile(r"(/[^/?#\s]+)+")
_Port = Annotated[int, Ge(0), Le(65535), "a port, an integer from 0 to 65535, where 0 takes a free one"]
_Seconds = Annotated[float, Ge(0), Lt(math.inf), "a number of seconds >= 0"]
_Count = Annotated[int, Ge(0), "an integer >= 0"]


@dataclass(frozen=True, kw_only=True)
class ServeConfig(EngineOptions):
    """The options that a server starts with.

    Raises:
        ConfigError: an option's value is not allowed, or other machines can reach the host and there is no key.
    """

    drafter: str | dict[str, Any] = option("auto", "The drafter; see `specdec drafters`.", metavar="NAME")
    drafters: list[str] = option(
        list,
        "Drafters that a request may name, beside its own and none (default: those that need no training).",
        metavar="A,B,C",
        commas=True,
    )
    host: str = option("127.0.0.1", "Address to listen on; any but the machine's own needs a key.", panel=_PANEL)
    port: _Port = option(8000, "Port to listen on; 0 takes a free one.", panel=_PANEL)
    served_model_name: list[str] = option(
        list,
        "The model's names for clients, the first of which answers have (default: --model's value).",
        metavar="A,B,C",
        commas=True,
        panel=_PANEL,
    )
    root_path: str = option("", "What a proxy has before the server's paths, such as /llm.", panel=_PANEL)
    max_num_seqs: AtLeast1 = option(8, "Most sequences at once; further ones wait in line.", panel=_PANEL)
    max_queue: _Count = option(128, "Most sequences in line; for more the answer is 429.", panel=_PANEL)
    max_num_batched_tokens: AtLeast1 | None = option(
        None,
        "Most rows of a step, drafts and chunks of prompts together (default: as many as take a quarter of a second).",
        panel=_PANEL,
    )
    cache_bytes: AtLeast1 | None = option(
        None,
        "Most bytes of keys and values, running texts and cached prefixes together (default: no bound).",
        panel=_PANEL,
    )
    prefix_bytes: _Count | None = option(
        None,
        "Most of these bytes for cached prefixes of texts; 0 caches none (default: what running texts leave "
        "of --cache-bytes, or 1 GiB).",
        panel=_PANEL,
    )
    keep_alive: _Seconds = option(
        75.0, "Seconds that an idle connection stays open; more than a proxy before the server keeps it.", panel=_PANEL
    )
    request_timeout: _Seconds = option(600.0, "Seconds that a request may take; 0 is no limit.", panel=_PANEL)
    grace: _Seconds = option(30.0, "Seconds that running requests get to end after SIGTERM.", panel=_PANEL)
    generation_config: str = option(
        "openai",
        "Source of the defaults of temperature and the like: OpenAI's or the checkpoint's.",
        metavar="openai|model",
        panel=_PANEL,
    )
    chat_template: str | None = option(
        None, "The chat template: a file, or chatml, llama3, mistral (default: the model's).", metavar="FILE|NAME"
    )
    tool_parser: str = option(
        "auto",
        "How the model writes tool calls (default: as its chat template shows).",
        metavar="|".join(TOOL_PARSERS),
        panel=_PANEL,
    )
    api_key: str | None = option(
        None, f"The key that clients send; better by a file, or {API_KEY}.", metavar="KEY", panel=_PANEL
    )
    api_key_file: str | None = option(None, "A file that holds keys, one a line.", metavar="FILE", panel=_PANEL)
    allow_origin: list[str] = option(
        list, "A web page's origin that may call the server; repeatable (CORS).", panel=_PANEL
    )
    unknown_fields: str = option(
        "refuse",
        "What becomes of a request with unknown fields: an error, or an answer and a line in the log.",
        metavar="refuse|ignore",
        panel=_PANEL,
    )
    max_body_bytes: AtLeast1 = option(8 << 20, "Most bytes of a request's body.", panel=_PANEL)
    ray: bool = option(False, "Serve by Ray Serve, which keeps several replicas.", panel="Ray")
    replicas: AtLeast1 = option(1, "Replicas under Ray Serve.", panel="Ray")
    ray_options: str | None = option(
        None,
        "More options of the deployment, YAML such as '{autoscaling_config: {max_replicas: 4}}'.",
        metavar="YAML",
        panel="Ray",
    )
    log_prompts: bool = option(False, "Write prompts and answers to the log.", panel=_PANEL)

    def __post_init__(self) -> None:
        EngineOptions.__post_init__(self)
        check_fields(self)
        check_choice("generation_config", self.generation_config, ("openai", "model"))
        check_choice("tool_parser", self.tool_parser, TOOL_PARSERS)
        check_choice("unknown_fields", self.unknown_fields, ("refuse", "ignore"))
        for origin in self.allow_origin:
            if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allow_origin holds {shown(origin)}; give an origin such as https://example.org, without a path, "
                    "or null for pages without one, or * for any"
                )
        if self.root_path and not _ROOT.fullmatch(self.root_path):
            raise ConfigError(f"root_path is {shown(self.root_path)}; give a path such as /llm, without a / at its end")
        if self.parallel != "off":
            raise ConfigError(f"parallel is {self.parallel!r}, and a server decodes by one process; leave it out")
        if self.api_key is not None and self.api_key_file is not None:
            raise ConfigError("api_key and api_key_file were given; give one of them")
        if not is_loopback(self.host) and not self.keys:
            raise ConfigError(
                f"host is {shown(self.host)}, which others reach, and there is no key: give --api-key-file FILE, or "
                f"set {API_KEY}, or listen on 127.0.0.1"
            )

    @property
    def keys(self) -> list[str]:
        """The API keys of which clients must send one; empty where they need none.

        Raises:
            ConfigError: the keys' file cannot be read, or a key is empty or has other than visible ASCII characters.
        """
        source = "api_key"
        if self.api_key_file is not None:
            source = f"the key file {shown(self.api_key_file)}"
            try:
                lines = Path(self.api_key_file).read_text("utf-8").splitlines()
            except (OSError, UnicodeError) as error:
                raise ConfigError(f"cannot read {source}: {error}; give another") from error
            keys = [line.strip() for line in lines if line.strip()] or [""]
        else:
            key = self.api_key
            if key is None:
                key, source = os.environ.get(API_KEY), API_KEY
            keys = [] if key is None else [key]
        if not all(key and key.isascii() and key.isprintable() and " " not in key for key in keys):
            raise ConfigError(f"{source} holds no key; a key is visible ASCII characters, without spaces")
        return keys

    @property
    def names(self) -> list[str]:
        """The model's names for clients."""
        return self.served_model_name or [self.model]


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine can connect to a host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
