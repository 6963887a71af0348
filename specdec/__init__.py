"""specdec: speculative decoding that does not change what the model says."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specdec.version import __version__ as __version__

if TYPE_CHECKING:
    from specdec.draft import Draft, DraftBuilder
    from specdec.drafter import Context, Drafter, DrafterBase, DrafterWrapper, DraftSession, Observation
    from specdec.engine import Engine
    from specdec.errors import SpecdecError, SpecdecWarning
    from specdec.integrations.transformers import custom_generate
    from specdec.model import TransformersTarget
    from specdec.prefix import PrefixCache
    from specdec.results import Chunk, Generation, Statistics, Step
    from specdec.sampling import SamplingParams
    from specdec.target import FINAL, Target

__all__ = [
    "FINAL",
    "Chunk",
    "Context",
    "Draft",
    "DraftBuilder",
    "DraftSession",
    "Drafter",
    "DrafterBase",
    "DrafterWrapper",
    "Engine",
    "Generation",
    "Observation",
    "PrefixCache",
    "SamplingParams",
    "SpecdecError",
    "SpecdecWarning",
    "Statistics",
    "Step",
    "Target",
    "TransformersTarget",
    "custom_generate",
]

_HOMES = {
    "draft": ("Draft", "DraftBuilder"),
    "drafter": ("Context", "DraftSession", "Drafter", "DrafterBase", "DrafterWrapper", "Observation"),
    "engine": ("Engine",),
    "errors": ("SpecdecError", "SpecdecWarning"),
    "integrations.transformers": ("custom_generate",),
    "model": ("TransformersTarget",),
    "prefix": ("PrefixCache",),
    "results": ("Chunk", "Generation", "Statistics", "Step"),
    "sampling": ("SamplingParams",),
    "target": ("FINAL", "Target"),
}


def __getattr__(name: str) -> Any:
    """Import a name's module when it is first used: torch takes seconds, and ``specdec --help`` needs none of it."""
    for module, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"specdec.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
