"""Training of heads: its guesses are the drafters', its figures the engine's, and what it exports is read by others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from drafters.heads.loading import load_head
from specdec import Engine
from specdec.costs.curve import roofline
from specdec.drafting.registry import make_drafter
from specdec.errors import ConfigError
from specdec.models.transformers_target import TransformersTarget
from specdec.settings.parsing import parse
from tests.fakes import Oracle
from tests.head_references import exported
from tests.integration.test_heads_reference import Beside, key
from tests.integration.test_training_kangaroo import _fresh_accelerator, model_folder, talks, values  # noqa: F401
from tests.models import VOCAB, greedy, live, model_of, new_model, prompt_of
from training import dspark, eagle3, kangaroo, medusa
from training.acceptance import Written
from training.data import Sample
from training.dspark import anchors_of
from training.eagle3 import followed
from training.export import export
from training.log import read_log
from training.packing import Batch, pack

FAMILY = "llama"
CHAINS: dict[str, dict[str, Any]] = {
    "plain": {},
    "draft vocabulary": {"draft_vocab": 20, "taps": [0, 2]},
    "own head": {"draft_vocab": 17, "own_head": True, "norm_before_residual": True},
    "3.1": {"norm_inputs": "each", "norm_output": True, "heads": 2, "intermediate_size": 24},
    "inputs normed": {"norm_inputs": "whole", "taps": [3, 1]},
    "layers": {"draft_vocab": 21, "taps": [1, 2]},
    "layers with its own head": {"own_head": True, "taps": [1, 3]},
}
BLOCKS: dict[str, dict[str, Any]] = {
    "plain": {"taps": [1, 2]},
    "draft vocabulary": {"draft_vocab": 20, "layers": 1, "mask_token": 3},
    "own head": {"draft_vocab": 17, "own_head": True, "block_size": 4},
    "without a bias": {"markov_rank": 0},
}
EXPORTED = Path(__file__).parents[1] / "head_exports.json"
CASES = [("eagle3", name) for name in CHAINS] + [("dspark", name) for name in BLOCKS]


def training_of(kind: str, name: str, target: TransformersTarget, texts: list[Written] | None = None) -> Any:
    """A training whose head has random weights."""
    module: Any = {"eagle3": eagle3, "dspark": dspark}[kind]
    own = {"eagle3": CHAINS, "dspark": BLOCKS}[kind][name]
    counts = torch.arange(VOCAB) % 7
    head = module.new_head(module.NewHead(**own), target, counts=counts)
    generator = torch.Generator().manual_seed(len(name))
    for parameter in head.parameters():
        if parameter.ndim == 2:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 2 * parameter.shape[1] ** -0.5)
        elif "norm" in str(parameter.shape) or parameter.ndim == 1:
            parameter.data.copy_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
    config = module.Config(data=["stdlib"])
    made = module.Eagle3Training if kind == "eagle3" else module.DSparkTraining
    return made(head.to(target.dtype).eval(), target, texts or [], config)


def drafting(kind: str, training: Any, folder: Path) -> dict[str, Any]:
    """Options of the drafter that drafts chains with the head of a training, as long as it goes, whatever they cost."""
    training.head.save_pretrained(folder)
    drafter = {"eagle3": "eagle", "dspark": "dflash"}[kind]
    return {"name": drafter, "head": str(folder), "min_chance": 0.0, "branch": 1, "tokens": training.depth}


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_guesses_are_the_drafters(
    target_of: Callable[..., TransformersTarget], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    """In each step of a text whose blocks are accepted as they come, of each row of a chain: the logits of training."""
    target, prompt = target_of(FAMILY, torch.float64), list(prompt_of(9))
    training = training_of(kind, name, target)
    truth = greedy(FAMILY, prompt_of(9), 40)[:20]
    drafter = Beside(make_drafter(drafting(kind, training, tmp_path), target), Oracle([*prompt, *truth], VOCAB))
    said: list[tuple[list[int], list[int], torch.Tensor]] = []

    def scores(self: Any, logits: torch.Tensor, paths: Any) -> torch.Tensor:
        said.append(([*self._context.tokens], [*paths[0]], logits[0]))
        return logits

    monkeypatch.setattr("drafters.heads.session.HeadSession._scores", scores)
    out = Engine(target, None, drafter, max_rows=24, prefill_chunk=4, costs=roofline()).generate(prompt, 20)
    assert out.token_ids == truth
    assert len(set(out.stats.acceptance_lengths)) > 2  # blocks of several lengths were committed
    assert max(len(path) for _, path, _ in said) == training.depth - 1
    for tokens, path, logits in said:
        text = Written([*tokens, *path, 0], len(tokens))  # the path stands for what the target wrote
        found = (
            training.guesses(text, len(path) + 1)[-1][0]
            if kind == "eagle3"
            else training.guesses(text)[0][0][len(path)]
        )
        torch.testing.assert_close(found, logits, rtol=0, atol=1e-12)
        assert int(found.argmax()) == int(logits.argmax())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_figures_are_the_engines(target_of: Callable[..., TransformersTarget], tmp_path: Path, kind: str) -> None:
    """The tally over given texts counts the very steps that decoding takes."""
    target = target_of(FAMILY, torch.float64)
    training = training_of(kind, "plain", target)
    engine = Engine(target, None, drafting(kind, training, tmp_path))
    texts, steps = [], 0
    for seed in range(6):
        prompt = list(prompt_of(8, seed))
        found = engine.generate(prompt, 40)
        texts.append(Written([*prompt, *found.token_ids], len(prompt)))
        steps += found.stats.steps
    training.texts = texts
    assert steps < 6 * 40  # some drafts were right
    assert training.evaluate()["tokens_per_step"] == 6 * 40 / steps


def batch_of_pieces() -> Batch:
    """Targets 0 1 2 5 6 of a window of 8, positions 5 to 7 being another text."""
    tokens, documents = torch.arange(8)[None], torch.tensor([[1, 1, 1, 1, 1, 2, 2, 2]])
    return Batch(tokens, torch.tensor([0, 1, 2, 5, 6]), torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]]), documents)


def test_chains_end_where_nothing_is_trained() -> None:
    found = [(kept.tolist(), places.tolist()) for kept, places in followed(batch_of_pieces(), 3)]
    assert found == [([0, 1, 3], [1, 2, 4]), ([0], [2]), ([], [])]


def test_chains_end_with_their_text() -> None:
    batch = replace(batch_of_pieces(), targets=torch.arange(8))
    found = [(kept.tolist(), places.tolist()) for kept, places in followed(batch, 3)]
    assert found == [([0, 1, 2, 3, 5, 6], [1, 2, 3, 4, 6, 7]), ([0, 1, 2, 5], [2, 3, 4, 7]), ([0, 1], [3, 4])]


def test_blocks_begin_anywhere_and_end_where_nothing_is_trained() -> None:
    anchors, places = anchors_of(batch_of_pieces(), 9, 3, 0)
    assert anchors.tolist() == [0, 1, 2, 5, 6]
    assert places.tolist() == [[0, 1, 2], [1, 2, -1], [2, -1, -1], [3, 4, -1], [4, -1, -1]]


def test_blocks_are_drawn_by_seed_step_and_window() -> None:
    windows = pack([Sample([*range(60)], [True] * 60, False)], 30)
    one, other = windows.at(np.array([0, 1])), windows.at(np.array([1]))

    def drawn(batch: Batch, seed: int = 0) -> list[int]:
        return anchors_of(batch, 5, 4, seed)[0].tolist()

    assert drawn(one) == drawn(windows.at(np.array([0, 1])))
    assert len(drawn(one)) == 10
    assert len({tuple(drawn(windows.at(np.array([0, 1]), step))) for step in range(5)}) == 5
    assert drawn(one) != drawn(one, 1)
    assert len(drawn(other)) == 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_training_helps_and_serves(model_folder: Path, talks: Path, tmp_path: Path, kind: str) -> None:  # noqa: F811
    options = {**values(model_folder, talks, tmp_path, log_every=1, lr=3e-3), "head": {"draft_vocab": 256}}
    del options["adapter"]
    module: Any = {"eagle3": eagle3, "dspark": dspark}[kind]
    best = module.run(parse(module.Config, options, where="test"))
    losses = [line["loss"] for line in read_log(tmp_path / "log.jsonl") if "loss" in line]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.1
    name = {"eagle3": "eagle", "dspark": "dflash"}[kind]
    engine = Engine.from_pretrained(model_folder, {"name": name, "head": str(tmp_path / "best")})
    assert engine.generate([0, 5, 6], 8).token_ids == engine.with_drafter("none").generate([0, 5, 6], 8).token_ids
    assert best["tokens_per_step"] >= 1
    # It goes on from there, as it is.
    again = {**options, "start": str(tmp_path / "best"), "out": str(tmp_path / "more"), "head": {}}
    module.run(parse(module.Config, {**again, "loop": {**options["loop"], "steps": 1, "lr": 1e-9}}, where="test"))
    before, after = (load_file(tmp_path / place / "model.safetensors") for place in ("best", "more/best"))
    torch.testing.assert_close(before, after, rtol=0, atol=1e-6)


def exports(kind: str, name: str, target: TransformersTarget, folder: Path) -> Path:
    """The head of a case, exported for others."""
    training = training_of(kind, name, target)
    training.head.save_pretrained(folder / "own")
    model_of(FAMILY).save_pretrained(folder / "target")
    drafter, out = {"eagle3": "eagle", "dspark": "dflash"}[kind], folder / "out"
    export(folder / "own", out, drafter, target, layout="speculators", verifier=str(folder / "target"))
    return out


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_exported_heads_draft_as_was_recorded(
    target_of: Callable[..., TransformersTarget], tmp_path: Path, kind: str, name: str
) -> None:
    """As the package ``speculators`` does with the same folder: ``scripts/record_exports.py`` wrote it down."""
    target = target_of(FAMILY, torch.float64)
    out = exports(kind, name, target, tmp_path)
    recorded = json.loads(EXPORTED.read_text())[f"{kind}, {name}"]
    for tokens, path, children in drafts(kind, out, target):
        assert children == recorded[key(tokens, path)][: len(children)], (len(tokens), path)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_exported_heads_are_read_by_others(
    target_of: Callable[..., TransformersTarget], tmp_path: Path, kind: str, name: str
) -> None:
    """As that package guesses here and now."""
    target = target_of(FAMILY, torch.float64)
    out = exports(kind, name, target, tmp_path)
    try:
        guess = exported(out)
    except ModuleNotFoundError as missing:
        pytest.skip(f"{missing.name} is not installed; see tests/head_references.py")
    for tokens, path, children in drafts(kind, out, target):
        likeliest = guess(tokens, path)[-1].topk(len(children)).indices.tolist()
        assert children == likeliest, (len(tokens), path)


def drafts(kind: str, folder: Path, target: TransformersTarget) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """In some steps of a text: it, a path below its root, and the tokens that the exported head proposes behind it."""
    prompt, truth = list(prompt_of(9)), greedy(FAMILY, prompt_of(9), 40)[:10]
    settings = {"name": {"eagle3": "eagle", "dspark": "dflash"}[kind], "head": str(folder), "min_chance": 0.0}
    drafter = Beside(make_drafter({**settings, "rows": 12, "tokens": 3}, target), Oracle([*prompt, *truth], VOCAB))
    Engine(target, None, drafter, max_rows=24, prefill_chunk=4, costs=roofline()).generate(prompt, 10)
    for tokens, draft in drafter.found:
        below: dict[int, list[int]] = {}
        for row in range(1, len(draft)):
            below.setdefault(draft.parents[row], []).append(draft.tokens[row])
        for row, children in below.items():
            yield tokens, draft.path_tokens(row), children


@pytest.mark.parametrize("layout", ["speculators", "eagle3"])
def test_an_exported_head_is_the_same_head(
    target_of: Callable[..., TransformersTarget], tmp_path: Path, layout: str
) -> None:
    """Read back it has the same weights and switches, and the target's matrix as its own."""
    target = target_of(FAMILY, torch.float64)
    training = training_of("eagle3", "own head" if layout == "speculators" else "layers", target)
    training.head.save_pretrained(tmp_path / "own")
    export(tmp_path / "own", tmp_path / "out", "eagle", target, layout=layout, verifier="some/model")
    head = load_head(tmp_path / "out", "eagle", target)
    same = asdict(training.head.config) | {"own_head": True, "own_embedding": layout == "speculators"}
    other = asdict(head.config)
    for field in ("target", "target_name", "target_layers", "depth", "rope"):
        del same[field], other[field]
    assert other == same
    for name, tensor in training.head.state_dict().items():
        assert torch.equal(head.state_dict()[name], tensor.float() if tensor.is_floating_point() else tensor), name
    if not training.head.config.own_head:
        matrix = live(target).lm_head.weight[training.head.draft_tokens]  # type: ignore[index]
        assert torch.equal(head.lm_head.weight, matrix.float())
    if layout == "speculators":
        assert torch.equal(head.embed_tokens.weight, live(target).get_input_embeddings().weight.float())


def test_heads_that_no_layout_can_say(target_of: Callable[..., TransformersTarget], tmp_path: Path) -> None:
    bounded = target_of("gemma2", torch.float64)
    training_of("eagle3", "draft vocabulary", bounded).head.save_pretrained(tmp_path / "bounded")
    with pytest.raises(ConfigError, match=r"bounds its logits.*own_head=true"):
        export(tmp_path / "bounded", tmp_path / "out", "eagle", bounded, layout="speculators", verifier="x")
    target = target_of(FAMILY, torch.float64)
    training_of("eagle3", "draft vocabulary", target).head.save_pretrained(tmp_path / "own")
    with pytest.raises(ConfigError, match=r"over outputs of layers.*\[0, 2\]; take speculators"):
        export(tmp_path / "own", tmp_path / "out", "eagle", target, layout="eagle3", verifier="x")
    training_of("dspark", "plain", target).head.save_pretrained(tmp_path / "block")
    with pytest.raises(ConfigError, match=r"kind dspark.*take speculators"):
        export(tmp_path / "block", tmp_path / "out", "dflash", target, layout="eagle3", verifier="x")
    with pytest.raises(ConfigError, match="layout 'vllm'"):
        export(tmp_path / "own", tmp_path / "out", "eagle", target, layout="vllm", verifier="x")
    assert not (tmp_path / "out").exists()


def test_a_scaled_embedding_goes_with_the_head(target_of: Callable[..., TransformersTarget], tmp_path: Path) -> None:
    target = target_of("gemma3", torch.float64)
    training_of("eagle3", "layers with its own head", target).head.save_pretrained(tmp_path / "own")
    export(tmp_path / "own", tmp_path / "out", "eagle", target, layout="eagle3", verifier="x")
    head = load_head(tmp_path / "out", "eagle", target)
    assert torch.equal(head.embed_tokens.weight, target.embed(torch.arange(VOCAB)).float())


@pytest.mark.parametrize(("norms", "flag"), [("each", "fc_norm"), ("whole", "norm_before_fc")])
def test_the_authors_layout_says_its_norms(
    target_of: Callable[..., TransformersTarget], tmp_path: Path, norms: Any, flag: str
) -> None:
    target = target_of(FAMILY, torch.float64)
    eagle3.new_head(eagle3.NewHead(norm_inputs=norms, taps=[1, 2]), target).save_pretrained(tmp_path / "own")
    values = export(tmp_path / "own", tmp_path / "out", "eagle", target, layout="eagle3", verifier="x")
    assert [name for name in ("fc_norm", "norm_before_fc") if values[name]] == [flag]


def test_both_spellings_of_positions_are_written(target_of: Callable[..., TransformersTarget], tmp_path: Path) -> None:
    target = target_of(FAMILY, torch.float64)
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    for rope, scaling in ((scaled, {"rope_type": "linear", "factor": 2.0}), ({"rope_theta": 500.0}, None)):
        head = eagle3.new_head(eagle3.NewHead(taps=[1, 2]), target)
        head.config = replace(head.config, rope=rope)
        head.save_pretrained(tmp_path / "own")
        for layout in ("eagle3", "speculators"):
            values = export(tmp_path / "own", tmp_path / "out", "eagle", target, layout=layout, verifier="x")
            values = values.get("transformer_layer_config", values)
            assert (values["rope_theta"], values["rope_scaling"], values["rope_parameters"]) == (500.0, scaling, rope)
            read = load_head(tmp_path / "out", "eagle", target).config.rope
            assert read == {"rope_type": "default", **rope}


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["llama", "gemma2", "neox", "starcoder2"])
def test_new_weights_begin_with_the_targets_norm(family: str) -> None:
    """With its weight alone, whether it is stored as such, less one, or beside a bias."""
    model: Any = new_model(family)
    own = model.gpt_neox.final_layer_norm if family == "neox" else model.model.norm
    weight = 1 + 0.3 * torch.randn(32, generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        own.weight.copy_(weight - float(family == "gemma2"))
        if getattr(own, "bias", None) is not None:
            own.bias.add_(0.5)
    target = TransformersTarget(model)
    made = [
        kangaroo.new_adapter(kangaroo.NewAdapter(exit_layer=1), target).norm,
        2 * eagle3.new_head(eagle3.NewHead(), target).norm.weight,
        2 * dspark.new_head(dspark.NewHead(), target).norm.weight,
    ]
    for norm in made:
        torch.testing.assert_close(norm.detach(), weight.float(), rtol=1e-4, atol=0)  # the norm's epsilon is 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["medusa", "eagle3", "kangaroo", "dspark"])
def test_short_answers_train_or_are_refused_in_words(model_folder: Path, tmp_path: Path, kind: str) -> None:  # noqa: F811
    """Labels of one token, and then one longer answer among them: most batches have nothing to learn from."""
    module: Any = {"medusa": medusa, "eagle3": eagle3, "kangaroo": kangaroo, "dspark": dspark}[kind]

    def run(long: int, out: str) -> None:
        said = [(f"Is {n} even? ", "no" * (1 + 20 * (n < long))) for n in range(40)]
        record = [
            {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}
            for question, answer in said
        ]
        (tmp_path / "data.json").write_text(json.dumps(record))
        options = values(model_folder, tmp_path / "data.json", tmp_path / out, steps=3, batch=1, optimizer="muon")
        options |= {"text": {"length": 8, "template": "plain"}, "evaluation": {"prompts": 2, "new": 3}}
        options |= {"adapter": {"exit_layer": 1}} if kind == "kangaroo" else {}
        if kind != "kangaroo":
            del options["adapter"]
        module.run(parse(module.Config, options, where="test"))
        AcceleratorState._reset_state(reset_partial_state=True)

    if kind in ("medusa", "eagle3"):
        with pytest.raises(ConfigError, match=r"no answer .* has more than 1 trained tokens in a row.*from 2;"):
            run(0, "short")
    else:
        run(0, "short")
    run(20, "mixed")
