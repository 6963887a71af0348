"""What users hand to the public functions by mistake: each is a SpecdecError that names the value and the remedy."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import specdec
from specdec import Draft, Engine, Hints, SamplingParams, TransformersTarget
from specdec.errors import ConfigError, DraftError, PromptError, SpecdecError
from specdec.settings.arguments import ARGUMENTS, checked
from specdec.step.step_io import Entering
from tests.fakes import Scripted
from tests.models import VOCAB, live, prompt_of, target_of

PROMPT = prompt_of(7)
NAN = float("nan")
HUGE = 10**5000  # has more digits than Python writes
CYCLE: list[Any] = []
CYCLE.append(CYCLE)


class Odd:
    """A value whose repr fails."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Words:
    """A tokenizer for the fakes: one token per character."""

    chat_template = "{{ messages }}"

    def __call__(self, text: str) -> dict[str, list[int]]:
        text.encode()  # as the fast tokenizers do
        return {"input_ids": [2 + ord(c) % 29 for c in text]}

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(chr(97 + t) for t in tokens)

    def apply_chat_template(self, messages: list[Any], **_: Any) -> dict[str, list[int]]:
        return self("".join(m["role"] + m["content"] for m in messages))


@functools.cache
def engine() -> Engine:
    return Engine(target_of("llama"), Words())


@contextmanager
def refused(kind: type[SpecdecError], *parts: str) -> Iterator[None]:
    """The block raises an error of that kind, in one line of a readable length, that says all parts."""
    with pytest.raises(kind) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    for part in parts:
        assert part in message


# -- generate, stream, start -------------------------------------------------------------------------------------------

GENERATE: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": 1.5}, "max_new_tokens is 1.5, of type float; it must be an integer"),
    ({"max_new_tokens": 8.0}, "max_new_tokens is 8.0, of type float"),
    ({"max_new_tokens": "8"}, "max_new_tokens is '8', of type str"),
    ({"max_new_tokens": None}, "max_new_tokens is None, of type NoneType"),
    ({"max_new_tokens": NAN}, "max_new_tokens is nan, of type float"),
    ({"max_new_tokens": True}, "max_new_tokens is True, of type bool"),
    ({"max_new_tokens": [8]}, "max_new_tokens is [8], of type list"),
    ({"max_new_tokens": -HUGE}, "max_new_tokens is "),
    ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be an integer >= 1"),
    ({"max_new_tokens": torch.tensor([4])}, "max_new_tokens is tensor([4]), of type Tensor"),
    ({"max_new_tokens": np.array([4])}, "max_new_tokens is array([4]), of type ndarray"),
    ({"max_new_tokens": np.float32(4)}, "max_new_tokens is np.float32(4.0), of type float32"),
    ({"max_new_tokens": torch.tensor(True)}, "max_new_tokens is tensor(True), of type Tensor"),
    ({"max_new_tokens": Odd()}, "max_new_tokens is <Odd>, of type Odd"),
    (
        {"sampling": {"temperature": 1.0}},
        "sampling is {'temperature': 1.0}, of type dict; it must be of type Sampl",
    ),
    ({"sampling": 0.7}, "sampling is 0.7; it must be of type SamplingParams"),
    ({"sampling": SamplingParams}, "sampling is <class"),
    ({"stop": None}, "stop is None, of type NoneType; it must be non-empty text, or a list of such"),
    ({"stop": 3}, "stop is 3, of type int"),
    ({"stop": b"x"}, "stop is b'x', of type bytes"),
    ({"stop": ""}, "stop is ''"),
    ({"stop": ["x", ""]}, "stop is ['x', '']"),
    ({"stop": ["x", None]}, "stop is ['x', None]"),
    ({"stop": [["x"]]}, "stop is [['x']]"),
    ({"stop": {"x": 1}}, "stop is {'x': 1}, of type dict"),
    ({"stop": CYCLE}, "stop is [[...]]"),
    ({"logits_processor": None}, "logits_processor is None, of type NoneType; it must be a list of functions"),
    ({"logits_processor": [None]}, "logits_processor is [None]"),
    ({"logits_processor": ["top_k"]}, "logits_processor is ['top_k']"),
    ({"logits_processor": lambda ids, scores: scores}, "logits_processor is <function"),
    ({"logits_processor": 3}, "logits_processor is 3"),
]


@pytest.mark.parametrize(("options", "message"), GENERATE)
def test_generate(options: dict[str, Any], message: str) -> None:
    with refused(ConfigError, message):
        engine().generate(PROMPT, **{"max_new_tokens": 4, **options})
    for method in (engine().stream, engine().start):
        with refused(ConfigError, message):
            method(PROMPT, **{"max_new_tokens": 4, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_step": 3}, "on_step is 3, of type int; it must be a function"),
        ({"on_step": "print"}, "on_step is 'print'"),
    ],
)
def test_on_step(options: dict[str, Any], message: str) -> None:
    with refused(ConfigError, message):
        engine().generate(PROMPT, 4, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_when": 3}, "stop_when is 3, of type int; it must be a function"),
        ({"sample": "yes"}, "sample is 'yes', of type str; it must be True or False"),
        ({"eos_ids": 2}, "eos_ids is 2, of type int; it must be a set of token ids"),
        ({"eos_ids": {"a"}}, "eos_ids is {'a'}"),
        ({"stream": 1}, "stream is 1, of type int; it must be True or False"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids is ['a'], of type list; it must be a token id, or a list of such"),
        ({"stop_token_ids": True}, "stop_token_ids is True"),
        ({"stop_token_ids": [1, 999]}, "stop_token_ids holds 999, which is outside the vocabulary"),
        ({"stop_token_ids": -1}, "stop_token_ids holds -1, which is outside the vocabulary"),
    ],
)
def test_start(options: dict[str, Any], message: str) -> None:
    with refused(ConfigError, message):
        engine().start(PROMPT, 4, **options)


PROMPTS: list[tuple[Any, str]] = [
    (None, "the prompt is None, of type NoneType; give text, token ids, or chat messages"),
    (5, "the prompt is 5, of type int; give text"),
    (True, "the prompt is True, of type bool"),
    (b"import", "the prompt is b'import', of type bytes; give text"),
    (bytearray(b"import"), "of type bytearray"),
    (Path("prompt.txt"), "the prompt is PosixPath('prompt.txt')"),
    ({"role": "user", "content": "x"}, "the prompt is {'role': 'user', 'content': 'x'}, of type dict"),
    ({3, 4}, "the prompt is {3, 4}, of type set"),
    ([1.5], "the prompt's item 0 is 1.5, of type float"),
    ([3, 4.0], "the prompt's item 1 is 4.0"),
    ([True, False], "the prompt's item 0 is True, of type bool"),
    ([3, None], "the prompt's item 1 is None"),
    ([[1, 2]], "the prompt's item 0 is [1, 2], of type list; give one sequence"),
    (["a", "b"], "the prompt's item 0 is 'a', of type str"),
    ([3, {"role": "user", "content": "x"}], "the prompt's item 1 is {'role'"),
    ([HUGE], "is outside the vocabulary"),
    ([-HUGE], "is outside the vocabulary"),
    (np.array([1.5]), "the prompt's item 0 is "),
    (np.array([[1, 2]]), "the prompt's item 0 is array([1, 2])"),
    (np.array(3), "the prompt is array(3)"),
    (torch.tensor(3), "shape []"),
    (torch.tensor([1j]), "the prompt is of torch.complex64; token ids are integers"),
    (CYCLE, "the prompt's item 0 is [[...]]"),
    ("", "the prompt is empty"),
    ("a\ud800b", "the prompt holds '\\ud800' at character 1, half a character"),
    ([{"role": "user"}], "message 0 of the prompt has no 'content'"),
    ([{"content": "x"}], "message 0 of the prompt has no 'role'"),
    ([{}], "message 0 of the prompt has no 'role'"),
    ([{"role": "user", "content": None}], "message 0 of the prompt has the content None, of type NoneType"),
    ([{"role": 3, "content": "x"}], "message 0 of the prompt has the role 3, of type int"),
    ([{"role": "user", "content": "x"}, "y"], "the prompt's item 1 is 'y', of type str"),
    ([{"role": "user", "content": "\udfff"}], "message 0 of the prompt holds '\\udfff' at character 0"),
    ([("user", "x")], "the prompt's item 0 is ('user', 'x'), of type tuple"),
]


@pytest.mark.parametrize(("prompt", "message"), PROMPTS)
def test_prompt(prompt: Any, message: str) -> None:
    for call in (engine().encode, engine().generate, engine().stream):
        with refused(PromptError, message):
            call(prompt)


def test_prompts_of_other_kinds_are_taken() -> None:
    for prompt in (range(3, 6), (3, 4, 5), np.array([3, 4, 5], np.uint8), torch.tensor([3, 4, 5], dtype=torch.uint8)):
        assert engine().encode(prompt) == [3, 4, 5]
    messages = ({"role": "user", "content": "x"},)
    assert engine().encode(messages) == engine().encode(list(messages)) == Words()("userx")["input_ids"]


def test_a_chat_template_that_refuses() -> None:
    class Strict(Words):
        def apply_chat_template(self, messages: list[Any], **_: Any) -> dict[str, list[int]]:
            raise ValueError("roles must alternate\nuser/assistant")

    other = Engine(target_of("llama"), Strict())
    with refused(PromptError, "the tokenizer's chat template refuses these messages: roles must alternate"):
        other.encode([{"role": "user", "content": "x"}])


def test_what_numpy_gives_is_taken() -> None:
    out = engine().generate(list(PROMPT), np.int64(3), stop={"q" * 9}, logits_processor=())  # type: ignore[arg-type]
    assert len(out.token_ids) == 3
    for budget in (np.uint8(3), np.array(3), torch.tensor(3)):
        assert engine().generate(list(PROMPT), budget).token_ids == out.token_ids  # type: ignore[arg-type]
    end = out.token_ids[1]
    for ends in (np.int64(end), np.array([end, 99 % VOCAB]), torch.tensor([end]), [np.int16(end)], {np.int64(end)}):
        assert engine().generate(list(PROMPT), 3, stop_token_ids=ends).token_ids == out.token_ids[:2]  # type: ignore[arg-type]
    assert Engine(target_of("llama"), max_rows=np.int32(8)).max_rows == 8  # type: ignore[arg-type]


# -- Logits processors -------------------------------------------------------------------------------------------------


@pytest.mark.few(7)
@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda scores: None, "returned None, of type NoneType; it must return scores, floats of shape [1, 32]"),
        (lambda scores: [3], "returned [3], of type list; it must return scores"),
        (lambda scores: scores[0], "returned float64 of shape [32]; it must return scores, floats of shape [1, 32]"),
        (lambda scores: scores[:, :5], "returned float64 of shape [1, 5]"),
        (lambda scores: scores.argmax(-1), "returned int64 of shape [1]"),
        (lambda scores: scores.long(), "returned int64 of shape [1, 32]"),
        (lambda scores: scores > 0, "returned bool of shape [1, 32]"),
        (lambda scores: scores.to(torch.complex128), "returned complex128 of shape [1, 32]"),
    ],
)
def test_processor(result: Callable[[torch.Tensor], Any], message: str) -> None:
    def mine(ids: torch.Tensor, scores: torch.Tensor) -> Any:
        return result(scores)

    for params in (
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1, acceptance="reject"),
    ):
        for drafter in ("none", "lookahead"):
            call = functools.partial(engine().with_drafter(drafter).generate, PROMPT, 4, params)
            with refused(ConfigError, "the logits processor test_processor.<locals>.mine " + message):
                call(logits_processor=[mine])


# -- Engine ------------------------------------------------------------------------------------------------------------

ENGINE: list[tuple[dict[str, Any], str]] = [
    ({"max_rows": 1.5}, "max_rows is 1.5, of type float; it must be an integer from 1 to"),
    ({"max_rows": None}, "max_rows is None"),
    ({"max_rows": "8"}, "max_rows is '8'"),
    ({"max_rows": True}, "max_rows is True"),
    ({"max_rows": 10**9}, "max_rows is 1000000000; it must be an integer from 1 to"),
    ({"max_rows": HUGE}, "max_rows is <int>"),
    ({"prefill_chunk": 1.5}, "prefill_chunk is 1.5"),
    ({"prefill_chunk": "512"}, "prefill_chunk is '512'"),
    ({"prefill_chunk": -1}, "prefill_chunk is -1"),
    ({"policy": None}, "policy is None, of type NoneType; it must be off, acceptance, or the path"),
    ({"policy": 3}, "policy is 3"),
    ({"policy": True}, "policy is True"),
    ({"policy": "/"}, "policy='/' is unknown"),
    ({"policy": "a\0b"}, "policy='a\\x00b' is unknown"),
    ({"policy": "x" * 10_000}, "is unknown; choose acceptance"),
    ({"costs": 3}, "costs is 3; it must be a CostCurve"),
    ({"progress": 3}, "progress is 3, of type int; it must be a function"),
    ({"drafter": None}, "drafter is None, of type NoneType; it must be a name"),
    ({"drafter": ["lookahead"]}, "drafter is ['lookahead'], of type list; it must be a name"),
    ({"drafter": {"name": 3}}, "has no name; choose one of"),
    ({"drafter": {"name": "lookahead", 3: 4}}, "unknown option of lookahead '3'"),
    ({"drafter": {"name": "prompt_lookup", "tokens": None}}, "prompt_lookup.tokens is None, of type NoneType"),
    ({"drafter": {"name": "lookahead", "window": True}}, "lookahead.window is True, of type bool"),
    ({"drafter": {"name": "lookahead", "window": 2.0}}, "lookahead.window is 2.0, of type float"),
    ({"drafter": Scripted}, "drafter is <class"),
    ({"tokenizer": "tiny"}, "tokenizer is 'tiny'; it must be a tokenizer of transformers, or None"),
    ({"tokenizer": 3}, "tokenizer is 3"),
]


@pytest.mark.parametrize(("options", "message"), ENGINE)
def test_engine(options: dict[str, Any], message: str) -> None:
    with refused(ConfigError, message):
        Engine(target_of("llama"), **options)


@pytest.mark.parametrize("target", [None, 3, "tiny", Path("tiny"), TransformersTarget])
def test_target(target: Any) -> None:
    with refused(ConfigError, "target is ", "; it must be a Target"):
        Engine(target)


def test_a_model_is_no_target() -> None:
    model: Any = target_of("llama").model
    with refused(ConfigError, "of type LlamaForCausalLM; it must be a Target, such as TransformersTarget(model)"):
        Engine(model)


@pytest.mark.parametrize("model", [None, 3, "tiny", Path("tiny"), torch.nn.Linear(2, 2)])
def test_no_model(model: Any) -> None:
    with refused(ConfigError, "model is ", "it must be a causal language model of transformers"):
        TransformersTarget(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": None}, "drafter is None, of type NoneType; it must be a name"),
        ({"drafter": "none", "policy": 3}, "policy is 3"),
        ({"drafter": "none", "policy": "nope"}, "policy='nope' is unknown"),
    ],
)
def test_with_drafter(options: dict[str, Any], message: str) -> None:
    with refused(ConfigError, message):
        engine().with_drafter(**options)


LOADING: list[tuple[dict[str, Any], str]] = [
    ({"path": None}, "path is None, of type NoneType; it must be 'tiny', a folder, or a hub id"),
    ({"path": 3}, "path is 3"),
    ({"path": b"tiny"}, "path is b'tiny'"),
    (
        {"dtype": "flot32"},
        "dtype is 'flot32'; it must be auto, float64, float32, bfloat16, float16, or such a torch.dtype",
    ),
    ({"dtype": None}, "dtype is None"),
    ({"dtype": 32}, "dtype is 32"),
    ({"dtype": torch.int8}, "dtype is torch.int8"),
    ({"dtype": torch.complex64}, "dtype is torch.complex64"),
    ({"device": 1.5}, "device is 1.5; it must be a device"),
    ({"device": "abacus"}, "device 'abacus' cannot be used"),
    ({"device": "cuda:77"}, "device 'cuda:77' cannot be used"),
    ({"device": "meta"}, "device 'meta' cannot be used"),
    ({"device": ["cpu"]}, "device is ['cpu']"),
    ({"device": True}, "device is True"),
    ({"device": torch.device("meta")}, "cannot be used"),
    ({"device": "cpu", "device_map": "auto"}, "device is 'cpu' and device_map 'auto'; give only one of them"),
    ({"device_map": 1.5}, "device_map is 1.5"),
    ({"device_map": "nowhere"}, "device 'nowhere' cannot be used"),
    ({"device_map": {"": "nowhere"}}, "device 'nowhere' cannot be used"),
    ({"device_map": {"": None, "a": [1]}}, "device '[1]' cannot be used"),
    ({"device_map": {3: "cpu"}}, "device_map is {3: 'cpu'}"),
    ({"execution": "fast"}, "execution 'fast'"),
    ({"execution": None}, "execution is None"),
    ({"execution": ["native"]}, "execution is ['native']"),
    ({"attention": "split"}, "unknown attention 'split'; known: auto, flash"),
    ({"attention": 3}, "attention is 3"),
    ({"attention": []}, "attention is []"),
    ({"activations": "int4"}, "activations 'int4'"),
    ({"activations": 8}, "activations is 8"),
    ({"activations": "int8"}, "tiny' is no GGUF file"),
    ({"trust_remote_code": "no"}, "trust_remote_code is 'no', of type str; it must be True or False"),
    ({"trust_remote_code": None}, "trust_remote_code is None"),
]


@pytest.mark.parametrize(("options", "message"), LOADING)
def test_loading(options: dict[str, Any], message: str) -> None:
    for load in (Engine.from_pretrained, TransformersTarget.from_pretrained):
        with refused(SpecdecError, message):
            load(**{"path": "tiny", **options})


@pytest.mark.parametrize(
    "options", [{"max_rows": 1.5}, {"prefill_chunk": "x"}, {"policy": "nope"}, {"drafter": "lokahead"}]
)
def test_nothing_is_loaded_for_a_bad_argument(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded for nothing")

    monkeypatch.setattr("specdec.models.transformers_target.load_live", load)
    monkeypatch.setattr("specdec.models.transformers_target.DescribedCheckpoint.opened", load)
    with pytest.raises(ConfigError):
        Engine.from_pretrained("tiny", **options)


# -- SamplingParams ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": HUGE}, "temperature is <int>, of type int; it must be a finite number"),
        ({"temperature": 1j}, "temperature is 1j, of type complex"),
        ({"temperature": Odd()}, "temperature is <Odd>, of type Odd"),
        ({"top_k": -HUGE}, "top_k is <int>; it must be an integer >= 0"),
        ({"top_k": True}, "top_k is True, of type bool"),
        ({"top_k": np.array([3])}, "top_k is array([3]), of type ndarray; it must be an integer >= 0"),
        ({"temperature": np.array([0.7, 0.8])}, "temperature is array([0.7, 0.8]), of type ndarray"),
        ({"seed": torch.tensor([1, 2])}, "seed is tensor([1, 2]), of type Tensor"),
        ({"top_p": NAN}, "top_p is nan"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"seed": "0"}, "seed is '0', of type str"),
        ({"seed": True}, "seed is True, of type bool"),
        ({"acceptance": None}, "acceptance is None, of type NoneType"),
        ({"acceptance": ["match"]}, "acceptance is ['match'], of type list"),
        ({"allow_lossy": None}, "allow_lossy is None"),
    ],
)
def test_sampling(options: dict[str, Any], message: str) -> None:
    with refused(ConfigError, message):
        SamplingParams(**options)


# -- custom_generate ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": 3}, "drafter is 3; it must be a name"),
        ({"seed": "x"}, "seed is 'x', of type str; it must be an integer"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"acceptance": "always"}, "acceptance is 'always'"),
        ({"stop": 3}, "stop is 3"),
        ({"stop": ["x"], "tokenizer": "tiny"}, "tokenizer is 'tiny'"),
        ({"policy": 3}, "policy is 3"),
        ({"target": "tiny"}, "target is 'tiny'; it must be a Target"),
        ({"streamer": 3}, "streamer is 3; it must be a streamer of transformers"),
    ],
)
def test_custom_generate(options: dict[str, Any], message: str) -> None:
    model: Any = live(target_of("llama"))
    ids = torch.tensor([PROMPT])
    generate: Any = functools.partial(specdec.custom_generate, **{"target": TransformersTarget(model), **options})
    with refused(ConfigError, message):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, custom_generate=generate)


@pytest.mark.parametrize("ids", [None, [1, 2], [[1, 2]], torch.tensor([1.5]), torch.tensor([[[1]]]), torch.tensor(1)])
def test_custom_generate_without_generate(ids: Any) -> None:
    model = live(target_of("llama"))
    with refused(ConfigError, "input_ids "):
        specdec.custom_generate(model, ids, target=TransformersTarget(model))


# -- Drafters ----------------------------------------------------------------------------------------------------------


class Duck:
    tokens, parents = (3,), (-1,)


@pytest.mark.few(27)
@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (lambda root: None, "proposed None, of type NoneType; it must propose a Draft"),
        (lambda root: [root, 3], ", of type list; it must propose a Draft"),
        (lambda root: root, ", of type int; it must propose a Draft"),
        (lambda root: Duck(), "of type Duck; it must propose a Draft"),
        (lambda root: Draft, "it must propose a Draft"),
        (lambda root: torch.tensor([root, 3]), "of type Tensor; it must propose a Draft"),
        (lambda root: Draft.chain([float(root), 3.0]), "of type float; tokens are integers"),
        (lambda root: Draft.chain([root, 3.0]), "token 3.0, of type float; tokens are integers"),
        (lambda root: Draft.chain([root, "a"]), "token 'a', of type str; tokens are integers"),
        (lambda root: Draft.chain([root, None]), "token None, of type NoneType; tokens are integers"),
        (lambda root: Draft.chain([root, True]), "token True, of type bool; tokens are integers"),
        (lambda root: Draft.chain([root, torch.tensor(3)]), "token tensor(3), of type Tensor; tokens are integers"),
        (lambda root: Draft(None, [-1]), "tokens are None, of type NoneType"),
        (lambda root: Draft([root], root), "of type int; both are sequences of integers"),
        (lambda root: Draft.chain([]), "needs one parent per token"),
        (
            lambda root: Draft(torch.tensor([root, 3]), [-1, 0]),
            "of type Tensor; tokens are integers",
        ),
        (lambda root: Draft([root, 3], None), "parents are None, of type NoneType"),
        (lambda root: Draft([root, 3], [-1, 0.0]), "parents are [-1, 0.0]"),
        (lambda root: Draft([root, 3], [-1, None]), "parents are [-1, None]"),
        (lambda root: Draft([root, 3], [-1, 0], probes=3), "as probes and read are"),
        (lambda root: Draft([root, 3], [-1, 0], probes={"1"}), "as probes and read are"),
        (lambda root: Draft([root, 3], [-1, 0], read=3), "as probes and read are"),
        (lambda root: Draft([root, 3], [-1, 0], q=[0.5]), "q is [0.5], of type list"),
        (lambda root: Draft([root, 3], [-1, 0], hints=3), "hints are 3, of type int; they must be Hints"),
        (lambda root: Draft.chain([root], hints=Hints(match_length=0.5)), "match_length is 0.5, of type float"),
        (lambda root: Draft.chain([root], hints=Hints(match_length=-1)), "match_length is -1, of type int"),
        (lambda root: Draft.chain([root, 3], hints=Hints(chances=[1.0])), "they must be a list of 2 numbers"),
        (lambda root: Draft.chain([root], hints=Hints(chances=0.5)), "chances are 0.5, of type float"),
        (lambda root: Draft.chain([root], hints=Hints(cost="a")), "cost is 'a', of type str"),
        (lambda root: Draft.chain([root], hints=Hints(cost=float("nan"))), "cost is nan, of type float"),
        (lambda root: Draft([root, 3], [-1, 0], q={0: [0.5] * VOCAB}), "q of row 0 is [0.5,"),
        (
            lambda root: Draft([root, 3], [-1, 0], q={0: torch.ones(3)}),
            "q of row 0 is float32 of shape [3]; it must be floats of shape [32]",
        ),
        (lambda root: Draft([root, 3], [-1, 0], q={0: torch.ones(VOCAB).long()}), "q of row 0 is int64 of shape [32]"),
        (lambda root: Draft([root, 3], [-1, 0], entry=3), "entry is 3, of type int; it must be an Entering"),
        (lambda root: Draft([root, 3], [-1, 0], entry=Entering(1, None)), "entry.hidden is None"),
        (lambda root: Draft([root, 3], [-1, 0], entry=Entering(1.5, torch.zeros(2, 32))), "entry.layer is 1.5"),
        (lambda root: Draft([root, 3], [-1, 0], entry=Entering(9, torch.zeros(2, 32))), "entry.layer is 9"),
        (lambda root: Draft([root, 3], [-1, 0], entry=Entering(-1, torch.zeros(2, 32))), "entry.layer is -1"),
        (
            lambda root: Draft([root, 3], [-1, 0], entry=Entering(1, torch.zeros(2, 32).long())),
            "entry.hidden is int64 of shape [2, 32]; it must be float64 of shape [2, 32]",
        ),
        (lambda root: Draft([root, 3], [-1, 5]), "row 1 names row 5 as its parent"),
    ],
)
def test_draft(draft: Callable[[int], Any], message: str) -> None:
    scripted = Engine(target_of("llama"), None, Scripted(lambda context, row_budget: draft(context.root)))
    for params in (SamplingParams(), SamplingParams(temperature=1.0)):
        with refused(DraftError, "drafter 'scripted'", message):
            scripted.generate(PROMPT, 8, params)


def test_tokens_of_numpy_are_integers() -> None:
    plain = Engine(target_of("llama")).generate(PROMPT, 8).token_ids
    drafter = Scripted(lambda context, row_budget: Draft.chain([context.root, np.int64(3)]))
    assert Engine(target_of("llama"), None, drafter).generate(PROMPT, 8).token_ids == plain


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"taps": 3}, "taps of drafter Scripted is 3, of type int; it must be of type frozenset[int]"),
        ({"taps": frozenset({"last"})}, "taps of drafter Scripted is frozenset({'last'})"),
        ({"taps": frozenset({1, 99})}, "hold layer 99; the target has 3 layers"),
        ({"name": None}, "name of drafter Scripted is None"),
        ({"needs_observe": "no"}, "needs_observe of drafter Scripted is 'no'"),
        ({"fixed_cost_rows": None}, "fixed_cost_rows of drafter Scripted is None"),
    ],
)
def test_what_a_drafter_declares(changes: dict[str, Any], message: str) -> None:
    drafter = Scripted(lambda context, row_budget: Draft.chain([context.root]))
    for name, value in changes.items():
        setattr(drafter, name, value)
    with refused(ConfigError, message):
        Engine(target_of("llama"), None, drafter)


@pytest.mark.parametrize("session", [None, 3, object()])
def test_a_session_that_is_none(session: Any) -> None:
    class Empty(Scripted):
        def start(self, context: Any) -> Any:
            return session

    drafter = Empty(lambda context, row_budget: Draft.chain([context.root]))
    with refused(DraftError, "drafter 'scripted' started ", "it must be a session with propose and observe"):
        Engine(target_of("llama"), None, drafter).generate(PROMPT, 4)


# -- The net itself ----------------------------------------------------------------------------------------------------


PUBLIC = [
    Engine.__init__, Engine.from_pretrained, Engine.with_drafter, Engine.generate, Engine.stream, Engine.start,
    TransformersTarget.__init__, TransformersTarget.from_pretrained, specdec.custom_generate,
]  # fmt: skip


@pytest.mark.parametrize("function", PUBLIC, ids=lambda function: function.__qualname__)
def test_every_argument_of_a_public_function_is_checked(function: Callable[..., Any]) -> None:
    assert hasattr(function, "__wrapped__")
    names = {p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD}
    elsewhere = {"self", "prompt", "prediction", "drafter", "generation_config", "stopping_criteria"}
    assert names - elsewhere <= set(ARGUMENTS)


def test_checked_takes_positions_and_names() -> None:
    @checked
    def decode(max_new_tokens: int, stop: Any = (), *, sample: bool | None = None) -> tuple[Any, ...]:
        return max_new_tokens, stop, sample

    assert decode(3, "x", sample=True) == (3, "x", True)
    with refused(ConfigError, "max_new_tokens is 'x'"):
        decode("x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        decode()  # type: ignore[call-arg]
