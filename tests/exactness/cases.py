"""A case of the exactness harness, and how a seed draws it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from specdec import SamplingParams
from specdec.drafting.registry import drafter_names
from tests.models import FAMILIES, FUSED, MIXTURES, OF_LAYERS
from tests.quantised_files import FAMILIES as BLOCK_FAMILIES
from tests.quantised_files import FORMATS

__all__ = ["DRAFTERS", "ENDS", "KINDS", "LOADS", "PROCESSED", "SAMPLINGS", "Case", "described", "draw"]

_KNOWN = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", *MIXTURES, "olmoe")
_IN_TORCH = ("cohere2", "exaone4", "glm4", "gpt_oss", "lfm2", "olmo2", "phi3", "qwen2_moe", "smollm3", "starcoder2")
_INT4 = ("llama", "mistral", "qwen2", "qwen3", "gemma2")
KINDS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    *(("modules", "float64", FAMILIES) for _ in range(3)),
    *((executor, "float64", FUSED) for executor in ("fused", "split")),
    *(("native", dtype, _KNOWN) for dtype in ("float32", "bfloat16", "bfloat16")),
    *(("fused", dtype, _IN_TORCH[turn::2]) for turn, dtype in enumerate(("float32", "bfloat16"))),
    *(("native", f"packed {turn}", _INT4) for turn in range(2)),
    *(("native", f"bitsandbytes {kind}", ("llama", "qwen2")) for kind in ("nf4", "int8")),
    *(("native", f"blocks {turn}", BLOCK_FAMILIES) for turn in range(3)),
    *((executor, "float64", ("llama", "mistral", "qwen3")) for executor in ("recorded", "paged")),
    *((executor, "float64", ("llama", "mistral", "gemma3")) for executor in ("ranks", "tensor")),
)
"""Executor, format of the weights, and the families that are run so; one that stands twice is drawn twice as often."""
DRAFTERS = (*drafter_names(), "oracle", "oracle", "oracle", "drawing")
"""The registered ones, one that knows the text, and one that draws from a q."""
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8},
    "hot": {"temperature": 1.3},
    "greedy once more": {},
    "top": {"temperature": 0.8, "top_k": 8, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "penalty": {"temperature": 0.9, "repetition_penalty": 1.4},
    "greedy penalty": {"repetition_penalty": 1.2},
    "own": {"temperature": 0.7},
    "greedy own": {},
    "no_repeat": {"temperature": 0.5},
    "bad_words": {"temperature": 1.0},
    "grammar": {"temperature": 0.9},
    "auto": {"temperature": 0.8, "acceptance": "auto"},
    "reject": {"temperature": 1.0, "acceptance": "reject"},
}
PROCESSED = ("own", "greedy own", "no_repeat", "bad_words", "grammar")
"""Samplings with logits processors of the caller's."""
LOADS = ("one", "batch", "prefix", "stream", "mixed", "batch", "prefix", "one", "custom")
ENDS = ("length", "stop token", "length", "eos", "length", "stop string", "length", "context", "budget")
_UNSPLIT = ("dflash", "drawing", "eagle", "kangaroo", "layer_skip", "mtp")  # ranks that share rows do not take them
_STATEFUL = ("own", "greedy own", "grammar")  # nor these


@dataclass(frozen=True)
class Case:
    """What a text is made with.

    Attributes:
        activations: ``int8`` where rows are multiplied in bytes.
        setting: counts the options that a drafter is tried with.
        load: alone, streamed, in a batch, in one of several drafters, from a kept beginning, or in ``generate``.
        predicted: what is said of the answer before it is made; nothing where it is empty.
        small: whether caches begin with few slots, so that they grow at once and often.
        prompts: sizes; all of them in a batch, else the first.
    """

    seed: int
    executor: str
    format: str
    family: str
    activations: str
    drafter: str
    setting: int
    sampling: str
    load: str
    end: str
    max_rows: int
    chunk: int
    policy: str
    predicted: str
    small: bool
    logprobs: int | None
    prompts: tuple[int, ...]
    new: int

    def params(self, place: int = 0) -> SamplingParams:
        """Of the prompt at this place."""
        return SamplingParams(**{"acceptance": "match", **SAMPLINGS[self.sampling], "seed": self.seed + place})

    @property
    def rejects(self) -> bool:
        """Whether the text may be the drafter's own, at a seed: then it is compared with that drafter's text alone."""
        return "acceptance" in SAMPLINGS[self.sampling]

    @property
    def apart(self) -> bool:
        """Whether several ranks decode it."""
        return self.executor in ("ranks", "tensor")

    @property
    def in_torch(self) -> bool:
        """Whether layers in torch round each row alike, by the library's products and attention."""
        return self.executor == "fused" and self.format != "float64"

    @property
    def recorded(self) -> bool:
        """Whether steps are replayed, as on a CUDA device."""
        return self.executor in ("recorded", "paged")


def _turn(axis: str, values: Sequence[Any], seed: int) -> Any:
    """The seed's value of an axis: each ``len(values)`` seeds have all of them, in an order of their own."""
    lap, place = divmod(seed, len(values))
    return random.Random(f"{axis} {lap}").sample(list(values), len(values))[place]


def draw(seed: int) -> Case:
    """The seed's case; what does not go together is replaced."""
    rng, take = random.Random(seed), partial(_turn, seed=seed)
    number, (executor, form, families) = take("kind", tuple(enumerate(KINDS)))
    lap = seed // len(KINDS)
    if form.startswith("blocks"):
        form = _turn("blocks", (*FORMATS, "MXFP4", "mixed"), 3 * lap + int(form[-1]))
    if form.startswith("packed"):
        form = _turn("packed", ("gptq", "awq", "compressed 4", "compressed 8"), 2 * lap + int(form[-1]))
    in_bytes = executor == "native" and form not in ("float32", "bfloat16", "bitsandbytes nf4")
    case = Case(
        seed=seed,
        executor=executor,
        format=form,
        family=_turn(f"family {number}", families, lap),
        activations=rng.choice(("default", "int8" if in_bytes else "default")),
        drafter=take("drafter", DRAFTERS),
        setting=seed // len(DRAFTERS),  # a drafter's next time has its next options
        sampling=take("sampling", tuple(SAMPLINGS)),
        load=take("load", LOADS),
        end=take("end", ENDS),
        max_rows=take("rows", (24, 5, 12, 2, 24, 1, 40)),
        chunk=take("chunk", (16, 3, 512)),
        policy=rng.choice(("off", "acceptance")),
        predicted=take("predicted", ("", "", "right", "", "edited", "wrong")),
        small=rng.random() < 0.25,
        logprobs=rng.choice((None, None, 0, 2)),
        prompts=tuple(rng.sample((1, 2, 5, 7, 9, 20, 40), 4)),
        new=rng.choice((9, 20, 28)),
    )
    return _possible(case)


def _possible(case: Case) -> Case:
    """The case without what its other parts do not take."""
    if case.executor == "modules" and case.drafter in OF_LAYERS:
        family = case.family if case.family in FUSED else FUSED[case.seed % len(FUSED)]
        case = replace(case, executor="fused", family=family)
    if case.family in _IN_TORCH and case.drafter == "mtp":  # whose layers tests write of other families
        case = replace(case, family=_KNOWN[case.seed % len(_KNOWN)])
    changes: dict[str, Any] = {}
    if case.executor == "tensor":
        changes |= {"load": "one", "end": case.end if case.end in ("length", "budget") else "stop token"}
    elif case.executor == "ranks":
        changes |= {"load": "one", "logprobs": None, "predicted": "", "policy": "off"}
        changes |= {"drafter": "lookahead"} if case.drafter in _UNSPLIT else {}
        changes |= {"sampling": "penalty"} if case.rejects or case.sampling in _STATEFUL else {}
        changes |= {"end": "stop token"} if case.end in ("eos", "context") else {}
    elif case.load == "custom" and case.executor != "modules":
        changes["load"] = "one"
    elif case.load == "custom" or (case.executor == "modules" and case.seed % 3 == 0):
        changes["load"] = "custom"
        changes |= {"end": case.end if case.end == "budget" else "length", "predicted": "", "logprobs": None}
        changes |= {"sampling": "penalty"} if case.rejects or case.sampling in PROCESSED else {}
    elif case.load == "mixed" and case.rejects:
        changes["load"] = "batch"
    if case.executor == "tensor" and case.drafter in OF_LAYERS:
        changes["drafter"] = "eagle" if case.seed % 2 else "medusa"
    case = replace(case, **changes)
    if case.rejects:  # the text at a seed depends on the room that drafts have, and so on where the text would end
        case = replace(case, predicted="", end="length" if case.end in ("context", "budget") else case.end)
    if case.end == "context" and case.load not in ("one", "stream"):
        case = replace(case, end="stop token")
    if case.drafter == "prediction" and not case.rejects and not case.apart and case.load != "custom":
        case = replace(case, predicted=case.predicted or "edited")
    return case


def described(case: Case) -> str:
    """What is printed of a case, and the command that runs it again."""
    options = " ".join(f"{name}={value!r}" for name, value in asdict(case).items())
    return f"{options}\nagain: EXACTNESS={case.seed} python -m pytest tests/property/test_exactness.py -n 0"
