"""The training loop with a trainable of its own: order of the data, accumulation, resume, and what can go wrong."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file
from torch import nn

from specdec.errors import CheckpointError, ConfigError, NumericalError, SpecdecWarning
from specdec.settings.parsing import parse
from training import checkpoint, eagle3, log
from training.data import Sample
from training.identity import identity
from training.interrupt import stopping
from training.loop import LoopConfig, expected_seconds, new_accelerator, rate_at, rows_of, train
from training.muon import Muon
from training.packing import Batch, Windows, pack

CONFIG = LoopConfig(steps=12, batch=2, lr=0.05, eval_every=4, save_every=3, log_every=1, wandb="off")


class Bigrams:
    """Learns the next token from this one; a drafter that only a test could want."""

    metric, judges = "score", True

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module: nn.Module = nn.Embedding(16, 16)
        self.scores: Iterator[float] = iter(())
        self.poison: Callable[[Batch], bool] = lambda batch: False

    def loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        flat = batch.tokens.flatten()
        loss = nn.functional.cross_entropy(module(flat[batch.targets]), flat[batch.targets + 1], reduction="sum")
        return loss * float("nan") if self.poison(batch) else loss

    def evaluate(self) -> dict[str, float]:
        return {"score": next(self.scores, 0.0)}

    def evaluation_seconds(self, clock: Callable[[], float]) -> float:
        return 0.0

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(dict(self.module.state_dict()), folder / "weights.safetensors")


@pytest.fixture(scope="module")
def windows() -> Windows:
    rng = np.random.default_rng(0)
    samples = [Sample(rng.integers(0, 16, size).tolist(), [True] * size, False) for size in (9, 30, 4, 50, 7)]
    return pack(samples, 8)


@pytest.fixture(autouse=True)
def _fresh_accelerator() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def trained(windows: Windows, folder: Path, config: LoopConfig = CONFIG, part: Bigrams | None = None) -> torch.Tensor:
    part = part or Bigrams()
    train(part, windows, config, new_accelerator(config), folder, run={"name": "test"})
    return part.module.weight.detach().clone()


def test_every_window_once_an_epoch() -> None:
    config = LoopConfig(batch=2, accumulate=2)
    rows = [row for step in range(4) for rank in (0, 1) for part in rows_of(step, config, 16, rank, 2) for row in part]
    assert sorted(rows[:16]) == list(range(16))
    assert sorted(rows[16:]) == list(range(16))
    assert rows[:16] != rows[16:]
    crossing = np.concatenate([part for step in range(5) for part in rows_of(step, config, 7, 0, 1)])
    assert sorted(crossing[:7]) == sorted(crossing[7:14]) == list(range(7))


def test_rates_rise_and_fall() -> None:
    config = LoopConfig(warmup=0.2, decay=0.5)
    rates = [round(rate_at(step, 10, config), 3) for step in range(10)]
    assert rates == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]


@pytest.mark.slow
def test_muon_learns_and_resumes(windows: Windows, tmp_path: Path) -> None:
    config = replace(CONFIG, optimizer="muon")
    expected = trained(windows, tmp_path / "whole", config)
    assert not torch.allclose(expected, trained(windows, tmp_path / "adamw"))
    part = Bigrams()
    steps = iter(range(8))
    part.poison = lambda batch: next(steps) == 7  # stops step 8, after the checkpoint at 6
    with pytest.raises(NumericalError):
        trained(windows, tmp_path / "cut", config, part)
    torch.testing.assert_close(trained(windows, tmp_path / "cut", config), expected, rtol=0, atol=0)


@pytest.mark.slow
def test_accumulation_equals_the_large_batch(windows: Windows, tmp_path: Path) -> None:
    # Windows differ in their number of trained tokens, so a mean of means would differ.
    large = trained(windows, tmp_path / "a", replace(CONFIG, batch=6))
    small = trained(windows, tmp_path / "b", replace(CONFIG, batch=2, accumulate=3))
    torch.testing.assert_close(small, large)
    assert not torch.allclose(large, trained(windows, tmp_path / "c"))


def test_a_stopped_run_ends_like_one_that_was_not(windows: Windows, tmp_path: Path) -> None:
    whole = Bigrams()
    whole.scores = iter([1.0, 3.0, 2.0])
    expected = trained(windows, tmp_path / "whole", part=whole)

    class Stop(Exception):
        pass

    halves = Bigrams()
    halves.scores = iter([1.0, 3.0])
    seen = 0

    def stop(batch: Batch) -> bool:
        nonlocal seen
        seen += 1
        if seen == 3 + 9:  # three to see what it takes; then after the evaluation at 8, before the checkpoint at 9
            raise Stop
        return False

    halves.poison = stop
    with pytest.raises(Stop):
        trained(windows, tmp_path / "cut", part=halves)
    rest = Bigrams()
    rest.scores = iter([3.0, 2.0])
    torch.testing.assert_close(trained(windows, tmp_path / "cut", part=rest), expected, rtol=0, atol=0)
    for name in ("best", "last"):
        a, b = (load_file(tmp_path / run / name / "weights.safetensors") for run in ("whole", "cut"))
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    keys = ("step", "loss", "score")
    logs = [
        [{k: line[k] for k in keys if k in line} for line in log.read_log(tmp_path / run / "log.jsonl")]
        for run in ("whole", "cut")
    ]
    assert logs[0] == logs[1]
    assert [line["step"] for line in logs[0] if "loss" in line] == list(range(1, 13))


def test_the_best_checkpoint_is_kept(windows: Windows, tmp_path: Path) -> None:
    part = Bigrams()
    part.scores = iter([1.0, 3.0, 2.0])
    best = train(part, windows, CONFIG, new_accelerator(CONFIG), tmp_path, run={})
    assert best == {"step": 8, "score": 3.0}
    assert not torch.equal(load_file(tmp_path / "best/weights.safetensors")["weight"], part.module.weight)


def test_what_a_run_will_take(windows: Windows) -> None:
    """Told by a clock of our own: features are paid for once a window, and nothing is changed by asking."""
    part, config = Bigrams(), replace(CONFIG, batch=2, accumulate=3)
    before = {name: value.clone() for name, value in part.module.state_dict().items()}
    # To warm up 9 s, with new features 4 s, with kept ones 1 s; then updates of a copy, to warm up 9 s, later 2 s.
    ticks = iter([0.0, 9.0, 9.0, 13.0, 13.0, 14.0, 0.0, 9.0, 9.0, 11.0])
    found = expected_seconds(part, windows, config, new_accelerator(config), 100, clock=lambda: next(ticks))
    assert found == 100 * 2 + 300 * 1 + -(-len(windows) // 2) * 3
    torch.testing.assert_close(part.module.state_dict(), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in part.module.parameters())


def test_another_run_is_not_continued(windows: Windows, tmp_path: Path) -> None:
    trained(windows, tmp_path)
    with pytest.raises(ConfigError, match="with steps 12, this one has 13"):
        trained(windows, tmp_path, replace(CONFIG, steps=13))
    with pytest.raises(ConfigError, match="with data "):
        trained(pack([Sample([1, 2] * 9, [True] * 18, False)], 8), tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sources": {"model": "b", "text": {"length": 9}}}, None),  # other places of the same texts and model
        ({"held_out": "y", "sources": {"text": {"held_out_one_in": 9}}}, r"text\.held_out_one_in 50, this one has 9"),
        ({"held_out": "y", "sources": {"eval_data": ["z"]}}, r"eval_data \[\], this one has \['z'\]"),
        ({"held_out": "y"}, "held_out 'x', this one has 'y'"),  # a file's content
        ({"heads": {"target": "q", "width": 7}, "sources": {"model": "b"}}, "model 'a', this one has 'b'"),
    ],
)
def test_what_only_hashes_tell_is_named_by_its_option(
    windows: Windows, tmp_path: Path, change: dict[str, Any], said: str | None
) -> None:
    places = {"model": "a", "data": ["d"], "eval_data": [], "text": {"length": 8, "held_out_one_in": 50}}
    run = {"heads": {"target": "p", "width": 8}, "held_out": "x", "sources": places}
    config = replace(CONFIG, steps=1)
    train(Bigrams(), windows, config, new_accelerator(config), tmp_path, run=run)
    other = change.get("sources", {})
    texts = {**places, **other, "text": {**places["text"], **other.get("text", {})}}
    named = nullcontext() if said is None else pytest.raises(ConfigError, match=f"of a run with {said}; start")
    with named:
        train(Bigrams(), windows, config, new_accelerator(config), tmp_path, run={**run, **change, "sources": texts})


def test_another_drafters_run_is_named(windows: Windows, tmp_path: Path) -> None:
    """Before options that the other one has not, and before its tensors are read."""
    part = Bigrams()
    train(part, windows, CONFIG, new_accelerator(CONFIG), tmp_path, run={"a": 1, "drafter": "medusa"})
    other: Any = SimpleNamespace(module=nn.Linear(2, 2), judges=False)
    with pytest.raises(ConfigError, match="with drafter 'medusa', this one has 'kangaroo'"):
        train(other, windows, CONFIG, new_accelerator(CONFIG), tmp_path, run={"b": 1, "drafter": "kangaroo"})
    train(part, windows, CONFIG, new_accelerator(CONFIG), tmp_path / "old", run={"a": 1})
    train(part, windows, CONFIG, new_accelerator(CONFIG), tmp_path / "old", run={"a": 1, "drafter": "medusa"})


def test_a_broken_checkpoint_is_named(windows: Windows, tmp_path: Path) -> None:
    trained(windows, tmp_path)
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match="delete it to start over"):
        trained(windows, tmp_path)


def test_a_loss_that_is_no_number_stops_and_names_the_batch(windows: Windows, tmp_path: Path) -> None:
    part = Bigrams()
    fifth = rows_of(4, CONFIG, len(windows), 0, 1)[0]
    bad = windows.at(fifth).tokens
    part.poison = lambda batch: torch.equal(batch.tokens, bad)
    with pytest.raises(NumericalError) as caught:
        trained(windows, tmp_path, part=part)
    assert "step 5: loss is nan" in str(caught.value)
    assert str(fifth.tolist()) in str(caught.value)
    assert torch.isfinite(part.module.weight).all()


@pytest.mark.slow
def test_a_full_disk_leaves_the_old_checkpoint(
    windows: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(windows, tmp_path / "whole")
    calls = 0

    def full(tensors: dict[str, torch.Tensor], path: Path, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save_file(tensors, path, **options)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError, match=r"No space left.*former one is whole"):
        trained(windows, tmp_path / "cut")
    assert not list((tmp_path / "cut").glob(".checkpoint*"))
    torch.testing.assert_close(trained(windows, tmp_path / "cut"), expected, rtol=0, atol=0)


def test_the_log_survives_a_line_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n{"step": 3, "lo')
    log.TrainingLog(tmp_path, 1).write(step=2, loss=1.4)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": 1.4},
    ]


def test_a_full_disk_leaves_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = log.TrainingLog(tmp_path, 0)
    first.write(step=1, loss=2.0)

    def full(path: Path, text: str, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(CheckpointError, match=r"log\.jsonl.*No space left.*start the same command again"):
        log.TrainingLog(tmp_path, 1)
    assert log.read_log(tmp_path / "log.jsonl") == [{"step": 1, "loss": 2.0}]
    (tmp_path / "log.jsonl").unlink()
    (tmp_path / "log.jsonl").mkdir()  # a file that cannot be opened, on any machine
    with pytest.raises(CheckpointError, match=r"cannot write the log"):
        first.write(step=2, loss=1.0)


def test_the_plot_is_drawn(windows: Windows, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trained(windows, tmp_path)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_no_plot_is_said(
    windows: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if it were not installed
    trained(windows, tmp_path)
    assert "loss.png needs matplotlib" in capsys.readouterr().out
    assert not (tmp_path / "loss.png").exists()


@pytest.mark.slow
def test_gradients_are_clipped(windows: Windows, tmp_path: Path) -> None:
    free, tight = (trained(windows, tmp_path / str(clip), replace(CONFIG, clip=clip)) for clip in (0.0, 1e-12))
    start = Bigrams().module.weight.detach()
    assert float((free - start).abs().max()) > 0.1
    # AdamW's step is g / (|g| + 1e-8): it forgets a gradient's size until that falls below its epsilon.
    assert float((tight - start).abs().max()) < 1e-3


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["offline", "online"])
def test_wandb_gets_what_the_log_gets(
    windows: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    lines: list[dict[str, Any]] = []
    asked: dict[str, Any] = {}
    ended: list[bool] = []
    run = SimpleNamespace(
        log=lambda values, step: lines.append({"step": step, **values}), finish=lambda: ended.append(True)
    )

    def init(**options: Any) -> SimpleNamespace:
        asked.update(options)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    trained(windows, tmp_path, replace(CONFIG, wandb=mode))
    assert (asked["mode"], asked["config"]["name"]) == (mode, "test")
    assert lines == log.read_log(tmp_path / "log.jsonl")
    assert ended == [True]


@pytest.mark.slow
def test_wandb_online_needs_wandb(windows: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"pip install '\.\[wandb\]'"):
        trained(windows, tmp_path, replace(CONFIG, wandb="online"))
    trained(windows, tmp_path, replace(CONFIG, wandb="offline"))


@pytest.mark.parametrize("values", [{"batch": 0}, {"lr": 0.0}, {"precision": "fp8"}, {"warmup": 2.0}, {"epochs": 0}])
def test_options_are_checked(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"loop.{next(iter(values))}"):
        LoopConfig(**values)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_muon_is_torchs_in_another_dtype(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Wide, tall and square matrices, two of one shape; torch's own products are only moved out of bfloat16."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 9), (9, 4), (5, 5), (4, 9), (1, 3)]
    ours, theirs = ([torch.ones(shape, dtype=getattr(torch, dtype)) for shape in shapes] for _ in range(2))
    own = Muon(ours, 0.03, weight_decay=0.1, dtype=getattr(torch, dtype))
    other = torch.optim.Muon(theirs, lr=0.03, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator, dtype=a.dtype)
            b.grad = a.grad.clone()
        own.step()
        other.step()
    # A few hundred sums and products of numbers near 1, in an order of torch's own.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12 if dtype == "float64" else 1e-5)
    assert {key for values in own.state_dict()["state"].values() for key in values} == {"momentum_buffer"}


def test_a_checkpoint_of_torchs_muon_goes_on(tmp_path: Path) -> None:
    module = nn.Linear(6, 4, bias=False)
    theirs = torch.optim.Muon(module.parameters(), adjust_lr_fn="match_rms_adamw")
    module(torch.randn(3, 6)).sum().backward()
    theirs.step()
    path = tmp_path / "checkpoint.safetensors"
    checkpoint.save_checkpoint(path, module, [theirs], state={"step": 1}, run={})
    ours = Muon(module.parameters(), 1e-3)
    assert checkpoint.load_checkpoint(path, module, [ours], run={}) == {"step": 1}
    assert torch.equal(ours.state[module.weight]["momentum_buffer"], theirs.state[module.weight]["momentum_buffer"])


@pytest.mark.few(1)
@pytest.mark.parametrize("fast", [True, False])
def test_products_keep_the_dtype_that_a_run_began_with(
    windows: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    used = list[torch.dtype]()
    monkeypatch.setattr("training.muon.orthogonal", lambda wide, dtype: used.append(dtype) or wide)
    monkeypatch.setattr("training.loop_config.half_is_fast", lambda device: fast)
    config, part = replace(CONFIG, optimizer="muon", precision="no", steps=4), Bigrams()
    bad = iter([False] * 6 + [True])
    part.poison = lambda batch: next(bad)
    with pytest.raises(NumericalError):
        trained(windows, tmp_path, config, part)
    wanted = torch.bfloat16 if fast else torch.float32
    assert {*used} == {wanted}
    monkeypatch.setattr("training.loop_config.half_is_fast", lambda device: not fast)
    used.clear()
    trained(windows, tmp_path, config)
    assert used[-1] == wanted


@pytest.mark.slow
@pytest.mark.parametrize(("number", "end"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_ends_the_run_after_its_step(
    windows: Windows, tmp_path: Path, number: signal.Signals, end: type[BaseException]
) -> None:
    """Saved, with words about what to do next; so it ends as one that was not asked."""
    expected, part = trained(windows, tmp_path / "whole"), Bigrams()
    calls = iter(range(99))
    part.poison = lambda batch: bool(next(calls) == 3 + 4 and signal.raise_signal(number))  # in step 5
    told = pytest.warns(SpecdecWarning, match=r"after step 5 of 12 is in .*the same command")
    with told, pytest.raises(end), stopping(True) as stop:
        train(part, windows, CONFIG, new_accelerator(CONFIG), tmp_path / "cut", run={"name": "test"}, stop=stop)
    assert checkpoint.state_of(tmp_path / "cut" / "checkpoint.safetensors")["step"] == 5
    assert signal.getsignal(number) is not stop.received
    torch.testing.assert_close(trained(windows, tmp_path / "cut"), expected, rtol=0, atol=0)


def test_a_second_signal_ends_it_at_once(windows: Windows, tmp_path: Path) -> None:
    part, calls = Bigrams(), iter(range(99))

    def twice(batch: Batch) -> bool:
        if next(calls) == 3 + 4:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            pytest.fail("it went on")
        return False

    part.poison = twice
    told = pytest.warns(SpecdecWarning, match="after step 3 of 12")
    with told, pytest.raises(KeyboardInterrupt), stopping(True) as stop:
        train(part, windows, CONFIG, new_accelerator(CONFIG), tmp_path, run={"name": "test"}, stop=stop)
    assert checkpoint.state_of(tmp_path / "checkpoint.safetensors")["step"] == 3


@pytest.mark.slow
def test_the_best_is_judged_anew_where_it_is_judged_otherwise(
    windows: Windows, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(scores: list[float], judging: str, poison: int = 99) -> dict[str, float]:
        part, calls = Bigrams(), iter(range(99))
        part.scores, part.poison = iter(scores), lambda batch: next(calls) == poison
        kept = new_accelerator(CONFIG)
        return train(part, windows, CONFIG, kept, tmp_path, run={"name": "test"}, judging=judging)

    with pytest.raises(NumericalError):
        run([5.0, 4.0], "one way", poison=3 + 10)
    assert run([2.0, 3.0], "another") == {"step": 12, "score": 3.0}
    assert "step 4 is judged anew, as the options of the evaluation changed: score 2" in capsys.readouterr().out
    shutil.rmtree(tmp_path)
    with pytest.raises(NumericalError):
        run([5.0, 4.0], "one way", poison=3 + 10)
    assert run([3.0], "one way") == {"step": 4, "score": 5.0}


@pytest.mark.slow
def test_without_held_out_data_the_last_is_the_best(windows: Windows, tmp_path: Path) -> None:
    part = Bigrams()
    part.judges = False
    assert train(part, windows, CONFIG, new_accelerator(CONFIG), tmp_path, run={}) == {"step": 12}
    assert torch.equal(load_file(tmp_path / "best/weights.safetensors")["weight"], part.module.weight)


def test_a_best_that_was_deleted_is_the_next_one(windows: Windows, tmp_path: Path) -> None:
    """Of a finished run, it is that of the last step."""
    part = Bigrams()
    part.scores = iter([9.0, 3.0, 2.0])
    first = train(part, windows, CONFIG, new_accelerator(CONFIG), tmp_path, run={})
    assert first == {"step": 4, "score": 9.0}
    shutil.rmtree(tmp_path / "best")
    part.scores = iter([2.0])
    for _ in range(2):
        assert train(part, windows, CONFIG, new_accelerator(CONFIG), tmp_path, run={}) == {"step": 12, "score": 2.0}
    assert torch.equal(load_file(tmp_path / "best/weights.safetensors")["weight"], part.module.weight)


def test_a_dry_run_only_tells(windows: Windows, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part, folder = Bigrams(), tmp_path / "run"
    train(part, windows, CONFIG, new_accelerator(CONFIG), folder, run={}, dry_run=True)
    assert "12 steps are expected to take 0.00 hours here" in capsys.readouterr().out
    assert not folder.exists()
    trained(windows, folder)
    train(part, windows, CONFIG, new_accelerator(CONFIG), folder, run={"name": "test"}, dry_run=True)
    assert "all 12 steps are done" in capsys.readouterr().out


def test_a_batch_with_nothing_to_learn_from_changes_nothing(windows: Windows, tmp_path: Path) -> None:
    """As of medusa and eagle3, where all answers of a batch are of one token."""
    part = Bigrams()
    start = part.module.weight.detach().clone()
    part.loss = lambda module, batch: torch.zeros(())  # type: ignore[method-assign]
    assert torch.equal(trained(windows, tmp_path, part=part), start)


def test_a_run_is_the_same_with_less_memory_and_judged_otherwise(windows: Windows, tmp_path: Path) -> None:
    def same(**options: Any) -> dict[str, Any]:
        values = {"data": ["x"], "loop": {"batch": 8}, **options}
        return identity(parse(eagle3.Config, values, where="test"), {"head": {"depth": 3, "width": 8}}, "no")

    first = same()
    assert first == same(
        keep_features=0.5, features_folder="x", data=["y"], judged_depth=2, evaluation={"prompts": 3, "new": 9},
        loop={"batch": 2, "accumulate": 4, "eval_every": 7, "wandb": "off"},
    )  # fmt: skip
    for version in (first, {**first, "keep_features": 4.0, "evaluation": {"prompts": 24}}):  # the latter of older ones
        folder = tmp_path / str(len(version))
        train(Bigrams(), windows, CONFIG, new_accelerator(CONFIG), folder, run=version)
        train(Bigrams(), windows, CONFIG, new_accelerator(CONFIG), folder, run={**first, "held_out": "x"})
        for other, said in (
            ({"batch": 8, "lr": 2e-3}, r"loop\.lr 0\.001, this one has 0\.002"),
            ({"batch": 4}, r"loop\.batch \* accumulate 8, this one has 4"),
        ):
            with pytest.raises(ConfigError, match=f"of a run with {said}; start"):
                train(Bigrams(), windows, CONFIG, new_accelerator(CONFIG), folder, run=same(loop=other))
