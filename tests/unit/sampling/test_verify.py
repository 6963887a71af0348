"""The acceptance rules against enumeration: the first three tokens must have the target's own joint distribution.

``reject`` and ``match`` are run here for every outcome of every coin and every draw, the drafter's included, each with
its probability. So what is compared are sums of products, and they agree to rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from specdec import Draft, Engine, SamplingParams
from specdec.errors import ConfigError, DraftError
from specdec.sampling.noise import Noise
from specdec.sampling.sampler import Sampler
from specdec.sampling.verify import Verdict, Verifier, match, reject, typical, verifier_for
from specdec.step.step_output import StepOutput
from tests.choices import Choices, every
from tests.joint import assert_joint
from tests.models import prompt_of, target_of

Text = tuple[int, ...]
Table = dict[Text, torch.Tensor]  # text below the root -> distribution of the next token, [V] float64
SCORES: Any = None  # the samplers here know the distributions by text


class IdealNoise:
    """Coins and draws whose outcomes are enumerated; each key may be asked for once, and only keys for coins."""

    def __init__(self, choices: Choices, position: int) -> None:
        self._choices, self._position = choices, position
        self._asked: set[int] = set()

    def _ask(self, position: int, stream: int, index: int) -> None:
        assert (position, stream) == (self._position, Noise.COIN)
        assert index not in self._asked, "one random number decides twice"
        self._asked.add(index)

    def uniform(self, position: int, stream: int, index: int = 0) -> Coin:
        self._ask(position, stream, index)
        return Coin(self._choices)

    def draw(self, probabilities: torch.Tensor, position: int, stream: int, index: int = 0) -> int:
        self._ask(position, stream, index)
        return self._choices.pick((probabilities / probabilities.sum()).tolist())


class Coin:
    """A uniform number that is below a threshold with that probability."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices

    def __lt__(self, threshold: float) -> bool:
        return self._choices.coin(threshold)


class IdealSampler:
    """A sampler over a table of distributions, with enumerated noise."""

    params, greedy = SamplingParams(temperature=1.0), False

    def __init__(self, table: Table, choices: Choices) -> None:
        self.tokens = [0, 0, 0]
        self.noise = IdealNoise(choices, len(self.tokens))
        self._table, self._choices = table, choices

    def probabilities(self, scores: StepOutput, row: int, path: Sequence[int]) -> torch.Tensor:
        return self._table[tuple(path)]

    distribution = probabilities

    def token(self, scores: StepOutput, row: int, path: Sequence[int]) -> int:
        return self._choices.pick(self._table[tuple(path)].tolist())


def table(vocab: int, seed: int, *, depth: int = 3, sharpness: float = 1.0, zeros: bool = False) -> Table:
    """Random distributions for every text of up to ``depth`` tokens; with ``zeros`` each lacks a token."""
    generator = torch.Generator().manual_seed(seed)
    made: Table = {}
    for size in range(depth + 1):
        for text in itertools.product(range(vocab), repeat=size):
            p = torch.softmax(sharpness * torch.randn(vocab, generator=generator, dtype=torch.float64), -1)
            if zeros:
                p[int(torch.randint(vocab, (), generator=generator))] = 0
            made[text] = p / p.sum()
    return made


def joint(p: Table, count: int = 3) -> dict[Text, float]:
    """Probability of every text of ``count`` tokens."""
    vocab = len(p[()])
    made: dict[Text, float] = {}
    for text in itertools.product(range(vocab), repeat=count):
        weight = 1.0
        for at, token in enumerate(text):
            weight *= float(p[text[:at]][token])
        made[text] = weight
    return made


Drawer = Callable[[Choices, Table], Draft]


def emitted(rule: Verifier, p: Table, q: Table, drawer: Drawer, count: int = 3) -> dict[Text, float]:
    """Distribution of the first ``count`` tokens under a rule: what a step emits, then p's own."""
    vocab = len(p[()])

    def step(choices: Choices) -> Text:
        draft = drawer(choices, q)
        verdict = rule(draft, SCORES, IdealSampler(p, choices))  # type: ignore[arg-type]
        check_verdict(draft, verdict)
        return tuple(verdict.tokens)

    made = dict.fromkeys(itertools.product(range(vocab), repeat=count), 0.0)
    total = 0.0
    for text, weight in every(step):
        total += weight
        for rest in itertools.product(range(vocab), repeat=max(0, count - len(text))):
            more = weight
            for at, token in enumerate(rest):
                more *= float(p[(*text, *rest[:at])][token])
            made[(*text, *rest)[:count]] += more
    assert abs(total - 1) < 1e-12
    return made


def check_verdict(draft: Draft, verdict: Verdict) -> None:
    assert verdict.path[0] == 0
    assert len(verdict.path) == len(verdict.tokens)
    for above, row, token in zip(verdict.path, verdict.path[1:], verdict.tokens, strict=False):
        assert draft.parents[row] == above
        assert draft.tokens[row] == token
        assert row not in draft.probes


def distance(one: dict[Text, float], other: dict[Text, float]) -> float:
    """Total variation."""
    return sum(abs(one[key] - other[key]) for key in one) / 2


def drawn(widths: Sequence[int]) -> Drawer:
    """A tree with ``widths[d]`` children below every row of depth d, siblings drawn without replacement."""

    def draw(choices: Choices, q: Table) -> Draft:
        tokens, parents, texts, dists = [0], [-1], [()], dict[int, torch.Tensor]()
        level = [0]
        for width in widths:
            below: list[int] = []
            for row in level:
                dists[row] = left = q[texts[row]]
                for _ in range(width):
                    if not float(left.sum()) > 0:
                        break
                    token = choices.pick((left / left.sum()).tolist())
                    left = left.clone()
                    left[token] = 0
                    below.append(len(tokens))
                    tokens.append(token)
                    parents.append(row)
                    texts.append((*texts[row], token))
            level = below
        return Draft(tokens, parents, q=dists)

    return draw


def chosen(choices: Choices, q: Table) -> Draft:
    """A fixed tree without any q, with a probe, and an equal sibling too late."""
    return Draft((0, 1, 2, 2, 0, 1, 0, 2), (-1, 0, 0, 1, 1, 2, 0, 0), probes=frozenset({6}))


def mixed(choices: Choices, q: Table) -> Draft:
    """A drawn row with chosen children, the likeliest token and another; the former has a drawn child."""
    first = choices.pick(q[()].tolist())
    best = int(q[(first,)].argmax())
    last = choices.pick(q[(first, best)].tolist())
    other = (best + 1) % len(q[()])
    return Draft((0, first, best, other, last), (-1, 0, 1, 1, 2), q={0: q[()], 2: q[(first, best)]})


SHAPES: dict[str, Drawer] = {
    "chain of 1": drawn((1,)),
    "chain of 2": drawn((1, 1)),
    "chain of 3": drawn((1, 1, 1)),
    "2 siblings": drawn((2,)),
    "3 siblings": drawn((3,)),
    "2 then 1": drawn((2, 1)),
    "1 then 2": drawn((1, 2)),
    "2 then 2": drawn((2, 2)),
    "chosen": chosen,
    "mixed": mixed,
}
TABLES: dict[str, tuple[Table, Table]] = {
    "smooth": (table(3, 1), table(3, 2)),
    "sharp": (table(3, 3, sharpness=3), table(3, 4, sharpness=3)),
    "p without some": (table(3, 5, zeros=True), table(3, 6)),
    "q without some": (table(3, 7), table(3, 8, zeros=True)),
    "both without some": (table(3, 9, zeros=True), table(3, 10, zeros=True)),
    "equal": (table(3, 11), table(3, 11)),
}


@pytest.mark.few(8)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tables", TABLES)
def test_reject_keeps_the_joint_distribution(tables: str, shape: str) -> None:
    p, q = TABLES[tables]
    found, expected = emitted(reject, p, q, SHAPES[shape]), joint(p)
    assert max(abs(found[text] - expected[text]) for text in expected) < 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("vocab", "widths"), [(4, (1, 1, 1)), (4, (2, 1)), (4, (4,)), (4, (3,)), (5, (1, 2)), (5, (3,)), (5, (5,))]
)
def test_reject_on_larger_vocabularies(vocab: int, widths: tuple[int, ...]) -> None:
    p, q = table(vocab, 20), table(vocab, 21, sharpness=2)
    found, expected = emitted(reject, p, q, drawn(widths)), joint(p)
    assert max(abs(found[text] - expected[text]) for text in expected) < 1e-12


@pytest.mark.few(5)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tables", ["smooth", "p without some", "equal"])
def test_match_keeps_the_joint_distribution(tables: str, shape: str) -> None:
    p, q = TABLES[tables]
    found, expected = emitted(match, p, q, SHAPES[shape]), joint(p)
    assert max(abs(found[text] - expected[text]) for text in expected) < 1e-12


def test_match_draws_the_targets_noise() -> None:
    """The same with the real sampler and its noise: chi-square over the seeds, and plain decoding's tokens."""
    p = table(3, 30)
    draft = chosen(Choices([]), p)
    texts = [()]
    for row in range(1, len(draft)):
        texts.append((*texts[draft.parents[row]], draft.tokens[row]))
    scores = StepOutput(torch.stack([p[text].log() for text in texts]))
    found: list[Text] = []
    accepted = 0
    for seed in range(4000):
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), [0, 0, 0], 3, torch.device("cpu"))
        tokens = match(draft, scores, sampler).tokens
        accepted += len(tokens) - 1
        for _ in range(3 - len(tokens)):
            rest = StepOutput(p[tuple(tokens)].log()[None])
            tokens.append(sampler.token(StepOutput(rest.logits, (0,)), 0, tokens))
        found.append(tuple(tokens[:3]))
    assert accepted > 1000
    assert_joint(found, joint(p))


@pytest.mark.slow
def test_real_noise_rejects_as_the_enumerated_one() -> None:
    """``reject`` with the real coins on a tree drawn with the real noise: chi-square over the seeds."""
    p, q = table(3, 31), table(3, 32)
    found: list[Text] = []
    for seed in range(4000):
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), [0, 0, 0], 3, torch.device("cpu"))
        tokens, parents, texts, dists = [0], [-1], [()], dict[int, torch.Tensor]()
        for row in range(3):  # two children of the root, two of each
            dists[row] = left = q[texts[row]]
            for _ in range(2):
                token = sampler.noise.draw(left, 3, Noise.DRAFT, len(tokens))
                left = left.clone()
                left[token] = 0
                tokens.append(token)
                parents.append(row)
                texts.append((*texts[row], token))
        scores = StepOutput(torch.stack([p[text].log() for text in texts]))
        out = reject(Draft(tokens, parents, q=dists), scores, sampler).tokens
        rest = Noise(seed + 10_000, 3, torch.device("cpu"))
        for _ in range(3 - len(out)):
            out.append(rest.draw(p[tuple(out)], len(out), Noise.TARGET))
        found.append(tuple(out[:3]))
    assert_joint(found, joint(p))


def block_verification(p: Table, q: Table, text: Text) -> list[tuple[float, torch.Tensor]]:
    """Sun et al. 2024, algorithm 2, on one drafted block: per accepted length its probability and the bonus's law."""
    size = len(text)
    kept = [1.0]
    for at, token in enumerate(text):
        kept.append(min(1.0, kept[-1] * float(p[text[:at]][token] / q[text[:at]][token])))
    rest = [(kept[at] * p[text[:at]] - q[text[:at]]).clamp(min=0) for at in range(size)]
    accept = [float(rest[at].sum() / (rest[at].sum() + 1 - kept[at])) if at else 1.0 for at in range(size)]
    accept.append(kept[size])
    laws = [*(r / r.sum() for r in rest), p[text]]
    made: list[tuple[float, torch.Tensor]] = []
    for length in range(size + 1):
        later = 1.0
        for at in range(length + 1, size + 1):
            later *= 1 - accept[at]
        made.append((later * accept[length], laws[length]))
    return made


def lengths(rule: Verifier, p: Table, q: Table, drawer: Drawer) -> float:
    """Mean acceptance length, the bonus token counted."""

    def step(choices: Choices) -> int:
        draft = drawer(choices, q)
        return len(rule(draft, SCORES, IdealSampler(p, choices)).tokens)  # type: ignore[arg-type]

    return sum(length * weight for length, weight in every(step))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_reject_on_a_chain_is_block_verification(size: int, seed: int) -> None:
    p, q = table(3, 40 + seed, sharpness=seed), table(3, 50 + seed)
    for text in itertools.product(range(3), repeat=size):
        draft = Draft.chain([0, *text], q={row: q[text[:row]] for row in range(size)})
        found = torch.zeros(size + 1, 3, dtype=torch.float64)

        def step(choices: Choices, draft: Draft = draft) -> Verdict:
            return reject(draft, SCORES, IdealSampler(p, choices))  # type: ignore[arg-type]

        for verdict, weight in every(step):
            found[len(verdict.tokens) - 1, verdict.tokens[-1]] += weight
        for length, (weight, law) in enumerate(block_verification(p, q, text)):
            if weight > 0:
                assert torch.allclose(found[length], weight * law, rtol=0, atol=1e-12)
            else:
                assert not found[length].any()


@pytest.mark.parametrize("seed", range(4))
def test_block_verification_accepts_at_least_as_much_as_token_wise_rejection(seed: int) -> None:
    p, q = table(3, 60 + seed, sharpness=2), table(3, 70 + seed)
    token_wise = 1.0
    for text in itertools.product(range(3), repeat=3):
        drafted = kept = 1.0
        for at, token in enumerate(text):
            drafted *= float(q[text[:at]][token])
            kept *= min(1.0, float(p[text[:at]][token] / q[text[:at]][token]))
            # Every prefix is met once per continuation that q can draw.
            token_wise += drafted * kept / 3 ** (2 - at)
    block = lengths(reject, p, q, drawn((1, 1, 1)))
    assert block >= token_wise - 1e-12
    assert block > token_wise + 1e-3 or seed


def test_equal_distributions_accept_everything() -> None:
    p, q = TABLES["equal"]
    assert abs(lengths(reject, p, q, drawn((1, 1, 1))) - 4) < 1e-12


def test_second_sibling_helps() -> None:
    p, q = TABLES["smooth"]
    assert lengths(reject, p, q, drawn((2,))) > lengths(reject, p, q, drawn((1,))) + 0.02


TOY = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)


def toy() -> Table:
    return {text: TOY for size in range(3) for text in itertools.product(range(4), repeat=size)}


@pytest.mark.parametrize("rule", [match, reject])
def test_argmax_draft_without_a_q_is_exact(rule: Verifier) -> None:
    for tokens in ((0,), (0, 1), (0, 0), (3,)):
        found = emitted(rule, toy(), {}, lambda choices, q, tokens=tokens: Draft.chain([0, *tokens]), 2)
        assert distance(found, joint(toy(), 2)) < 1e-12


def test_argmax_draft_with_a_q_is_the_trap() -> None:
    """Why a draft carries a q only if it was drawn from it: the likeliest token, verified with its q, is biased."""
    for q in (TOY, torch.softmax(TOY.log() / 2, -1)):
        found = emitted(reject, toy(), {}, lambda choices, _, q=q: Draft.chain([0, int(q.argmax())], q={0: q}), 1)
        assert distance(found, joint(toy(), 1)) > 0.1
    # Where the drafter is the target itself, its argmax is always kept, and the text is greedy decoding's.
    always = emitted(reject, toy(), {}, lambda choices, _: Draft.chain([0, 0], q={0: TOY}), 1)
    assert distance(always, joint(toy(), 1)) == pytest.approx(0.5)


def test_replacing_siblings_would_be_biased() -> None:
    """Siblings drawn *with* replacement break the contract; where they coincide that is noticed."""
    draft = Draft((0, 1, 1), (-1, 0, 0), q={0: torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)})
    p = {(): torch.tensor([0.6, 0.1, 0.3], dtype=torch.float64), (1,): torch.ones(3, dtype=torch.float64) / 3}
    with pytest.raises(DraftError, match=r"row 2 holds token 1.*probability 0.0; set q only for children.*drawn"):
        list(every(lambda choices: reject(draft, SCORES, IdealSampler(p, choices))))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", ["chain of 2", "2 then 1"])
def test_what_q_sums_to_changes_nothing(shape: str) -> None:
    """Children are drawn in proportion to it; in half precision its sum may be 1 and a hundredth."""
    p, q = TABLES["smooth"]
    coarse = {text: row.to(torch.bfloat16) * (1 + len(text)) for text, row in q.items()}
    assert any(row.double().sum() != 1 for row in coarse.values())

    def halved(choices: Choices, _: Table) -> Draft:
        draft = SHAPES[shape](choices, {text: row.double() for text, row in coarse.items()})
        return Draft(draft.tokens, draft.parents, q={row: own.to(torch.bfloat16) for row, own in draft.q.items()})

    assert distance(emitted(reject, p, q, halved), joint(p)) < 1e-12


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -0.1, -torch.inf])
@pytest.mark.parametrize("place", [1, 2])
def test_a_q_that_is_no_distribution_is_named(place: int, value: float) -> None:
    """At a child's own token or elsewhere."""
    q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    q[place] = value
    p = {text: torch.ones(3, dtype=torch.float64) / 3 for text in [(), (1,)]}
    draft = Draft.chain([0, 1], q={0: q})
    with pytest.raises(DraftError, match=r"the q of row 0 is no distribution: its sum is .*its smallest number"):
        list(every(lambda choices: reject(draft, SCORES, IdealSampler(p, choices))))  # type: ignore[arg-type]


def test_a_q_of_zeros_is_named() -> None:
    p = {text: torch.ones(3, dtype=torch.float64) / 3 for text in [(), (1,)]}
    draft = Draft.chain([0, 1], q={0: torch.zeros(3)})
    with pytest.raises(DraftError, match=r"the q of row 0 is no distribution: its sum is 0\.0"):
        list(every(lambda choices: reject(draft, SCORES, IdealSampler(p, choices))))  # type: ignore[arg-type]


def test_typical_is_lossy() -> None:
    p = toy()
    found = emitted(typical, p, {}, lambda choices, q: Draft.chain([0, 1, 0]), 2)
    assert distance(found, joint(p, 2)) > 0.05


def test_typical_takes_the_longest_path_of_likely_tokens() -> None:
    # Entropy 1.14 nats: the bar is min(0.09, 0.3 * exp(-1.14)) = 0.09, so that tokens 0 to 2 pass and 3 does not.
    draft = Draft((0, 3, 1, 2, 0, 3), (-1, 0, 0, 2, 3, 4))

    def step(choices: Choices) -> Verdict:
        return typical(draft, SCORES, IdealSampler(toy() | {(1, 2, 0): TOY}, choices))  # type: ignore[arg-type]

    assert {tuple(verdict.path) for verdict, _ in every(step)} == {(0, 2, 3, 4)}
    assert {tuple(verdict.tokens[:-1]) for verdict, _ in every(step)} == {(1, 2, 0)}


def test_typical_needs_leave_and_says_so() -> None:
    with pytest.raises(ConfigError, match="changes the output distribution; pass allow_lossy=True"):
        SamplingParams(temperature=1.0, acceptance="typical")
    with pytest.raises(ConfigError, match="needs temperature > 0"):
        SamplingParams(acceptance="typical", allow_lossy=True)
    params = SamplingParams(temperature=1.0, acceptance="typical", allow_lossy=True)
    out = Engine(target_of("llama"), None, "prompt_lookup").generate(prompt_of(7), 8, params)
    assert out.lossy
    assert out.stats.lossy
    exact = SamplingParams(temperature=1.0, allow_lossy=True)
    assert not Engine(target_of("llama"), None, "prompt_lookup").generate(prompt_of(7), 8, exact).lossy


def test_rule_for_a_draft() -> None:
    with_q = Draft.chain([0, 1], q={0: TOY})
    without = Draft.chain([0, 1])
    for acceptance, draft, temperature, rule in (
        ("auto", without, 1.0, match),
        ("auto", with_q, 1.0, reject),
        ("auto", with_q, 0.0, match),
        ("match", with_q, 1.0, match),
        ("reject", without, 1.0, reject),
        ("reject", with_q, 0.0, match),
        ("typical", with_q, 1.0, typical),
    ):
        params = SamplingParams(temperature=temperature, acceptance=acceptance, allow_lossy=True)
        assert verifier_for(params, draft, sampling=temperature > 0) is rule


def test_cut_keeps_paths_and_tokens_together() -> None:
    for count, left in ((9, Verdict([0, 2, 5], [7, 8, 9])), (2, Verdict([0, 2], [7, 8]))):
        verdict = Verdict([0, 2, 5], [7, 8, 9])
        verdict.cut(count)
        assert verdict == left
