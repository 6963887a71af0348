"""Oracle: a drafter that knows the answer, and is right with a given probability.

Trained drafters reach some acceptance by training. The oracle sets the acceptance at no cost, and so shows the speed of
the engine at that acceptance. At T tokens per step the limit is T times plain decoding; the difference from this limit
is the target's time for more rows and the engine's own time.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from specdec.costs.measuring import measure
from specdec.drafter import Context, DrafterBase, Observation
from specdec.engine.engine import Engine
from specdec.errors import ConfigError
from specdec.results import Generation
from specdec.settings.sampling_params import SamplingParams
from specdec.step.tree import Draft

__all__ = ["Oracle", "OraclePoint", "sweep_oracle"]


class Oracle(DrafterBase):
    """Proposes a chain of the known answer's next tokens, each of them right with probability ``accuracy``.

    Args:
        answers: prompt -> plain decoding's new tokens, with the same sampling.
        accuracy: probability that a token is right, whatever came before it in the chain.
        depth: tokens of a chain.
        seed: seed of the wrong tokens; all generations from one prompt have the same ones.

    Raises:
        ConfigError: the accuracy or the depth is out of range.
    """

    name = "oracle"

    def __init__(
        self, answers: Mapping[tuple[int, ...], Sequence[int]], *, accuracy: float = 1.0, depth: int = 4, seed: int = 0
    ) -> None:
        if not 0 <= accuracy <= 1:
            raise ConfigError(f"oracle.accuracy is {accuracy}; it must be in [0, 1]")
        if depth < 1:
            raise ConfigError(f"oracle.depth is {depth}; it must be at least 1")
        self.answers, self.accuracy, self.depth, self.seed = answers, accuracy, depth, seed

    def start(self, context: Context) -> OracleSession:
        prompt = tuple(context.tokens)
        if prompt not in self.answers:
            raise ConfigError(
                f"the oracle knows {len(self.answers)} prompts, and none is this one of {len(prompt)} tokens; "
                "decode it with drafter='none' first and give it the answer"
            )
        return OracleSession(self, context, [*prompt, *self.answers[prompt]])


class OracleSession:
    def __init__(self, oracle: Oracle, context: Context, text: list[int]) -> None:
        self._oracle, self._context, self._text = oracle, context, text
        self._rng = random.Random(oracle.seed)

    def propose(self, row_budget: int) -> Draft:
        known, size = len(self._context.tokens), self._context.target.vocab_size
        depth = min(self._oracle.depth, self._context.remaining - 1, row_budget - 1)
        chain = [self._context.root]
        for token in self._text[known : known + depth]:
            chain.append(token if self._rng.random() < self._oracle.accuracy else (token + 1) % size)
        return Draft.chain(chain)

    def observe(self, seen: Observation) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class OraclePoint:
    """The engine's figures at one accuracy and depth.

    Attributes:
        speedup: relative to plain decoding in the same run, without the prefill.
        row_cost: time of a forward of depth + 1 rows relative to one row, measured without the engine.
        same: whether every text equals plain decoding's.
    """

    depth: int
    accuracy: float
    tokens_per_step: float
    rows_per_step: float
    speedup: float
    row_cost: float
    same: bool

    @property
    def kept(self) -> float:
        """Speedup relative to tokens per step: 1 where rows and engine cost nothing."""
        return self.speedup / self.tokens_per_step

    @property
    def engine_share(self) -> float:
        """The same without the rows' own cost: 1 where the engine adds the same share to every step.

        It is above 1 where the engine adds a fixed time, which weighs less in a step of many rows than in a plain one.
        """
        return self.kept * self.row_cost


Setting = tuple[int, float]  # depth, accuracy
_PLAIN: Setting = (0, 0.0)


def sweep_oracle(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    accuracies: Sequence[float] = (0.5, 0.7, 0.9, 1.0),
    depths: Sequence[int] = (4, 8),
    max_new_tokens: int = 128,
    repeats: int = 5,
    sampling: SamplingParams | None = None,
    on_round: Callable[[], object] = lambda: None,
) -> list[OraclePoint]:
    """Every accuracy at every depth and plain decoding: interleaved, medians by prompt, after one warm-up round."""
    plain = engine.with_drafter("none")
    answers = {tuple(prompt): plain.generate(prompt, max_new_tokens, sampling).token_ids for prompt in prompts}
    settings = [(depth, accuracy) for depth in depths for accuracy in accuracies]
    engines = {_PLAIN: plain} | {
        (depth, accuracy): engine.with_drafter(Oracle(answers, accuracy=accuracy, depth=depth), policy="off")
        for depth, accuracy in settings
    }
    taken: dict[tuple[Setting, int], list[float]] = {}
    outs: dict[tuple[Setting, int], Generation] = {}
    middle = len(prompts[0]) + len(answers[tuple(prompts[0])]) // 2  # a typical context
    rows = sorted({1, *(depth + 1 for depth in depths)})
    costs: list[list[float]] = []
    for repeat in range(-1, repeats):
        for place, prompt in enumerate(prompts):
            for setting, system in engines.items():
                out = outs[setting, place] = system.generate(prompt, max_new_tokens, sampling)
                if repeat >= 0:
                    taken.setdefault((setting, place), []).append(out.stats.seconds.decode)
            on_round()
        costs.append(measure(engine.target, rows=rows, lengths=[middle]).steps(middle, rows[-1]))
    medians = {s: [statistics.median(taken[s, place]) for place in range(len(prompts))] for s in engines}
    seconds = {s: max(sum(own), 1e-9) for s, own in medians.items()}
    points = []
    for setting in settings:
        mine = [outs[setting, place] for place in range(len(prompts))]
        steps = sum(out.stats.steps for out in mine)
        points.append(
            OraclePoint(
                depth=setting[0],
                accuracy=setting[1],
                tokens_per_step=sum(out.stats.new_tokens for out in mine) / steps,
                rows_per_step=sum(sum(out.stats.rows) for out in mine) / steps,
                speedup=seconds[_PLAIN] / seconds[setting],
                row_cost=statistics.median(cost[setting[0] + 1] for cost in costs),
                same=all(out.token_ids == answers[tuple(p)] for out, p in zip(mine, prompts, strict=True)),
            )
        )
    return points
