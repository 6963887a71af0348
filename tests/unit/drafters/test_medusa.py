"""Medusa: heads read the right position and fill the right nodes; trees and checkpoints are strict; training counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from drafters.medusa.drafter import Medusa, MedusaConfig
from drafters.medusa.heads import HeadsConfig, MedusaHeads, with_roots
from drafters.medusa.heads_step import State
from drafters.medusa.rank_paths import check_tree, nodes_of, paths_of
from drafters.shared.weights import embedded_weights
from specdec import Engine, SamplingParams
from specdec.costs.curve import CostCurve
from specdec.errors import CheckpointError, ConfigError
from specdec.models.transformers_target import TransformersTarget
from specdec.native.library import library
from specdec.sampling.noise import Noise
from specdec.step.tree import Draft
from tests.fakes import Spy
from tests.models import live, prompt_of, random_heads
from training.acceptance import Written
from training.data import Sample
from training.medusa import Config, MedusaTraining, NewHeads, ahead, new_heads, started_heads
from training.packing import pack

PROMPT = prompt_of(9)
needs_compiler = pytest.mark.skipif(library() is None, reason="no C compiler")


@pytest.fixture
def target(target_of: Callable[..., TransformersTarget]) -> TransformersTarget:
    return target_of("llama")


def drafter_of(target: TransformersTarget, folder: Path, tree: Any = None, **sizes: Any) -> Medusa:
    random_heads(target, folder, **sizes)
    return Medusa.build(MedusaConfig(heads=str(folder), tree=tree), target)


# Trees


def test_nodes_put_parents_first() -> None:
    found = [(node.parent, node.rank, node.depth) for node in nodes_of([[0, 1], [2], [0], [0, 1, 3]])]
    assert found == [(0, 0, 1), (1, 1, 2), (0, 2, 1), (2, 3, 3)]


def test_the_published_tree_is_whole() -> None:
    """Cai et al.: 63 nodes, four deep, 42 of them leaves, none of a rank beyond the tenth."""
    paths = [tuple(path) for path in paths_of("mc_sim_7b_63")]
    check_tree(paths, heads=4, ranks=10)
    assert len(paths) == 63
    assert len(set(paths) - {path[:-1] for path in paths}) == 42


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ([], "empty"),
        ([[0], []], r"\[\]"),
        ([[0], [-1]], r"\[-1\]"),
        ([[0], [1], [0]], r"\[0\] twice"),
        ([[0], [1, 0]], r"\[1, 0\] without its parent \[1\]"),
        ("mc_sim_7b_64", "did you mean 'mc_sim_7b_63'"),
    ],
)
def test_odd_trees_are_named(tree: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        MedusaConfig(tree=tree)


def test_a_tree_may_be_a_file(target: TransformersTarget, tmp_path: Path) -> None:
    path, tree = tmp_path / "tree.yaml", [[0], [0, 0], [1]]
    for text in ("[[0], [0, 0], [1]]", "tree: [[0], [0, 0], [1]]", "drafter: {name: medusa, tree: [[0], [0, 0], [1]]}"):
        path.write_text(text)
        assert drafter_of(target, tmp_path, str(path)).nodes == nodes_of(tree)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, r"cannot read the tree .*it holds rank paths"),
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


def test_a_tree_beyond_heads_or_vocabulary_is_named(target: TransformersTarget, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[0, 0, 0\], 3 deep, but there are 2 heads"):
        drafter_of(target, tmp_path, [[0], [0, 0], [0, 0, 0]], heads=2)
    with pytest.raises(ConfigError, match=r"\[32\]; the model's vocabulary has 32 ranks"):
        drafter_of(target, tmp_path, [[0], [32]], heads=2)


# Drafts


DEEP, FLAT = [[0], [0, 0], [1], [0, 1], [1, 0], [0, 0, 0]], [[0], [1]]  # of three heads, and of the first one alone


@pytest.mark.few(1)
@pytest.mark.parametrize("sees_root", [False, True])
@pytest.mark.parametrize(
    ("tree", "own_head", "temperature"), [(DEEP, False, 0.0), (DEEP, True, 0.0), (DEEP, False, 0.7), (FLAT, False, 0.0)]
)
def test_draft_is_what_the_heads_say_of_the_position_before_the_root(
    target: TransformersTarget,
    tmp_path: Path,
    tree: list[list[int]],
    own_head: bool,
    temperature: float,
    sees_root: bool,
) -> None:
    """Against the modules as trained and transformers' own hidden states, over steps that accept and that do not.

    When sampling it is what they would draw with the target's noise.
    """
    drafter = drafter_of(target, tmp_path, tree, heads=3, layers=2, own_head=own_head, sees_root=sees_root)
    heads = MedusaHeads.from_pretrained(tmp_path).double()
    drafts: list[Draft] = []
    sampling = SamplingParams(temperature=temperature, seed=5)
    found = Engine(target, None, Spy(drafter, drafts.append), prefill_chunk=5).generate(PROMPT, 30, sampling)
    text = [*PROMPT, *found.token_ids]
    with torch.no_grad():
        hidden = live(target).get_decoder()(torch.tensor([text])).last_hidden_state[0]
        if sees_root:
            embedded = live(target).get_input_embeddings()(torch.tensor(text))[1:]
            hidden = torch.cat((hidden[:-1], embedded / embedded.square().mean(-1, keepdim=True).sqrt()), 1)
        logits = [guess if own_head else target.head(guess) for guess in heads(hidden)]
    root, noise = len(PROMPT) - 1, Noise(5, 32, torch.device("cpu"))
    assert len(drafts) > 10
    for draft, length in zip(drafts, found.stats.acceptance_lengths, strict=False):  # a last token needs no draft
        noises = [temperature * noise.gumbel(root + ahead) for ahead in (1, 2, 3)]
        ranks = [(guess[root - 1] + own).topk(2).indices.tolist() for guess, own in zip(logits, noises, strict=True)]
        fits = [path for path in tree if len(path) < len(text) - root - 1]
        expected = [ranks[len(path) - 1][path[-1]] for path in fits]
        assert list(draft.tokens) == [text[root], *expected]
        root += length


def test_each_sequence_s_heads_see_its_own_root(target: TransformersTarget, tmp_path: Path) -> None:
    drafter = drafter_of(target, tmp_path, sees_root=True)
    hidden = torch.randn(1, 32, dtype=torch.float64)
    brought = [(State(hidden, 0, root), None) for root in (3, 8)]
    together = drafter.lists(brought)
    assert together[0] != together[1]
    for own, (alone,) in zip(together, (drafter.lists([one]) for one in brought), strict=True):
        torch.testing.assert_close(torch.tensor(own), torch.tensor(alone))


@pytest.mark.few(4)
@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [{"layers": 1}, {"layers": 3}, {"own_head": True}, {"layers": 2, "draft_vocab": 20}])
@pytest.mark.parametrize("sees_root", [False, True])
def test_native_heads_say_what_the_heads_do(
    target_of: Callable[..., TransformersTarget],
    tmp_path: Path,
    heads: dict[str, Any],
    sees_root: bool,
    dtype: torch.dtype,
) -> None:
    """All of them at once, and where their last matrix is packed, the same bit for bit whatever rows are beside."""
    target = target_of("llama", dtype)
    drafter = drafter_of(target, tmp_path, heads=3, sees_root=sees_root, **heads)
    modules = MedusaHeads.from_pretrained(tmp_path).to(dtype).float()
    hidden = torch.randn(7, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    states = [State(hidden, row, root) for row, root in ((2, 5), (6, 1), (2, 30), (0, 0))]
    found = drafter.step.each(states)
    assert drafter.step.native
    within = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.05}
    for one, state in zip(found, states, strict=True):
        (own,) = drafter.step.each([state])
        if heads.keys() & {"own_head", "draft_vocab"}:
            assert torch.equal(one, own)
        else:  # the last matrix is torch's to multiply by
            torch.testing.assert_close(one, own, **within)
    rows, roots = hidden[[state.row for state in states]].float(), torch.tensor([state.root for state in states])
    with torch.no_grad():
        brought = with_roots(rows, target.embed(roots).float()) if sees_root else rows
        ends = [guess if "own_head" in heads else target.head(guess.to(dtype)).float() for guess in modules(brought)]
        expected = torch.stack(ends, 1)
    if drafter.vocabulary.tokens is not None:
        expected = expected[..., drafter.vocabulary.tokens]
    torch.testing.assert_close(torch.stack(found).float(), expected, **within)


def test_a_prompt_of_one_token_starts_plainly(target: TransformersTarget, tmp_path: Path) -> None:
    drafter = drafter_of(target, tmp_path)
    rows = Engine(target, None, drafter).generate(PROMPT[:1], 8).stats.rows
    assert rows[0] == 1
    assert rows[1] > 1


def test_what_processors_forbid_is_not_proposed(target: TransformersTarget, tmp_path: Path) -> None:
    """Of three tokens that may be drawn a fourth rank has none, and nothing stands below it."""
    tree = [[0], [3], [3, 0], [1], [0, 2], [0, 3]]
    drafter = drafter_of(target, tmp_path, tree, heads=2)
    sampling = SamplingParams(temperature=1.0, top_k=3, seed=1)
    rows = [step.rows for step in Engine(target, None, drafter, max_rows=8).generate(PROMPT, 12, sampling).steps]
    assert max(rows) == 4
    assert len(rows) > 1


def test_a_narrow_room_keeps_the_first_nodes(target: TransformersTarget, tmp_path: Path) -> None:
    drafts: list[Draft] = []
    spy = Spy(drafter_of(target, tmp_path, "small"), drafts.append)
    Engine(target, None, spy, max_rows=4).generate(PROMPT, 6)
    assert list(drafts[0].parents) == [-1, 0, 0, 1]  # 0, 1, 00


def test_untrained_heads_repeat_the_target(target: TransformersTarget) -> None:
    """W = 0: head 1 says of n what the target said, which is the root itself."""
    drafter = Medusa(MedusaConfig(tree="chain"), new_heads(NewHeads(heads=5), target).double(), target)
    drafts: list[Draft] = []
    Engine(target, None, Spy(drafter, drafts.append)).generate(PROMPT, 12)
    assert all(len(set(draft.tokens)) == 1 for draft in drafts[1:])


def test_typical_acceptance_is_asked_for(target: TransformersTarget, tmp_path: Path) -> None:
    drafter = drafter_of(target, tmp_path)
    with pytest.raises(ConfigError, match="allow_lossy"):
        SamplingParams(temperature=1.0, acceptance="typical")
    sampling = SamplingParams(temperature=1.0, acceptance="typical", allow_lossy=True)
    assert Engine(target, None, drafter).generate(PROMPT, 8, sampling).lossy


@pytest.mark.few(3)
@pytest.mark.parametrize(("slope", "max_rows", "size"), [(0.0, 64, 16), (0.0, 7, 6), (0.04, 64, 5), (2.0, 64, 0)])
def test_the_tree_grows_by_what_the_heads_promise_and_rows_cost(
    target: TransformersTarget, tmp_path: Path, slope: float, max_rows: int, size: int
) -> None:
    """Rows whose chance, four fifths of the heads', outweighs their time; none of less than a hundredth."""
    drafter, drafts = drafter_of(target, tmp_path, heads=2), list[Draft]()
    costs = CostCurve(machine={}, rows=[1, 101], lengths=[1], seconds=[[1.0, 1.0 + 100 * slope]])
    Engine(target, None, Spy(drafter, drafts.append), costs=costs, max_rows=max_rows).generate(PROMPT, 8)
    hidden = live(target).get_decoder()(torch.tensor([PROMPT[:-1]])).last_hidden_state[0, -1:].detach()
    first, second = (dict(zip(*own, strict=True)) for own in drafter.lists([(State(hidden, 0, PROMPT[-1]), None)])[0])
    worth = {(token,): 0.8 * chance for token, chance in first.items()}
    worth |= {(token, after): worth[token,] * 0.8 * chance for (token,) in [*worth] for after, chance in second.items()}
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(drafts[0].tokens[1:], drafts[0].parents[1:], strict=True):
        paths.append((*paths[parent], token))
    expected = sorted((path for path in worth if worth[path] > max(slope, 0.01)), key=lambda path: -worth[path])
    assert paths[1:] == expected[: max_rows - 1]
    assert len(paths) == size + 1


# Checkpoints


def published(folder: Path, *, heads: int = 5, form: str = "pt", size: int = 32, vocab: int = 32) -> dict[str, Any]:
    """A checkpoint of the published layout, whose config counts 2 heads as the authors' own does."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for head in range(heads):
        tensors[f"{head}.0.linear.weight"] = torch.randn(size, size, generator=generator)
        tensors[f"{head}.0.linear.bias"] = torch.randn(size, generator=generator)
        tensors[f"{head}.1.weight"] = torch.randn(vocab, size, generator=generator)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    (folder / "config.json").write_text(json.dumps(config))
    if form == "pt":
        torch.save(tensors, folder / "medusa_lm_head.pt")
    elif form == "safetensors":
        save_file(tensors, folder / "medusa_lm_head.safetensors")
    else:
        merged = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
        one, two = dict(list(merged.items())[:7]), dict(list(merged.items())[7:])
        save_file({**one, "model.norm.weight": torch.ones(size)}, folder / "model-00001-of-00002.safetensors")
        save_file(two, folder / "model-00002-of-00002.safetensors")
    return tensors


@pytest.mark.few(2)
@pytest.mark.parametrize("form", ["pt", "safetensors", "merged"])
def test_published_checkpoints(target: TransformersTarget, tmp_path: Path, form: str) -> None:
    tensors = published(tmp_path, form=form)
    heads = MedusaHeads.from_pretrained(tmp_path)
    assert heads.config == HeadsConfig(heads=5, layers=1, hidden_size=32, vocab_size=32, own_head=True)
    hidden = torch.randn(32)
    for number, found in enumerate(heads(hidden)):
        inner = tensors[f"{number}.0.linear.weight"] @ hidden + tensors[f"{number}.0.linear.bias"]
        expected = tensors[f"{number}.1.weight"] @ (hidden + inner * torch.sigmoid(inner))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    drafter = Medusa.build(MedusaConfig(heads=str(tmp_path), tree="mc_sim_7b_63"), target)
    assert Engine(target, None, drafter).generate(PROMPT, 8).stats.rows[0] == 64


@pytest.mark.few(2)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("shuffled", [False, True])
def test_heads_as_vllm_names_them(target: TransformersTarget, tmp_path: Path, shared: bool, shuffled: bool) -> None:
    """Blocks without biases, whole or cut heads, a map of tokens in any order: the same heads."""
    generator = torch.Generator().manual_seed(0)
    blocks = [torch.randn(32, 32, generator=generator) for _ in range(2)]
    heads = [torch.randn(32, 32, generator=generator) for _ in range(2)]
    tokens = torch.tensor([9, 3, 20] if shuffled else [3, 9, 20])
    tensors = {f"medusa_heads.blocks.{n}.layers.0.weight": block for n, block in enumerate(blocks)}
    if shared:
        tensors["lm_heads.0.weight"] = heads[0]
    else:
        tensors |= {"lm_heads.0.weight": heads[0][tokens], "lm_heads.1.weight": heads[1]}
    save_file({**tensors, "token_map": tokens}, tmp_path / "model.safetensors")
    values = {"num_heads": 2, "vocab_size": 32, "truncated_vocab_size": 3, "original_lm_head": shared}
    (tmp_path / "config.json").write_text(json.dumps(values))
    found = MedusaHeads.from_pretrained(tmp_path)
    assert found.config == HeadsConfig(
        heads=2, layers=1, hidden_size=32, vocab_size=32, own_head=not shared, draft_vocab=3
    )
    assert found.draft_tokens is not None
    assert found.draft_tokens.tolist() == [3, 9, 20]
    hidden = torch.randn(32)
    for state, block, head in zip(found(hidden), blocks, heads, strict=True):
        inner = block @ hidden
        expected = hidden + inner * torch.sigmoid(inner)
        expected = expected if shared else head[[3, 9, 20]] @ expected
        torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-4)
    engine = Engine(target, None, Medusa.build(MedusaConfig(heads=str(tmp_path), tree=[[0], [0, 0]]), target))
    assert engine.generate(PROMPT, 8).token_ids == Engine(target).generate(PROMPT, 8).token_ids


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("3.0.linear.bias"), r"'3\.0\.linear\.bias' is missing"),
        (lambda t: t.pop("3.1.weight"), r"'3\.1\.weight' is missing"),
        (lambda t: t.update({"1.0.linear.weight": torch.zeros(32, 31)}), r"\(32, 31\), expected \(32, 32\)"),
        (lambda t: t.update({"0.2.weight": torch.zeros(32, 32)}), "none of that name"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(32, 32)}), r"'lm_head\.weight' is none of theirs"),
        (lambda t: t.clear(), "no tensor is called"),
    ],
)
def test_odd_tensors_are_named(tmp_path: Path, change: Callable[[dict[str, Any]], Any], words: str) -> None:
    tensors = published(tmp_path)
    change(tensors)
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match=words):
        MedusaHeads.from_pretrained(tmp_path)


def test_broken_files_are_refused(target: TransformersTarget, tmp_path: Path) -> None:
    published(tmp_path)
    with pytest.raises(CheckpointError, match=r"no Medusa heads in .*none"):
        MedusaHeads.from_pretrained(tmp_path / "none")
    torch.save({"0.0.linear.weight": Path("no tensor, and no code either")}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match="no Medusa heads"):  # weights_only
        MedusaHeads.from_pretrained(tmp_path)
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"no checkpoint")
    with pytest.raises(CheckpointError, match="no Medusa heads"):
        MedusaHeads.from_pretrained(tmp_path)


def test_heads_that_cannot_be_written_leave_the_former_ones(
    target: TransformersTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    random_heads(target, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(Path, "write_text", full)  # the second file
    with pytest.raises(CheckpointError, match=r"cannot write the heads to .*what stood there before is unchanged"):
        random_heads(target, tmp_path, seed=1)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot write the heads"):
        random_heads(target, tmp_path / "file" / "heads")


def test_heads_of_another_model_are_refused(target: TransformersTarget, tmp_path: Path) -> None:
    published(tmp_path, size=16)
    with pytest.raises(CheckpointError, match="width is 16, the model's is 32"):
        Medusa.build(MedusaConfig(heads=str(tmp_path)), target)
    published(tmp_path, vocab=30)
    with pytest.raises(CheckpointError, match="vocabulary is 30, the model's is 32"):
        Medusa.build(MedusaConfig(heads=str(tmp_path)), target)
    with pytest.raises(CheckpointError, match="medusa has no heads for this model"):
        Medusa.build(MedusaConfig(), target)
    heads = random_heads(target, tmp_path / "other")
    MedusaHeads(HeadsConfig(heads=3, layers=1, hidden_size=32, vocab_size=32, target="another")).save_pretrained(
        tmp_path / "other"
    )
    with pytest.raises(CheckpointError, match="trained for another"):
        Medusa.build(MedusaConfig(heads=str(tmp_path / "other")), target)
    Medusa.build(MedusaConfig(heads=str(tmp_path / "other"), check_target=False), target)
    heads.save_pretrained(tmp_path / "other")
    Medusa.build(MedusaConfig(heads=str(tmp_path / "other")), target)


# Training


def test_heads_look_ahead_within_their_text() -> None:
    """Three texts in two windows; positions whose k-th successor is of another text or window are left out."""
    windows = pack([Sample([1] * n, [True] * n, False) for n in (4, 7, 5)], 8)
    batch = windows.at(np.array([0, 1]))
    assert batch.targets.tolist() == [0, 1, 2, 4, 5, 6, 8, 9, 11, 12, 13, 14]
    rows, places = ahead(batch, 1)
    assert batch.targets[rows].tolist() == [0, 1, 4, 5, 8, 11, 12, 13]
    assert (batch.targets[places] - batch.targets[rows]).tolist() == [1] * 8
    rows, places = ahead(batch, 2)
    assert batch.targets[rows].tolist() == [0, 4, 11, 12]
    assert (batch.targets[places] - batch.targets[rows]).tolist() == [2] * 4


@pytest.mark.parametrize(("labels", "sees_root"), [("hard", False), ("soft", False), ("soft", True)])
def test_loss_is_the_papers(target_of: Callable[..., TransformersTarget], labels: str, sees_root: bool) -> None:
    """sum of .8^k CE_k over one text, written out position by position."""
    target = target_of("llama", torch.float32)
    heads = new_heads(NewHeads(heads=2, sees_root=sees_root), target)
    torch.manual_seed(3)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    text = list(prompt_of(12))
    batch = pack([Sample(text, [True] * 12, False)], 12).at(np.array([0]))
    config = Config(data=["stdlib"], tree=[[0]], labels=labels)
    found = MedusaTraining(heads, target, [], config).loss(heads, batch)
    hidden = live(target).get_decoder()(torch.tensor([text])).last_hidden_state[0]
    own = torch.softmax(target.head(hidden), -1)
    expected = torch.zeros(())
    if sees_root:
        embedded = live(target).get_input_embeddings()(torch.tensor(text)).roll(-1, 0)  # of the last nothing is asked
        hidden = with_roots(hidden, embedded)
    for k, guess in enumerate(heads(hidden), 1):
        logs = torch.log_softmax(target.head(guess), -1)
        for t in range(12 - k - 1):
            label = own[t + k] if labels == "soft" else torch.eye(32)[text[t + k + 1]]
            expected = expected - 0.8**k * (label * logs[t]).sum()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    found.backward()
    assert all(parameter.grad is not None for parameter in heads.parameters())


def test_figures_are_the_engines(target_of: Callable[..., TransformersTarget], tmp_path: Path) -> None:
    """Steps counted from ranks are the very steps that decoding takes."""
    target = target_of("llama", torch.float32)
    heads = new_heads(NewHeads(heads=3), target)  # repeats the target's own token, which looping texts reward
    tree = [[rank] for rank in range(12)] + [[0, rank] for rank in range(6)] + [[0, 0, 0], [3, 0], [3, 0, 1]]
    drafter = Medusa(MedusaConfig(tree=tree), heads, target)
    texts, steps, tokens = [], 0, 0
    for seed in range(4):
        prompt = list(prompt_of(1 + 3 * seed, seed))
        found = Engine(target, None, drafter).generate(prompt, 30)
        texts.append(Written([*prompt, *found.token_ids], len(prompt)))
        steps, tokens = steps + found.stats.steps, tokens + 30
    figures = MedusaTraining(heads, target, texts, Config(data=["stdlib"], tree=tree)).evaluate()
    assert figures["tokens_per_step"] == tokens / steps > 1.1


def test_training_goes_on_from_given_heads(target: TransformersTarget, tmp_path: Path) -> None:
    given = random_heads(target, tmp_path, heads=2, layers=2)
    config = Config(data=["stdlib"], tree=[[0], [0, 0]], start=str(tmp_path), heads=NewHeads(sees_root=False))
    heads = started_heads(config, target)
    assert (heads.config.heads, heads.config.layers) == (2, 2)
    assert all(torch.equal(a, b) for a, b in zip(heads.parameters(), given.parameters(), strict=True))
    with pytest.raises(ConfigError, match="3 deep, but there are 2 heads"):
        started_heads(Config(data=["stdlib"], tree="small", start=str(tmp_path)), target)
    (tmp_path / "other").mkdir()
    published(tmp_path / "other", size=16)
    with pytest.raises(CheckpointError, match="width is 16, the model's is 32"):
        started_heads(Config(data=["stdlib"], start=str(tmp_path / "other")), target)


def test_heads_learn_to_see_the_root_from_what_they_say_without_it(target: TransformersTarget, tmp_path: Path) -> None:
    blind = random_heads(target, tmp_path, heads=2, layers=2)
    config = Config(data=["stdlib"], tree=[[0], [0, 0]], start=str(tmp_path), heads=NewHeads(sees_root=True))
    heads = started_heads(config, target)
    assert heads.config.sees_root
    hidden = torch.randn(3, 32)
    for root in (torch.zeros(3, 32), torch.randn(3, 32)):
        for own, former in zip(heads(with_roots(hidden, root)), blind(hidden), strict=True):
            torch.testing.assert_close(own, former)
    assert heads.seeing_root() is heads


def test_odd_training_options_are_named() -> None:
    for options, words in (
        ({}, "no data"),
        ({"labels": "own"}, "hard"),
        ({"decay": 0.0}, "decay is 0.0"),
        ({"tree": [[0], [0, 0]], "heads": NewHeads(heads=1)}, "there are 1 heads"),
    ):
        with pytest.raises(ConfigError, match=words):
            Config(**{"data": ["stdlib"] if options else [], **options})


# The shipped heads


def test_shipped_heads_serve_the_embedded_model(tiny_engine: Engine) -> None:
    assert all((folder / "README.md").exists() for folder in embedded_weights("medusa").values())
    engine = tiny_engine.with_drafter({"name": "medusa", "tree": "small"})  # the default's size follows the clock
    prompt = "def read(path):\n    with open(path) as file:\n"
    found, plain = engine.generate(prompt, 48), tiny_engine.generate(prompt, 48)
    assert found.token_ids == plain.token_ids
    assert found.stats.tokens_per_step > 1.2
