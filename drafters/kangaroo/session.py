"""A round of Kangaroo: shallow passes, guesses behind them, and the rule by which it stops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from drafters.kangaroo.worth import Worth
from drafters.shared.own_cache import Nodes, OwnCache
from drafters.shared.vocabulary import DraftVocabulary, coupled, processed, top_k
from specdec.drafter import BatchedSession, Context, Observation
from specdec.sampling.noise import Noise
from specdec.step import device_copies
from specdec.step.forward_passes import Pass, Passes
from specdec.step.step_io import Entering, LayerPlan, StepInput
from specdec.step.step_output import StepOutput
from specdec.step.tree import Draft, Hints
from specdec.target import forward_pass

__all__ = ["KangarooSession"]


@dataclass(slots=True)
class _Growing:
    """A round's draft so far.

    Attributes:
        tokens: those that the host knows; those that stay on a device are ``unread``.
        nodes: the rows to guess behind, of one depth.
        reached: for each of these the chance that all above it and itself are right.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    unread: list[torch.Tensor] = field(default_factory=list)
    q: dict[int, torch.Tensor] = field(default_factory=dict)
    nodes: range = range(1)
    reached: list[float] = field(default_factory=lambda: [1.0])

    def add(self, above: Sequence[int]) -> None:
        """Add rows, one depth deeper, by their parents; the first ones are ``reached``."""
        first, depth = len(self.parents), self.depths[self.nodes[0]] + 1
        self.parents += above
        self.depths += [depth] * len(above)
        self.nodes = range(first, first + len(self.reached))


class KangarooSession(BatchedSession):
    """One sequence's rounds; ``drafter`` is a :class:`drafters.kangaroo.drafter.Kangaroo`."""

    def __init__(self, drafter: Any, context: Context) -> None:
        self._drafter, self._adapter, self._context = drafter, drafter.adapter, context
        self._plan = LayerPlan(drafter.exit_layer)
        self._gamma = min(drafter.gamma, context.max_rows)  # more would not fit a step
        most = min(self._gamma * drafter.branch, context.max_rows)  # rows below the root
        text = context.prompt_length + context.remaining
        self._own = OwnCache(drafter.adapter.new_cache(text, most + 1))  # a row reads the feature of its own token
        self._draft = Draft.root(context.root)  # this round's
        params = context.sampling
        self._temperature, self._processors = params.temperature, params.processors()
        self._reads_prefix = params.repetition_penalty != 1
        self._ids: Any = torch.empty(1, 0, dtype=torch.long, device=drafter.adapter.norm.device)  # where they are read
        sampled = params.temperature > 0 and params.acceptance != "typical"
        self._draws = sampled and params.acceptance == "reject"  # from q, not by the target's noise
        self._noise = drafter.vocabulary.noise(context.noise) if sampled and not self._draws else None
        target = context.target
        self._apart = apart = target.launches
        self._stays = apart and drafter.eta is None
        self._wide = drafter.eta is None and not (apart or self._draws or self._reads_prefix)  # guess behind siblings
        self._ahead = apart and drafter.eta is not None and drafter.branch == 1  # else reads decide the rows
        self._worth = Worth(drafter, context, wide=self._wide)
        # For each row that the adapter has run: the chance of its likeliest token, and the kept tokens, or their place.
        self._guessed: list[tuple[float, list[int] | slice]] = []

    def passes(self, row_budget: int) -> Passes[Draft]:
        """One round: shallow pass, adapter, shallow pass, ... until gamma, the row budget, or a lack of confidence."""
        drafter, context, worth = self._drafter, self._context, self._worth
        most = min(self._gamma, row_budget - 1, context.remaining - 1)
        self._own.begin()
        self._guessed = []
        if most < 1:
            self._draft = Draft.root(context.root)
            return self._draft
        if self._reads_prefix:
            self._ids = torch.tensor([context.tokens], device=self._ids.device)
        tree = _Growing([context.root])
        root: StepOutput = yield self._shallow(tree.tokens, tree.parents, tree.depths)
        features, cost = [root.out], 0.0
        if self._stays:
            tree.unread.append(root.tokens)
        while tree.nodes and tree.depths[tree.nodes[0]] < most and len(tree.parents) < row_budget:
            scores = self._scores((yield from self._guess(tree.nodes, features[-1], tree.parents)))
            cost += worth.guess_price * worth.step(len(tree.nodes))
            left = min(drafter.branch, row_budget - len(tree.parents))
            chosen: Sequence[int] | torch.Tensor
            if self._stays:
                chosen, above, hidden = *self._chosen_there(tree, scores[0], left), None
            else:
                chosen, above, hidden = yield from self._chosen_here(tree, scores, left)
            if not above:
                break
            if self._reads_prefix:
                newest = chosen[:1] if isinstance(chosen, torch.Tensor) else torch.tensor(chosen[:1])
                self._ids = torch.cat((self._ids, newest.to(self._ids.device)[None]), 1)
            tree.add(above)
            if hidden is None:
                hidden = (yield self._shallow(chosen, tree.parents, tree.depths)).out
            features.append(hidden)
        hints = Hints(cost=cost + (len(features) - 1) * worth.shallow_price)
        entry = Entering(drafter.exit_layer, torch.cat(features))
        there = torch.cat([own.to(self._ids.device) for own in tree.unread]) if self._stays else None
        known = () if self._stays else tree.tokens
        self._draft = Draft(known, tree.parents, q=tree.q, entry=entry, hints=hints, on_device=there)
        return self._draft

    def _chosen_there(self, tree: _Growing, scores: torch.Tensor, most: int) -> tuple[torch.Tensor, list[int]]:
        """Choose among the tokens behind a row where they are, unread; the tokens, and each one's parent row."""
        vocabulary, last, first = self._drafter.vocabulary, tree.nodes[0], len(tree.parents)
        _, places, drawn_from = (self._draw if self._draws else self._rank)(scores, tree.depths[last])
        count, tree.reached, chance = self._worth.unread(tree.reached[0], first, min(most, len(places)))
        self._guessed.append((chance, slice(first, first + count)))
        tree.unread.append(vocabulary.tokens_at(places[:count].clamp(min=0)))
        if drawn_from is not None:
            tree.q[last] = vocabulary.spread(drawn_from, 0.0)
        return tree.unread[-1], [last] * count

    def _chosen_here(
        self, tree: _Growing, scores: torch.Tensor, most: int
    ) -> Passes[tuple[list[int], list[int], torch.Tensor | None]]:
        """As :meth:`_chosen_there`, reading all that are guessed; and the features that were computed meanwhile."""
        drafter, vocabulary, nodes, drawn_from, hidden = self._drafter, self._drafter.vocabulary, tree.nodes, None, None
        last, first = nodes[0], len(tree.parents)
        listed = None if self._draws else self._listed(scores, tree.depths[last])
        if listed is None:
            shares, places, drawn_from = (self._draw if self._draws else self._rank)(scores[0], tree.depths[last])
            # In one copy from the device; a number is exact in float64, too.
            read = device_copies.reading(torch.cat((places.double(), shares.double())))
            if self._ahead:
                ahead = vocabulary.tokens_at(places[:1].clamp(min=0))
                depths = [*tree.depths, tree.depths[last] + 1]
                hidden = (yield self._shallow(ahead, [*tree.parents, last], depths)).out
            numbers_read = read()
            listed = [(numbers_read[: len(places)], numbers_read[len(places) :])]
        guesses = [
            [(int(number), chance) for number, chance in zip(*one, strict=True) if chance > 0 and number >= 0]
            for one in listed
        ]
        if not guesses[0]:  # NaN, from very large weights
            return [], [], None
        if drafter.eta is None:
            above, numbers, tree.reached = self._worth.chosen(nodes, tree.reached, guesses, first, most)
        else:
            numbers, tree.reached = self._trusted(guesses[0], drawn_from, most)
            above = [last] * len(numbers)
        chosen: list[int] = [vocabulary.token(number) for number in numbers]
        tree.tokens += chosen
        for node, guess in zip(nodes, guesses, strict=True):
            kept = [token for token, row in zip(chosen, above, strict=True) if row == node]
            # The likeliest one is judged, kept or not.
            judged = kept or [vocabulary.token(number) for number, _ in guess[:1]]
            self._guessed.append((guess[0][1] if guess else 0.0, judged))
        if above and drawn_from is not None:
            tree.q[last] = vocabulary.spread(drawn_from, 0.0)
        return chosen, above, hidden

    def _trusted(
        self, guess: Sequence[tuple[int, float]], drawn_from: torch.Tensor | None, most: int
    ) -> tuple[list[int], list[float]]:
        """The likeliest token's number, and that a guess follows; with no confidence, its alternatives, and none."""
        assert self._drafter.eta is not None
        if guess[0][1] > self._drafter.eta:
            return [guess[0][0]], [1.0]
        count = min(most, len(guess))
        if drawn_from is not None and count > 1:
            return self._alternatives(drawn_from, count), []
        return [number for number, _ in guess[:count]], []

    def missed(self) -> None:
        self._own.miss()

    def observe(self, seen: Observation) -> None:
        features, own = seen.taps[self._drafter.exit_layer], self._own
        if seen.draft is None:
            if len(self._context.tokens) > self._context.prompt_length:  # it rests, and a pass now would be for one row
                own.defer(features)
            elif self._adapter.config.attends:
                self._adapter.absorb(features.to(self._adapter.norm.device), own.cache)
            return
        tokens = self._draft.on_host().tokens
        known = own.commit(seen, tokens)
        for row, token in zip(known, seen.tokens, strict=False):
            if row >= len(self._guessed):
                break
            chance, guess = self._guessed[row]
            chosen = guess if isinstance(guess, list) else tokens[guess]
            self._worth.learn(chance, chosen, token)
        own.defer(features, seen.path[len(known) :])
        self._guessed = []

    def _shallow(self, rows: Sequence[int] | torch.Tensor, parents: Sequence[int], depths: Sequence[int]) -> Pass:
        """These tokens, the draft's last rows, through layers [0, l), into their slots."""
        tree = None if depths[-1] == len(depths) - 1 else (parents, depths)
        step = StepInput.of(self._context.cache, rows, tree, first=len(depths) - len(rows), plan=self._plan)
        return forward_pass(self._context.target, step)

    def _guess(self, rows: Sequence[int], features: torch.Tensor, parents: Sequence[int]) -> Passes[torch.Tensor]:
        """[N, d] logits after some rows, whose features are computed first; the root's rows fill the cache's gap."""
        own, features, begins = self._own, features[: len(rows)], rows[0] == 0
        if begins:
            features = own.catch_up(features)
        step = own.text_rows(range(len(features))) if begins else own.draft_rows(rows, parents)
        nodes = Nodes(step, features.to(self._adapter.norm.device))
        logits: torch.Tensor = yield Pass(self._drafter.guess, nodes, self._drafter.batch_invariant)
        if begins:
            own.read_text(step)
        return logits

    def _scores(self, logits: torch.Tensor) -> torch.Tensor:
        """[N, d] guesses, under the processors that the target's logits are under."""
        if not self._processors:
            return logits
        vocabulary: DraftVocabulary = self._drafter.vocabulary
        scores = logits.float()
        if not self._reads_prefix:
            return processed(scores, self._ids, self._processors)
        scores = vocabulary.spread(scores[0], -torch.inf)  # by the tokens' ids
        return vocabulary.gather(processed(scores[None], self._ids, self._processors)[0])[None]

    def _listed(self, scores: torch.Tensor, depth: int) -> list[tuple[Sequence[float], Sequence[float]]] | None:
        """Per guess the numbers of the likeliest tokens, likeliest first, with their chances to be the target's choice.

        All guesses are behind rows of one depth. None where reading them would wait for a device.
        """
        if self._apart:
            return None
        listed, place = list[tuple[Sequence[float], Sequence[float]]](), self._place(depth)
        for row in scores:
            one = top_k(row, self._drafter.branch, self._noise, place, self._temperature)
            if one is None:
                shares, places, _ = self._rank(row, depth)
                listed.append((places.tolist(), shares.tolist()))
            else:
                listed.append((one[0][0], one[1][0]))
        return listed

    def _rank(self, scores: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor, None]:
        """The chances of one guess's likeliest tokens, and their numbers."""
        if self._noise is not None:
            scores = coupled(scores, self._noise.gumbel(self._place(depth)), self._temperature)
        best = torch.softmax(scores, -1, dtype=torch.float32).topk(min(self._drafter.branch, len(scores)))
        return best.values, best.indices, None

    def _draw(self, scores: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The chance and the index of one token that is drawn from q; and q.

        The chance depends on q and on the record of other draws, never on the token itself.
        """
        q = torch.softmax(scores, -1, dtype=torch.float64)
        if self._stays:  # the device cannot test for an adapter's NaN without a wait
            q = q.nan_to_num(1 / len(q))
        return (q.max()[None] + self._worth.accepted.share) / 2, self._choice(q)[None], q

    def _place(self, depth: int) -> int:
        """The position of a token that is guessed behind a row of this depth."""
        return len(self._context.tokens) + depth

    def _choice(self, q: torch.Tensor, before: int = 0) -> torch.Tensor:
        """A draw's number, int64 [], behind ``before`` siblings; -1 where there is none.

        It inverts the distribution function, for which one number does.
        """
        sums = q.cumsum(-1)
        drafted = len(self._own.rows) - 1 + before
        # The first sum that is not below a positive number ends a step up: its token has probability.
        drawn = sums[-1:] * self._context.noise.uniform(len(self._context.tokens), Noise.DRAFT, drafted)
        return torch.where(sums[-1] > 0, torch.searchsorted(sums, drawn)[0], -1)

    def _alternatives(self, q: torch.Tensor, count: int) -> list[int]:
        """Numbers of up to ``count`` tokens drawn without replacement, the first being ``_choice``'s."""
        chosen = list[torch.Tensor]()
        for before in range(count):
            chosen.append(self._choice(q, before))
            q = q.scatter(0, chosen[-1].clamp(min=0)[None], 0)
        drawn: list[int] = torch.stack(chosen).tolist()
        return [number for number in drawn if number >= 0]
