"""Draft model: a smaller language model with the same vocabulary writes ahead (Leviathan et al. 2023, Alg. 1).

It runs like a target, with its own cache, which holds the same tokens as the target's: every text token but the root
(:mod:`drafters.shared.own_cache`).

Models with one tokenizer may pad their vocabularies to different sizes. The draft model drafts among the tokens that
both models have: its other logits are cut off before processing, and tokens that only the target has get probability 0
in q. The target's probability of those tokens stays in the residual.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from drafters.shared.fingerprint import known_tokenizer
from drafters.shared.own_cache import OwnCache
from drafters.shared.scored_tree import ScoredTree
from specdec.costs.curve import pass_price
from specdec.drafter import BatchedSession, Context, DrafterBase, Observation
from specdec.errors import ConfigError, shown
from specdec.models.loading import embedded_model
from specdec.models.transformers_target import TransformersTarget
from specdec.sampling.noise import Noise
from specdec.sampling.sampler import Sampler
from specdec.settings.parsing import check_positive
from specdec.step.forward_passes import Pass, Passes
from specdec.step.step_io import NOTHING, Wanted
from specdec.step.tree import Draft, Hints
from specdec.target import Target, forward_pass

__all__ = ["DraftModel", "DraftModelConfig", "embedded_draft_model", "fitting"]

_CONFIDENCE = 0.2  # see min_confidence
_CHUNK = 512  # text tokens per forward while catching up


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelConfig:
    """Options.

    Attributes:
        model: folder or hub id; None is the draft model in this package, which fits the embedded model.
        tokens: depth of a draft; each level costs a forward of the draft model.
        widths: children per row, level by level; 1 beyond the list's end. The empty list is a chain.
        min_confidence: a path is not extended where its likeliest extension has a smaller probability than this, by
            the draft model. None is 0.2 on a CPU. On a device it is 0: a draft then stays there until it is verified,
            while a stop has to be read, level by level; that pays for a large draft model only (docs/gpu.md).
        dtype: of the draft model; None takes the target's.
        check_tokenizer: refuse a model whose tokenizer is known to have another vocabulary than the target's, or one
            of another size whose tokenizer is not known. Off, any model is tried; output stays exact.
    """

    model: str | None = None
    tokens: int = 4
    widths: list[int] = field(default_factory=list)
    min_confidence: float | None = None
    dtype: str | None = None
    check_tokenizer: bool = True

    def __post_init__(self) -> None:
        check_positive("draft_model.", tokens=self.tokens)
        if len(self.widths) > self.tokens or any(type(width) is not int or width < 1 for width in self.widths):
            raise ConfigError(
                f"draft_model.widths is {shown(self.widths)}; it takes at most tokens = {shown(self.tokens)} numbers "
                "of 1 or more"
            )
        if self.min_confidence is not None and not 0 <= self.min_confidence < 1:
            raise ConfigError(f"draft_model.min_confidence is {self.min_confidence}; it must be in [0, 1)")


def embedded_draft_model() -> str:
    """Folder of the draft model for the embedded model."""
    return str(embedded_model().parent / "tiny-draft")


class DraftModel(DrafterBase):
    """The loaded model, shared by all sequences."""

    name = "draft_model"
    Config = DraftModelConfig

    def __init__(self, config: DraftModelConfig, model: Target) -> None:
        super().__init__(config)
        self.model = model

    @classmethod
    def build(cls, config: DraftModelConfig, target: Target) -> DraftModel:
        """Load the model onto the device of the target's head.

        Raises:
            ConfigError: none was named, or its vocabulary is not the target's.
            CheckpointError: no model there, or a broken one.
            TargetError: a model that specdec cannot drive.
        """
        path = embedded_draft_model() if config.model is None else config.model
        if config.model is None and not Path(path).is_dir():
            raise ConfigError(
                "draft_model.model is not set, and this package holds no draft model; give the folder or hub id of a "
                "smaller model with the target's tokenizer"
            )
        head = target.head(torch.zeros(1, target.hidden_size, dtype=target.dtype, device=target.head_device))
        model = TransformersTarget.from_pretrained(path, dtype=config.dtype or target.dtype, device=head.device)
        if config.check_tokenizer:
            _check_tokenizer(str(path), model, target)
        return cls(config, model)

    def warm_up(self, target: Target, rows: int, sequences: int) -> None:
        widths, level, nodes = self.config.widths, 1, 1
        for depth in range(self.config.tokens if widths else 0):
            level *= widths[depth] if depth < len(widths) else 1
            nodes += level
        self.model.warm_up(rows, sequences=sequences, levels=min(nodes, rows))

    def start(self, context: Context) -> DraftModelSession:
        return DraftModelSession(self.config, self.model, context)


def _check_tokenizer(path: str, model: Target, target: Target) -> None:
    """Raises ConfigError where a draft model's token ids are not, or may not be, the target's."""
    theirs, own = known_tokenizer(target), known_tokenizer(model)
    remedy = "take a model with the target's tokenizer, or draft_model.check_tokenizer=false to try it"
    if theirs is not None and own is not None and theirs != own:
        size = ", of the same size" if model.vocab_size == target.vocab_size else ""
        raise ConfigError(
            f"the draft model {path!r} has another vocabulary than the target{size}; {remedy} (output stays exact)"
        )
    if model.vocab_size != target.vocab_size and (theirs is None or own is None):
        raise ConfigError(
            f"the draft model {path!r} has a vocabulary of {model.vocab_size} tokens, the target one of "
            f"{target.vocab_size}, and no tokenizer beside the {'target' if theirs is None else 'draft model'} says "
            f"that only their padding differs; {remedy} (output stays exact)"
        )


class DraftModelSession(BatchedSession):
    def __init__(self, config: DraftModelConfig, model: Target, context: Context) -> None:
        self._config = config
        self._model = model
        self._context = context
        text = len(context.tokens) + context.remaining
        cache = model.new_cache(capacity=text, rows=max(context.max_rows, min(_CHUNK, text)))
        self._own = OwnCache(cache)
        # The target's processors on the draft model's logits, each row on its own prefix.
        params = context.sampling
        self._size = context.target.vocab_size
        self._sampler = Sampler(params, context.tokens, self._size, model.device)
        apart = model.launches
        trust = config.min_confidence
        self._least = (0.0 if apart else _CONFIDENCE) if trust is None else trust
        self._stays = apart and not self._least
        self._samples = params.temperature > 0
        self._draws = self._samples and params.acceptance in ("auto", "reject")
        self._draft = Draft.chain([context.root])
        weights = model.layer_weights + model.vocab_size * model.hidden_size
        self._price = pass_price(weights, context.target, context.costs, context.prompt_length)

    def passes(self, row_budget: int) -> Passes[Draft]:
        context = self._context
        depth = min(self._config.tokens, context.remaining - 1)
        self._own.begin()
        if depth < 1 or row_budget < 2 or len(context.tokens) + depth > self._model.context_length:
            self._draft = Draft.chain([context.root])
        else:
            logits, root = yield from self._catch_up()
            widths = fitting(self._config.widths, depth, row_budget)
            # A child that is drawn has to have a probability. Whether the second one has is known only by reading it.
            if self._stays and (max(widths) == 1 or not self._draws):
                self._draft = yield from self._grow_there(logits, root, widths)
            else:
                self._draft = yield from self._grow(logits, widths)
        return self._draft

    def observe(self, seen: Observation) -> None:
        self._own.commit(seen, self._draft.on_host().tokens)

    def _catch_up(self) -> Passes[tuple[torch.Tensor, torch.Tensor]]:
        """[1, V] logits of the root, after the text that the cache lacks; and the root, [1], on the model's device."""
        own, tokens = self._own, self._context.tokens
        while True:
            new = own.lacking(tokens, min(_CHUNK, own.cache.rows))
            last = own.cache.length + len(new) == len(tokens)
            read = self._known(new)
            step = own.text_rows(read, Wanted(np.array([len(new) - 1])) if last else NOTHING)
            output = yield forward_pass(self._model, step)
            own.read_text(step, root=last)
            if last:
                logits = output.given
                known = read is new or read[-1] == new[-1]
                there = known and self._model.launches
                root = output.tokens[-1:] if there else torch.tensor(new[-1:], device=logits.device)
                return self._shared(logits), root

    def _shared(self, logits: torch.Tensor) -> torch.Tensor:
        """The draft model's logits [R, V'] as [R, V] over the target's tokens; -inf for tokens it does not have."""
        more = self._size - logits.shape[-1]
        return F.pad(logits, (0, more), value=-math.inf) if more else logits

    def _known(self, tokens: Any) -> Any:
        """Tokens, or a tensor of these, as the draft model may read them: its last one for each that it lacks."""
        last = self._model.vocab_size - 1
        if last + 1 >= self._size:
            return tokens
        if isinstance(tokens, torch.Tensor):
            return tokens.clamp(max=last)
        return [min(token, last) for token in tokens]

    def _grow(self, logits: torch.Tensor, widths: list[int]) -> Passes[Draft]:
        """Draft level by level; ``logits``: of the root."""
        tree, q, level, passes = ScoredTree(self._context.root), dict[int, torch.Tensor](), [0], 1
        for depth, width in enumerate(widths):
            read = torch.empty(0)
            if self._sampler.unread is not None:
                paths = [tree.path(row) for row in level]
                read = torch.tensor(paths, dtype=torch.long, device=logits.device).view(len(level), depth)
            drawn = torch.softmax(self._sampler.together(logits, read).double(), -1)  # [R, V]
            children = self._children(drawn, level, depth, width)
            for row, probabilities, (best, below) in zip(level, drawn, children, strict=True):
                # A choice that rests on the path alone; one that looked at the drawn child would bias the output. Of
                # logits that are no distribution the largest probability is NaN, and nothing is drafted.
                if not tree.reach[row] * best >= self._least:
                    continue
                if self._draws:
                    q[row] = probabilities
                for token, probability in below:
                    tree.add(row, token, probability)
            level = [*range(level[-1] + 1, len(tree))]
            if not level or depth + 1 == len(widths):
                break
            logits = self._shared((yield self._run(tree.tokens[level[0] :], tree.parents)).logits)
            passes += 1
        return Draft(tree.tokens, tree.parents, q=q, hints=Hints(cost=passes * self._price))

    def _grow_there(self, logits: torch.Tensor, root: torch.Tensor, widths: list[int]) -> Passes[Draft]:
        """``_grow`` with full levels and without reads: the next level embeds tokens that are on the device."""
        parents, depths, level = [-1], [0], [0]
        tokens, paths = [root], root.new_empty(1, 0)
        q: dict[int, torch.Tensor] = {}
        for depth, width in enumerate(widths):
            values = self._sampler.together(logits, paths)
            if self._draws:
                (chances,) = torch.softmax(values.double(), -1)
                q[depth] = chances.nan_to_num(1 / self._size)  # the device cannot test for NaN without a wait
                values = q[depth].log()[None]
            if self._samples:
                values = values + self._noise(depth, depth)  # the rows of a chain are its depths
            best = values.topk(min(width, values.shape[-1])).indices
            tokens.append(best.flatten())
            parents += [row for row in level for _ in best[0]]
            depths += [depth + 1] * best.numel()
            level = list(range(level[-1] + 1, len(parents)))
            if depth + 1 < len(widths):
                logits = self._shared((yield self._run(tokens[-1], parents)).logits)
                paths = torch.cat((paths.repeat_interleave(best.shape[1], 0), tokens[-1][:, None]), 1)
        hints = Hints(cost=len(widths) * self._price)
        return Draft((), parents, q=q, hints=hints, on_device=torch.cat(tokens))

    def _run(self, tokens: Sequence[int] | torch.Tensor, parents: Sequence[int]) -> Pass:
        """The draft's last rows, which hold these tokens, through the model."""
        rows = range(len(parents) - len(tokens), len(parents))
        return forward_pass(self._model, self._own.draft_rows(rows, parents, self._known(tokens)))

    def _children(
        self, drawn: torch.Tensor, level: list[int], below: int, width: int
    ) -> list[tuple[float, list[tuple[int, float]]]]:
        """For each row of a level the largest probability, and its children: tokens with theirs.

        They are the likeliest, after noise where tokens are sampled. The ``width`` largest of log q + Gumbel noise are
        draws without replacement, in order (Kool et al. 2019). Where the verifier draws from the target, the noise is
        the target's own at that position, so that both tend to take the same token; a draft that the verifier holds
        against its q needs noise that nothing else has seen. All of a level is read from the device at once.
        """
        width = min(width, len(drawn[0]))
        parts: list[torch.Tensor] = []
        for row, probabilities in zip(level, drawn, strict=True):
            values = probabilities.log()
            if self._samples:
                values += self._noise(row, below)
            best, tokens = values.topk(width)
            parts += [probabilities.max()[None], best, tokens, probabilities.index_select(0, tokens)]
        numbers: list[float] = torch.cat([part.double() for part in parts]).tolist()
        size = 1 + 3 * width
        rows = [numbers[start : start + size] for start in range(0, len(numbers), size)]
        return [(row[0], _there(row[1 : 1 + width], row[1 + width : 1 + 2 * width], row[-width:])) for row in rows]

    def _noise(self, row: int, depth: int) -> torch.Tensor:
        """[V] for the draws of a row's children."""
        noise, position = self._context.noise, len(self._context.tokens)
        return noise.gumbel(position, Noise.DRAFT, row) if self._draws else noise.gumbel(position + depth)


def _there(values: list[float], tokens: list[float], probabilities: list[float]) -> list[tuple[int, float]]:
    """The tokens that have any probability, with it; a token is exact in float64."""
    triples = zip(values, tokens, probabilities, strict=True)
    return [(int(token), probability) for value, token, probability in triples if value > -math.inf]


def fitting(widths: Sequence[int], depth: int, row_budget: int) -> list[int]:
    """Children per row of each of ``depth`` levels, such that the full tree has at most ``row_budget`` rows.

    Decided before anything is drawn: were it decided row by row, what one branch drew could cost another its children.

    Example: widths [3, 2] at depth 3 are [3, 2, 1] in 16 rows, and [3, 2] in 12: three more do not fit.
    """
    fitted, level, left = list[int](), 1, row_budget - 1
    for deep in range(depth):
        width = min(widths[deep] if deep < len(widths) else 1, left // level)
        if not width:
            break
        fitted.append(width)
        level *= width
        left -= level
    return fitted
