"""A round of Kangaroo: shallow passes, guesses behind them, and the rule by which it stops."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch

from drafters.shared.calibration import Calibration
from drafters.shared.own_cache import Nodes, OwnCache
from drafters.shared.ranks import Ranks
from drafters.shared.vocabulary import DraftVocabulary, coupled, processed, top_k
from specdec.costs.curve import pass_price
from specdec.costs.prices import Prices
from specdec.drafter import BatchedSession, Context, Observation
from specdec.sampling.noise import Noise
from specdec.step import device_copies
from specdec.step.forward_passes import Pass, Passes
from specdec.step.step_io import Entering, LayerPlan, StepInput
from specdec.step.step_output import StepOutput
from specdec.step.tree import Draft, Hints
from specdec.target import forward_pass

__all__ = ["KangarooSession"]

_ACCEPTED, _GUESSES = 0.6, 4.0  # prior share of accepted guesses, and its weight in guesses
_RIGHT, _PROMISED = 0.9, 8.0  # likeliest tokens that are right for one that is promised, and the promises it counts as


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
        # In plain steps: a shallow pass of one row, a guess, and a step by its rows.
        costs, length = context.costs, context.prompt_length
        self._shallow_price, self._guess_price = (
            pass_price(weights, context.target, costs, length)
            for weights in (drafter.shallow_weights, drafter.guess_weights)
        )
        self._prices, self._length = Prices(costs), length
        self._deep: float = 1 - drafter.exit_layer / context.target.num_layers
        # For each row that the adapter has run: the chance of its likeliest token, and the kept tokens, or their place.
        self._guessed: list[tuple[float, list[int] | slice]] = []
        self._accepted = Calibration(_ACCEPTED * _GUESSES, _GUESSES)  # guesses, where all above was right
        self._likeliest = Calibration(_RIGHT * _PROMISED, _PROMISED)
        self._ranks = Ranks(min(drafter.branch, context.max_rows), _ACCEPTED, _GUESSES)  # of these guesses

    def passes(self, row_budget: int) -> Passes[Draft]:
        """One round: shallow pass, adapter, shallow pass, ... until gamma, the row budget, or a lack of confidence."""
        drafter, context, drawn_from = self._drafter, self._context, None
        most = min(self._gamma, row_budget - 1, context.remaining - 1)
        parents, depths = [-1], [0]
        self._own.begin()
        self._guessed = []
        tokens: list[int] = [context.root]
        if most < 1:
            self._draft = Draft(tokens, parents)
            return self._draft
        if self._reads_prefix:
            self._ids = torch.tensor([context.tokens], device=self._ids.device)
        root: StepOutput = yield self._shallow(tokens, parents, depths)
        features = [root.out]
        unread: list[torch.Tensor] = [root.tokens] if self._stays else []
        q: dict[int, torch.Tensor] = {}
        nodes, reached, cost = range(1), [1.0], 0.0  # rows to guess behind, and the chances that all above is right
        while nodes and depths[nodes[0]] < most and len(parents) < row_budget:
            scores = self._scores((yield from self._guess(nodes, features[-1], parents)))
            cost += self._guess_price * self._prices.step(self._length, len(nodes))
            last, first, left = nodes[0], len(parents), min(drafter.branch, row_budget - len(parents))
            listed = None if self._draws else self._listed(scores, depths[last])
            if listed is None:
                shares, places, drawn_from = (self._draw if self._draws else self._rank)(scores[0], depths[last])
            chosen: Any  # tokens, or where they stay on the device a tensor of these
            if self._stays:
                count, reached = self._unread(reached[0], first, min(left, len(places)))
                unread.append(drafter.vocabulary.tokens_at(places[:count].clamp(min=0)))
                chosen, above = unread[-1], [last] * count
            else:
                if listed is None:
                    # In one copy from the device; a number is exact in float64, too.
                    read = device_copies.reading(torch.cat((places.double(), shares.double())))
                    if self._ahead:
                        ahead = drafter.vocabulary.tokens_at(places[:1].clamp(min=0))
                        hidden = (yield self._shallow(ahead, [*parents, last], [*depths, depths[last] + 1])).out
                    numbers_read = read()
                    listed = [(numbers_read[: len(places)], numbers_read[len(places) :])]
                guesses = [
                    [(int(number), chance) for number, chance in zip(*one, strict=True) if chance > 0 and number >= 0]
                    for one in listed
                ]
                if not guesses[0]:  # NaN, from very large weights
                    break
                if drafter.eta is None:
                    above, numbers, reached = self._worth(nodes, reached, guesses, first, left)
                else:
                    numbers, reached = self._trusted(guesses[0], drawn_from, left)
                    above = [last] * len(numbers)
                chosen = [drafter.vocabulary.token(number) for number in numbers]
                tokens += chosen
                for node, guess in zip(nodes, guesses, strict=True):
                    kept = [token for token, row in zip(chosen, above, strict=True) if row == node]
                    # The likeliest one is judged, kept or not.
                    judged = kept or [drafter.vocabulary.token(number) for number, _ in guess[:1]]
                    self._guessed.append((guess[0][1] if guess else 0.0, judged))
            if not above:
                break
            if drawn_from is not None:
                q[last] = drafter.vocabulary.spread(drawn_from, 0.0)
            if self._reads_prefix:
                newest = unread[-1][:1] if self._stays else torch.tensor(chosen[:1], device=self._ids.device)
                self._ids = torch.cat((self._ids, newest.to(self._ids.device)[None]), 1)
            parents += above
            depths += [depths[last] + 1] * len(above)
            features.append(hidden if self._ahead else (yield self._shallow(chosen, parents, depths)).out)
            nodes = range(first, first + len(reached))
        cost += (len(features) - 1) * self._shallow_price
        entry = Entering(drafter.exit_layer, torch.cat(features))
        there = torch.cat([own.to(self._ids.device) for own in unread]) if self._stays else None
        known = () if self._stays else tokens
        self._draft = Draft(known, parents, q=q, entry=entry, hints=Hints(cost=cost), on_device=there)
        return self._draft

    def _unread(self, reached: float, rows: int, most: int) -> tuple[int, list[float]]:
        """How many unread tokens of a guess are verified, and :meth:`_onward` of the first."""
        chances = self._ranks.shares[:most]
        hopes = self._hopes(reached, chances)
        # With no token nothing would be learned; the row policy may still decide to draft nothing.
        count = max(self._paying(hopes, rows), 1)
        self._guessed.append((chances[0], slice(rows, rows + count)))
        return count, self._onward(hopes[:1], rows + count)

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

    def _worth(
        self,
        nodes: Sequence[int],
        reached: Sequence[float],
        guesses: Sequence[Sequence[tuple[int, float]]],
        rows: int,
        most: int,
    ) -> tuple[list[int], list[int], list[float]]:
        """The guesses behind some rows that pay, the likeliest to be reached first; a guess is a number and its chance.

        Returns:
            Per token its parent row and its number; and :meth:`_onward`.
        """
        candidates = [
            (hope, node, number)
            for node, reach, guess in zip(nodes, reached, guesses, strict=True)
            for (number, _), hope in zip(guess, self._hopes(reach, [chance for _, chance in guess]), strict=True)
        ]
        if len(nodes) > 1:
            candidates.sort(key=itemgetter(0), reverse=True)
        hopes = [hope for hope, _, _ in candidates[:most]]
        count = self._paying(hopes, rows)
        onward = self._onward(hopes[: count if self._wide else min(count, 1)], rows + count)
        return [node for _, node, _ in candidates[:count]], [number for _, _, number in candidates[:count]], onward

    def _hopes(self, reached: float, chances: Sequence[float]) -> list[float]:
        """Probabilities to reach tokens with these chances, calibrated by earlier guesses."""
        sure = self._likeliest.share
        return [reached * min(1.0, sure * chance) for chance in chances]

    def _paying(self, hopes: Sequence[float], rows: int) -> int:
        """The number of tokens, likeliest first, with the largest net gain; ``rows``: rows of the draft so far."""
        # The first token pays for a shallow pass; the others pay only for a row in that pass.
        return self._prices.keep(hopes, self._length, base=rows, least=self._pass_price(rows))

    def _onward(self, hopes: Sequence[float], rows: int) -> list[float]:
        """The hopes of the tokens behind which another guess pays.

        The first token pays for adapter, head and a shallow pass; the others only for a row of each.
        """
        prices, length, accepted, onward = self._prices, self._length, self._accepted.share, list[float]()
        drafting = self._guess_price + self._pass_price(rows)
        for row, hope in enumerate(hopes, rows):
            if guessed := len(onward):
                drafting = self._guess_price * prices.added(length, guessed + 1, guessed)
            if prices.gain(hope * accepted, length, row + 1, base=row, drafting=drafting) <= 0:
                break
            onward.append(hope)
        return onward

    def _pass_price(self, rows: int) -> float:
        """What the first token behind ``rows`` others costs beside its row: a shallow pass, in which its row is."""
        return self._shallow_price - (1 - self._deep) * self._prices.added(self._length, rows + 1, rows)

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
            self._ranks.learn(chosen, token)
            self._accepted.learn(1, token in chosen)
            self._likeliest.learn(chance, chosen[:1] == [token])
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
        return (q.max()[None] + self._accepted.share) / 2, self._choice(q)[None], q

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
