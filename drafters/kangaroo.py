"""Kangaroo (Liu, Tang, Liu, Ni, Wang and Han 2024, arXiv 2404.18911): the target's first layers draft for it.

A round runs the newest token through layers [0, l), keeps its feature, and lets the adapter guess the next token from
it; in the paper it ends after gamma guesses, or after one that the adapter does not trust (confidence <= eta), which is
kept. Without an eta what pays is drafted: a guess is kept if its chance is worth its own shallow pass and its row of
verification, and followed by another one if that one's chance is worth adapter and head, too. Verification enters at
layer l with the kept features, so no layer runs twice for a token, and draft and verification share one cache.

On a device the shallow pass of a guess is launched before its confidence is read, so that the device has work while the
host waits and decides. What the host learns thus costs nothing but a pass in vain where a guess is dropped, which is
rare, as rows cost little there; with a number of guesses that is settled beforehand nothing would be read, but
confidence, the best thing there is to go by, would not be used (docs/gpu.md has the sums).

The adapter's own cache lags behind by whatever it has not seen: the features of accepted rows beyond its last one wait
in ``_pending`` and go in with the next root. So full acceptance is no special case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from operator import eq
from typing import Any

import torch

from drafters.adapter import Adapter, AdapterConfig
from drafters.adapter_step import AdapterCache, AdapterStep
from drafters.vocabulary import DraftVocabulary
from drafters.weights import check_fit, weights_folder
from specdec import copies
from specdec.block import Block
from specdec.config import check_positive
from specdec.cost import pass_price
from specdec.draft import Draft, Entry
from specdec.drafter import BatchedSession, Context, DrafterBase, Observation
from specdec.errors import CheckpointError, ConfigError, shown
from specdec.passes import Forward, Pass, Passes
from specdec.sampling import Noise
from specdec.target import Target

__all__ = ["Kangaroo", "KangarooConfig", "check_adapter"]

_PRIOR, _PRIOR_WEIGHT = 0.6, 4.0  # share of accepted drafts before any was seen, and the drafts that it counts as


@dataclass(frozen=True, slots=True, kw_only=True)
class KangarooConfig:
    """Options.

    Attributes:
        adapter: folder of a trained adapter; None is the one in this package that was trained for the model.
        exit_layer: draft with no adapter at all: leave behind this layer through the target's own norm and head, for
            models that were trained for it (LayerSkip, Elhoushi et al. 2024, arXiv 2404.16710). The head is then run
            for every draft.
        eta: confidence at or below which a round ends; None takes the adapter's own, and where that is None, too, a
            round goes on while it pays: a draft is kept if its chance to be accepted is worth more than its shallow
            pass and row of verification cost, and the next one is made if its chance is worth adapter and head, too.
        gamma: most drafts of a round; None takes the adapter's own.
        branch: where a round ends for want of confidence, verify this many alternatives for its last token; 1 is the
            paper's chain; None takes the adapter's own.
        check_target: refuse a model that is not the one the adapter was trained for.
    """

    adapter: str | None = None
    exit_layer: int | None = None
    eta: float | None = None
    gamma: int | None = None
    branch: int | None = None
    check_target: bool = True

    def __post_init__(self) -> None:
        if self.eta is not None and not 0 <= self.eta <= 1:
            raise ConfigError(f"kangaroo.eta is {self.eta}; it is a probability, in [0, 1]")
        check_positive("kangaroo.", gamma=self.gamma, branch=self.branch, exit_layer=self.exit_layer)
        if self.adapter is not None and self.exit_layer is not None:
            raise ConfigError(
                f"kangaroo.exit_layer={shown(self.exit_layer)} drafts without an adapter, and kangaroo.adapter is "
                f"{self.adapter!r}; give one of them"
            )


class Kangaroo(DrafterBase):
    """A trained adapter and when to stop."""

    name = "kangaroo"
    Config = KangarooConfig

    def __init__(self, config: KangarooConfig, adapter: Adapter, target: Target) -> None:
        super().__init__(config)
        self.adapter = AdapterStep(adapter, target.norm)
        self.vocabulary = DraftVocabulary(adapter.draft_tokens, target)
        self.alike = self.adapter.alike and target.alike
        self.exit_layer = adapter.config.exit_layer
        self.eta = adapter.config.eta if config.eta is None else config.eta
        self.gamma = adapter.config.gamma if config.gamma is None else config.gamma
        self.branch = adapter.config.branch if config.branch is None else config.branch
        self.taps = frozenset({self.exit_layer})
        # What is read by a shallow pass, and by adapter and head for a guess.
        self.shallow_weights = target.layer_weights * self.exit_layer / target.num_layers
        head = (adapter.config.draft_vocab or target.vocab_size) * target.hidden_size
        self.guess_weights = head + sum(weight.numel() for weight in adapter.parameters())

    @classmethod
    def build(cls, config: KangarooConfig, target: Target) -> Kangaroo:
        """Load the adapter for a target.

        Raises:
            CheckpointError: no adapter, a broken one, or one of another model.
        """
        if config.exit_layer is None:
            adapter = Adapter.from_pretrained(weights_folder(config.adapter, target, "kangaroo.adapter"))
        else:
            size, vocabulary, layer = target.hidden_size, target.vocab_size, config.exit_layer
            adapter = Adapter(
                AdapterConfig(hidden_size=size, vocab_size=vocabulary, heads=1, exit_layer=layer, variant="none")
            )
        check_adapter(adapter.config, target, check_target=config.check_target)
        return cls(config, adapter.to(target.head_device, target.dtype).requires_grad_(False).eval(), target)

    def start(self, context: Context) -> KangarooSession:
        return KangarooSession(self, context)

    def guess(self, brought: Sequence[tuple[torch.Tensor, AdapterCache]]) -> Sequence[torch.Tensor]:
        """[d] logits of the token after the features [T, D] that each sequence brought, with its cache."""
        hidden = self.adapter.step([features for features, _ in brought], [cache for _, cache in brought])
        return self.adapter.logits(hidden, self.vocabulary.head).unbind()


def check_adapter(config: AdapterConfig, target: Target, *, check_target: bool = True) -> None:
    """Raises CheckpointError where an adapter cannot serve a target, or was trained for another one."""
    check_fit(config, target, Kangaroo.name, check_target=check_target)
    if config.exit_layer >= target.num_layers:
        raise CheckpointError(
            f"drafting leaves behind layer {shown(config.exit_layer)}, and the model has {target.num_layers} layers; "
            f"the exit layer must be in [1, {target.num_layers - 1}]"
        )


class KangarooSession(BatchedSession):
    def __init__(self, drafter: Kangaroo, context: Context) -> None:
        self._drafter, self._adapter, self._context = drafter, drafter.adapter, context
        self._forward = Forward(context.target, drafter.exit_layer)
        self._gamma = min(drafter.gamma, context.max_rows)  # more would not fit a step
        capacity = context.prompt_length + context.remaining + self._gamma
        self._cache = AdapterCache(drafter.adapter, capacity)
        self._committed = 0  # positions of the text that the cache holds, or that wait in _pending
        self._pending: list[torch.Tensor] = []  # [T, D] features of committed tokens that the adapter has not seen
        self._drafted: list[int] = []  # the tokens, from the root on, that it has seen in this round
        params = context.sampling
        self._processors = params.processors()
        self._reads_prefix = params.repetition_penalty != 1
        self._no_ids = torch.empty(1, 0, dtype=torch.long, device=drafter.adapter.norm.device)
        self._sampled = params.temperature > 0 and params.acceptance != "typical"
        self._coupled = self._sampled and params.acceptance == "match"
        target = context.target
        apart = copies.is_apart(target.device) and copies.is_apart(target.head_device)
        self._ahead = apart and drafter.branch == 1  # alternatives are in the same pass as the guess
        # In plain steps: a shallow pass, a guess, and keeping draft number 1, 2, ...: such a pass and a deep row.
        costs, length = context.costs, context.prompt_length
        self._shallow_price, self._guess_price = (
            pass_price(weights, context.target, costs, length)
            for weights in (drafter.shallow_weights, drafter.guess_weights)
        )
        steps, deep = costs.steps(length, self._gamma + 2)[1:], 1 - drafter.exit_layer / context.target.num_layers
        self._row_prices = [self._shallow_price + deep * (after - before) for before, after in pairwise(steps)]
        self._accepted, self._reached = _PRIOR * _PRIOR_WEIGHT, _PRIOR_WEIGHT

    def passes(self, room: int) -> Passes[Draft]:
        """One round: shallow pass, adapter, shallow pass, ... until gamma, the room, or a lack of confidence."""
        drafter, context = self._drafter, self._context
        most = min(self._gamma, room - 1, context.remaining - 1)
        tokens, parents, self._drafted = [context.root], [-1], []
        if most < 1:
            return Draft(tokens, parents)
        features = [(yield self._shallow(tokens, 0)).hidden]
        q: dict[int, torch.Tensor] = {}
        confident, last, reached = True, 0, 1.0
        while confident and last < most:
            logits = yield self._guess(tokens[last], features[-1])
            probabilities = self._probabilities(logits, tokens[1:])
            confidence, best = probabilities.max(-1)
            first_choice = self._choice(probabilities, best, len(tokens) - 1)
            # In one copy from the device; a number is exact in float64, too.
            numbers_of = copies.reading(torch.stack((confidence.double(), first_choice.double())))
            if self._ahead:
                guess = copies.Later(drafter.vocabulary.tokens_at(first_choice.clamp(min=0)[None]))
                features.append((yield self._shallow(guess, last + 1)).hidden)
            trust, number = numbers_of()
            # How probable the likeliest token is says less of a draw.
            reached *= (trust + self._chance) / 2 if self._sampled else trust
            if drafter.eta is None and reached <= self._row_prices[last]:
                break
            confident = self._goes_on(trust, reached, last)
            branch = 1 if confident else min(drafter.branch, room - len(tokens))
            numbers = [int(number)] if number >= 0 else []
            if branch > 1:
                numbers = self._alternatives(probabilities, branch, len(tokens) - 1)
            chosen = [drafter.vocabulary.token(number) for number in numbers]
            if not chosen:  # weights so large that the adapter says NaN
                break
            if self._sampled and not self._coupled:
                q[last] = drafter.vocabulary.spread(probabilities, 0.0)
            first = len(tokens)
            tokens += chosen
            parents += [last] * len(chosen)
            if not self._ahead:
                features.append((yield self._shallow(chosen, first, parents)).hidden)
            last = first
        cost = len(self._drafted) * self._guess_price + (len(features) - 1) * self._shallow_price
        hidden = torch.cat(features)[: len(tokens)]  # without what was run ahead in vain
        return Draft(tokens, parents, q=q, entry=Entry(drafter.exit_layer, hidden), cost=cost)

    def _goes_on(self, confidence: float, reached: float, drafts: int) -> bool:
        """Whether to draft behind one that ``drafts`` others precede; ``reached``: the chance that all are right."""
        if self._drafter.eta is not None:
            return confidence > self._drafter.eta
        return reached * self._chance > self._guess_price + self._row_prices[drafts + 1]

    @property
    def _chance(self) -> float:
        """Share of this text's drafts that were accepted, of those behind accepted ones."""
        return self._accepted / self._reached

    def observe(self, seen: Observation) -> None:
        features = seen.taps[self._drafter.exit_layer]
        if seen.draft is None:
            if self._adapter.config.attends:
                self._adapter.absorb(features.to(self._adapter.norm.device), self._cache)
            self._committed += len(features)
            return
        committed = [seen.draft.tokens[0], *seen.tokens[:-1]]
        known = sum(takewhile(bool, map(eq, self._drafted, committed)))
        if self._drafted:
            self._cache.length = self._committed + known
            accepted = len(seen.path) - 1
            self._accepted += accepted
            self._reached += accepted + (accepted < max(seen.draft.depths))
        self._committed += len(committed)
        if known < len(committed):
            self._pending += [features[row : row + 1] for row in seen.path[known:]]
        self._drafted = []

    def _shallow(self, rows: Sequence[int], first: int, parents: Sequence[int] = ()) -> Pass:
        """These tokens, the draft's rows from ``first`` on, through layers [0, l), into their slots."""
        context, target = self._context, self._context.target
        siblings: dict[str, Any] = {}
        if len(rows) > 1:  # under the last row of the chain
            siblings = {"parents": parents, "depths": [*range(first), *([first] * len(rows))]}
        block = Block(context.cache, rows, first=first, device=target.device, backend=target.backend, **siblings)
        return self._forward.of(block)

    def _guess(self, token: int, feature: torch.Tensor) -> Pass:
        """The adapter's guess after ``token``, whose feature is [1, D]; the first of a round brings what waited."""
        rows = torch.cat((*self._pending, feature)) if self._pending else feature
        self._pending.clear()
        self._drafted.append(token)
        return Pass(self._drafter.guess, (rows.to(self._adapter.norm.device), self._cache), self._drafter.alike)

    def _probabilities(self, logits: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
        """[d] the draft's distribution of the token after ``path``, under the processors that the target's is under."""
        if self._processors:
            vocabulary = self._drafter.vocabulary
            prefix = [*self._context.tokens, *path] if self._reads_prefix else []
            ids: Any = torch.tensor([prefix], dtype=torch.long, device=logits.device) if prefix else self._no_ids
            scores: Any = vocabulary.spread(logits.float(), -torch.inf)[None]  # processors know tokens by their ids
            logits = vocabulary.gather(self._processors(ids, scores)[0])
        return torch.softmax(logits, -1, dtype=torch.float64 if self._sampled else torch.float32)

    def _choice(self, probabilities: torch.Tensor, best: torch.Tensor, depth: int) -> torch.Tensor:
        """A token's number, int64 [], ``depth`` below the root: the likeliest, or a draw; -1 where there is none.

        In ``match`` the noise is the one that the target's own draw will use, so that the two tend to agree (Daliri et
        al. 2024). In ``reject`` a draw inverts the distribution function, for which one number does.
        """
        if self._coupled:
            return (probabilities.log() + self._noises(depth)).argmax()
        if not self._sampled:
            return best
        sums = probabilities.cumsum(-1)
        # The first sum that is not below a positive number ends a step up: its token has probability.
        drawn = sums[-1:] * self._context.noise.uniform(len(self._context.tokens), Noise.DRAFT, depth)
        return torch.where(sums[-1] > 0, torch.searchsorted(sums, drawn)[0], -1)

    def _noises(self, depth: int) -> torch.Tensor:
        """[d] the target's own noise where it draws the token."""
        return self._drafter.vocabulary.gather(self._context.noise.gumbel(len(self._context.tokens) + depth))

    def _alternatives(self, probabilities: torch.Tensor, count: int, depth: int) -> list[int]:
        """Numbers of up to ``count`` tokens, the first being ``_choice``'s; draws are without replacement."""
        if self._sampled and not self._coupled:
            chosen = list[torch.Tensor]()
            for after in range(count):
                chosen.append(self._choice(probabilities, probabilities, depth + after))
                probabilities = probabilities.scatter(0, chosen[-1].clamp(min=0)[None], 0)
            numbers = torch.stack(chosen)
        else:
            scores = probabilities.log() + self._noises(depth) if self._coupled else probabilities.log()
            values, numbers = scores.topk(min(count, len(scores)))
            numbers = numbers.where(torch.isfinite(values), -1)
        found: list[int] = numbers.tolist()
        return [number for number in found if number >= 0]
