"""Training of the adapter: features as the engine's, figures as the engine's, and a run that is killed and goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from drafters.kangaroo.adapter import Adapter
from drafters.kangaroo.drafter import Kangaroo, KangarooConfig
from drafters.shared.fingerprint import fingerprint
from drafters.shared.vocabulary import most_frequent, token_counts
from specdec import Engine
from specdec.cli.main import build, main
from specdec.engine.config import WeightsOptions
from specdec.errors import CheckpointError, ConfigError, SpecdecWarning
from specdec.models.loading import embedded_model
from specdec.models.tokenizer import load_tokenizer
from specdec.models.transformers_target import TransformersTarget
from specdec.settings.files import held_folder
from specdec.settings.options import Given
from specdec.settings.parsing import parse
from specdec.step.tree import Draft
from tests.fakes import Spy
from tests.models import FAMILIES, live, prompt_of, random_adapter, target_of
from training import kangaroo, medusa
from training.acceptance import EvalConfig, Tally, Written, continued_texts, judged_samples, standard_error
from training.card import command_line, write_card
from training.checkpoint import precision_of, state_of
from training.choice import kept_options, settling
from training.cli import coloured
from training.convert import convert
from training.data import Sample, TextConfig, load_samples
from training.features import FrozenTarget
from training.kangaroo import Config, KangarooTraining, NewAdapter, new_adapter, run
from training.log import read_log
from training.loop import half_is_fast
from training.losses import Labels
from training.packing import pack
from training.run import frozen_target, started

LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]  # accelerate starts GPUs so


@pytest.fixture(autouse=True)
def _fresh_accelerator() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with the embedded model's tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = AutoTokenizer.from_pretrained(embedded_model())
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "talks.json"
    record = [
        {"id": str(i), "conversations": [
            {"from": "human", "value": f"What is {i} plus {i}?"}, {"from": "gpt", "value": f"It is {2 * i}, of course."}
        ]} for i in range(60)
    ]  # fmt: skip
    path.write_text(json.dumps(record))
    return path


def values(model: Path, data: Path, out: Path, **loop: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "data": [str(data)],
        "out": str(out),
        "adapter": {"exit_layer": 1, "gamma": 3, "eta": 0.0},
        "text": {"length": 32, "held_out_one_in": 6},
        "loop": {"steps": 30, "batch": 4, "lr": 1e-2, "eval_every": 10, "save_every": 1, "wandb": "off", **loop},
        "evaluation": {"prompts": 3, "prompt": 16, "new": 12},
    }


@pytest.mark.few(6)
@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_the_engines(target_of: Callable[..., TransformersTarget], family: str) -> None:
    """Two packed texts, each against a tapped walk of its own: layers, head states and separation agree."""
    target = target_of(family, execution="modules")
    texts = [list(prompt_of(size, seed)) for size, seed in ((11, 1), (13, 2))]
    windows = pack([Sample(text, [True] * len(text), False) for text in texts], 24)
    batch = windows.at(np.array([0]))
    features, states = FrozenTarget(target, [1, 2]).read(batch)
    logits = target.head(states)
    start = row = 0
    for text in texts:
        hidden = live(target)(torch.tensor([text]), output_hidden_states=True, use_cache=False)
        for layer in (1, 2):
            here = features[layer][0, start : start + len(text)]
            torch.testing.assert_close(here, hidden.hidden_states[layer][0], rtol=1e-5, atol=1e-6)
        found = logits[row : row + len(text) - 1]
        torch.testing.assert_close(found, hidden.logits[0, :-1], rtol=1e-5, atol=1e-5)
        start, row = start + len(text), row + len(text) - 1


@pytest.mark.parametrize("slab", [1, 2, 64])
def test_kept_features_are_those_computed(
    target_of: Callable[..., TransformersTarget], monkeypatch: pytest.MonkeyPatch, slab: int
) -> None:
    """A window is computed once, whatever batch it comes in; what does not fit is computed anew."""
    monkeypatch.setattr("training.features._SLAB", slab)
    target = target_of("llama", torch.float32)
    windows = pack([Sample(list(prompt_of(40, 1)), [True] * 40, False)], 8)
    each = 2 * 8 * 32 * 4  # taps, tokens, width, bytes
    forwards: list[int] = []
    frozen = FrozenTarget(target, [1], keep=3 * each)
    frozen._computed = lambda *window, of=frozen._computed: forwards.append(1) or of(*window)  # type: ignore[func-returns-value,method-assign]
    every, again = windows.at(np.arange(5)), windows.at(np.array([4, 2, 0]))
    features, states = frozen.read(every)
    found, _ = frozen.read(again)
    assert len(forwards) == 5 + 1
    assert sum(part.nbytes for part in frozen._slabs) == 3 * each
    torch.testing.assert_close(found[1], features[1][[4, 2, 0]], rtol=0, atol=0)
    assert states.shape == (35, 32)
    assert not found[1].is_inference()


def test_features_on_disk_are_those_computed(target_of: Callable[..., TransformersTarget], tmp_path: Path) -> None:
    """A second run computes no window anew but those of other text or layers, and one whose file is broken."""
    target = target_of("llama", torch.float32)
    windows = pack([Sample(list(prompt_of(40, 1)), [True] * 40, False)], 8)
    every, forwards = windows.at(np.arange(5)), list[int]()

    def reading(layers: list[int]) -> FrozenTarget:
        frozen = FrozenTarget(target, layers, folder=tmp_path / "features")
        frozen._computed = lambda *window, of=frozen._computed: forwards.append(1) or of(*window)  # type: ignore[func-returns-value,method-assign]
        return frozen

    wanted, states = FrozenTarget(target, [1]).read(every)
    for _ in range(2):
        features, found = reading([1]).read(every)
        torch.testing.assert_close((features[1], found), (wanted[1], states), rtol=0, atol=0)
        assert len(forwards) == 5
    next((tmp_path / "features").iterdir()).write_bytes(b"broken")
    features, _ = reading([1]).read(every)
    torch.testing.assert_close(features[1], wanted[1], rtol=0, atol=0)
    assert len(forwards) == 6
    reading([2]).read(every)
    reading([1]).read(pack([Sample(list(prompt_of(40, 2)), [True] * 40, False)], 8).at(np.arange(5)))
    assert len(forwards) == 16


def test_features_stay_in_memory_once_the_disk_is_full(
    target_of: Callable[..., TransformersTarget], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, forwards, folder = target_of("llama", torch.float32), list[int](), tmp_path / "features"
    windows = pack([Sample(list(prompt_of(40, 1)), [True] * 40, False)], 8)
    every, wanted = windows.at(np.arange(5)), FrozenTarget(target, [1])

    def full(tensors: dict[str, torch.Tensor], path: Path) -> None:
        Path(path).write_bytes(b"half")
        if len(list(folder.iterdir())) > 2:
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        save_file(tensors, path)

    monkeypatch.setattr("training.features.save_file", full)
    frozen = FrozenTarget(target, [1], keep=2**20, folder=folder)
    frozen._computed = lambda *window, of=frozen._computed: forwards.append(1) or of(*window)  # type: ignore[func-returns-value,method-assign]
    with pytest.warns(SpecdecWarning, match=r"a window, 2,048 bytes, to '.*features': .*No space.*keep_features"):
        frozen.read(every)
    assert [path.suffix for path in folder.iterdir()] == [".safetensors"] * 2
    for _ in range(2):
        torch.testing.assert_close(frozen.read(every), wanted.read(every), rtol=0, atol=0)
    assert len(forwards) == 5 + 1  # that which the disk did not take is computed once more


@pytest.mark.slow
def test_half_precision_is_left_where_it_is_slow(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    AutoModelForCausalLM.from_pretrained(model_folder).bfloat16().save_pretrained(tmp_path)
    cpu = torch.device("cpu")
    assert isinstance(half_is_fast(cpu), bool)
    for fast, auto in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr("training.run.half_is_fast", lambda device, fast=fast: fast)
        target, line = frozen_target(WeightsOptions(model=str(tmp_path)), cpu)
        assert target.dtype is auto
        assert ("slow here" in line) is not fast
        target, _ = frozen_target(WeightsOptions(model=str(tmp_path), dtype="bfloat16"), cpu)
        assert target.dtype is torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["kangaroo", "medusa"])
def test_training_over_a_draft_vocabulary(model_folder: Path, talks: Path, tmp_path: Path, drafter: str) -> None:
    """It is counted on the data, lies with the weights, and what was trained drafts from it alone."""
    sizes = {"adapter": {"exit_layer": 1, "draft_vocab": 64}, "heads": {"draft_vocab": 64}}
    options = values(model_folder, talks, tmp_path)
    options.pop("adapter")
    part, module = ("adapter", kangaroo) if drafter == "kangaroo" else ("heads", medusa)
    best = module.run(parse(module.Config, {**options, part: sizes[part]}, where="train"))
    tokens = load_file(next((tmp_path / "best").glob("*.safetensors")))["draft_tokens"]
    counts = token_counts(
        (
            s.tokens
            for s in load_samples([str(talks)], [], TextConfig(held_out_one_in=6), load_tokenizer(str(model_folder)))[0]
        ),
        len(load_tokenizer(str(model_folder))),
    )
    assert torch.equal(tokens, most_frequent(counts, 64))
    assert best["tokens_per_step"] >= 1
    engine = Engine.from_pretrained(str(model_folder), {"name": drafter, part: str(tmp_path / "best")}, policy="off")
    drafts: list[Draft] = []
    engine = engine.with_drafter(Spy(engine.drafter, drafts.append))
    assert engine.generate("What is", 20).token_ids == engine.with_drafter("none").generate("What is", 20).token_ids
    assert {token for draft in drafts for token in draft.tokens[1:]} <= set(tokens.tolist())
    assert "64 tokens that are the most frequent" in (tmp_path / "best" / "README.md").read_text()


@pytest.mark.slow
def test_figures_are_the_engines(target_of: Callable[..., TransformersTarget]) -> None:
    """The tally over given texts counts the very steps that decoding takes."""
    target = target_of("llama", torch.float32, execution="fused")
    kinds = (("attention", 0.05, 4, 1), ("mlp", 0.0, 2, 1), ("layer", 1.0, 6, 3), ("head", 0.06, 3, 2))
    for variant, eta, gamma, branch in kinds:
        adapter = new_adapter(NewAdapter(exit_layer=2, variant=variant, eta=eta, gamma=gamma, branch=branch), target)
        engine = Engine(target, None, Kangaroo(KangarooConfig(), adapter.requires_grad_(False), target))
        texts, steps, tokens = [], 0, 0
        for seed in range(4):
            prompt = list(prompt_of(8, seed))
            found = engine.generate(prompt, 40)
            texts.append(Written([*prompt, *found.token_ids], len(prompt)))
            steps, tokens = steps + found.stats.steps, tokens + found.stats.new_tokens
        figures = KangarooTraining(adapter, target, texts, Config(data=["stdlib"])).evaluate()
        assert steps < tokens  # some drafts were right
        assert figures["tokens_per_step"] == pytest.approx(tokens / steps)


def test_tally_of_a_text() -> None:
    tally = Tally(3)
    tally.add([True, True, False, True, True, True, True, True], [True] * 6 + [False] * 2)
    # Steps: two of three accepted (3 tokens); three of three (4 tokens); the last token alone.
    assert (tally.steps, tally.tokens) == (3, 8)
    figures = tally.figures()
    assert figures["tokens_per_step"] == pytest.approx(8 / 3)
    assert [figures[f"ctar_{w}"] for w in (1, 2, 3, 4)] == pytest.approx([2 / 3, 2 / 3, 1 / 3, 0])
    assert [figures[f"accepted_{place}"] for place in (1, 2, 3)] == pytest.approx([1, 1, 1 / 2])


def test_losses() -> None:
    guess, wanted, text = torch.randn(5, 11), torch.randn(5, 11), torch.tensor([3, -1, 0, 10, 3])
    p, said = torch.softmax(wanted, -1), torch.log_softmax(guess, -1)
    kept = torch.where(p >= p.topk(3).values[:, -1:], p, 0)
    kept = kept / kept.sum(-1, keepdim=True)
    best = torch.nn.functional.one_hot(wanted.argmax(-1), 11)
    next_one = torch.nn.functional.one_hot(text.clamp(min=0), 11) * (text >= 0)[:, None]  # one has no number
    places = torch.tensor([4, 1, 1])
    for options, chances in (({}, p), ({"top_k": 11}, p), ({"top_k": 3}, kept), ({"labels": "hard"}, best)):
        for share in (0.0, 0.25):
            expected = -(((1 - share) * chances + share * next_one) * said).sum(-1)
            labels = Labels.of(wanted, text, hard_share=share, **options)
            torch.testing.assert_close(labels.loss(guess), expected)
            again = -(((1 - share) * chances + share * next_one)[places] * said[[0, 2, 3]]).sum(-1)
            torch.testing.assert_close(labels.loss(guess[[0, 2, 3]], places), again)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_training_helps_and_serves(model_folder: Path, talks: Path, tmp_path: Path, precision: str) -> None:
    config = parse(Config, values(model_folder, talks, tmp_path, log_every=1, precision=precision), where="test")
    best = run(config)
    losses = [line["loss"] for line in read_log(tmp_path / "log.jsonl") if "loss" in line]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.01
    engine = Engine.from_pretrained(model_folder, {"name": "kangaroo", "adapter": str(tmp_path / "best")})
    assert engine.generate([0, 5, 6], 8).token_ids == engine.with_drafter("none").generate([0, 5, 6], 8).token_ids
    assert 1 <= best["tokens_per_step"] <= 4
    assert Adapter.from_pretrained(tmp_path / "best").config.target == fingerprint(engine.target)


@pytest.mark.slow
@pytest.mark.parametrize("fast", [True, False])
def test_a_run_goes_on_in_the_precision_that_it_began_in(
    model_folder: Path, talks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    """Whatever looks fast when it does."""
    monkeypatch.setattr("training.loop_config.half_is_fast", lambda device: fast)
    config = parse(Config, values(model_folder, talks, tmp_path, steps=2, save_every=1), where="test")
    run(config)
    assert precision_of(tmp_path / "checkpoint.safetensors") == ("bf16" if fast else "no")
    AcceleratorState._reset_state(reset_partial_state=True)
    asked = list[str]()
    monkeypatch.setattr("training.loop_config.half_is_fast", lambda device: not fast)
    monkeypatch.setattr("training.run.train", lambda *given, **_: asked.append(given[3].mixed_precision) or {})
    with pytest.raises(KeyError):
        run(config)
    assert asked == ["bf16" if fast else "no"]


@pytest.mark.slow
def test_two_processes_train_as_one(model_folder: Path, talks: Path, tmp_path: Path) -> None:
    """DDP, on CPU: two processes of batch 2 end where one of batch 4 does."""
    same = {"steps": 4, "log_every": 1, "precision": "no"}  # rounding in bfloat16 would tell batches apart
    run(parse(Config, values(model_folder, talks, tmp_path / "one", **same), where="test"))
    path = tmp_path / "two.yaml"
    path.write_text(json.dumps(values(model_folder, talks, tmp_path / "two", batch=2, **same)))
    command = [sys.executable, *LAUNCH, "-m", "specdec", "train", "kangaroo", "--config", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("best at step") == 1
    one, two = (load_file(tmp_path / name / "last" / "model.safetensors") for name in ("one", "two"))
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    logs = [[x for x in read_log(tmp_path / name / "log.jsonl") if "loss" in x] for name in ("one", "two")]
    for key in ("loss", "grad_norm", "tokens"):
        assert [x[key] for x in logs[0]] == pytest.approx([x[key] for x in logs[1]], rel=1e-4)


@pytest.mark.slow
def test_two_processes_end_after_the_same_step(model_folder: Path, talks: Path, tmp_path: Path) -> None:
    """A launcher hands a signal on; each of its processes ends with the checkpoint of one step."""
    path, out = tmp_path / "two.yaml", tmp_path / "two"
    path.write_text(json.dumps(values(model_folder, talks, out, steps=60_000, log_every=1, save_every=60_000)))
    command = [sys.executable, *LAUNCH, "-m", "specdec", "train", "kangaroo", "--config", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    while process.poll() is None and not ((out / "log.jsonl").exists() and len(read_log(out / "log.jsonl")) > 5):
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=240)[1]
    assert said.count("interrupted: the checkpoint after step") == 1, said[-2000:]
    assert state_of(out / "checkpoint.safetensors")["step"] > 5


@pytest.mark.slow
def test_the_card_tells_how_to_do_it_again(model_folder: Path, talks: Path, tmp_path: Path) -> None:
    settings = values(model_folder, talks, tmp_path / "out", log_every=1, steps=10, eval_every=5)
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump(settings))
    result = CliRunner().invoke(build(), ["train", "kangaroo", "--config", str(path), "--set", "save_dtype=bfloat16"])
    assert result.exit_code == 0, result.output
    card = (tmp_path / "out" / "best" / "README.md").read_text()
    config = parse(Config, {**settings, "save_dtype": "bfloat16"}, where="test")
    options = yaml.safe_load(card.split("```yaml")[1].split("```")[0])
    assert options["loop"] == asdict(config.loop)
    assert (options["save_dtype"], options["data"], options["adapter"]["gamma"]) == ("bfloat16", ["talks.json"], 3)
    lines = read_log(tmp_path / "out" / "log.jsonl")
    figures = {line["step"]: line for line in lines if "overlap" in line}
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in card.splitlines() if line.startswith("|")]
    assert rows[0][:4] == ["step", "loss", "tokens per step", "overlap"]
    assert [int(row[0]) for row in rows[2:]] == list(figures) == [5, 10]
    for row in rows[2:]:
        assert float(row[2]) == pytest.approx(figures[int(row[0])]["tokens_per_step"], abs=1e-3)
        loss = next(line["loss"] for line in lines if line["step"] == int(row[0]) and "loss" in line)
        assert float(row[1]) == pytest.approx(loss, abs=1e-3)
    weights = load_file(tmp_path / "out" / "best" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


def test_commands_are_shown_without_the_folder_of_their_program() -> None:
    words = ["/opt/some/where/bin/specdec", "train", "kangaroo", "--data", "my talks.json"]
    assert command_line(words) == "specdec train kangaroo --data 'my talks.json'"
    assert command_line(["/opt/specdec/__main__.py", "train"]) == "python -m specdec train"


@pytest.mark.parametrize("broken", ["write", "rename"])
def test_a_card_that_cannot_be_written_leaves_the_former_one(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_card(tmp_path, "former")
    write = Path.write_text

    def full(path: Path, text: str, **options: Any) -> None:
        write(path, text[:2], **options)  # as far as the disk goes
        raise OSError(28, "No space left on device")

    def refuse(*_: Any) -> None:
        raise OSError(13, "Permission denied")

    if broken == "write":
        monkeypatch.setattr(Path, "write_text", full)
    else:
        monkeypatch.setattr("pathlib.Path.replace", refuse)
    with pytest.raises(CheckpointError, match=r"cannot write the card in .*(No space|denied).*; the weights are there"):
        write_card(tmp_path, "later")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("README.md", "former")]


@pytest.mark.slow
def test_training_goes_on_from_a_given_adapter(target_of: Callable[..., TransformersTarget], tmp_path: Path) -> None:
    target = target_of("llama")
    given = random_adapter(target, tmp_path / "own", exit_layer=2, variant="layer", draft_vocab=8)
    adapter = started(Adapter, str(tmp_path / "own"), target, "kangaroo")
    assert adapter.config == given.config
    weights = adapter.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in given.state_dict().items())
    assert all(weight.dtype == torch.float32 and weight.requires_grad for weight in adapter.parameters())
    with pytest.raises(CheckpointError, match="width is 32, the model's is"):
        started(Adapter, str(tmp_path / "own"), TransformersTarget.from_pretrained(embedded_model()), "kangaroo")


def test_two_trainings_into_one_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a model is loaded: a log would have each step twice."""
    monkeypatch.setattr("training.run.frozen_target", lambda *_: pytest.fail("loaded"))
    with held_folder(tmp_path / "run"):
        assert main(["train", "kangaroo", "--data", "stdlib", "--out", str(tmp_path / "run")]) == 2
    assert "another run is writing to" in capsys.readouterr().err


class TestBadInput:
    @pytest.mark.parametrize("layer", [0, 3, 7])
    def test_wrong_exit_layer(self, target_of: Callable[..., TransformersTarget], layer: int) -> None:
        with pytest.raises(ConfigError, match=r"must be in \[1, 2\]"):
            new_adapter(NewAdapter(exit_layer=layer), target_of("llama"))

    def test_no_usable_conversation(self, tmp_path: Path) -> None:
        path = tmp_path / "empty.json"
        path.write_text(json.dumps([{"id": 1}, {"conversations": []}]))
        config = Config(data=[str(path)])
        tokenizer = AutoTokenizer.from_pretrained(embedded_model())
        with pytest.raises(ConfigError, match=r"not one usable conversation; 1 skipped: no list.*\"from\": \"human\""):
            load_samples(config.data, (), config.text, tokenizer, say=lambda line: None)

    def test_nothing_to_evaluate_with(self, talks: Path, tmp_path: Path) -> None:
        path = tmp_path / "empty.json"
        path.write_text("[]")
        tokenizer = AutoTokenizer.from_pretrained(embedded_model())
        with pytest.raises(ConfigError, match=r"empty\.json.*: not one usable conversation to evaluate with"):
            load_samples([str(talks)], [str(path)], TextConfig(), tokenizer, say=lambda line: None)

    def test_the_tokenizer_of_another_model(self, talks: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(embedded_model())
        with pytest.raises(ConfigError, match=r"the model knows \[0, 32\): it is another model's tokenizer"):
            load_samples([str(talks)], [], TextConfig(), tokenizer, say=lambda line: None, vocab_size=32)

    def test_no_tokenizer(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"no tokenizer at .*save one beside the weights"):
            load_tokenizer(str(tmp_path))

    @pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "gemma2"])
    def test_a_tokenizer_that_transformers_makes_without_files(self, family: str, tmp_path: Path) -> None:
        live(target_of(family)).config.save_pretrained(tmp_path)
        with pytest.raises(CheckpointError, match=r"no tokenizer at .*a \w+ without a vocabulary"):
            load_tokenizer(str(tmp_path))

    def test_unknown_dtype_of_the_file(self) -> None:
        with pytest.raises(ConfigError, match="save_dtype is 'int8'; it must be one of float32, bfloat16"):
            Config(data=["x.json"], save_dtype="int8")

    def test_no_data(self) -> None:
        with pytest.raises(ConfigError, match="--data FILE"):
            Config()

    def test_unknown_option(self) -> None:
        result = CliRunner().invoke(build(), ["train", "kangaroo", "--data", "x.json", "--set", "loop.learning=1"])
        assert isinstance(result.exception, ConfigError)
        assert "loop" in str(result.exception)

    def test_unknown_drafter(self) -> None:
        result = CliRunner().invoke(build(), ["train", "kangarooo", "--data", "x.json"])
        assert "did you mean 'kangaroo'" in str(result.exception)


class TestConversion:
    @pytest.fixture
    def official(self, tmp_path: Path) -> Path:
        """A checkpoint of the official layout, as saved from several GPUs, for a Llama of width 32."""
        tensors = {
            "module.layers.0.input_layernorm.weight": torch.rand(32, dtype=torch.float16),
            **{f"module.layers.0.self_attn.{p}_proj.weight": torch.randn(32, 32).half() for p in "qkvo"},
            "module.norm.weight": torch.rand(32, dtype=torch.float16),
            "module.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(4),
        }
        folder = tmp_path / "official"
        folder.mkdir()
        torch.save(tensors, folder / "pytorch_model.bin")
        config = {
            "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 32,
            "num_hidden_layers": 1, "rms_norm_eps": 1e-05, "model_type": "llama",
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    def test_official_layout(
        self, official: Path, tmp_path: Path, target_of: Callable[..., TransformersTarget]
    ) -> None:
        target = target_of("llama")
        convert(official, tmp_path / "ours", exit_layer=2, target=target)
        adapter = Adapter.from_pretrained(tmp_path / "ours")
        source = torch.load(official / "pytorch_model.bin", weights_only=True)
        torch.testing.assert_close(
            adapter.q_proj.weight, source["module.layers.0.self_attn.q_proj.weight"].float(), check_dtype=False
        )
        torch.testing.assert_close(adapter.norm, source["module.norm.weight"].float(), check_dtype=False)
        assert (adapter.config.exit_layer, adapter.config.norm_eps, adapter.config.rope_base) == (2, 1e-5, 1e4)
        engine = Engine(target, None, {"name": "kangaroo", "adapter": str(tmp_path / "ours"), "eta": 0.0})
        prompt = prompt_of(8)
        assert engine.generate(prompt, 20).token_ids == engine.with_drafter("none").generate(prompt, 20).token_ids

    @pytest.mark.parametrize(
        "rope", [{"rope_theta": 500.0}, {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}]
    )
    @pytest.mark.parametrize("key_heads", [4, 2])
    def test_the_official_computation(
        self, official: Path, tmp_path: Path, key_heads: int, rope: dict[str, Any]
    ) -> None:
        """Against transformers' own Llama layer with its MLP out of the way; configs as versions 4 and 5 write them."""
        values = json.loads((official / "config.json").read_text())
        (official / "config.json").write_text(json.dumps({**values, **rope, "num_key_value_heads": key_heads}))
        tensors = torch.load(official / "pytorch_model.bin", weights_only=True)
        for part in ("k_proj", "v_proj"):
            name = f"module.layers.0.self_attn.{part}.weight"
            tensors[name] = tensors[name][: key_heads * 8].clone()
        torch.save(tensors, official / "pytorch_model.bin")
        adapter = convert(official, tmp_path / "ours", exit_layer=2).requires_grad_(False)
        config = LlamaConfig(
            hidden_size=32, intermediate_size=8, num_attention_heads=4, num_key_value_heads=key_heads,
            num_hidden_layers=1, vocab_size=32, rms_norm_eps=1e-5,
            rope_parameters={"rope_theta": 500.0, "rope_type": "default"},
        )  # fmt: skip
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
        layer = model.model.layers[0]
        layer.mlp.down_proj.weight.zero_()
        layer.input_layernorm.weight.copy_(adapter.input_norm)
        model.model.norm.weight.copy_(adapter.norm)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            getattr(layer.self_attn, name).weight.copy_(getattr(adapter, name).weight)
        features = torch.randn(1, 40, 32)
        expected = model(inputs_embeds=features).logits[0]
        found = adapter(features, torch.arange(40)[None], model.lm_head)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
    def test_scaled_positions_are_refused(self, official: Path, tmp_path: Path, key: str) -> None:
        values = json.loads((official / "config.json").read_text())
        (official / "config.json").write_text(json.dumps({**values, key: {"rope_type": "yarn", "factor": 4.0}}))
        with pytest.raises(CheckpointError, match=r"scaled \(yarn\)"):
            convert(official, tmp_path / "ours", exit_layer=2)

    @pytest.mark.parametrize(
        ("damage", "words"),
        [
            ("missing", "k_proj.weight' is missing"),
            ("extra", "gate_proj"),
            ("pickle", "no official"),
            ("none", "no official"),
        ],
    )
    def test_other_files(self, official: Path, tmp_path: Path, damage: str, words: str) -> None:
        path = official / "pytorch_model.bin"
        tensors: dict[str, Any] = torch.load(path, weights_only=True)
        if damage == "missing":
            del tensors["module.layers.0.self_attn.k_proj.weight"]
        elif damage == "extra":
            tensors["module.layers.0.mlp.gate_proj.weight"] = torch.ones(2)
        elif damage == "pickle":
            tensors["module.norm.weight"] = Path("/")  # any object but a tensor
        torch.save(tensors, path)
        if damage == "none":
            path.unlink()
        with pytest.raises(CheckpointError, match=words):
            convert(official, tmp_path / "ours", exit_layer=2)

    def test_the_command(self, official: Path, tmp_path: Path) -> None:
        out = tmp_path / "ours"
        result = CliRunner().invoke(
            build(), ["convert", "kangaroo", str(official), "--out", str(out), "--exit-layer", "3"]
        )
        assert result.exit_code == 0, result.output
        assert Adapter.from_pretrained(out).config.exit_layer == 3


class TestShowSample:
    def test_trained_tokens_are_coloured(self) -> None:
        tokenizer = AutoTokenizer.from_pretrained(embedded_model())
        tokens = tokenizer("one two three", add_special_tokens=False)["input_ids"]
        text = coloured(tokens, [False] + [True] * (len(tokens) - 1), tokenizer)
        assert text.plain == "one two three"
        styles = [str(span.style) for span in text.spans]
        assert styles == ["dim", "bold green"]

    def test_the_command(self, talks: Path) -> None:
        result = CliRunner().invoke(build(), ["show-sample", str(talks), "--index", "2"])
        assert result.exit_code == 0, result.output
        assert "It is 4, of course." in result.output
        result = CliRunner().invoke(build(), ["show-sample", str(talks), "--index", "60"])
        assert "60 usable samples" in str(result.exception)


def samples_of(*questions: int) -> list[Sample]:
    return [
        Sample([7] * (size + 3), [False] * size + [True] * 3, True, f"p{n}", size) for n, size in enumerate(questions)
    ]


def test_best_is_chosen_on_other_prompts_than_it_is_reported_on() -> None:
    judged = EvalConfig(prompts=4, prompt=10)
    chose, others = judged_samples(samples_of(*range(3, 9), 50, 20, 30) * 2, judged)  # each prompt twice
    assert [sample.question for sample in chose] == [3, 5, 7, 20]
    assert [sample.question for sample in others] == [4, 6, 8, 30]  # whole ones where short ones are too few
    assert [len(part) for part in judged_samples(samples_of(*range(3, 10)), judged)] == [4, 0]  # seven are too few
    assert [len(part) for part in judged_samples(samples_of(*range(2, 10)), judged)] == [4, 4]
    assert [len(part) for part in judged_samples(samples_of(*[5] * 99), judged)] == [4, 4]


def test_questions_are_kept_whole(tmp_path: Path, tiny_engine: Engine) -> None:
    """The target answers them; a text that is kept is not written anew, with more tokens it is, and none is lost."""
    tokens = tiny_engine.tokenizer("def f(x):\n    return x\n" * 8)["input_ids"]
    question = Sample(tokens, [False] * 40 + [True] * (len(tokens) - 40), True, "a", 40)
    text = Sample(tokens, [True] * len(tokens), True, "b")
    too_long = Sample([5] * 9999, [True] * 9999, True, "c", 9998)
    judged, kept = EvalConfig(prompt=16, new=4), tmp_path / "kept.jsonl"
    first = continued_texts(tiny_engine, [question, text, too_long], judged, kept)
    assert [written.prompt for written in first] == [40, 16]
    assert all(written.tokens[: written.prompt] == tokens[: written.prompt] for written in first)
    with kept.open("a") as file:
        file.write('{"prompt": [1')  # a kill
    whole, *_ = lines = kept.read_text().split("\n")
    line = json.loads(whole)
    kept.write_text("\n".join([json.dumps({**line, "new": [*line["new"][:-1], 11]}), *lines[1:]]))
    again = continued_texts(tiny_engine, [question, text], judged, kept)
    assert again[0].tokens[-1] == 11
    longer = continued_texts(tiny_engine, [question], replace(judged, new=5), kept)[0]
    assert longer.tokens[: len(first[0].tokens)] == first[0].tokens
    kept.write_text("{}\n")
    with pytest.raises(ConfigError, match=r"kept\.jsonl', line 1: no text"):
        continued_texts(tiny_engine, [question], judged, kept)


def test_the_standard_error_of_a_ratio() -> None:
    assert standard_error([4, 8, 2], [2, 4, 1]) == 0
    assert standard_error([4], [2]) == 0
    assert standard_error([3, 1], [1, 1]) == pytest.approx(1)  # 2 ± 1


@pytest.mark.slow
@pytest.mark.parametrize(("records", "one_in", "counted"), [(60, 50, "2 on 0"), (60, 2, "12 on 12"), (1, 2, "0 on 0")])
def test_the_card_counts_what_was_judged(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], records: int, one_in: int, counted: str
) -> None:
    record = [
        {
            "conversations": [
                {"from": "human", "value": f"Tell {n}."},
                {"from": "gpt", "value": f"It is {n}, of course."},
            ]
        }
        for n in range(records)
    ]
    (tmp_path / "talks.json").write_text(json.dumps(record))
    options = values(model_folder, tmp_path / "talks.json", tmp_path / "out", steps=1, batch=1)
    options |= {"text": {"length": 16, "held_out_one_in": one_in}, "evaluation": {"prompts": 12, "new": 4}}
    best = run(parse(Config, options, where="test"))
    card, said = (tmp_path / "out" / "best" / "README.md").read_text(), capsys.readouterr().out
    chose, others = map(int, counted.split(" on "))
    assert f"- Evaluation: {chose + others} held-out prompts of" in card
    place = "held-out texts" if chose else "not judged, as nothing was held out"
    assert place in card
    assert place in said.splitlines()[-1]
    assert (f"{chose} held-out texts that chose it, so on others it may be less" in card) == (chose > 0 == others)
    assert (f"{others} held-out texts, others than the {chose} that chose it" in card) == (others > 0)
    assert ("tokens_per_step" in best) == (chose > 0)


def test_features_of_texts_are_kept(target_of: Callable[..., TransformersTarget]) -> None:
    """Those that every evaluation reads, within the same bytes."""
    target, forwards = target_of("llama", torch.float32), list[int]()
    windows = pack([Sample(list(prompt_of(40, 1)), [True] * 40, False)], 8)
    each = 2 * 8 * 32 * 4
    frozen = FrozenTarget(target, [1], keep=2 * each)
    frozen._computed = lambda *window, of=frozen._computed: forwards.append(1) or of(*window)  # type: ignore[func-returns-value,method-assign]
    texts = [replace(windows.at(np.array([number])), numbers=None) for number in range(3)]
    wanted = [frozen.read(text)[1] for text in texts]
    for text, states in zip(texts, wanted, strict=True):
        torch.testing.assert_close(frozen.read(text)[1], states, rtol=0, atol=0)
    assert len(forwards) == 3 + 1
    frozen.read(windows.at(np.arange(2)))
    frozen.read(windows.at(np.arange(2)))
    assert len(forwards) == 4 + 4


class TestWithoutAConfig:
    """``specdec train kangaroo --data FILE --model PATH``."""

    @pytest.mark.parametrize(
        ("layers", "size", "vocab", "wanted", "why"),
        [
            (16, 192, 4096, (4, "layer", 0, "muon"), "measured on this model"),
            (30, 576, 49152, (5, "layer", 8192, "muon"), "measured on this model"),
            (32, 4096, 32000, (2, "attention", 0, "adamw"), "published for 32 layers"),
            (40, 5120, 32000, (3, "attention", 0, "adamw"), "published for 40 layers"),
            (24, 896, 151936, (4, "layer", 8192, "muon"), "by analogy to SmolLM2"),
            (80, 8192, 128256, (6, "attention", 0, "adamw"), "by analogy to models of 32"),
            (1, 64, 64, (1, "layer", 0, "muon"), "by analogy to SmolLM2"),
        ],
    )
    def test_what_is_chosen(self, layers: int, size: int, vocab: int, wanted: tuple[Any, ...], why: str) -> None:
        target: Any = SimpleNamespace(num_layers=layers, hidden_size=size, vocab_size=vocab)
        config, line = settling(Config, Given(values={"data": ["x"], "out": "nowhere"}), "test")(target)
        own = config.adapter
        assert (own.exit_layer, own.variant, own.draft_vocab, config.loop.optimizer) == wanted
        assert why in line
        assert f"exit layer {own.exit_layer} of {layers}" in line

    def test_a_run_goes_on_with_what_was_chosen(
        self, model_folder: Path, talks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Given options count; the same command chooses nothing anew, and another option is named alone."""
        short = ("text.length=32", "loop.steps=2", "loop.batch=2", "loop.save_every=1", "loop.wandb=off")
        short += ("evaluation.prompts=2", "evaluation.new=4")
        words = ["train", "kangaroo", "--data", str(talks), "--model", str(model_folder), "--out", str(tmp_path)]
        words += [word for setting in short for word in ("--set", setting)]
        first = CliRunner().invoke(build(), words)
        assert "exit layer 1 of 3, variant layer" in first.output
        assert Adapter.from_pretrained(tmp_path / "best").config.exit_layer == 1
        monkeypatch.setattr("training.choice.chosen", lambda target: pytest.fail("chosen again"))
        AcceleratorState._reset_state(reset_partial_state=True)
        again = CliRunner().invoke(build(), words)
        assert again.exit_code == 0, again.output
        assert "the options are those of" in again.output
        AcceleratorState._reset_state(reset_partial_state=True)
        other = CliRunner().invoke(build(), [*words, "--set", "loop.lr=0.5"])
        assert "is of a run with loop.lr 0.005, this one has 0.5;" in str(other.exception)
        (tmp_path / "options.yaml").write_text("model: [")
        with pytest.raises(ConfigError, match=r"options\.yaml' is no YAML: .*; delete it to have them chosen anew"):
            kept_options(tmp_path)

    def test_a_dry_run_writes_nothing(self, model_folder: Path, talks: Path, tmp_path: Path) -> None:
        words = ["train", "kangaroo", "--data", str(talks), "--model", str(model_folder), "--out", str(tmp_path / "o")]
        result = CliRunner().invoke(build(), [*words, "--dry-run", "--set", "loop.batch=1", "--set", "text.length=32"])
        assert result.exit_code == 0, result.output
        assert "300 steps are expected to take" in result.output
        assert not (tmp_path / "o").exists()
