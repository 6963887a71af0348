"""Layer skip: the target drafts with some of its own sublayers, without any training (SWIFT, arXiv 2410.06916).

Attention and MLP of a layer are left out together or apart. The attentions that run write keys and values to the draft
rows' slots in the target's own cache, behind the committed text; verification overwrites them. So there is no further
cache, weight or state, except for the choice of sublayers. The text decides that choice, see
:mod:`drafters.layer_skip.search`, or the options ``skip``, ``skip_attention`` and ``skip_mlp`` do.

With ``exit_layer`` the last layers are left out, for models that were trained for that (LayerSkip, Elhoushi et al.
2024, arXiv 2404.16710). The states at the exit are then kept for verification, as Kangaroo's drafter does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from drafters.heads.growing import Behind, GrowingSession, Tokens
from drafters.heads.growth import Growth
from drafters.heads.options import GrowingOptions
from drafters.kangaroo.drafter import Kangaroo, KangarooConfig
from drafters.layer_skip.forward import Skip
from drafters.layer_skip.search import best_skip, share_of
from drafters.shared.own_cache import OwnCache
from drafters.shared.vocabulary import DraftVocabulary
from specdec.drafter import Context, DrafterBase, Observation
from specdec.errors import ConfigError, shown
from specdec.settings.parsing import check_positive
from specdec.step.forward_passes import Pass, Passes
from specdec.step.step_io import StepInput
from specdec.target import Forward, Target

__all__ = ["LayerSkip", "LayerSkipConfig"]

_LOOKED_AT = 64  # last tokens of a text that decide the choice of layers


@dataclass(frozen=True, kw_only=True)
class LayerSkipConfig(GrowingOptions):
    """Options.

    Attributes:
        skip: layers to leave out, counted from 0.
        skip_attention: layers of which the attention alone is left out.
        skip_mlp: layers of which the MLP alone is left out. Where all three are empty, the text decides.
        exit_layer: exit behind this layer, through the target's own norm and head, for models that were trained for it
            (LayerSkip); no other layer is left out.
        tokens: most depth of a draft; each level costs a pass of the remaining layers.
        rows: most rows of a draft below the root; None for as many as pay.
        branch: most children of a row; 1 makes a chain.
        min_chance: extend and verify all rows that the draft expects to be reached with at least this chance, within
            ``rows`` and ``tokens``; None takes as many as pay by measured costs.
    """

    skip: list[int] = field(default_factory=list)
    skip_attention: list[int] = field(default_factory=list)
    skip_mlp: list[int] = field(default_factory=list)
    exit_layer: int | None = None
    tokens: int = 4
    where: ClassVar[str] = "layer_skip."

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("layer_skip.", exit_layer=self.exit_layer)
        for name in ("skip", "skip_attention", "skip_mlp"):
            own = getattr(self, name)
            if len({*own}) < len(own) or any(type(layer) is not int or layer < 0 for layer in own):
                raise ConfigError(f"layer_skip.{name} is {shown(own)}; it takes layers, each once, counted from 0")
            if own and self.exit_layer is not None:
                raise ConfigError(
                    f"layer_skip.exit_layer={shown(self.exit_layer)} leaves out all layers from there on, and "
                    f"layer_skip.{name} is {shown(own)}; give one of them"
                )

    @property
    def chosen(self) -> Skip:
        """The sublayers that the options name."""
        return Skip.of(self.skip, self.skip_attention, self.skip_mlp)


class LayerSkip(DrafterBase):
    """The target with some sublayers left out.

    Attributes:
        chosen: the sublayers to leave out; None until they are chosen.
    """

    name = "layer_skip"
    draws = False
    needs_draft = False
    Config = LayerSkipConfig

    def __init__(self, config: LayerSkipConfig, target: Target) -> None:
        super().__init__(config)
        self.vocabulary = DraftVocabulary(None, target)
        self.chosen = config.chosen or None

    @classmethod
    def build(cls, config: LayerSkipConfig, target: Target) -> DrafterBase:
        """The drafter for a target.

        Raises:
            ConfigError: the target has no such layers, or is run as a whole, or over several processes.
            CheckpointError: the target has no more than ``exit_layer`` layers.
        """
        if target.splits:
            raise ConfigError(
                "parallel='rows' runs all layers together, and layer_skip some of them alone; choose lookahead, medusa "
                "or auto"
            )
        target.check_layers(cls.name)
        if config.exit_layer is not None:
            early = KangarooConfig(exit_layer=config.exit_layer, gamma=config.tokens, branch=config.branch)
            made = Kangaroo.build(early, target)
            made.name = cls.name
            return made
        _check(config, target)
        return cls(config, target)

    def start(self, context: Context) -> LayerSkipSession:
        return LayerSkipSession(self, context)

    def choice(self, context: Context) -> Skip:
        """The sublayers to leave out for a sequence: the choice made on the first text serves all later texts.

        Where the text depends on the proposed rows, each sequence makes its own choice, from its prompt.
        """
        if self.config.chosen or (self.chosen is not None and not context.isolated):
            assert self.chosen is not None
            return self.chosen
        tokens = context.tokens[-_LOOKED_AT:]
        found = best_skip(context.target, tokens, self.config.tokens)
        if not context.isolated:
            self.chosen = found
        return found


def _check(config: LayerSkipConfig, target: Target) -> None:
    """Raises ConfigError where the target has no such layers, or none is left to run."""
    most, skip = target.num_layers, config.chosen
    for name in ("skip", "skip_attention", "skip_mlp"):
        given = getattr(config, name)
        if any(layer >= most for layer in given):
            raise ConfigError(
                f"layer_skip.{name} is {shown(given)}, and the model has {most} layers; they are counted from 0"
            )
    if len(skip.whole) >= most or most < 2:
        raise ConfigError(
            f"layer_skip leaves out {shown(sorted(skip.whole))}, and the model has {most} layer{'s' * (most > 1)}; at "
            "least one is run"
        )


class LayerSkipSession(GrowingSession):
    def __init__(self, drafter: LayerSkip, context: Context) -> None:
        target, options = context.target, drafter.config
        skip = drafter.choice(context)
        plain = target.layer_weights + target.vocab_size * target.hidden_size
        weights = plain * share_of(target, skip)
        depth = min(options.tokens, max(context.max_rows - 1, 1))
        super().__init__(context, drafter.vocabulary, options, depth=depth, weights=weights)
        self._forward = Forward(target, skip.plan(target.num_layers))
        # Rows that run need slots of the target's cache, which has room for the rows of one step.
        self._width = max(1, min(self._width, (context.max_rows - 1) // max(depth - 1, 1)))
        self._own = OwnCache(context.cache)
        self._logits: torch.Tensor | None = None

    def _ready(self) -> bool:
        self._own.begin()
        return True

    def observe(self, seen: Observation) -> None:
        self._learn(seen)

    def _begin(self, deepest: int) -> Passes[None]:
        step = self._own.text_rows([self._context.root])
        yield from self._run(step)
        self._own.read_text(step)

    def _behind(self, tree: Growth, level: Sequence[int], tokens: Tokens) -> Passes[Behind]:
        if tree.depths[level[0]]:
            yield from self._run(self._own.draft_rows(level, tree.parents, tokens))
        assert self._logits is not None
        return Behind(self._logits)

    def _run(self, step: StepInput) -> Passes[None]:
        output = yield Pass(self._forward, replace(step, plan=self._forward.plan))
        self._logits = output.logits
