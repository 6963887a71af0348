"""What drafters, steps and forwards do today, recorded, so that a change which is to keep it shows where it does not.

    python -m tests.behaviour record     # writes tests/behaviour.json, beside what other kinds of arithmetic have there
    python -m tests.behaviour compare    # exits with 1 where something is another now, and names it
    python -m tests.behaviour dump FILE  # writes the drafts themselves as JSON, to compare chances of two checkouts

Digests, by executor, format and family: of the logits and hidden states of 1, 4, 7 and 17 rows of a chain, of a
tree and of several texts in one forward; and for each drafter, step by step, of its draft (tokens, parents and the path
that was accepted) and, behind a slash, of the draft's chances. Numbers are compared to the bit, so they stand under the
arithmetic that made them.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specdec import Context, Draft, Observation, SamplingParams
from specdec.costs.machine import processor
from specdec.drafting.registry import drafter_names, make_drafter
from specdec.models.transformers_target import TransformersTarget
from specdec.native import library as native
from specdec.step.step_output import StepOutput
from specdec.target import FINAL
from tests import heads, models, seam
from tests.exactness.cases import Case, draw
from tests.exactness.targets import Targets, engine_of
from tests.fakes import Spy

FILE = Path(__file__).with_suffix(".json")
ALL = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3")
KINDS = (
    ("modules", "float64", models.FAMILIES),
    ("fused", "float64", ("llama",)),
    ("native", "float32", (*ALL, "mixtral")),
    ("native", "bfloat16", (*ALL, "qwen3_moe")),
    ("native", "gptq", ("llama",)),
    ("native", "awq", ("qwen2",)),
    ("native", "bitsandbytes nf4", ("llama",)),
    ("native", "bitsandbytes int8", ("qwen2",)),
    ("native", "mixed", ("llama", "gemma3")),
)
DRAFTED = ("llama", "gemma3", "qwen2", "qwen3_moe")  # families whose drafts are recorded
WIDE = (("native", "float32"), ("native", "bfloat16"))  # where heads that the library runs are tried
WHOLE = ("modules", "bfloat16")  # where drafters are tried with all of their options, of llama
IN_C = ("eagle", "dflash")  # drafters whose heads the library runs where their attention's heads are wide enough
TREE = Draft((3, 4, 5, 6, 7, 8, 9), (-1, 0, 0, 1, 2, 3, 5))
PROMPT, NEW = (3, 9, 4, 3, 9, 4, 11, 3, 9), 12
Step = tuple[list[int], list[int], list[int], list[float]]
"""A draft's tokens and parents, the path that was accepted, and the draft's chances."""


def kind_of_arithmetic() -> str:
    """Of the native library, and of torch's own products, whose library asks the processor."""
    torchs = f"torch {torch.__version__} by {torch.backends.cpu.get_cpu_capability()}"
    return f"{native.arithmetic()}, {torchs}, {processor(torch.device('cpu'))}"


def digest(*parts: Any) -> str:
    """8 hexadecimal digits of numbers, or of a tensor's bytes."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, torch.Tensor):
            found.update(part.contiguous().view(torch.uint8).numpy().tobytes())
        else:
            found.update(struct.pack(f"{len(part)}d", *part) + b"|")
    return found.hexdigest()[:8]


def forwards(target: Any) -> str:
    """Of a chain's rows, of a tree's at once and in two forwards, of three texts' together, and of an early exit."""
    states = {0, 1, target.num_layers, FINAL}
    found = list[str]()

    def add(output: StepOutput) -> None:
        logits = () if output.logits is None else (output.logits,)
        found.append(digest(*logits, *(output.hidden[place] for place in sorted(output.hidden))))

    with target.active():
        own, *others = (seam.text(target).fill(PROMPT[:length], 16) for length in (9, 5, 2))
        for draft in (*(Draft.chain(models.prompt_of(rows)) for rows in (1, 4, 7, 17)), TREE):
            add(own.run(draft, taps=states))
        for first, last in ((0, 3), (3, len(TREE.tokens))):
            add(own.run(TREE.tokens[first:last], TREE.parents[:last], first=first))
        chain, plain = Draft.chain(models.prompt_of(3)), Draft.chain(models.prompt_of(1))
        add(seam.run_together([own, *others], [TREE, chain, plain], taps=states))
        add(seam.run_together([own, *others], [plain] * 3))
        if not isinstance(target, TransformersTarget):
            add(own.run(TREE, exit_layer=1, taps={1}))
    return " ".join(found)


def drafts(target: Any, settings: Any, sampling: SamplingParams | None) -> tuple[list[Step], list[int]]:
    """Each step of a text, and the text."""
    drafted, found = list[Draft](), list[Step]()

    def seen(context: Context, step: Observation) -> None:
        if step.draft is not None:
            draft = drafted[-1]
            found.append(([*draft.tokens], [*draft.parents], [*step.path], [*draft.hints.chances]))

    spy = Spy(make_drafter(settings, target), drafted.append, seen)
    out = engine_of(target, spy, max_rows=24).generate(PROMPT, NEW, sampling)
    return found, [*out.token_ids]


def told(steps: list[Step], text: list[int]) -> str:
    """Digests of them."""
    return " ".join((*(f"{digest(*step[:3])}/{digest(step[3])}" for step in steps), digest(text)))


def behaviour(targets: Targets, only: Sequence[str] = (), tried: int = 1) -> Iterator[tuple[str, Any]]:
    """Each name with its digest, or with its drafts.

    Args:
        targets: what is run.
        only: drafters, without forwards; empty for all.
        tried: how many options of each drafter.
    """
    base: Case = replace(draw(0), activations="default", sampling="greedy", setting=0)
    hot = SamplingParams(temperature=0.8, seed=3)
    for executor, form, families in KINDS:
        if only and (executor, form) not in WIDE:
            continue
        for family in families:
            if only and family not in DRAFTED:
                continue
            case = replace(base, executor=executor, format=form, family=family)
            target, place = targets.of(case), f"{executor} {form} {family}"
            if not only:
                yield f"{place}: forwards", forwards(target)
            if family not in DRAFTED and len(families) > 2:
                continue
            for number, drafter in enumerate(only or drafter_names()):
                if executor == "modules" and drafter in models.OF_LAYERS:
                    continue
                most = 5 if family == "llama" and {executor, form} & {*WHOLE} else tried
                settings = [targets.settings(replace(case, setting=one), target, drafter) for one in range(most)]
                for one, chosen in enumerate(
                    each for place, each in enumerate(settings) if each not in settings[:place]
                ):
                    sampling = hot if (number + one) % 2 else None
                    yield f"{place}: {drafter} {one}{' drawn' if sampling else ''}", drafts(target, chosen, sampling)


def everything(folder: Path) -> Iterator[tuple[str, Any]]:
    """All of it; at last heads that the library runs."""
    yield from behaviour(Targets(folder))
    narrow, wide = heads.WIDTHS["head_dim"], folder / "wide"
    wide.mkdir()
    heads.WIDTHS["head_dim"] = 16
    try:
        for name, found in behaviour(Targets(wide), IN_C, 5):
            yield f"heads of 16: {name}", found
    finally:
        heads.WIDTHS["head_dim"] = narrow


def main() -> int:
    torch.set_num_threads(1)
    known: dict[str, dict[str, str]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        found = dict(everything(Path(folder)))
    kind = kind_of_arithmetic()
    if sys.argv[1:2] == ["dump"]:
        raw = {name: own for name, own in found.items() if not isinstance(own, str)}
        Path(sys.argv[2]).write_text(json.dumps(raw), encoding="utf-8")
        print(f"drafts of {len(raw)} in {sys.argv[2]}, by {kind}")
        return 0
    now = {name: own if isinstance(own, str) else told(*own) for name, own in found.items()}
    if sys.argv[1:] == ["record"]:
        whole = {**known, kind: now}
        beside = FILE.with_name(f".{FILE.name}.{os.getpid()}")
        beside.write_text(json.dumps(whole, indent=0, sort_keys=True) + "\n", encoding="utf-8")
        beside.replace(FILE)
        print(f"{len(now)} recorded, by {kind}")
        return 0
    if kind not in known:
        print(f"nothing is recorded by {kind}; record it with the code that it is to be compared with")
        return 1
    before = known[kind]
    others = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    for name in others:
        print(f"{name}\n  was {before.get(name)}\n  is  {now.get(name)}")
    print(f"{len(others)} of {len(before)} are other than recorded, by {kind}")
    return int(bool(others))


if __name__ == "__main__":
    sys.exit(main())
