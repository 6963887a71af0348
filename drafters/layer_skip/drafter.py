"""Layer skip: the target drafts with some of its own layers, and nothing is trained (SWIFT, arXiv 2410.06916).

The layers that are run write keys and values to the slots that the draft's rows have in the target's own cache, behind
what is committed; verification writes them anew. So there is no cache, no weight and no state besides the choice of
layers. It is made on the text, see :mod:`drafters.layer_skip.search`, or by ``skip``.

With ``exit_layer`` the last layers are left out, for models that were trained for it (LayerSkip, Elhoushi et al. 2024,
arXiv 2404.16710): what these rows were computed to is kept for verification, as Kangaroo's drafter does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from drafters.heads.growing import Behind, GrowingSession, check_chance
from drafters.heads.growth import Growth
from drafters.kangaroo.drafter import Kangaroo, KangarooConfig
from drafters.layer_skip.forward import SkippedForward
from drafters.layer_skip.search import best_skip, layer_costs
from drafters.shared.own_cache import OwnCache
from drafters.shared.vocabulary import DraftVocabulary
from specdec.drafter import Context, DrafterBase, Observation
from specdec.errors import ConfigError, shown
from specdec.settings.parsing import check_positive
from specdec.step.forward_passes import Pass, Passes
from specdec.target import Target

__all__ = ["LayerSkip", "LayerSkipConfig"]

_BRANCH = 8  # children of a row that are looked at
_LOOKED_AT = 64  # last tokens of a text, by which layers are chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSkipConfig:
    """Options.

    Attributes:
        skip: layers that are left out, counted from 0; empty to find them on the text.
        exit_layer: leave behind this layer, through the target's own norm and head, for models that were trained for it
            (LayerSkip); no other layer is left out.
        tokens: depth of a draft, at most; each level costs a pass of the layers that are kept.
        rows: rows of a draft below the root, at most; None leaves it to what pays.
        branch: children of a row, at most; 1 makes a chain. Under ``reject`` it is 1.
        min_chance: verify and extend whatever is reached with this chance, by the draft, as far as ``rows`` and
            ``tokens`` go; None takes what pays by measured costs.
    """

    skip: list[int] = field(default_factory=list)
    exit_layer: int | None = None
    tokens: int = 4
    rows: int | None = None
    branch: int = _BRANCH
    min_chance: float | None = None

    def __post_init__(self) -> None:
        check_positive(
            "layer_skip.", tokens=self.tokens, rows=self.rows, branch=self.branch, exit_layer=self.exit_layer
        )
        check_chance("layer_skip.", self.min_chance)
        if len({*self.skip}) < len(self.skip) or any(type(layer) is not int or layer < 0 for layer in self.skip):
            raise ConfigError(f"layer_skip.skip is {shown(self.skip)}; it takes layers, each once, counted from 0")
        if self.skip and self.exit_layer is not None:
            raise ConfigError(
                f"layer_skip.exit_layer={shown(self.exit_layer)} leaves out all layers from there on, and "
                f"layer_skip.skip is {shown(self.skip)}; give one of them"
            )


class LayerSkip(DrafterBase):
    """The target, and what of it drafts.

    Attributes:
        chosen: the layers that are left out; None until they were found.
    """

    name = "layer_skip"
    draws = False
    needs_draft = False
    Config = LayerSkipConfig

    def __init__(self, config: LayerSkipConfig, target: Target) -> None:
        super().__init__(config)
        self.vocabulary = DraftVocabulary(None, target)
        self.chosen = frozenset(config.skip) or None

    @classmethod
    def build(cls, config: LayerSkipConfig, target: Target) -> DrafterBase:
        """The drafter for a target.

        Raises:
            ConfigError: the target has no such layers, or gives none of its own to be run alone.
            CheckpointError: it ends before ``exit_layer``.
        """
        if getattr(target, "splits", False):
            raise ConfigError(
                "parallel='rows' runs all layers together, and layer_skip some of them alone; choose lookahead, medusa "
                "or auto"
            )
        if config.exit_layer is not None:
            early = KangarooConfig(exit_layer=config.exit_layer, gamma=config.tokens, branch=config.branch)
            made = Kangaroo.build(early, target)
            made.name = cls.name
            return made
        most = target.num_layers
        if any(layer >= most for layer in config.skip) or len(config.skip) >= most or most < 2:
            raise ConfigError(
                f"layer_skip.skip is {shown(config.skip)}, and the model has {most} layers; it takes some of them, in "
                f"[0, {most - 1}], and at least one is run"
            )
        return cls(config, target)

    def start(self, context: Context) -> LayerSkipSession:
        return LayerSkipSession(self, context)

    def choice(self, context: Context) -> frozenset[int]:
        """The layers to leave out for a sequence: those that were found on the first text, for all that come later.

        Where the text depends on the rows that are proposed, each sequence finds its own, of its prompt alone.
        """
        if self.config.skip or (self.chosen is not None and not context.isolated):
            assert self.chosen is not None
            return self.chosen
        tokens = context.tokens[-_LOOKED_AT:]
        found = best_skip(context.target, tokens, self.config.tokens)
        if not context.isolated:
            self.chosen = found
        return found


class LayerSkipSession(GrowingSession):
    def __init__(self, drafter: LayerSkip, context: Context) -> None:
        target, options = context.target, drafter.config
        skip, costs = drafter.choice(context), layer_costs(context.target)
        kept = sum(cost for layer, cost in enumerate(costs) if layer not in skip)
        weights = kept + target.vocab_size * target.hidden_size
        depth = min(options.tokens, max(context.max_rows - 1, 1))
        super().__init__(context, drafter.vocabulary, options, depth=depth, weights=weights)
        self._forward = SkippedForward(target, skip)
        # Rows that are run have slots of the target's cache, which has room for those of a step.
        self._width = max(1, min(self._width, (context.max_rows - 1) // max(depth - 1, 1)))
        self._own = OwnCache(context.cache, device=target.device, backend=target.backend)
        self._logits: torch.Tensor | None = None

    def _ready(self) -> bool:
        self._own.begin()
        return True

    def observe(self, seen: Observation) -> None:
        self._learn(seen)

    def _begin(self, deepest: int) -> Passes[None]:
        block = self._own.text_block([self._context.root])
        self._logits = yield Pass(self._forward, block)
        self._own.read_text(block)

    def _behind(self, grown: Growth, level: Sequence[int]) -> Passes[Behind]:
        if grown.depths[level[0]]:
            block = self._own.draft_block(level, grown.parents, [grown.tokens[node] for node in level])
            self._logits = yield Pass(self._forward, block)
        assert self._logits is not None
        return Behind(self._logits)
