"""Which models run exactly, and how: docs/models.md, from a tiny random model of every causal decoder in transformers.

    python scripts/models_table.py            # writes docs/models.md; some minutes
    python scripts/models_table.py granite    # prints the rows of these model types

Each model is built from ``scripts/model_sizes.yaml``, in float64 and with large random weights, so that every layer's
attention decides on the text, which is checked. Its greedy text after a prompt that is longer than every limit of its
config has to be that of transformers' ``generate``, token for token, on every runner that takes the model, without a
drafter and with two; native layers compute in float32, and there no token's logit may be further below the best than
rounding. What specdec refuses stands in the table with the reason. Text that differs stops the script: it is a defect.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
import yaml
from transformers import CONFIG_MAPPING, AttentionInterface, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specdec import Engine, TransformersTarget
from specdec.decoder.families import FAMILIES
from specdec.errors import ConfigError, SpecdecError, TargetError
from specdec.step.step_io import StepInput, Wanted
from specdec.target import FINAL, Target

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/models.md"
PROMPT, NEW = 40, 40
DRAFTERS = ("none", "token_recycling", "lookahead")  # plain, a tree, and rows that are no candidates
ROUNDING = 1e-3  # of float32, in logits
MOST = 20_000_000  # parameters of a tiny model; one with more has a size that model_sizes.yaml does not know
_LIMIT = re.compile("window|chunk_size$|chunk_length|topk$")

HEAD = """# Models

One row for each of the {count} model types for which transformers {version} has a causal decoder. A tiny random model
of each was decoded: with its prompt longer than every limit of its config, in float64, on every runner that takes it,
without a drafter, with a tree and with lookahead. *Exact* means that the greedy text was that of transformers'
`generate`, token for token. *Refused* means that specdec says so at load, rather than decode wrongly. A model that was
neither would have stopped the script. The weights are random, so the table is about architectures; what a checkpoint's
own config adds is checked when it is loaded.

`modules` is the model's own forward as a whole. Drafters that run some of the layers cannot use it; those that read
hidden states can, where embedding and head can be called by themselves, which was checked by their numbers. `fused` and
`native` run decoders that a description covers (`specdec/decoder/families.py`), loaded from their folders.

Made by `python scripts/models_table.py`; the tests hold rows of it to what the script says.

| model type | exact on | refused, because |
| --- | --- | --- |
"""


@dataclass(frozen=True)
class Row:
    """What became of a model type: the runners on which it is exact, or why there are none."""

    kind: str
    runners: tuple[str, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        return f"| `{self.kind}` | {', '.join(self.runners)} | {self.reason} |"


@cache
def sizes() -> dict[str, Any]:
    """What ``model_sizes.yaml`` says."""
    found: dict[str, Any] = yaml.safe_load((ROOT / "scripts/model_sizes.yaml").read_text(encoding="utf-8"))
    return found


def kinds() -> list[str]:
    """All model types with a causal decoder."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def small_config(kind: str) -> Any:
    """A small config of a model type."""
    return _shrunk(CONFIG_MAPPING[kind], sizes()["models"].get(kind, {}))


def _shrunk(cls: Any, own: dict[str, Any]) -> Any:
    """A config of a class, its parts shrunk as well; ``own`` goes before the sizes that all have."""
    default = cls()
    names = default.to_dict().keys()
    values = {name: value for name, value in sizes()["sizes"].items() if name in names} | own
    for name in cls.sub_configs or {}:
        part = getattr(default, name, None)
        if part is not None:
            values[name] = _shrunk(type(part), own.get(name, {})).to_dict()
    return cls(**values)


def small_model(kind: str) -> Any:
    """A small random model of a type, in float64 where transformers can run it so.

    Raises:
        ValueError: it has too many parameters, or a limit that the prompt does not exceed.
    """
    config = small_config(kind)
    texts = config.get_text_config(decoder=True)
    beyond = [f"{name}={n}" for name, n in texts.to_dict().items() if _LIMIT.search(name) and _exceeds(n)]
    with torch.device("meta"):
        count = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if beyond or count > MOST:
        raise ValueError(f"{kind} has {count} parameters and {beyond or 'no'} limits beyond the prompt: give it sizes")
    torch.manual_seed(1)
    # Only the plain loop over experts computes in float64.
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    model = model.to(torch.float32 if kind in sizes()["float32"] else torch.float64).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.is_floating_point():
                noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
                weight.copy_(1.5 * noise / math.sqrt(weight.shape[-1]) if weight.ndim > 1 else weight + 0.1 * noise)
    return model


def _exceeds(limit: Any) -> bool:
    return isinstance(limit, int) and limit >= PROMPT


def row_of(kind: str) -> Row:
    """Try a model type.

    Raises:
        RuntimeError: it is neither exact nor refused, or its text does not depend on what is tried.
    """
    if kind in sizes()["untried"]:
        return Row(kind, reason=f"not tried: {sizes()['untried'][kind]}")
    model = small_model(kind)
    generator = torch.Generator().manual_seed(0)
    words = min(model.get_input_embeddings().num_embeddings, model.config.get_text_config().vocab_size)
    prompt = torch.randint(2, words, (PROMPT,), generator=generator).tolist()
    reason, whole = "", list[Target]()
    try:
        whole.append(TransformersTarget(model, execution="modules"))
    except SpecdecError as error:
        reason = plain(error, type(model).__name__)
        if kind not in FAMILIES:
            return Row(kind, reason=reason)
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    expected = output[0, PROMPT:].tolist()
    layers = len(whole[0].specs) if whole else model.config.num_hidden_layers
    must_matter(kind, model, layers, [*prompt, *expected])
    for target in whole:
        must_agree(kind, target, prompt)
    runners = []
    for name in ("modules", "fused", "native") if whole else ("fused", "native"):
        try:
            target = tried(model, name)
        except ConfigError:
            continue
        for drafter in DRAFTERS:
            out = Engine(target, drafter=drafter, max_rows=24, prefill_chunk=16).generate(prompt, NEW).token_ids
            if out != expected and not (name == "native" and is_near(model, prompt, out)):
                raise RuntimeError(f"{kind} on {name} with {drafter} is neither exact nor refused")
        runners.append(name)
    return Row(kind, tuple(runners), f"{reason} by its own forward" if reason else "")


def tried(model: Any, execution: str) -> Target:
    """A target, loaded from the model's folder by an executor; native layers compute in float32."""
    if execution == "modules":
        return TransformersTarget(model)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        dtype = torch.float32 if execution == "native" else torch.float64
        return TransformersTarget.from_pretrained(folder, dtype=dtype, execution=execution)


@torch.inference_mode()
def is_near(model: Any, prompt: Sequence[int], text: Sequence[int]) -> bool:
    """Whether every token of a text is the model's likeliest, up to rounding."""
    logits = model(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1]
    return bool((logits.max(-1).values - logits[range(len(text)), list(text)] < ROUNDING).all())


@torch.inference_mode()
def must_matter(kind: str, model: Any, layers: int, text: Sequence[int]) -> None:
    """Raises RuntimeError where a text would be the same if some layer's attention saw one token only."""
    ids = torch.tensor([list(text)])
    before = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    for layer in range(layers):
        with blind(list(before.values()), layer) as called:
            said = model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0].argmax(-1)
        if called and said[PROMPT - 1 : -1].tolist() == list(text[PROMPT:]):
            raise RuntimeError(f"the text of {kind} does not depend on attention in layer {layer}: change its sizes")


def must_agree(kind: str, target: Target, tokens: Sequence[int]) -> None:
    """Raises RuntimeError where embedding and head, called by themselves, disagree with what the forward returns."""
    wanted, cache = Wanted(hidden=(0, FINAL)), target.new_cache(capacity=len(tokens), rows=len(tokens))
    with target.active():
        try:
            embedded = target.embed(tokens)
        except TargetError:
            return  # it says that they cannot be called
        output = target.forward(StepInput.of(cache, tokens, wanted=wanted))
        logits = target.head(output.hidden[FINAL])
    for said, made in ((output.hidden[0], embedded), (output.logits, logits)):
        if said is None or float((said - made).abs().max()) > ROUNDING * float(made.abs().max()):
            raise RuntimeError(f"{kind}'s embedding or head does something else by itself than in its forward")


@contextmanager
def blind(configs: Sequence[Any], layer: int) -> Iterator[list[int]]:
    """While inside, tokens see only themselves in this layer.

    Gives a list that stays empty where the layer attends by code of its own, and so cannot be made blind.
    """
    former = [config._attn_implementation for config in configs]
    called: list[int] = []

    def attention(module: Any, query: Any, key: Any, value: Any, *arguments: Any, **options: Any) -> Any:
        if module.layer_idx != layer:
            usual: Any = sys.modules[type(module).__module__]
            return usual.eager_attention_forward(module, query, key, value, *arguments, **options)
        called.append(layer)
        heads = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        return heads.transpose(1, 2).contiguous(), None

    AttentionInterface.register("blind", attention)
    transformers.AttentionMaskInterface.register("blind", transformers.masking_utils.eager_mask)
    try:
        for config in configs:
            config._attn_implementation = "blind"
        yield called
    finally:
        for config, implementation in zip(configs, former, strict=True):
            config._attn_implementation = implementation


def plain(error: Exception, name: str) -> str:
    """A refusal as one line, without the model's name and without numbers that another machine rounds otherwise."""
    line = str(error).split(";")[0].removeprefix(name).lstrip(": ")
    line = re.sub(r": by [\d.e+-]+, where .*? is rounding", "", line)
    return line.replace("|", "\\|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help="model types whose rows are printed; none: the page is written")
    asked = parser.parse_args().kinds
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    rows = []
    for kind in asked or kinds():
        rows.append(row_of(kind))
        print(rows[-1], file=sys.stdout if asked else sys.stderr, flush=True)
    if not asked:
        head = HEAD.format(count=len(rows), version=transformers.__version__)
        PAGE.write_text(head + "".join(f"{row}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
