"""A training run: the options that all drafters share, and the path from a config to weights with a card."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from accelerate import Accelerator
from annotated_types import Ge, Le
from torch import nn

from drafters.shared.fingerprint import fingerprint
from drafters.shared.vocabulary import token_counts
from drafters.shared.weights import check_fit
from specdec.engine.config import WeightsOptions
from specdec.engine.engine import Engine
from specdec.errors import ConfigError
from specdec.models.tokenizer import load_tokenizer
from specdec.models.transformers_target import TransformersTarget
from specdec.settings.files import check_place, held_folder
from specdec.settings.validation import check_fields
from specdec.step import torch_switches
from specdec.target import Target
from training.acceptance import EvalConfig, Written, continued_texts, judged_samples, standard_error
from training.card import Report, model_card, write_card
from training.checkpoint import precision_of
from training.choice import OPTIONS, Settle, keep_options
from training.data import TextConfig, load_samples
from training.features import FrozenTarget
from training.identity import identity, judging, sources
from training.interrupt import Stop, stopping
from training.judging import load_weights
from training.log import read_log
from training.loop import LoopConfig, half_is_fast, new_accelerator, train
from training.packing import Batch, pack
from training.split import Sample, digest_of_samples, prompt_of, prompts_in

__all__ = ["DrafterTraining", "LabelConfig", "TrainConfig", "frozen_target", "parameters_of", "run_training", "started"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig(WeightsOptions):
    """The options of any drafter's training; ``model`` and ``dtype`` are the frozen target's.

    Attributes:
        data: ``stdlib``, or files with conversations or text; see :mod:`specdec.settings.formats`.
        eval_data: the same for evaluation; if empty, a share of ``data`` is held out.
        out: folder for checkpoint, log and result.
        start: folder of weights to train further, such as this package's own, for example on other data; they keep
            their sizes. None trains new ones.
        labels: ``soft`` for the target's distribution, or ``hard`` for one token; see the drafter's own config.
        keep_features: GiB of the target's features to keep in memory, so that later epochs need no forward of the
            target.
        features_folder: folder on disk that keeps them instead, for later runs and for other heads of the same layers;
            4.5 KiB a token for SmolLM2's last states and three layers.
        save_dtype: dtype of the weights' file, ``float32`` or ``bfloat16``; checkpoints are float32.
        text, loop, evaluation: see their classes.

    Raises:
        ConfigError: there is no data, or ``labels`` has another value.
    """

    data: list[str] = field(default_factory=list)
    eval_data: list[str] = field(default_factory=list)
    out: str = "runs/drafter"
    start: str | None = None
    labels: Literal["soft", "hard"] = "soft"
    keep_features: Annotated[float, Ge(0), "a size in GiB, 0 or more"] = 4.0
    features_folder: str | None = None
    save_dtype: Literal["float32", "bfloat16"] = "float32"
    text: TextConfig = field(default_factory=TextConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        WeightsOptions.__post_init__(self)
        check_fields(self)
        if not self.data:
            raise ConfigError("there is no data; give --data FILE (ShareGPT's JSON, or text), or data: [stdlib]")


def parameters_of(module: nn.Module) -> int:
    """The number of a module's parameters."""
    return sum(p.numel() for p in module.parameters())


def frozen_target(options: WeightsOptions, device: torch.device) -> tuple[Target, str]:
    """The target, and a line about it; where ``auto`` leaves its dtype open, it is one that is fast on the device.

    Native layers are equally fast in both, as they widen weights while reading them.

    Raises:
        SpecdecError: there is no model, or one that specdec cannot run.
    """
    target = TransformersTarget.from_pretrained(options.model, dtype=options.dtype, device=device)
    reason = ""
    slow = target.dtype is torch.bfloat16 and target.options["runner"] != "native" and not half_is_fast(device)
    if options.dtype == "auto" and slow:
        target = TransformersTarget.from_pretrained(options.model, dtype=torch.float32, device=device)
        reason = ", as bfloat16 is slow here"
    dtype = str(target.dtype).removeprefix("torch.")
    return target, f"the target runs in {dtype} on {target.device}, {target.options['runner']} layers{reason}"


def started(kind: Any, folder: str, target: Target, drafter: str) -> Any:
    """The weights in a folder, of class ``kind``, to train further for a target.

    Raises:
        CheckpointError: there are none, or they have another size.
    """
    module = kind.from_pretrained(folder)
    check_fit(module.config, target, drafter, check_target=False)
    module.config = replace(module.config, target=fingerprint(target))
    return module.float()


@dataclass(frozen=True, kw_only=True)
class LabelConfig(TrainConfig):
    """The options of a training by the target's distribution, beside those of TrainConfig.

    Attributes:
        labels: ``soft`` for the target's distribution, or ``hard`` for its largest token.
        top_k: number of tokens to keep of the soft labels, for large vocabularies; 0 keeps all.
        hard_share: share of the loss on the text's own next token, which is what counts at T=0; the rest is the loss on
            ``labels``.
    """

    top_k: Annotated[int, Ge(0), "an integer >= 0, where 0 keeps the whole distribution"] = 0
    hard_share: Annotated[float, Ge(0), Le(1), "a number in [0, 1]"] = 0.0


class DrafterTraining:
    """A drafter's module, its frozen target and its evaluation texts; see :class:`training.judging.Trainable`.

    Subclasses add ``loss``, ``evaluate`` and ``card``, a :class:`training.card.CardText`.

    Attributes:
        least: trained tokens in a row from which on there is a loss.

    Args:
        module: the trained module; it has ``draft_tokens``, a dataclass ``config`` and ``save_pretrained``.
        target: the target.
        texts: texts that the target wrote.
        config: the run's config.
        layers: the target's layers whose features ``loss`` reads.
    """

    metric = "tokens_per_step"
    least = 1

    def __init__(
        self,
        module: Any,
        target: Target,
        texts: Sequence[Written],
        config: TrainConfig,
        layers: Sequence[int] = (),
    ) -> None:
        self.module, self.texts, self.config = module, texts, config
        keep = int(config.keep_features * 2**30)
        folder = None if config.features_folder is None else Path(config.features_folder)
        self.frozen = FrozenTarget(target, layers, draft_tokens=module.draft_tokens, keep=keep, folder=folder)

    @property
    def judges(self) -> bool:
        """Whether there are texts to judge by."""
        return bool(self.texts)

    def evaluation_seconds(self, clock: Callable[[], float]) -> float:
        """The expected seconds of an evaluation, by that of one text."""
        if not self.texts:
            return 0.0
        texts, self.texts = self.texts, self.texts[:1]
        try:
            began = clock()
            self.evaluate()
            return (clock() - began) * len(texts)
        finally:
            self.texts = texts

    def report(self, folder: Path, best: Mapping[str, float], others: Sequence[Written]) -> Report:
        """Judge the weights in a folder by other texts than those that chose them, if there are some."""
        chose, texts = len(self.texts), others or self.texts
        if not texts:
            return Report(chose=0)
        load_weights(self.module, folder)
        self.module.eval()
        self.texts = texts
        figures = self.evaluate() if others else {name: value for name, value in best.items() if name != "step"}
        new, steps = [], []
        for text in texts:
            self.texts = [text]
            new.append(len(text.tokens) - text.prompt)
            steps.append(new[-1] / self.evaluate()[self.metric])
        return Report(
            chose=chose,
            others=len(others),
            longest=max(text.prompt for text in texts),
            figures=figures,
            spread=standard_error(new, steps),
        )

    def evaluate(self) -> dict[str, float]:
        """See :class:`training.judging.Trainable`."""
        raise NotImplementedError

    def batch_of(self, text: Written, first: int, end: int) -> Batch:
        """A batch of one text, whose targets are the positions [first, end)."""
        tokens = torch.tensor([text.tokens], device=self.frozen.target.device)
        places = torch.arange(len(text.tokens), device=tokens.device)
        return Batch(tokens, places[first:end], places[None], torch.zeros_like(tokens))

    def save(self, folder: Path) -> None:
        """Write the module's weights for use."""
        self.module.save_pretrained(folder, dtype=getattr(torch, self.config.save_dtype))


@torch_switches.makes
def run_training(
    config: TrainConfig,
    option: str,
    make: Callable[[Any, Target, torch.Tensor], Any],
    kind: Any,
    *,
    dry_run: bool = False,
    settle: Settle | None = None,
) -> dict[str, float]:
    """Train as a config says; returns the best checkpoint's step and evaluation.

    Args:
        config: the run's config.
        option: name of the drafter's option for the weights' folder, such as ``medusa.heads``.
        make: makes the module to train from the config, the target and [V] counts of the data's tokens.
        kind: class of :class:`DrafterTraining` that trains it.
        dry_run: only tell how long the run is expected to take, and write nothing.
        settle: completes the config once the target is known.

    Raises:
        SpecdecError: an error of the config, the data, the model or the disk; see the parts.
    """
    out = Path(config.out)
    check_place(out, "a training run", folder=True)
    if config.features_folder is not None:
        check_place(Path(config.features_folder), "features", folder=True, option="features_folder")
    loop, former = config.loop, precision_of(out / "checkpoint.safetensors")
    if loop.precision == "auto" and former is not None:  # a new timing could choose another precision
        loop = replace(loop, precision=former)
    accelerator = new_accelerator(loop)
    main = accelerator.is_main_process
    with held_folder(out) if main and not dry_run else nullcontext(), stopping(main) as stop:
        return _run(config, option, make, kind, accelerator, out, stop, dry_run, settle)


def _run(
    config: TrainConfig,
    option: str,
    make: Callable[[Any, Target, torch.Tensor], Any],
    kind: Any,
    accelerator: Accelerator,
    out: Path,
    stop: Stop,
    dry_run: bool,
    settle: Settle | None,
) -> dict[str, float]:
    say, main = accelerator.print, accelerator.is_main_process
    target, why = frozen_target(config, accelerator.device)
    say(f"{why}; the drafter's in {_precision(accelerator)}")
    if settle is not None:
        config, line = settle(target)
        say(line)
    if main and not dry_run and not (out / OPTIONS).exists():
        keep_options(config, out)
    tokenizer = load_tokenizer(config.model)
    learnt, held = load_samples(
        config.data, config.eval_data, config.text, tokenizer, say, vocab_size=target.vocab_size
    )
    module = make(config, target, token_counts((sample.tokens for sample in learnt), target.vocab_size))
    windows = pack(learnt, config.text.length)
    if windows.longest < kind.least:
        raise ConfigError(
            f"no answer of the data has more than {windows.longest} trained tokens in a row, and {option} learns from "
            f"{kind.least}; give longer answers, or train kangaroo, which learns from each token"
        )
    chosen, others = judged_samples(held, config.evaluation)
    written = _Written(Engine(target), config.evaluation, out if main and not dry_run else None, stop)
    part = kind(module, target, written(chosen[:2] if dry_run else chosen), config)
    text = part.card()
    say(
        f"{len(learnt)} samples, {len(held)} held out ({len(prompts_in(held))} prompts, of which {len(chosen)} choose "
        f"the best weights); {len(windows)} windows of {windows.length} tokens, {windows.trained} trained; {text.about}"
    )
    if config.features_folder is not None:
        stop.kept = " and ".join(filter(None, (stop.kept, f"features are in {config.features_folder!r}")))
        size = part.frozen.bytes_of(len(windows), windows.length) / 2**30
        say(
            f"features of all windows take {size:.2f} GiB in {config.features_folder!r}, which has {_free(config)} free"
        )
    drafter, _, weights = option.partition(".")
    run = identity(config, {weights: asdict(module.config)}, accelerator.mixed_precision)
    run |= {"drafter": drafter, "held_out": digest_of_samples(held), "sources": sources(config)}
    told = {"run": run, "judging": judging(config), "stop": stop, "dry_run": dry_run}
    best = train(part, windows, config.loop, accelerator, out, **told)
    if main and not dry_run:
        place = f"step {best['step']:.0f}"
        report = part.report(out / "best", best, written(others))
        write_card(out / "best", model_card(text, config, windows, read_log(out / "log.jsonl"), report))
        say(f"best at {place}, {report.sentence}; to use it: --drafter {drafter} --set {option}={config.out}/best")
        return {"step": best["step"], **report.figures}
    return best


def _precision(accelerator: Accelerator) -> str:
    """The precision of the training, in words."""
    if accelerator.mixed_precision != "bf16":
        return "float32"
    slow = not half_is_fast(accelerator.device)
    return "bfloat16, which is slow here (loop.precision=auto takes float32 in a new run)" if slow else "bfloat16"


def _free(config: TrainConfig) -> str:
    """The room on the disk of the features."""
    place = Path(str(config.features_folder)).absolute()
    there = next(one for one in (place, *place.parents) if one.exists())
    return f"{shutil.disk_usage(there).free / 2**30:.2f} GiB"


class _Written:
    """Lets the target write texts, and keeps them in a run's folder."""

    def __init__(self, engine: Engine, judged: EvalConfig, folder: Path | None, stop: Stop) -> None:
        target = engine.target
        by = f"{fingerprint(target)} {target.dtype} {target.options['runner']}"
        self._engine, self._judged, self._stop = engine, judged, stop
        self._kept = None if folder is None else folder / f"held_out.{prompt_of(by)[:8]}.jsonl"

    def __call__(self, samples: Sequence[Sample]) -> list[Written]:
        try:
            return continued_texts(self._engine, samples, self._judged, self._kept)
        finally:
            if self._kept is not None and self._kept.exists() and not self._stop.kept:
                self._stop.kept = f"the held-out texts that were written are in {str(self._kept)!r}"
