"""specdec: speculative decoding that does not change what the model says."""

from specdec.draft import Draft, DraftBuilder
from specdec.drafter import Context, Drafter, DrafterBase, DraftSession, Observation
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.integrations.transformers import custom_generate
from specdec.results import Chunk, Generation, Statistics, Step
from specdec.sampling import SamplingParams
from specdec.target import FINAL, Target, TransformersTarget

__all__ = [
    "FINAL",
    "Chunk",
    "Context",
    "Draft",
    "DraftBuilder",
    "DraftSession",
    "Drafter",
    "DrafterBase",
    "Engine",
    "Generation",
    "Observation",
    "SamplingParams",
    "SpecdecError",
    "Statistics",
    "Step",
    "Target",
    "TransformersTarget",
    "custom_generate",
]

__version__ = "0.1.0"
