"""Kangaroo: the adapter's two ways of running agree, its file format is strict, and rounds stop where they should."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters.kangaroo.adapter import VARIANTS, Adapter, AdapterConfig, fitting_heads
from drafters.kangaroo.adapter_step import AdapterStep
from drafters.kangaroo.drafter import Kangaroo, KangarooConfig
from drafters.kangaroo.session import KangarooSession
from drafters.shared.fingerprint import fingerprint
from drafters.shared.own_cache import Nodes
from specdec import Engine, SamplingParams
from specdec.costs.curve import CostCurve
from specdec.drafter import Context, DrafterBase, Observation
from specdec.errors import CheckpointError, ConfigError
from specdec.models.transformers_target import TransformersTarget
from specdec.native.library import library
from specdec.sampling.noise import Noise
from specdec.step import device_copies
from specdec.step.cache import KVCache
from specdec.step.tree import Draft
from tests import seam
from tests.fakes import Spy
from tests.models import live, new_model, prompt_of, random_adapter, target_for
from training.kangaroo import NewAdapter, new_adapter

LAYER = 1
PROMPT = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
"""


class Watched(Kangaroo):
    """Keeps its last session."""

    session: KangarooSession

    def start(self, context: Context) -> KangarooSession:
        self.session = super().start(context)
        return self.session


def adapter_of(
    variant: str = "attention", seed: int = 3, *, dtype: torch.dtype = torch.float64, **sizes: int
) -> Adapter:
    """Random weights throughout, so that every part matters."""
    sizes = {"hidden_size": 32, "vocab_size": 32, "heads": 4, "intermediate_size": 48, **sizes}
    config = AdapterConfig(exit_layer=LAYER, variant=variant, **sizes)
    adapter = Adapter(config).to(dtype).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapter.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return adapter


@pytest.fixture(scope="module")
def shallow_target() -> Any:
    """A model whose layers behind the exit add nothing, so that an adapter that adds nothing is always right."""
    model = new_model("llama")
    with torch.no_grad():
        for layer in model.model.layers[LAYER:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return target_for(model, execution="fused")


@pytest.fixture
def perfect(shallow_target: Any, tmp_path: Path) -> Callable[..., Watched]:
    def make(**options: Any) -> Watched:
        random_adapter(shallow_target, tmp_path, exit_layer=LAYER)  # its output projection starts at zero
        options.setdefault("eta", 0.0)
        return Watched.build(KangarooConfig(adapter=str(tmp_path), **options), shallow_target)  # type: ignore[return-value]

    return make


@pytest.mark.parametrize("key_heads", [0, 2, 1])
@pytest.mark.parametrize("variant", VARIANTS)
def test_step_by_step_equals_the_whole_text(variant: str, key_heads: int) -> None:
    check_steps(adapter_of(variant, key_heads=key_heads))


@pytest.mark.few(6)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_guess_behind_a_sibling_sees_its_own_path(variant: str, dtype: torch.dtype) -> None:
    """Rows of a tree, some at a time, and two sequences at once: each guess is that of the path's text."""
    adapter = adapter_of(variant, dtype=dtype, hidden_size=64, key_heads=2)
    head = torch.nn.Linear(64, 32, dtype=dtype).requires_grad_(False)
    step = AdapterStep(adapter, head)
    parents = [-1, 0, 0, 1, 2, 2, 4]
    texts = [torch.randn(1, 5 + len(parents), 64, dtype=dtype) for _ in range(2)]
    caches = [step.new_cache(12, len(parents)) for _ in texts]
    for text, cache in zip(texts, caches, strict=True):
        guess_on(step, text[0, :5], cache)
    for first, last in pairwise((0, 1, 3, 6, 7)):
        found = step.guess(
            [
                Nodes(
                    seam.Text(cache).rows(range(first, last), parents[:last], first=first),
                    text[0, 5 + first : 5 + last],
                )
                for text, cache in zip(texts, caches, strict=True)
            ]
        )
        for text, guesses in zip(texts, found, strict=True):
            for row, guess in zip(range(first, last), guesses, strict=True):
                path = [row]
                while path[0]:
                    path.insert(0, parents[path[0]])
                whole = torch.cat((text[:, :5], text[:, [5 + above for above in path]]), 1)
                expected = adapter(whole, torch.arange(whole.shape[1])[None], head)[-1]
                near = {} if dtype is torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
                torch.testing.assert_close(guess, expected, **near)


@pytest.mark.parametrize("key_heads", [4, 2])
def test_a_whole_layer_in_one_native_call(key_heads: int) -> None:
    adapter = adapter_of("layer", dtype=torch.float32, hidden_size=64, key_heads=key_heads)
    assert (AdapterStep(adapter, torch.nn.Identity())._layer is None) is (library() is None)
    check_steps(adapter)


def guess_on(step: AdapterStep, features: torch.Tensor, cache: KVCache) -> torch.Tensor:
    """[1, d] of what follows ``features`` [T, D], the next positions of a text."""
    rows = range(len(features))
    (found,) = step.guess([Nodes(seam.Text(cache).rows(rows), features)])
    cache.commit(rows)
    return found


def check_steps(adapter: Adapter) -> None:
    size, dtype, variant = adapter.config.hidden_size, adapter.norm.dtype, adapter.config.variant
    features = torch.randn(1, 11, size, dtype=dtype)
    head = torch.nn.Linear(size, 32, dtype=dtype).requires_grad_(False)
    whole = adapter(features, torch.arange(11)[None], head)
    step = AdapterStep(adapter, head)
    cache = step.new_cache(11)
    if variant != "mlp":
        step.absorb(features[0, :4], cache)
    found = torch.cat([guess_on(step, features[0, first:last], cache) for first, last in pairwise((4, 5, 8, 9, 11))])
    torch.testing.assert_close(
        found, whole[[4, 7, 8, 10]], **({} if dtype is torch.float64 else {"rtol": 1e-4, "atol": 1e-4})
    )


def test_packed_texts_do_not_see_each_other() -> None:
    adapter = adapter_of()
    head = torch.nn.Identity()
    features = torch.randn(1, 7, 32, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    documents = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    mask = ((documents[:, None] == documents) & torch.ones(7, 7, dtype=torch.bool).tril())[None, None]
    packed = adapter(features, positions, head, mask=mask)
    alone = adapter(features[:, 3:], torch.arange(4)[None], head)
    torch.testing.assert_close(packed[3:], alone)


@pytest.mark.few(1)
@pytest.mark.parametrize("acceptance", ["greedy", "match", "reject"])
def test_a_perfect_adapter_has_every_draft_accepted(
    perfect: Callable[..., Watched], shallow_target: Any, acceptance: str
) -> None:
    sampling = SamplingParams() if acceptance == "greedy" else SamplingParams(temperature=1.0, acceptance=acceptance)
    prompt = prompt_of(9)
    found = Engine(shallow_target, None, perfect(gamma=3), prefill_chunk=4).generate(prompt, 24, sampling)
    assert found.stats.acceptance_lengths == [4] * 6


def test_a_round_ends_where_confidence_ends(perfect: Callable[..., Watched], shallow_target: Any) -> None:
    found = Engine(shallow_target, None, perfect(gamma=5, eta=1.0)).generate(prompt_of(9), 12)
    assert found.stats.rows == [2] * 6  # the first guess is made and verified, and no other


@pytest.mark.few(1)
@pytest.mark.parametrize(("slope", "rows"), [(0.0, 6), (0.1, None), (2.0, 1)])
def test_a_round_ends_where_drafts_do_not_pay(
    perfect: Callable[..., Watched], shallow_target: Any, slope: float, rows: int | None
) -> None:
    """Without eta: free rows are drafted to the end, dear ones dropped, and what is right is trusted further."""
    drafter = perfect(gamma=5)
    drafter.eta = None
    drafter.guess_weights = drafter.shallow_weights = 0
    costs = CostCurve(machine={}, rows=[1, 101], lengths=[1], seconds=[[1.0, 1.0 + 100 * slope]])
    found = Engine(shallow_target, None, drafter, costs=costs).generate(
        prompt_of(9), 40, SamplingParams(temperature=1.0, acceptance="match")
    )
    if rows is None:
        assert found.stats.rows[0] < max(found.stats.rows) == 6
    else:
        assert set(found.stats.rows[:-1]) == {rows}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("slope", "right", "wrong"), [(0.0, (21, 21), (21, 17)), (0.1, (7, 6), (7, 2)), (2.0, (2, 2), (2, 2))]
)
def test_on_a_device_guesses_of_before_say_how_many_pay(
    perfect: Callable[..., Watched],
    shallow_target: Any,
    target_of: Callable[..., TransformersTarget],
    slope: float,
    right: tuple[int, int],
    wrong: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows at first, and two thirds into the text. Of dear ones there is but one guess; an adapter that is right is
    trusted further, and its alternatives are left out; of one that is wrong nothing follows a guess."""
    monkeypatch.setattr(device_copies, "is_apart", lambda device: True)
    costs = CostCurve(machine={}, rows=[1, 101], lengths=[1], seconds=[[1.0, 1.0 + 100 * slope]])
    random = Watched(KangarooConfig(gamma=5), adapter_of(), target_of("llama"))
    for target, drafter, rows in ((shallow_target, perfect(gamma=5), right), (target_of("llama"), random, wrong)):
        drafter.eta, drafter.branch, drafter.guess_weights, drafter.shallow_weights = None, 4, 0, 0
        found = Engine(target, None, drafter, costs=costs).generate(prompt_of(9), 80)
        assert (found.stats.rows[0], found.stats.rows[len(found.stats.rows) * 2 // 3]) == rows
        assert found.token_ids == Engine(target).generate(prompt_of(9), 80).token_ids


@pytest.mark.few(1)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_alternatives_are_verified_where_their_rows_pay(shallow_target: Any, temperature: float) -> None:
    """Without eta, at any guess of a round; the text and the adapter's cache stay plain decoding's."""
    sampling, prompt, drafts = SamplingParams(temperature=temperature), prompt_of(9), list[Draft]()
    drafter = Watched(KangarooConfig(gamma=3, branch=3), often_right(), shallow_target)
    drafter.eta, drafter.guess_weights, drafter.shallow_weights = None, 0, 0
    costs = CostCurve(machine={}, rows=[1, 101], lengths=[1], seconds=[[1.0, 2.0]])
    others, behind = list[int](), list[int]()

    def note(_: Any, seen: Observation) -> None:
        if seen.draft is not None:
            parents = list(seen.draft.parents)
            found = [row for row in seen.path[1:] if parents.index(parents[row]) != row]
            others.extend(found)
            behind.extend(row for row in found if row in seen.path[:-1])

    def look(draft: Draft) -> None:
        drafts.append(draft)
        seen, above = drafter.session._own.rows, drafter.session._own.parents
        assert [seen[own] if own >= 0 else -1 for own in above] == [draft.parents[row] for row in seen]

    spy = Spy(drafter, look, note)
    decoding = Engine(shallow_target, None, spy, costs=costs).start(prompt, 80, sampling)
    with shallow_target.active():
        decoding.prefill()
        for _ in range(20):
            decoding.step()
        drafter.session.propose(8)  # brings what waited
    shapes = {tuple(draft.parents) for draft in drafts}
    assert any({1, 2} <= {*parents} for parents in shapes), "guesses behind two siblings"
    assert any(parents.count(above) > 1 for parents in shapes for above in range(3))
    assert others, "another one than the likeliest was right"
    assert behind, "and a guess behind it"
    text = [*prompt, *Engine(shallow_target).generate(prompt, 80, sampling).token_ids]
    assert text[: len(decoding.tokens)] == decoding.tokens
    check_cache(drafter.session, shallow_target, decoding.tokens)


def often_right() -> Adapter:
    """Of the target whose layers behind the exit add nothing: what it says is nearly what that says."""
    adapter = adapter_of()
    adapter.norm.fill_(1)
    adapter.o_proj.weight.mul_(0.2)
    return adapter


def test_what_a_draft_costs(shallow_target: Any, tmp_path: Path) -> None:
    """By the weights that are read: two of three layers, the adapter, and eight of the head's 32 rows."""
    adapter = random_adapter(shallow_target, tmp_path, exit_layer=2, draft_vocab=8)
    made = Kangaroo.build(KangarooConfig(adapter=str(tmp_path)), shallow_target)
    layers = sum(weight.numel() for layer in live(shallow_target).model.layers for weight in layer.parameters())
    own = sum(weight.numel() for weight in adapter.parameters())
    assert made.shallow_weights == pytest.approx(layers * 2 / 3)
    assert made.guess_weights == own + 8 * 32


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1])
def test_draws_without_replacement_follow_q(shallow_target: Any, depth: int) -> None:
    """Ordered pairs by chi-square: P(a, b) = q(a) q(b) / (1 - q(a)); a token without probability never comes."""
    q = torch.tensor([0.0, 0.5, 0.3, 0.0, 0.2], dtype=torch.float64)
    counts: dict[tuple[int, ...], int] = {}
    size = 3000
    for seed in range(size):
        session = object.__new__(KangarooSession)
        session._own = SimpleNamespace(rows=[1] * (depth + 1))  # type: ignore[assignment]
        session._context = SimpleNamespace(tokens=[1] * 7, noise=Noise(seed, 5, q.device))  # type: ignore[assignment]
        pair = tuple(session._alternatives(q, 2))
        assert int(session._choice(q)) == pair[0]
        counts[pair] = counts.get(pair, 0) + 1
    expected = {(a, b): float(q[a] * q[b] / (1 - q[a])) * size for a in (1, 2, 4) for b in (1, 2, 4) if a != b}
    assert counts.keys() == expected.keys()
    assert sum((counts[pair] - n) ** 2 / n for pair, n in expected.items()) < 20.5  # 0.1 % of chi-square(5)


def test_draws_end_where_probability_ends() -> None:
    q = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    session = object.__new__(KangarooSession)
    session._own = SimpleNamespace(rows=[1])  # type: ignore[assignment]
    session._context = SimpleNamespace(tokens=[1], noise=Noise(0, 3, q.device))  # type: ignore[assignment]
    assert session._alternatives(q, 3) == [1]
    assert int(session._choice(q * 0)) == -1


def test_alternatives_of_the_last_guess_are_siblings(perfect: Callable[..., Watched], shallow_target: Any) -> None:
    drafter = perfect(gamma=5, eta=1.0, branch=3)
    decoding = Engine(shallow_target, None, drafter).start(prompt_of(9), 20)
    with shallow_target.active():
        decoding.prefill()
        draft = drafter.session.propose(10)
        assert list(draft.parents) == [-1, 0, 0, 0]
        assert len(set(draft.tokens[1:])) == 3
        assert len(drafter.session.propose(3)) == 3  # the room bounds the siblings, too


class Overruled(DrafterBase):
    """Lets a session draft, and proposes something else: the text itself, as another part of a union might."""

    def __init__(self, drafter: Watched, text: list[int]) -> None:
        self.name, self.taps, self.drafter, self.text = drafter.name, drafter.taps, drafter, text

    def start(self, context: Context) -> Overruled:
        self.context, self.session = context, self.drafter.start(context)
        return self

    def propose(self, row_budget: int) -> Draft:
        self.session.propose(row_budget)
        known = len(self.context.tokens)
        return Draft.chain(self.text[known - 1 : known + 2])

    def observe(self, seen: Observation) -> None:
        self.session.observe(seen)


def test_another_drafters_rows_are_learnt_from(target_of: Callable[..., TransformersTarget]) -> None:
    target, prompt, adapter = target_of("llama", execution="fused"), prompt_of(9), adapter_of()
    text = [*prompt, *Engine(target).generate(prompt, 30).token_ids]
    drafter = Watched(KangarooConfig(eta=0.0, gamma=3), adapter, target)
    decoding = Engine(target, None, Overruled(drafter, text)).start(prompt, 30)
    with target.active():
        decoding.prefill()
        for _ in range(6):
            assert len(decoding.step().tokens) == 3
        drafter.session.propose(8)
    check_cache(drafter.session, target, decoding.tokens)


@torch.inference_mode()
def check_cache(session: KangarooSession, target: TransformersTarget, tokens: list[int]) -> None:
    """The session's adapter cache against one computed afresh from the text."""
    with target.active():
        states = seam.text(target, capacity=len(tokens), rows=len(tokens)).run(tokens, taps={LAYER}).hidden[LAYER]
    fresh = session._adapter.new_cache(len(tokens))
    session._adapter.absorb(states, fresh)
    cache = session._own.cache
    for found, expected in ((cache.keys, fresh.keys), (cache.values, fresh.values)):
        torch.testing.assert_close(found[0][:, :, : len(tokens)], expected[0][:, :, : len(tokens)])


def test_the_adapters_cache_is_that_of_the_text(
    shallow_target: Any, target_of: Callable[..., TransformersTarget]
) -> None:
    """After steps of full, partial and no acceptance, and the plain steps that a small room makes."""
    for target in (shallow_target, target_of("llama", execution="fused")):
        adapter = often_right() if target is shallow_target else adapter_of()
        drafter = Watched(KangarooConfig(eta=0.0, gamma=3), adapter, target)
        decoding = Engine(target, None, drafter, prefill_chunk=4).start(prompt_of(9), 60)
        lengths = set()
        with target.active():
            decoding.prefill()
            for number in range(14):
                decoding.sequence.context.max_rows = 1 if number % 5 == 3 else 128
                lengths.add(len(decoding.step().tokens))
            drafter.session.propose(8)  # brings what waited
        assert len(lengths) > 2 or target is not shallow_target
        check_cache(drafter.session, target, decoding.tokens)


def test_no_shallow_layer_runs_twice_for_a_row(
    perfect: Callable[..., Watched], shallow_target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, run = {0: 0, LAYER: 0}, shallow_target.executor._through

    def counted(hidden: Any, rows: Any, first: int, last: int, taps: Any) -> Any:
        for layer in counts:
            counts[layer] += rows.rows * (first <= layer < last)
        return run(hidden, rows, first, last, taps)

    monkeypatch.setattr(shallow_target.executor, "_through", counted)
    found = Engine(shallow_target, None, perfect(gamma=3)).generate(prompt_of(9), 24)
    assert counts[0] == counts[LAYER] == 8 + sum(found.stats.rows)  # 8: the prompt but its last token


def test_early_exit_needs_no_adapter(shallow_target: Any) -> None:
    """Where later layers add nothing, the target's own norm and head are right from the exit on."""
    engine = Engine(shallow_target, None, {"name": "kangaroo", "exit_layer": LAYER, "eta": 0.0, "gamma": 3})
    found = engine.generate(prompt_of(9), 24)
    assert found.stats.acceptance_lengths == [4] * 6
    assert found.token_ids == Engine(shallow_target).generate(prompt_of(9), 24).token_ids
    with pytest.raises(CheckpointError, match=r"leaves behind layer 3, .* must be in \[1, 2\]"):
        engine.with_drafter({"name": "kangaroo", "exit_layer": 3})
    with pytest.raises(ConfigError, match="give one of them"):
        KangarooConfig(exit_layer=1, adapter="folder")


def test_adapters_begin_with_the_targets_norm() -> None:
    model = new_model("llama")
    with torch.no_grad():
        model.model.norm.weight.uniform_(1, 2)
    adapter = new_adapter(NewAdapter(exit_layer=1, variant="head"), TransformersTarget(model))
    torch.testing.assert_close(adapter.norm.double(), model.model.norm.weight, rtol=1e-6, atol=0)
    torch.testing.assert_close(adapter.head.weight.double(), model.lm_head.weight, rtol=1e-6, atol=1e-7)
    assert (adapter.config.heads, adapter.config.key_heads) == (4, 2)  # as the model's own


def test_heads_fit_the_width() -> None:
    assert [fitting_heads(width, 4) for width in (192, 30, 2, 6)] == [4, 3, 1, 3]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"exit_layer": 0}, "exit_layer is 0"),
        ({"heads": 5}, "heads is 5"),
        ({"key_heads": 3}, "key_heads is 3"),
        ({"variant": "lstm"}, "attention, head, layer, mlp"),
        ({"variant": "mlp"}, "needs intermediate_size"),
        ({"eta": 1.5}, "eta is 1.5"),
    ],
)
def test_adapter_configs_are_checked(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        AdapterConfig(**{"hidden_size": 32, "vocab_size": 32, "exit_layer": 1, "heads": 4, **values})


@pytest.mark.parametrize("values", [{"eta": -0.1}, {"gamma": 0}, {"branch": 0}, {"exit_layer": 0}])
def test_options_are_checked(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"kangaroo.{next(iter(values))}"):
        KangarooConfig(**values)


class TestFiles:
    @pytest.fixture
    def target(self, target_of: Callable[..., TransformersTarget]) -> TransformersTarget:
        return target_of("llama")

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_round_trip(self, target: TransformersTarget, tmp_path: Path, variant: str) -> None:
        saved = random_adapter(target, tmp_path, variant=variant, eta=0.5, gamma=4)
        loaded = Adapter.from_pretrained(tmp_path)
        assert loaded.config == saved.config
        torch.testing.assert_close(loaded.state_dict(), saved.state_dict(), rtol=0, atol=0)

    def test_defaults_come_from_the_adapter(self, target: TransformersTarget, tmp_path: Path) -> None:
        random_adapter(target, tmp_path, exit_layer=2, eta=0.25, gamma=4, branch=3)
        made = Kangaroo.build(KangarooConfig(adapter=str(tmp_path)), target)
        assert (made.exit_layer, made.eta, made.gamma, made.branch, made.taps) == (2, 0.25, 4, 3, {2})
        made = Kangaroo.build(KangarooConfig(adapter=str(tmp_path), eta=0.5, gamma=2, branch=1), target)
        assert (made.eta, made.gamma, made.branch) == (0.5, 2, 1)

    def test_files_may_be_smaller(self, target: TransformersTarget, tmp_path: Path) -> None:
        adapter = random_adapter(target, tmp_path)
        adapter.save_pretrained(tmp_path, dtype=torch.bfloat16)
        loaded = Adapter.from_pretrained(tmp_path)
        for name, weight in loaded.state_dict().items():
            assert weight.dtype is torch.float32
            torch.testing.assert_close(weight, adapter.state_dict()[name].bfloat16().float(), rtol=0, atol=0)

    @pytest.mark.parametrize("damage", ["drop", "add", "reshape", "cut"])
    def test_broken_weights_are_refused(self, target: TransformersTarget, tmp_path: Path, damage: str) -> None:
        random_adapter(target, tmp_path)
        path = tmp_path / "model.safetensors"
        tensors = load_file(path)
        if damage == "drop":
            del tensors["k_proj.weight"]
        elif damage == "add":
            tensors["module.norm"] = torch.ones(3)
        elif damage == "reshape":
            tensors["norm"] = torch.ones(16)
        save_file(tensors, path)
        if damage == "cut":
            path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(CheckpointError, match=r"do not fit|no Kangaroo adapter"):
            Adapter.from_pretrained(tmp_path)

    def test_a_folder_without_an_adapter(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="specdec train kangaroo"):
            Adapter.from_pretrained(tmp_path / "nowhere")

    def test_the_config_of_something_else(self, target: TransformersTarget, tmp_path: Path) -> None:
        random_adapter(target, tmp_path)
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 32}))
        with pytest.raises(CheckpointError, match="convert kangaroo"):
            Adapter.from_pretrained(tmp_path)

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"hidden_size": 16, "vocab_size": 32, "exit_layer": 1}, "width is 16, the model's is 32"),
            ({"hidden_size": 32, "vocab_size": 31, "exit_layer": 1}, "vocabulary is 31, the model's is 32"),
            ({"hidden_size": 32, "vocab_size": 32, "exit_layer": 3}, r"must be in \[1, 2\]"),
        ],
    )
    def test_adapters_of_another_shape(
        self, target: TransformersTarget, tmp_path: Path, changes: dict[str, int], words: str
    ) -> None:
        Adapter(AdapterConfig(heads=4, **changes)).save_pretrained(tmp_path)
        with pytest.raises(CheckpointError, match=words):
            Kangaroo.build(KangarooConfig(adapter=str(tmp_path)), target)

    def test_an_adapter_of_another_model(self, target: TransformersTarget, tmp_path: Path) -> None:
        other = TransformersTarget(new_model("llama", seed=2))
        random_adapter(other, tmp_path)
        with pytest.raises(CheckpointError) as caught:
            Kangaroo.build(KangarooConfig(adapter=str(tmp_path)), target)
        assert fingerprint(other) in str(caught.value)
        assert fingerprint(target) in str(caught.value)
        Kangaroo.build(KangarooConfig(adapter=str(tmp_path), check_target=False), target)

    def test_fingerprints_know_weights_and_not_dtypes(self) -> None:
        model = new_model("llama", torch.bfloat16)
        mine = fingerprint(TransformersTarget(model))
        assert fingerprint(TransformersTarget(model.float())) == mine
        with torch.no_grad():
            model.model.layers[2].mlp.down_proj.weight.mul_(1.01)
        assert fingerprint(TransformersTarget(model)) != mine

    def test_a_full_disk_leaves_the_old_adapter(
        self, target: TransformersTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = random_adapter(target, tmp_path, seed=1)

        def full(tensors: dict[str, torch.Tensor], path: Path) -> None:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("drafters.shared.weights.save_file", full)
        with pytest.raises(CheckpointError, match="No space left"):
            random_adapter(target, tmp_path, seed=2)
        after = Adapter.from_pretrained(tmp_path)
        torch.testing.assert_close(after.state_dict(), before.state_dict(), rtol=0, atol=0)
        assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", "config.json"}

    def test_other_models_have_no_adapter_by_default(self, target: TransformersTarget) -> None:
        with pytest.raises(CheckpointError, match="specdec train kangaroo --model"):
            Kangaroo.build(KangarooConfig(), target)

    def test_the_embedded_model_has_one(self, tiny_engine: Engine) -> None:
        """The adapter in the package, by name alone, drafts as its card says: well above the two tokens of a coin."""
        engine = tiny_engine.with_drafter("kangaroo")
        found, plain = engine.generate(PROMPT, 64), tiny_engine.generate(PROMPT, 64)
        assert found.token_ids == plain.token_ids
        assert found.stats.tokens_per_step > 2.0
