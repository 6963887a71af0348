"""``model.generate(custom_generate=...)``: the same tokens as plain ``generate``, and the model as it was."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from specdec import Engine, TransformersTarget, custom_generate
from specdec.errors import ConfigError, NumericalError, TargetError
from tests.fakes import Oracle
from tests.models import PAD, VOCAB, greedy, live, model_of, new_model, prompt_of, reference, target_of

FAMILY = "mistral"
PROMPT = prompt_of(9)
NEW = 30
TARGET = target_of(FAMILY, execution="modules")  # around the one model of the family


def generate(drafter: Any, *, ours: dict[str, Any] | None = None, prompt: Any = PROMPT, **options: Any) -> Any:
    """``generate``'s return value with the drafter, on the shared model."""
    loop: Any = functools.partial(custom_generate, drafter=drafter, target=TARGET, **(ours or {}))
    ids = torch.tensor([list(prompt)])
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    return model_of(FAMILY).generate(ids, attention_mask=torch.ones_like(ids), custom_generate=loop, **options)


def oracle(text: list[int]) -> Oracle:
    return Oracle([*PROMPT, *text], VOCAB)


GREEDY: dict[str, dict[str, Any]] = {
    "plain": {},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[26], [18, 4]]},
    "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": 7},
    "eos": {"eos_token_id": [26, 12]},
    "no eos": {"eos_token_id": [], "pad_token_id": 0, "repetition_penalty": 1.2},
    "max_length": {"max_new_tokens": None, "max_length": 25},
    "forced_eos": {"forced_eos_token_id": 3},
    "suppressed": {"suppress_tokens": [26, 18], "begin_suppress_tokens": [4]},
}


@pytest.mark.few(2)
@pytest.mark.parametrize("case", GREEDY)
def test_greedy_in_long_blocks(case: str) -> None:
    expected = reference(model_of(FAMILY), PROMPT, **{"max_new_tokens": NEW, **GREEDY[case]})
    assert generate(oracle(expected), **GREEDY[case])[0, len(PROMPT) :].tolist() == expected


@pytest.mark.slow
def test_cases_differ() -> None:
    """Otherwise the options would show nothing."""
    texts = {tuple(reference(model_of(FAMILY), PROMPT, **{"max_new_tokens": NEW, **o})) for o in GREEDY.values()}
    assert len(texts) == len(GREEDY)


SAMPLED: dict[str, dict[str, Any]] = {
    "plain": {},
    "warped": {"temperature": 0.7, "top_k": 10, "top_p": 0.9},
    "penalty": {"repetition_penalty": 1.3, "min_p": 0.05},
}


def test_torch_governs_the_seed() -> None:
    texts = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        texts.append(generate("prompt_lookup", do_sample=True).tolist())
    assert texts[0] == texts[1] != texts[2]


class AfterPair(StoppingCriteria):
    """Stops after a given pair of tokens; asked about every prefix, as in transformers' own loop."""

    def __init__(self, pair: list[int]) -> None:
        self.pair = pair

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **_: Any) -> torch.BoolTensor:
        return torch.tensor([row[-2:].tolist() == self.pair for row in input_ids])


@pytest.mark.few(2)
@pytest.mark.parametrize("at", range(1, 12))
def test_stopping_criteria_inside_a_block(at: int) -> None:
    text = greedy(FAMILY, PROMPT, NEW)
    options = {"stopping_criteria": StoppingCriteriaList([AfterPair(text[at - 1 : at + 1])])}
    expected = reference(model_of(FAMILY), PROMPT, NEW, **options)
    assert len(expected) < NEW
    for drafter in (oracle(text), "prompt_lookup"):
        assert generate(drafter, **options)[0, len(PROMPT) :].tolist() == expected


@pytest.mark.slow
def test_stop_strings(tiny_engine: Engine) -> None:
    model, prompt = live(tiny_engine.target), "def read(path):\n"
    plain = tiny_engine.generate(prompt, NEW)
    ids = torch.tensor([tiny_engine.encode(prompt)])
    stop = plain.text[9:13]
    loop: Any = functools.partial(custom_generate, stop=[stop], tokenizer=tiny_engine.tokenizer)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=loop, max_new_tokens=NEW)
    expected = tiny_engine.generate(prompt, NEW, stop=stop)
    assert expected.finish_reason == "stop"
    assert out[0, ids.shape[1] :].tolist() == expected.token_ids


class Recorder(BaseStreamer):
    """What a streamer is given."""

    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        assert not self.ended
        self.pieces.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_streamer() -> None:
    """The prompt first, then every step's tokens; as transformers' loop has it, but a block at a time."""
    recorder = Recorder()
    text = greedy(FAMILY, PROMPT, NEW)
    generate(oracle(text), ours={"streamer": recorder})
    assert recorder.pieces[0] == list(PROMPT)
    assert [token for piece in recorder.pieces[1:] for token in piece] == text
    assert max(map(len, recorder.pieces[1:])) > 1
    assert recorder.ended


def test_dictionary() -> None:
    out = generate("lookahead", return_dict_in_generate=True)
    assert isinstance(out, GenerateDecoderOnlyOutput)
    assert out.sequences[0, len(PROMPT) :].tolist() == greedy(FAMILY, PROMPT, NEW)


def padded(prompts: list[tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """[B, n] ids and mask, padded on the left."""
    width = max(map(len, prompts))
    ids = [[PAD] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"inputs": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


@pytest.mark.few(1)
@pytest.mark.parametrize("case", GREEDY)
def test_several_sequences_padded_on_the_left(case: str) -> None:
    """As in ``generate``, whose processors see the padding too, and which pads what ends before the others."""
    options = {"do_sample": False, "max_new_tokens": NEW, **GREEDY[case]}
    batch = padded([prompt_of(4), PROMPT, prompt_of(1)])
    expected = model_of(FAMILY).generate(**batch, **options)
    loop: Any = functools.partial(custom_generate, drafter="prompt_lookup", target=TARGET)
    assert torch.equal(model_of(FAMILY).generate(**batch, custom_generate=loop, **options), expected)


def test_each_of_several_sequences_has_a_seed_of_its_own() -> None:
    loop: Any = functools.partial(custom_generate, drafter="jacobi", target=TARGET, seed=5)
    batch = padded([PROMPT, PROMPT])
    out = model_of(FAMILY).generate(**batch, custom_generate=loop, do_sample=True, max_new_tokens=NEW)
    assert out[0].tolist() != out[1].tolist()
    for row, seed in enumerate((5, 6)):
        assert generate("jacobi", ours={"seed": seed}, do_sample=True).tolist() == out[row : row + 1].tolist()


def test_a_processor_that_counts_rows_is_refused() -> None:
    loop: Any = functools.partial(custom_generate, target=TARGET)
    options = {"custom_generate": loop, "max_new_tokens": 4, "prefix_allowed_tokens_fn": lambda row, ids: [row + 3]}
    with pytest.raises(ConfigError, match="PrefixConstrainedLogitsProcessor counts rows of a batch; give it one"):
        model_of(FAMILY).generate(**padded([PROMPT, PROMPT]), **options)


def test_padding_elsewhere_is_refused() -> None:
    """Without a mask ``generate`` takes a padding token for padding, wherever it stands."""
    prompt = [*PROMPT[:2], PAD, *PROMPT]
    loop: Any = functools.partial(custom_generate, target=TARGET)
    with pytest.raises(ValueError, match="attention_mask holds zeros behind ones"):
        model_of(FAMILY).generate(torch.tensor([prompt]), custom_generate=loop, max_new_tokens=4)
    expected = reference(model_of(FAMILY), prompt, 12)
    assert generate("prompt_lookup", prompt=prompt, max_new_tokens=12)[0, len(prompt) :].tolist() == expected


@pytest.fixture(params=["sdpa", "eager"])
def own_model(request: pytest.FixtureRequest) -> PreTrainedModel:
    model = new_model(FAMILY)
    model.set_attn_implementation(request.param)
    return model


@pytest.mark.few(1)
def test_model_is_as_it_was(own_model: PreTrainedModel) -> None:
    """Attention, mode, weights and generation config: nothing stays behind."""
    before = copy.deepcopy(own_model.generation_config.to_dict())
    weights = {name: tensor.clone() for name, tensor in own_model.state_dict().items()}
    implementation = own_model.config._attn_implementation
    expected = reference(own_model, PROMPT, NEW)
    own_model.train()
    ids = torch.tensor([PROMPT])
    out = own_model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, custom_generate=custom_generate
    )
    assert out[0, len(PROMPT) :].tolist() == expected
    assert own_model.training
    own_model.eval()
    assert own_model.config._attn_implementation == implementation
    assert own_model.generation_config.to_dict() == before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in own_model.state_dict().items())
    assert reference(own_model, PROMPT, NEW) == expected


def test_model_is_as_it_was_after_an_error(own_model: PreTrainedModel) -> None:
    implementation = own_model.config._attn_implementation

    def fail(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("of the user's own")

    ids = torch.tensor([PROMPT])
    with pytest.raises(ArithmeticError, match="of the user's own"):
        own_model.generate(ids, logits_processor=[fail], max_new_tokens=4, custom_generate=custom_generate)
    assert own_model.config._attn_implementation == implementation


def modes(model: PreTrainedModel) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


@pytest.mark.few(3)
@pytest.mark.parametrize("error", [None, {"drafter": "nosuch"}, {"stop": "x"}, {"target": TARGET}])
def test_every_module_s_mode_is_as_it_was(error: dict[str, Any] | None) -> None:
    """A training model of which a part is in eval mode (frozen, say): after success and after errors in the set-up."""
    model, ids = new_model(FAMILY), torch.tensor([PROMPT])
    expected = reference(model, PROMPT, 4)
    model.train()
    model.model.layers[1].eval()
    before = modes(model)
    assert len(set(before.values())) == 2
    loop: Any = functools.partial(custom_generate, **(error or {}))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "custom_generate": loop}
    if error is None:
        assert model.generate(ids, **options)[0, len(PROMPT) :].tolist() == expected
    else:
        with pytest.raises(ConfigError):
            model.generate(ids, **options)
    assert modes(model) == before
    model.model.layers[2].self_attn.attention_dropout = 0.9
    with pytest.raises(TargetError, match=r"attention_dropout of model.layers.2.self_attn .* call its eval\(\)"):
        model.generate(ids, **{**options, "custom_generate": custom_generate})
    assert modes(model) == before


def test_a_target_leaves_the_mode_alone() -> None:
    """Built around a training model, and while a stream is between two steps; a model that is refused, too."""
    model = new_model(FAMILY)
    expected = reference(model, PROMPT, 8)
    model.train()
    engine = Engine(TransformersTarget(model))
    assert all(modes(model).values())
    assert engine.generate(PROMPT, 8).token_ids == expected
    with engine.target.active():
        assert all(modes(model).values())
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(NumericalError):
        TransformersTarget(model)
    assert all(modes(model).values())
