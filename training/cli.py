"""The commands of training in specdec's command line: train, convert, show-sample, distill-data.

A trainable drafter is a module of this package with a ``Config`` dataclass and ``run(config)``. Heavy imports happen
within the commands, as in specdec's own.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from specdec.engine.config import RunConfig, WeightsOptions, resolve
from specdec.errors import ConfigError, check_choice, shown
from specdec.settings.files import check_place, refuse_existing
from specdec.settings.options import Given, with_options
from specdec.settings.parsing import check_positive

__all__ = ["convert", "distill_data", "show_sample", "train"]

_EXAMPLES = {"file": "configs/drafter/lookahead.yaml", "setting": "lookahead.window=15"}
TRAINABLE = ("kangaroo", "medusa", "eagle3", "dspark")
CONVERTED = ("kangaroo", "eagle", "dflash", "mtp")


@with_options(WeightsOptions, file="configs/train/kangaroo.yaml", setting="loop.lr=3e-4")
def train(
    given: Given,
    drafter: Annotated[str, typer.Argument(help="What to train: " + ", ".join(TRAINABLE))],
    data: Annotated[
        list[str] | None, typer.Option(help="Data instead of the file's: a file, or `stdlib`; may be repeated.")
    ] = None,
    out: Annotated[str | None, typer.Option(help="Output folder instead of the file's.")] = None,
    wandb: Annotated[str | None, typer.Option(help="off, offline or online.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell how many hours it will take.")] = False,
) -> None:
    """Train a drafter; the same command again continues a run that was interrupted."""
    module: Any = importlib.import_module(f"training.{check_choice('trainable drafter', drafter, TRAINABLE)}")
    own = {"data": data, "out": out, "loop": wandb and {"wandb": wandb}}
    values = {**given.values, **{name: value for name, value in own.items() if value}}
    given, where = replace(given, values=values), f"train {drafter}"
    more: dict[str, Any] = {}
    if drafter == "kangaroo" and given.file is None:
        from training.choice import settling

        more["settle"] = settling(module.Config, given, where)
    module.run(resolve(module.Config, given, where=where), dry_run=dry_run, **more)


def convert(
    drafter: str = typer.Argument(help=", ".join(CONVERTED)),
    source: Path = typer.Argument(help="Folder of the published checkpoint."),
    out: Path = typer.Option(..., help="Folder to write."),
    exit_layer: int | None = typer.Option(
        None, help="Kangaroo's layers below the adapter; the authors use 2 for 7B models, 3 for 13B."
    ),
    model: str | None = typer.Option(None, help="Its target; checked, and remembered in the result."),
    to: str | None = typer.Option(
        None, help="Write a head for other engines: speculators (vLLM), or eagle3, its authors' layout (SGLang)."
    ),
    verifier: str | None = typer.Option(None, help="The model's name or path there; none is --model's."),
) -> None:
    """Convert a published drafter checkpoint to one clean folder of safetensors, or a head to others' layouts."""
    check_choice("drafter to convert", drafter, CONVERTED)
    from specdec.models.transformers_target import TransformersTarget

    check_place(out, "the weights", folder=True)
    if (drafter == "kangaroo") != (exit_layer is not None):
        raise ConfigError(
            f"exit_layer is {shown(exit_layer)}; kangaroo needs it, as the file does not hold it, and {drafter} "
            f"{'has it in no other place' if drafter == 'kangaroo' else 'has none'}"
        )
    if to is not None and (model is None or drafter in ("kangaroo", "mtp")):
        raise ConfigError(f"to is {shown(to)}; it takes eagle or dflash heads, and --model, their target")
    target = None if model is None else TransformersTarget.from_pretrained(model)
    if to is not None and target is not None:
        from training.export import export

        export(source, out, drafter, target, layout=to, verifier=verifier or str(model))
        typer.echo(f"wrote {out}, in the layout of {to}")
        if to == "eagle3":
            typer.echo("it is for SGLang, never for vLLM, which would read each layer one early: take --to speculators")
        return
    if drafter == "mtp":
        from drafters.heads.mtp import convert_mtp

        found = convert_mtp(source, out, target)
        count = sum(map(math.prod, found.source.shapes.values()))
        typer.echo(f"wrote {out}: {count:,} parameters, {found.layers} layer{'s' * (found.layers > 1)}")
        return
    if exit_layer is None:
        from drafters.heads.loading import convert as convert_head

        head = convert_head(source, out, drafter, target)
        typer.echo(f"wrote {out}: {sum(p.numel() for p in head.parameters()):,} parameters, {head.config.kind}")
        return
    from training.convert import convert as convert_kangaroo

    adapter = convert_kangaroo(source, out, exit_layer=exit_layer, target=target)
    typer.echo(f"wrote {out}: {sum(p.numel() for p in adapter.parameters()):,} parameters, exit layer {exit_layer}")


def show_sample(
    data: list[str] = typer.Argument(help="Files as for train."),
    model: str = typer.Option("tiny", help="Whose tokenizer and chat template."),
    index: int = typer.Option(0, help="Which usable sample."),
    template: str = typer.Option("auto", help="auto, tokenizer, vicuna or plain."),
    tokens: int = typer.Option(1500, help="At most this many tokens."),
) -> None:
    """Print one sample with the trained tokens in green and the others dimmed."""
    from specdec.models.tokenizer import load_tokenizer
    from training.data import TextConfig, read_samples
    from training.skips import Skips

    tokenizer = load_tokenizer(model)
    skips = Skips()
    samples = list(read_samples(data, tokenizer, TextConfig(template=template, skip="any"), skips))
    if not 0 <= index < len(samples):
        raise ConfigError(f"index is {index}; the data holds {len(samples)} usable samples: {'; '.join(skips.lines())}")
    sample = samples[index]
    text = coloured(sample.tokens[:tokens], sample.trained[:tokens], tokenizer)
    console = Console()
    console.print(text, soft_wrap=True)
    console.print(f"[{sum(sample.trained)} of {len(sample.tokens)} tokens are trained]", markup=False)
    for line in skips.lines():
        console.print(line, markup=False)


@with_options(RunConfig, without=["parallel"], **_EXAMPLES)
def distill_data(
    given: Given,
    sources: Annotated[
        list[str],
        typer.Argument(help="ShareGPT or question files, text files, `stdlib`, or `self`: the model asks itself."),
    ],
    out: Annotated[Path, typer.Option(help="ShareGPT file to write: .json, or .jsonl for JSON lines.")],
    prompts: Annotated[
        int | None, typer.Option(help="Only so many prompts, evenly chosen; how many where the model asks itself.")
    ] = None,
    turns: Annotated[str, typer.Option(help="Human turns that are asked: first, or all.")] = "first",
    form: Annotated[
        str, typer.Option("--format", help="How they are asked: auto, chat, vicuna or plain (continued as text).")
    ] = "auto",
    prompt_tokens: Annotated[int, typer.Option(help="Length of a text's pieces, each of which is a prompt.")] = 128,
    batch: Annotated[int, typer.Option(help="How many prompts are answered at once.")] = 8,
    skip: Annotated[
        str, typer.Option(help="How many conversations of a file may ask nothing: few (3, or 1 in 100), or any.")
    ] = "few",
) -> None:
    """Let the target answer prompts, for a drafter to learn from; the same command continues what was interrupted.

    The model's options and the drafter are those of `generate`; the drafter changes the speed, not the answers.
    """
    from specdec.engine.load import load_run
    from specdec.engine.questions import FORMATS
    from training.distill import SELF, distill, own_prompts, prompts_of
    from training.skips import SKIPPING, Skips

    config, skips = resolve(RunConfig, given), Skips()
    check_choice("format", form, FORMATS)
    skipping: Any = check_choice("skip", skip, SKIPPING)
    check_positive(prompts=prompts, prompt_tokens=prompt_tokens, batch=batch)
    refuse_existing(out)
    engine = load_run(config)
    if SELF in sources and (len(sources) > 1 or prompts is None):
        raise ConfigError(f"{SELF!r} stands alone, with --prompts, as the model writes as many questions as are wanted")
    if sources == [SELF]:
        prompts_given = own_prompts(prompts or 0)
    else:
        prompts_given = prompts_of(
            sources, engine.tokenizer, turns=turns, prompt_tokens=prompt_tokens, skips=skips, skipping=skipping
        )
        for line in skips.lines():
            typer.echo(line)
    if prompts is not None and prompts < len(prompts_given):
        prompts_given = [prompts_given[number * len(prompts_given) // prompts] for number in range(prompts)]
    made = distill(
        engine,
        prompts_given,
        out,
        max_new_tokens=config.max_new_tokens,
        sampling=config.sampling,
        **config.stops,
        form=form,
        batch=batch,
        run={"model": config.model, "dtype": config.dtype},
    )
    for reason, count in made.skipped.most_common():
        typer.echo(f"{count} skipped: {reason}")
    plain = " --set text.template=plain" if "plain" in (form, prompts_given[0].format) else ""
    typer.echo(f"wrote {out}: {made.records} conversations; train with --data {out}{plain}")


def coloured(tokens: list[int], trained: list[bool], tokenizer: Any) -> Text:
    """The tokens as coloured text; consecutive tokens of one kind are decoded together, to keep characters whole."""
    from specdec.engine.text_stream import continuation

    text = Text()
    begin = 0
    for end in range(1, len(tokens) + 1):
        if end == len(tokens) or trained[end] != trained[begin]:
            style = "bold green" if trained[begin] else "dim"
            part = continuation(tokenizer, tokens[:begin], tokens[begin:end], skip_special_tokens=False)
            text.append(part, style=style)
            begin = end
    return text
