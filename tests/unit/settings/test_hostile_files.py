"""Files that drafters, runs and commands read, as a stranger may have written them: refused by name, or read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters.medusa.drafter import MedusaConfig
from drafters.rest.datastore import Datastore
from specdec import Engine
from specdec.bench.records import RunFolder
from specdec.costs.curve import CostCurve, roofline
from specdec.engine.config import RunConfig, resolve
from specdec.engine.questions import read_questions
from specdec.errors import CheckpointError, ConfigError, SpecdecError
from specdec.settings.formats import read_content
from specdec.settings.options import Given
from specdec.settings.parsing import load_yaml
from tests.models import greedy, prompt_of, random_adapter, random_heads, settings_of, target_of
from tests.tiers import each_once
from training.checkpoint import load_checkpoint
from training.data import TextConfig, read_samples
from training.distill import prompts_of
from training.log import read_log
from training.skips import Skips

PROMPT, NEW = prompt_of(9), 12
DEEP, LONG = 100_000, "9" * 5000

# Texts that are no JSON value of any file of ours.
BROKEN = {
    "empty": b"",
    "list": b"[]",
    "null": b"null",
    "number": b"7",
    "text": b'"word"',
    "cut": b'{"a": [1, 2',
    "deep list": b"[" * DEEP + b"]" * DEEP,
    "deep mapping": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "long number": b'{"tokens": ' + LONG.encode() + b"}",
    "no text": b'{"a": "\xff\xfe"}',
    "zeros": bytes(64),
    "nan": b"NaN",
}
READERS: dict[str, Callable[[Path], Any]] = {
    "adapter": lambda folder: Engine(target_of("llama"), None, {"name": "kangaroo", "adapter": str(folder)}),
    "heads": lambda folder: Engine(target_of("llama"), None, {"name": "medusa", "heads": str(folder)}),
    "datastore": lambda folder: Engine(target_of("llama"), None, {"name": "rest", "datastore": str(folder)}),
    "corpus": lambda folder: Engine(target_of("llama"), None, {"name": "suffix_automaton", "corpus": str(folder)}),
    "cost": lambda folder: CostCurve.load(folder / "cost.json"),
    "manifest": lambda folder: RunFolder(folder).manifest(),
    "log": lambda folder: read_log(folder / "log.jsonl"),
    "questions": lambda folder: read_questions(folder / "questions.jsonl"),
    "tree": lambda folder: MedusaConfig(tree=str(folder / "tree.yaml")),
    "config": lambda folder: resolve(RunConfig, Given(file=folder / "config.yaml")),
}
FILES = {
    "adapter": "config.json",
    "heads": "config.json",
    "datastore": "meta.json",
    "corpus": "meta.json",
    "cost": "cost.json",
    "manifest": "manifest.json",
    "log": "log.jsonl",
    "questions": "questions.jsonl",
    "tree": "tree.yaml",
    "config": "config.yaml",
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each kind that is as it should be."""
    folder, target = tmp_path_factory.mktemp("good"), target_of("llama")
    random_adapter(target, folder / "adapter", variant="layer")
    random_heads(target, folder / "heads")
    (folder / "corpora").mkdir()
    store = Path(settings_of("rest", target, folder / "corpora")[0]["datastore"])
    for kind in ("datastore", "corpus"):
        shutil.copytree(store, folder / kind)
    for kind in FILES.keys() - {"adapter", "heads", "datastore", "corpus"}:
        (folder / kind).mkdir()
    return folder


@pytest.fixture
def folder_of(good: Path, tmp_path: Path) -> Callable[[str], Path]:
    return lambda kind: Path(shutil.copytree(good / kind, tmp_path / kind))


def refused(kind: str, folder: Path) -> str:
    """What is said of a file that is refused."""
    with pytest.raises(SpecdecError) as caught:
        READERS[kind](folder)
    told = str(caught.value)
    assert len(told) < 1200
    return told


@pytest.mark.parametrize(("kind", "text"), each_once(FILES, BROKEN))
def test_a_broken_file_is_refused_by_name(kind: str, text: str, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of(kind)
    (folder / FILES[kind]).write_bytes(
        b"tokens: [" + BROKEN[text] + b"\n" if kind == "config" else BROKEN[text] + b"\n"
    )
    if kind == "log" and text in ("empty", "zeros"):
        return  # nothing was logged, and a line of zeros is what a lost page leaves
    told = refused(kind, folder)
    assert folder.name in told or FILES[kind] in told or "medusa.tree is empty" in told


NUMBERS = (None, 10**9, 10**18, 10**30, -1, 0, 1.5, "x", True, [], {}, float("nan"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adapter", "heads", "datastore"])
def test_a_value_that_cannot_be(kind: str, folder_of: Callable[[str], Path]) -> None:
    """Every key of the file, set to each: an error, before anything of that size is allocated, or the exact text."""
    folder = folder_of(kind)
    path = folder / FILES[kind]
    values, taken = json.loads(path.read_text()), list[str]()
    for key in values:
        for value in NUMBERS:
            path.write_text(json.dumps({**values, key: value}))
            try:
                engine: Engine = READERS[kind](folder)
            except CheckpointError:
                continue
            taken.append(key)
            assert engine.generate(PROMPT, NEW).token_ids == greedy("llama", PROMPT, NEW)
    told = {
        "adapter": {"hidden_size", "vocab_size", "heads", "exit_layer"},
        "heads": {"vocab_size"},
        "datastore": {"tokens"},
    }
    assert not told[kind] & set(taken)


@pytest.mark.parametrize("kind", ["adapter", "heads"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.2, 0.9])
def test_weights_cut_short(kind: str, share: float, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of(kind)
    path = next(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    assert "; give a folder" in refused(kind, folder) or kind == "heads"


def scaled(tensors: dict[str, torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    first = min(name for name, tensor in tensors.items() if tensor.ndim == 2)
    return {**tensors, first: change(tensors[first]).contiguous()}


@pytest.mark.parametrize("kind", ["adapter", "heads"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: {}, "."),
        (lambda t: dict(list(t.items())[1:]), "."),
        (lambda t: {**t, "more": torch.ones(3)}, "more"),
        (lambda t: scaled(t, lambda w: w[:-1]), "expected|do not fit"),
        (lambda t: scaled(t, lambda w: w.long()), "is of torch.int64, expected torch.float32"),
        (lambda t: scaled(t, lambda w: w > 0), "is of torch.bool"),
        (lambda t: scaled(t, lambda w: w.to(torch.complex64)), "is of torch.complex64"),
        (lambda t: scaled(t, lambda w: w * float("nan")), "holds NaN or infinity"),
        (lambda t: scaled(t, lambda w: torch.full_like(w.double(), 1e300)), "holds NaN or infinity"),
        (lambda t: scaled(t, lambda w: w.to(torch.float8_e4m3fn)), "nothing without its scales"),
        (lambda t: {name: w.reshape(-1)[:0] for name, w in t.items()}, "."),
        (lambda t: {name: torch.tensor(1.0) for name in t}, "."),
    ],
)
def test_tensors_that_do_not_fit(
    kind: str, change: Callable[[Any], Any], words: str, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of(kind)
    path = next(folder.glob("*.safetensors"))
    save_file(change(load_file(path)), path)
    with pytest.raises(CheckpointError, match=words):
        READERS[kind](folder)


def test_a_bias_that_promises_a_giant(folder_of: Callable[[str], Path]) -> None:
    """A vector of 400 kB says that matrices of 40 GB belong to it."""
    folder = folder_of("heads")
    save_file({"0.0.linear.bias": torch.zeros(100_000)}, folder / "medusa_lm_head.safetensors")
    assert "'0.0.linear.weight' is missing, expected (100000, 100000)" in refused("heads", folder)


@pytest.mark.parametrize("name", ["tokens.npy", "suffixes.npy"])
@pytest.mark.parametrize("form", ["archive", "objects", "header", "floats", "deep", "giant"])
def test_arrays_that_are_none(name: str, form: str, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("datastore")
    path = folder / name
    size = len(np.load(path))
    if form == "archive":
        with path.open("wb") as file:
            np.savez(file, np.zeros(3))
    elif form == "objects":
        np.save(path, np.array([{}] * size, dtype=object), allow_pickle=True)
    elif form == "floats":
        np.save(path, np.zeros(size))
    else:
        shape = {"header": "(lambda: 0)", "deep": "(" * 300 + ")" * 300, "giant": f"({10**30},)"}[form]
        header = f"{{'descr': '>u4', 'fortran_order': False, 'shape': {shape}}}".encode()
        header += b" " * (-(10 + len(header) + 1) % 64) + b"\n"
        path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(CheckpointError, match=r"run `specdec datastore build` again"):
        Datastore(folder)


@pytest.mark.few(1)
@pytest.mark.parametrize("drafter", ["rest", "suffix_automaton"])
def test_tokens_and_suffixes_that_are_none(drafter: str, folder_of: Callable[[str], Path]) -> None:
    """A datastore's arrays are not read as a whole; what is no token ends a draft."""
    folder = folder_of("datastore")
    option = {"rest": "datastore", "suffix_automaton": "corpus"}[drafter]
    engine = Engine(target_of("llama"), None, costs=roofline())
    tokens, suffixes = np.load(folder / "tokens.npy"), np.load(folder / "suffixes.npy")
    rng = np.random.default_rng(0)
    for odd in (32, 10**6, 2**32 - 2):
        changed = np.where(rng.random(len(tokens)) < 0.5, odd, tokens).astype(">u4")
        for starts in (suffixes, suffixes[::-1].copy(), np.full_like(suffixes, 2**32 - 1)):
            np.save(folder / "tokens.npy", changed)
            np.save(folder / "suffixes.npy", starts)
            found = engine.with_drafter({"name": drafter, option: str(folder)}).generate(PROMPT, 40)
            assert found.token_ids == greedy("llama", PROMPT, 40)


def test_a_corpus_too_large_for_an_automaton(folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafters.suffix_automaton._LARGEST", 100)
    assert "and an automaton of more than 100 does not fit into memory; take the drafter rest" in refused(
        "corpus", folder_of("corpus")
    )


CURVE = {"machine": {}, "rows": [1, 2], "lengths": [8], "seconds": [[1.0, 1.5]]}


@pytest.mark.parametrize("key", CURVE)
def test_curves_of_nonsense(key: str, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    for value in (*NUMBERS, [None], [1, 10**10], [1, 10**400], [1e999], [-5, 1], [[1.0, 1e999]], [[float("nan"), 1.0]]):
        if key == "machine" and value in ([], {}):
            continue
        path.write_text(json.dumps({**CURVE, key: value}))
        with pytest.raises(ConfigError, match="cost") as caught:
            CostCurve.load(path)
        assert len(str(caught.value)) < 600


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "text",
    [
        f"max_new_tokens: {LONG}",
        "stop: " + "[" * 3000,
        "stop: " + "[" * 40 + "]" * 40,
        "stop: &a [*a]",
        "a: &a [x, x]\n"
        + "\n".join(f"{b}: &{b} [*{a}, *{a}, *{a}]" for a, b in zip("abcdefghijklmno", "bcdefghijklmnop")),  # noqa: B905
        "stop: !!int x",
        "stop: !!bool x",
        "stop: !!timestamp x",
        "stop: !!float x",
        "stop: !!python/object/apply:os.system [true]",
        "? [a]\n: b",
        "drafter: {name: union, parts: &p [{name: union, parts: *p}]}",
        "drafter: [1]",
        "drafter: {name: lookahead, 5: 6}",
        "max_new_tokens: .nan",
        "threads: 1000000000",
        "\0",
    ],
)
def test_yaml_of_a_stranger(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        resolve(RunConfig, Given(file=path))
    assert len(str(caught.value)) < 600


def test_a_name_that_no_file_has() -> None:
    for name in ("a\0b", "x" * 5000, "/dev/null/x"):
        for read in (load_yaml, lambda name: read_content(Path(name)), lambda name: CostCurve.load(Path(name))):
            with pytest.raises(ConfigError):
                read(name)
        for drafter, option in (("rest", "datastore"), ("kangaroo", "adapter"), ("medusa", "heads")):
            with pytest.raises(CheckpointError):
                Engine(target_of("llama"), None, {"name": drafter, option: name})


def test_a_tree_of_many_paths_is_checked_at_once() -> None:
    paths = [[rank] for rank in range(20_000)]
    with pytest.raises(ConfigError, match="twice"):
        Engine(target_of("llama"), None, {"name": "medusa", "tree": [*paths, [3]]})


# -- Conversations and questions ---------------------------------------------------------------------------------------

HALF = '"\\ud800"'
TURN = '{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": %s}]}'


@pytest.mark.parametrize(
    "line",
    [
        TURN % HALF,
        TURN % "5",
        TURN % "null",
        TURN % '{"a": 1}',
        '{"conversations": [{"from": {"a": 1}, "value": "x"}]}',
        f'{{"conversations": [{HALF}, {LONG[:4000]}]}}',
        '{"conversations": ' + "[" * DEEP,
        f'{{"conversations": [{{"from": {HALF}, "value": "x"}}]}}',
        LONG,
        "NaN",
    ],
)
def test_records_of_a_stranger_are_left_out_and_counted(line: str, tmp_path: Path, tiny_engine: Engine) -> None:
    path, skips = tmp_path / "talks.jsonl", Skips()
    path.write_text(f"{line}\n{TURN % json.dumps('Hello')}\n")
    samples = list(read_samples([str(path)], tiny_engine.tokenizer, TextConfig(), skips))
    assert len(samples) == 1
    assert skips.skipped or skips.mended
    assert all(len(told) < 300 and told.encode() for told in skips.lines())


def test_prompts_that_are_no_text_are_left_out(tmp_path: Path, tiny_engine: Engine) -> None:
    path = tmp_path / "talks.json"
    talks = [{"conversations": [{"from": "human", "value": value}]} for value in ("a", "\ud800", 5, None, ["b"], {})]
    path.write_text(json.dumps(talks))
    skips = Skips()
    found = prompts_of([str(path)], tiny_engine.tokenizer, skips=skips, skipping="any")
    assert [prompt.turns for prompt in found] == [("a",)]
    [told] = skips.lines()
    assert told.startswith(
        "5 skipped: a user's turn that is empty, or no text (talks.json, record 2, record 3, record 4,"
    )
    with pytest.raises(ConfigError, match=r"5 of 6 records .* go on without them by --skip any"):
        prompts_of([str(path)], tiny_engine.tokenizer)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            '{"question_id": 1, "category": "qa", "turns": ["a \\ud800"]}',
            "it must be a list of at least one non-empty text without halves of surrogate pairs",
        ),
        ('{"question_id": "\\udc00", "category": "qa", "turns": ["a"]}', r"question_id is '\udc00'"),
        ('{"question_id": 1, "category": "\\ud800", "turns": ["a"]}', r"category is '\ud800'"),
        ('{"prompt": "\\ud800"}', r"prompt is '\ud800'"),
        ('{"question": "\\ud800"}', r"question is '\ud800'"),
        ('{"\\ud800": 1}', r"but ['\ud800']"),
        (f'{{"question_id": {LONG}, "category": "qa", "turns": ["a"]}}', "Exceeds the limit"),
        ('{"question_id": 1, "category": "qa", "turns": %s}' % ("[" * DEEP), "it is nested too deeply"),
        ('{"question_id": 1, "category": "qa", "turns": "%s"}' % ("x" * 9999), "..."),
    ],
)
def test_questions_of_a_stranger_are_named(line: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(line + "\n")
    told = refused("questions", tmp_path)
    assert "line 1: " in told or "line 1 is no JSON: " in told
    assert reason in told
    told.encode()


def test_a_checkpoint_that_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    module = torch.nn.Linear(2, 2)
    tensors = {f"module.{name}": tensor for name, tensor in module.state_dict().items()}
    for metadata in (
        None,
        {},
        {"run": "[]", "state": "{}"},
        {"run": "{}", "state": "null"},
        {"run": "[" * DEEP, "state": ""},
    ):
        save_file(tensors, path, metadata=metadata)
        with pytest.raises(CheckpointError, match="delete it to start over"):
            load_checkpoint(path, module, [], run={})
