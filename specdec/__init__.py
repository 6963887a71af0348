"""specdec: speculative decoding that does not change what the model says."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specdec.version import __version__ as __version__

if TYPE_CHECKING:
    from specdec.drafter import Context, Drafter, DrafterBase, DrafterWrapper, DraftSession, Observation
    from specdec.engine.custom_generate import custom_generate
    from specdec.engine.engine import Engine
    from specdec.engine.prefix_cache import PrefixCache
    from specdec.engine.prefix_tree import PrefixTree
    from specdec.errors import SpecdecError, SpecdecWarning
    from specdec.models.transformers_target import TransformersTarget
    from specdec.results import Chunk, Generation, Statistics, Step
    from specdec.settings.sampling_params import SamplingParams
    from specdec.step.tree import Draft, DraftBuilder, Hints
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
    "Hints",
    "Observation",
    "PrefixCache",
    "PrefixTree",
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
    "drafter": (
        "Context",
        "Drafter",
        "DrafterBase",
        "DrafterWrapper",
        "DraftSession",
        "Observation",
    ),
    "engine.custom_generate": ("custom_generate",),
    "engine.engine": ("Engine",),
    "engine.prefix_cache": ("PrefixCache",),
    "engine.prefix_tree": ("PrefixTree",),
    "errors": (
        "SpecdecError",
        "SpecdecWarning",
    ),
    "models.transformers_target": ("TransformersTarget",),
    "results": (
        "Chunk",
        "Generation",
        "Statistics",
        "Step",
    ),
    "settings.sampling_params": ("SamplingParams",),
    "step.tree": (
        "Draft",
        "DraftBuilder",
        "Hints",
    ),
    "target": (
        "FINAL",
        "Target",
    ),
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
