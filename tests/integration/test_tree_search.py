"""Tree search: trees are the best of their size, sizes the fastest at the given cost, and expectations come true."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from drafters.medusa.drafter import Medusa, MedusaConfig
from drafters.medusa.heads import with_roots
from drafters.medusa.rank_paths import nodes_of
from specdec import Engine, SamplingParams
from specdec.cli.main import build
from specdec.drafting.registry import make_drafter
from specdec.errors import CheckpointError, ConfigError
from specdec.models.transformers_target import TransformersTarget
from specdec.settings.parsing import load_yaml
from tests.models import prompt_of
from training.acceptance import Written
from training.medusa import NewHeads, new_heads
from training.tree_search import (
    Judged,
    Odds,
    RankPath,
    Size,
    decode,
    expected,
    grow,
    judge,
    plot,
    search,
    step_seconds,
    timed_sizes,
    write_tree,
)


def drawn(count: int, rates: Sequence[Sequence[float]], seed: int = 0) -> list[RankPath]:
    """Ranks of independent heads; the last rank stands for all that are beyond."""
    rng = random.Random(seed)
    return [tuple(rng.choices(range(len(own)), own)[0] for own in rates) for _ in range(count)]


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=40), st.integers(1, 6))
def test_grown_trees_are_the_best_of_their_size(found: list[RankPath], size: int) -> None:
    odds = Odds(found, 2)
    tree = grow(odds, size)
    assert all(len(path) == 1 or path[:-1] in tree[: tree.index(path)] for path in tree)
    paths = [path for depth in (1, 2, 3) for path in itertools.product(range(2), repeat=depth)]
    best = max(
        sum(odds.of(path) for path in chosen)
        for chosen in itertools.combinations(paths, size)
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen)
    )
    assert sum(map(odds.of, tree)) == pytest.approx(best)


def test_odds_are_frequencies_and_products_where_nothing_was_seen() -> None:
    joint = Odds([(0, 0)] * 400 + [(1, 1)] * 600, 2)  # never right apart
    assert joint.accuracy == [[0.4, 0.6], [0.4, 0.6]]
    assert joint.of((0, 0)) == pytest.approx(0.4, abs=0.03)
    assert joint.of((0, 1)) == pytest.approx(0.0, abs=0.03)
    apart = Odds(drawn(4000, [[0.5, 0.2, 0.3], [0.4, 0.1, 0.5]]), 2)
    assert apart.of((0, 1)) == pytest.approx(0.05, abs=0.01)
    assert Odds([(0, 5)] * 10, 3).of((1, 0)) == 0  # beyond the ranks, and never seen
    with pytest.raises(ConfigError, match="no position that all heads can be judged at"):
        Odds([], 2)


@pytest.mark.parametrize(
    ("cost", "nodes"),
    [
        (lambda rows: 1.0, 12),  # rows are free
        (lambda rows: float(rows), 1),  # each costs what plain decoding does
        (lambda rows: 1.0 if rows <= 8 else 2.0, 7),  # a kernel's edge
    ],
)
def test_the_size_is_the_fastest(
    target_of: Callable[..., TransformersTarget], cost: Callable[[int], float], nodes: int
) -> None:
    heads, engine, texts = looping(target_of)
    asked: list[int] = []

    def fake(engine: Engine, drafters: Mapping[int, Any], prompt: Sequence[int]) -> dict[int, float]:
        asked.extend(len(drafter.nodes) for drafter in drafters.values())
        return {size: cost(size + 1) for size in drafters}

    tree, sizes, chosen = search(heads, engine, texts, most=12, cost=fake)
    assert len(tree) == chosen.nodes == nodes
    assert asked == timed_sizes(12) == [1, 2, 3, 4, 5, 6, 7, 8, 11, 12]
    assert [size.nodes for size in sizes] == list(range(1, 13))
    _, _, fixed = search(heads, engine, texts, most=12, nodes=3, cost=fake)
    assert fixed.nodes == 3


def test_between_timed_sizes_lines_are_drawn() -> None:
    tree: list[RankPath] = [(rank,) for rank in range(8)]
    text = Judged(Written([0] * 6, 2), [[0] * 6])
    found = [size.seconds for size in expected([text], tree, {1: 1.0, 3: 2.0, 7: 4.0})]
    assert found == [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.0]
    assert Size(1, 1.5, 0.5).speed == 3.0


def looping(target_of: Callable[..., TransformersTarget]) -> tuple[Any, Engine, list[Written]]:
    """Heads that repeat their target's own token, and texts of it that loop, so that some are right."""
    target = target_of("llama", torch.float32)
    heads, engine = new_heads(NewHeads(heads=3), target), Engine(target)
    texts = []
    for seed in range(6):
        prompt = list(prompt_of(6, seed))
        texts.append(Written([*prompt, *engine.generate(prompt, 60).token_ids], len(prompt)))
    return heads, engine, texts


def test_odds_are_asked_where_steps_begin() -> None:
    """An easy half, crossed in steps of two, and a hard half: two thirds of the steps meet the hard one."""
    text = Judged(Written([0] * 401, 1), [[0] * 200 + [9] * 200])
    assert text.paths().count((0,)) == text.paths().count((9,)) == 200
    there = text.paths([(0,)])
    assert (there.count((0,)), there.count((9,))) == (100, 199)
    [size] = expected([text], [(0,)], {1: 1.0})
    assert size.tokens == pytest.approx(400 / 300, abs=0.01)


def test_what_is_expected_is_what_the_engine_does(target_of: Callable[..., TransformersTarget]) -> None:
    """On the calibration text itself, to the step."""
    heads, engine, texts = looping(target_of)
    tree, sizes, chosen = search(heads, engine, texts, most=5, cost=lambda engine, drafters, prompt: {1: 1.0})
    assert chosen is sizes[-1]
    drafter = Medusa(MedusaConfig(tree=tree), heads, engine.target)
    prompts = [text.tokens[: text.prompt] for text in texts]
    found = decode(engine, {"medusa": drafter}, prompts, 60, SamplingParams(), repeats=1)["medusa"]
    assert found.per_step == pytest.approx(chosen.tokens)
    assert found.per_step > 1.1


def test_heads_are_judged_where_they_draft(target_of: Callable[..., TransformersTarget]) -> None:
    heads, engine, texts = looping(target_of)
    odds = Odds(judge(heads, engine, texts[:1])[0].paths(), 32)
    with torch.no_grad():
        text = torch.tensor([texts[0].tokens])
        hidden = engine.target.decoder(text).last_hidden_state[0]  # type: ignore[attr-defined]
        embedded = engine.target.embed(text[0, 1:])
        right = [
            float((engine.target.head(guess).argmax(-1)[4 : 66 - 4] == text[0, 5 + k : 66 - 4 + k + 1]).float().mean())
            for k, guess in enumerate(heads(with_roots(hidden[:-1], embedded)), 1)
        ]
    assert [own[0] for own in odds.accuracy] == pytest.approx(right)


def test_steps_are_timed_in_turn(target_of: Callable[..., TransformersTarget]) -> None:
    heads, engine, texts = looping(target_of)
    drafters = {size: Medusa(MedusaConfig(tree=[[0], [1]][:size]), heads, engine.target) for size in (1, 2)}
    found = step_seconds(engine, drafters, texts[0].tokens[:20], steps=3)
    assert set(found) == {1, 2}
    assert min(found.values()) > 0


# Files


def test_medusa_reads_what_was_written(target_of: Callable[..., TransformersTarget], tmp_path: Path) -> None:
    heads, engine, _ = looping(target_of)
    heads.save_pretrained(tmp_path / "heads")
    tree, path = [[0], [0, 0], [1]], tmp_path / "new" / "tree.yaml"
    write_tree(path, tree, {"heads": str(tmp_path / "heads")}, ["a remark", ""])
    assert path.read_text().startswith("# a remark\n#\ndrafter:\n")
    assert [found.name for found in path.parent.iterdir()] == ["tree.yaml"]
    drafter = make_drafter(load_yaml(path)["drafter"], engine.target)
    assert isinstance(drafter, Medusa)
    assert drafter.nodes == nodes_of(tree)
    bare = tmp_path / "bare.yml"
    bare.write_text(yaml.safe_dump(tree))
    for form in (str(path), str(bare)):
        found = make_drafter({"name": "medusa", "heads": str(tmp_path / "heads"), "tree": form}, engine.target)
        assert isinstance(found, Medusa)
        assert found.nodes == nodes_of(tree)


def test_a_tree_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write the tree to .*give another --out"):
        write_tree(tmp_path / "file" / "tree.yaml", [[0]], {}, [])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, r"cannot read the tree .*`specdec tree-search` writes one"),
        ("drafter: [", "cannot read the tree"),
        ("drafter: {name: medusa}", "holds no tree"),
        ("[0, 1]", "holds no tree"),
        ("[[0], [a]]", "holds no tree"),
        ("tree: [[0], [1, 0]]", r"\[1, 0\] without its parent \[1\]"),
    ],
)
def test_odd_tree_files_are_named(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "tree.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        MedusaConfig(tree=str(path))


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sizes = [Size(1, 1.5, 1.0), Size(2, 1.7, 1.1)]
    assert plot(sizes, sizes[1], tmp_path / "tree.svg")
    assert (tmp_path / "tree.svg").stat().st_size > 1000


@pytest.mark.slow
def test_the_command_says_expected_and_measured(tmp_path: Path) -> None:
    texts = [f"def f{number}(x):\n    return x + {number}\n" * 8 for number in range(300)]
    held = next(text for text in texts if int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % 50 == 0)
    code = [tmp_path / f"{number}.txt" for number in range(3)]
    for path, text in zip(code, [*texts[:2], held], strict=True):
        path.write_text(text)
    out = tmp_path / "tree.yaml"
    command = ["tree-search", "--out", str(out), "--texts", "2", "--prompt", "32", "--max-nodes", "2"]
    data = [part for path in code for part in ("--data", str(path))]
    said = CliRunner().invoke(build(), [*command, *data, "--max-new-tokens", "12"], catch_exceptions=False).output
    assert "tokens per step expected," in said
    assert "measured on" in said
    assert f"--set medusa.tree={out}" in said.replace("\n", "")
    assert load_yaml(out)["drafter"]["name"] == "medusa"
    with pytest.raises(ConfigError, match="tree-search is for medusa"):
        CliRunner().invoke(build(), [*command, *data, "--drafter", "jacobi"], catch_exceptions=False)
    with pytest.raises(ConfigError, match="most nodes are 2 and nodes 3"):
        CliRunner().invoke(build(), [*command, *data, "--nodes", "3", "--max-new-tokens", "12"], catch_exceptions=False)
