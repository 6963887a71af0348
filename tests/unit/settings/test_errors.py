"""Bad input: every one is a SpecdecError that says what is wrong, with the values, and what to do about it."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import specdec
from specdec import Context, Draft, Engine, SamplingParams, TransformersTarget
from specdec.errors import (
    CacheError,
    CheckpointError,
    ConfigError,
    DraftError,
    ForkError,
    NumericalError,
    PromptError,
    SpecdecError,
    TargetError,
    unknown,
)
from specdec.models.inspection import refuse_unfit
from specdec.step.step_io import Entering
from tests.fakes import Oracle, Scripted
from tests.models import VOCAB, greedy, live, new_model, prompt_of, target_of

PROMPT = prompt_of(7)
NAN = float("nan")


def test_the_tree_of_errors() -> None:
    kinds = (ConfigError, PromptError, TargetError, CheckpointError, CacheError, DraftError, NumericalError, ForkError)
    assert all(issubclass(kind, SpecdecError) for kind in kinds)
    assert issubclass(ConfigError, ValueError)
    assert issubclass(PromptError, ValueError)
    assert issubclass(ForkError, RuntimeError)
    assert not issubclass(SpecdecError, ValueError)


def test_unknown_names_the_nearest() -> None:
    assert unknown("drafter", "lokahead", ["none", "lookahead"]) == (
        "unknown drafter 'lokahead'; did you mean 'lookahead'? known: lookahead, none"
    )
    assert unknown("drafter", "xyz", ["none"]) == "unknown drafter 'xyz'; known: none"
    assert unknown("drafter", "xyz", []).endswith("known: none")


# -- Prompts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty; give at least one token"),
        (torch.zeros(1, 0, dtype=torch.long), "the prompt is empty"),
        ([3, VOCAB], rf"token {VOCAB} is outside the vocabulary \[0, {VOCAB}\); the ids come from another tokenizer"),
        ([3, -1], "token -1 is outside the vocabulary"),
        (
            prompt_of(256),
            "has 256 tokens, and the model's context holds 256 with at least one new .*shorten the prompt",
        ),
        (prompt_of(300), "has 300 tokens"),
        (torch.zeros(2, 4, dtype=torch.long), r"shape \[2, 4\]; give one sequence, \[n\] or \[1, n\]"),
        (torch.tensor([3.5, 4.0]), "the prompt is of torch.float32; token ids are integers"),
        ("text", "no tokenizer; give token ids"),
        ([{"role": "user", "content": "hello"}], "no tokenizer; give token ids"),
    ],
)
def test_prompt(prompt: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        Engine(target_of("llama")).generate(prompt, 4)


def test_token_ids_of_any_integer_kind() -> None:
    engine, ids = Engine(target_of("llama")), [3, 4, 5]
    for prompt in (
        tuple(ids),
        torch.tensor(ids),
        torch.tensor([ids], dtype=torch.int32),
        np.array(ids),
        list(np.array(ids)),
    ):
        assert engine.encode(prompt) == ids


def test_longest_prompt_yields_one_token() -> None:
    out = Engine(target_of("llama"), None, "prompt_lookup").generate(prompt_of(255), 50)
    assert len(out.token_ids) == 1
    assert out.finish_reason == "context"


def test_chat_without_a_template(tiny_engine: Engine) -> None:
    class Plain:
        chat_template = None
        __call__ = decode = print

    with pytest.raises(PromptError, match=r"no chat template; give text, or set tokenizer.chat_template"):
        Engine(tiny_engine.target, Plain()).generate([{"role": "user", "content": "hello"}])


# -- Options of the engine ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_rows": 0}, "max_rows is 0; it must be an integer from 1 to 65536"),
        ({"max_rows": -3}, "max_rows is -3"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0; it must be an integer >= 1"),
        ({"drafter": 7}, "drafter is 7; it must be a name"),
        ({"drafter": {"window": 3}}, "has no name; choose one of .*lookahead"),
        ({"drafter": "lookahed"}, "unknown drafter 'lookahed'; did you mean 'lookahead'"),
        ({"drafter": {"name": "lookahead", "windw": 3}}, "'windw'; did you mean 'window'"),
        ({"drafter": {"name": "lookahead", "window": 0}}, "lookahead.window is 0; it must be at least 1"),
        ({"drafter": {"name": "lookahead", "ngram": 1}}, "lookahead.ngram is 1; it must be at least 2"),
        ({"drafter": {"name": "lookahead", "guesses": -2}}, "lookahead.guesses is -2"),
        ({"drafter": {"name": "lookahead", "window": "wide"}}, "lookahead.window is 'wide', of type str"),
        ({"drafter": {"name": "jacobi", "guesses": 0}}, "jacobi.guesses is 0; it must be at least 1"),
        ({"drafter": {"name": "prompt_lookup", "tokens": 0}}, "prompt_lookup.tokens is 0"),
        ({"drafter": {"name": "prompt_lookup", "min_ngram": 4}}, "min_ngram is 4 and max_ngram 3"),
    ],
)
def test_engine_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(target_of("llama"), None, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be an integer >= 1"),
        ({"stop": "x"}, "need a tokenizer; the engine has none"),
        ({"stop": ["x", ""]}, r"stop is \['x', ''\], of type list; it must be non-empty text"),
    ],
)
def test_generate_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(target_of("llama")).generate(PROMPT, **{"max_new_tokens": 4, **options})


def test_stream_needs_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="stop strings and streams need a tokenizer"):
        Engine(target_of("llama")).stream(PROMPT, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0; it must be a finite number >= 0, where 0 is greedy"),
        ({"temperature": NAN}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": "hot"}, "temperature is 'hot', of type str; it must be a finite number"),
        ({"temperature": None}, "temperature is None, of type NoneType"),
        ({"temperature": True}, "temperature is True, of type bool"),
        ({"top_k": -1}, "top_k is -1; it must be an integer >= 0, where 0 is off"),
        ({"top_k": 2.5}, "top_k is 2.5, of type float; it must be an integer"),
        ({"top_p": 0.0}, r"top_p is 0.0; it must be a number in \(0, 1\], where 1 is off"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_p": [0.9]}, r"top_p is \[0.9\], of type list"),
        ({"min_p": 1.0}, r"min_p is 1.0; it must be a number in \[0, 1\)"),
        ({"min_p": "x"}, "min_p is 'x', of type str"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be a finite number > 0"),
        ({"repetition_penalty": NAN}, "repetition_penalty is nan"),
        ({"repetition_penalty": "x"}, "repetition_penalty is 'x', of type str"),
        ({"seed": "x"}, "seed is 'x', of type str; it must be an integer, such as 0"),
        ({"seed": 1.0}, "seed is 1.0, of type float"),
        ({"seed": None}, "seed is None, of type NoneType"),
        ({"acceptance": "always"}, "acceptance is 'always'; it must be one of auto, match, reject, typ"),
        ({"acceptance": 3}, "acceptance is 3, of type int; it must be one of auto"),
        ({"allow_lossy": "yes"}, "allow_lossy is 'yes', of type str; it must be True or False"),
        ({"allow_lossy": 1}, "allow_lossy is 1, of type int"),
        ({"typical_epsilon": 0.0}, "typical_epsilon is 0.0"),
        ({"typical_delta": 2.0}, "typical_delta is 2.0"),
        ({"typical_delta": "x"}, "typical_delta is 'x', of type str"),
    ],
)
def test_sampling_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**options)


def test_sampling_options_of_any_numeric_kind() -> None:
    """Whole numbers and numpy's: transformers' warpers, which insist on Python's, get Python's."""
    given = {"temperature": 2, "top_k": np.int64(3), "top_p": np.float32(0.5), "repetition_penalty": 2}
    params = SamplingParams(**given, seed=np.int64(-7))
    assert params == SamplingParams(temperature=2.0, top_k=3, top_p=0.5, repetition_penalty=2.0, seed=-7)
    assert [type(getattr(params, name)) for name in (*given, "seed")] == [float, int, float, float, int]
    assert len(Engine(target_of("llama")).generate(PROMPT, 4, params).token_ids) == 4


# -- Numbers -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def poisoned() -> TransformersTarget:
    """A target whose logits have been NaN for one token since it was loaded."""
    target = TransformersTarget(new_model("llama"))
    with torch.no_grad():
        target.model.get_output_embeddings().weight[9] = NAN
    return target


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(repetition_penalty=1.2),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_k=4),
        SamplingParams(temperature=1.0, acceptance="reject"),
    ],
)
def test_nan_logits(poisoned: TransformersTarget, sampling: SamplingParams) -> None:
    with pytest.raises(
        NumericalError,
        match=r"the model's logits are no distribution: \d+ of \d+ are NaN.* check the weights, or use float32",
    ):
        Engine(poisoned, None, "prompt_lookup").generate(PROMPT, 4, sampling)


def test_model_is_as_it_was_after_an_error(poisoned: TransformersTarget) -> None:
    implementation = poisoned.model.config._attn_implementation
    with pytest.raises(NumericalError):
        Engine(poisoned).generate(PROMPT, 4)
    assert poisoned.model.config._attn_implementation == implementation == "sdpa"
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=1.0)])
@pytest.mark.parametrize("value", [-torch.inf, torch.inf, NAN])
def test_processor_that_leaves_no_distribution(value: float, sampling: SamplingParams) -> None:
    """It is named, and not the ones around it; a value at one token is enough, unless others are left."""

    def wipe(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, value)

    def spoil(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor([3]), value)

    def keep(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores

    for acceptance in ("match", "reject"):
        params = SamplingParams(temperature=sampling.temperature, top_p=0.9, acceptance=acceptance)
        for broken in (wipe, spoil):
            engine = Engine(target_of("llama"), drafter="prompt_lookup")
            if broken is spoil and value == -torch.inf:
                assert len(engine.generate(PROMPT, 4, params, logits_processor=[spoil]).token_ids) == 4
                continue
            nans = VOCAB * (value != value) if broken is wipe else int(value != value)
            said = (
                rf"after the logits processor .*{broken.__name__} are no distribution: {nans} of {VOCAB} are NaN, the"
            )
            with pytest.raises(
                NumericalError, match=rf"{said} largest is {value}, and the model's own logits are finite; it"
            ):
                engine.generate(PROMPT, 4, params, logits_processor=[keep, broken, keep])


def test_a_temperature_that_leaves_no_distribution() -> None:
    with pytest.raises(NumericalError, match="the logits processor TemperatureLogitsWarper are no distribution"):
        Engine(target_of("llama")).generate(PROMPT, 4, SamplingParams(temperature=1e-320, top_k=3))


def test_a_grammar_that_leaves_no_token() -> None:
    class Nothing:
        def start(self, prompt: Sequence[int]) -> Any:
            return self

        def advance(self, token: int) -> Any:
            return self

        def mask(self, scores: torch.Tensor) -> torch.Tensor:
            return torch.full_like(scores, -torch.inf)

    with pytest.raises(
        NumericalError, match=r"after the logits processor .*Nothing are no distribution: 0 of 32 are NaN"
    ):
        Engine(target_of("llama")).generate(PROMPT, 4, logits_processor=[Nothing()])


def test_model_of_nan_is_refused_at_load() -> None:
    model = new_model("llama")
    with torch.no_grad():
        model.model.norm.weight[0] = NAN
    with pytest.raises(
        NumericalError, match=r"LlamaForCausalLM: the model's own logits are nan .*weight 'model.norm.weight' holds NaN"
    ):
        TransformersTarget(model)


# -- Drafts that break the rules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (
            lambda context, row_budget: Draft.chain([context.root] * (row_budget + 1)),
            r"9 rows but 8 slots are free; propose at most `row_budget` rows \(drafter 'scripted'\).*max_rows",
        ),
        (
            lambda context, row_budget: Draft.chain([(context.root + 1) % VOCAB]),
            r"root is token \d+, the last emitted token is \d+; row 0 must be context.root \(drafter 'scripted'\)",
        ),
        (lambda context, row_budget: Draft.chain([context.root, VOCAB]), r"a token outside the vocabulary \[0, 32\)"),
        (lambda context, row_budget: Draft.chain([context.root, -1]), "a token outside the vocabulary"),
        (
            lambda context, row_budget: Draft([context.root, 1], [-1, 0], entry=Entering(1, torch.zeros(1, 32))),
            r"entry.hidden is float32 of shape \[1, 32\]; it must be float64 of shape \[2, 32\]: one row per draft row",
        ),
    ],
)
def test_draft(draft: Callable[[Context, int], Draft], message: str) -> None:
    with pytest.raises(DraftError, match=message):
        Engine(target_of("llama"), None, Scripted(draft), max_rows=8).generate(PROMPT, 20)


def test_room_at_the_end_of_the_context() -> None:
    """The last slots of a context hold as large a tree as the first, so no draft is refused there."""
    prompt = prompt_of(7)
    text = greedy("llama", prompt, 249)
    out = Engine(target_of("llama"), None, Oracle([*prompt, *text], VOCAB), max_rows=24).generate(prompt, 400)
    assert out.token_ids == text
    assert out.finish_reason == "context"


def test_draft_with_a_q_of_other_tokens() -> None:
    q = torch.zeros(VOCAB)
    q[3] = 1.0
    drafter = Scripted(lambda context, row_budget: Draft.chain([context.root, 4], q={0: q}))
    with pytest.raises(
        DraftError, match=r"row 1 holds token 4, to which the q of row 0 gives probability 0.0; set q only"
    ):
        Engine(target_of("llama"), None, drafter).generate(PROMPT, 8, SamplingParams(temperature=1.0))


# -- Checkpoints -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "good"
    new_model("llama", torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def rewrite(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


UP = "model.layers.1.mlp.up_proj.weight"


def test_good_checkpoint(saved: Path) -> None:
    assert TransformersTarget.from_pretrained(saved).dtype == torch.float32
    assert TransformersTarget.from_pretrained(saved, dtype=torch.float64).dtype == torch.float64


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop(UP), rf"1 missing, such as {UP}; .*incomplete"),
        (lambda tensors: tensors.update({"model.layers.9.x": torch.zeros(2)}), "1 extra, such as model.layers.9.x"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(7)}),
            r"1 misshapen, such as .*model.norm.weight.*\[7\].*\[32\]",
        ),
        (
            lambda tensors: (tensors.pop(UP), tensors.update(x=torch.zeros(2))),
            "1 missing, such as .*; 1 extra, such as x",
        ),
    ],
)
def test_tensors_that_do_not_fit(copied: Path, edit: Callable[[dict[str, torch.Tensor]], object], message: str) -> None:
    rewrite(copied, edit)
    with pytest.raises(CheckpointError, match=f"does not fit LlamaForCausalLM: .*{message}") as caught:
        TransformersTarget.from_pretrained(copied)
    assert str(copied) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"this is no such file" * 99, None])
def test_file_that_is_no_safetensors(copied: Path, content: bytes | None) -> None:
    weights = copied / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(CheckpointError, match=r"cannot read .*header"):
        TransformersTarget.from_pretrained(copied)


def test_pickled_weights_are_not_read(copied: Path) -> None:
    tensors = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()
    torch.save(tensors, copied / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pickles .*convert them to safetensors"):
        TransformersTarget.from_pretrained(copied)


@pytest.mark.parametrize("outside", ["../good/model.safetensors", "{good}/model.safetensors", "a/../../good/m"])
def test_an_index_that_points_out_of_its_folder(saved: Path, copied: Path, outside: str) -> None:
    (copied / "model.safetensors").rename(copied / "part.safetensors")
    names = load_file(copied / "part.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "part.safetensors")}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    assert TransformersTarget.from_pretrained(copied).dtype == torch.float32
    index["weight_map"][UP] = outside.format(good=saved)
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index.json' names weights outside its folder: '.*'; do not trust"):
        TransformersTarget.from_pretrained(copied)


@pytest.mark.parametrize("base", ["elsewhere", "itself"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_folder_that_sends_to_another_model_is_refused(saved: Path, copied: Path, base: str, whole: bool) -> None:
    """By peft's adapter_config.json, which transformers follows or not, depending on what is installed."""
    other = new_model("llama", torch.float32, seed=9)
    if not whole:
        (copied / "model.safetensors").unlink()
    folder = copied.parent / "elsewhere"
    other.save_pretrained(folder)
    config = {"peft_type": "LORA", "base_model_name_or_path": str(folder if base == "elsewhere" else copied)}
    (copied / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"adapter_config.json', which names another model .* with peft and hand"):
        TransformersTarget.from_pretrained(copied)


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": 3}', "{"])
def test_an_index_that_is_none(copied: Path, content: str) -> None:
    (copied / "model.safetensors").rename(copied / "part.safetensors")
    (copied / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"no weight_map|it must be a JSON object|cannot read .* Expecting"):
        TransformersTarget.from_pretrained(copied)


@pytest.mark.parametrize(
    ("config", "message"),
    [("{", "cannot read .*config.json': Expecting"), ('{"model_type": "nosuch"}', "cannot load .*model type `nosuch`")],
)
def test_config_that_says_nothing(copied: Path, config: str, message: str) -> None:
    (copied / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=message):
        TransformersTarget.from_pretrained(copied)


def test_no_folder_and_no_tokenizer(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot load .*nowhere.*give 'tiny' or 'smollm2', a folder"):
        Engine.from_pretrained(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot load a model from '.*file': that is a file; give"):
        Engine.from_pretrained(str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"(?s)no tokenizer at .*save one beside the weights"):
        Engine.from_pretrained(saved)


# -- Models that cannot be driven --------------------------------------------------------------------------------------

SMALL = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 3, "pad_token_id": 0}
DECODER = {**SMALL, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


def model_of_kind(kind: str, **options: Any) -> PreTrainedModel:
    config = getattr(transformers, f"{kind}Config")(**options)
    model: PreTrainedModel = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model


def test_a_config_without_layer_types_is_known_by_its_options() -> None:
    """As those of models with code of their own."""
    with pytest.raises(TargetError, match=r"Homemade has layers that specdec cannot roll back \(state_size\)"):
        refuse_unfit("Homemade", SimpleNamespace(state_size=4))
    refuse_unfit("Homemade", SimpleNamespace(layer_types=["full_attention", "sliding_attention"]))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Mamba", {**SMALL, "state_size": 4}),
        ("Mamba2", {**SMALL, "state_size": 4, "num_heads": 4, "head_dim": 16, "n_groups": 1}),
        ("RecurrentGemma", {**DECODER, "lru_width": 32, "attention_window_size": 8}),
        ("Jamba", {**DECODER, "num_experts": 2, "use_mamba_kernels": False}),
        ("FalconH1", DECODER),
        ("Qwen3Next", DECODER),
    ],
)
def test_recurrent_models_are_refused_by_name(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = model_of_kind(kind, **options)
    remedy = "cannot roll back .*recurrent.*Use a decoder of attention and MLP"
    with pytest.raises(TargetError, match=f"{kind}ForCausalLM has layers that specdec {remedy}"):
        TransformersTarget(model)
    model.config.save_pretrained(tmp_path)  # by its config alone, before any weights are read
    with pytest.raises(TargetError, match=f"{kind} has layers that specdec {remedy}"):
        TransformersTarget.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("Bloom", {"vocab_size": 32, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "own forward over a tree"),
        (
            "Helium",
            DECODER,
            "the model's own forward fails in torch.float32 on cpu, without specdec",
        ),
    ],
)
def test_other_models_are_refused(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TargetError, match=f"{kind}.*{message}"):
        TransformersTarget(model_of_kind(kind, **options))


@pytest.mark.slow
def test_models_keep_working_after_a_refusal() -> None:
    """A refused model keeps its own attention."""
    model = model_of_kind("Qwen3Next", **DECODER)
    with pytest.raises(TargetError):
        TransformersTarget(model)
    assert model.config._attn_implementation == "sdpa"


# -- custom_generate ---------------------------------------------------------------------------------------------------


def custom(prompt: Sequence[Sequence[int]], *, mask: torch.Tensor | None = None, **options: Any) -> Any:
    model: Any = live(target_of("llama"))
    ids = torch.tensor(prompt)
    mask = torch.ones_like(ids) if mask is None else mask
    ours = {"target": TransformersTarget(model), **options.pop("ours", {})}
    generate: Any = functools.partial(specdec.custom_generate, **ours)
    return model.generate(ids, attention_mask=mask, custom_generate=generate, **{"max_new_tokens": 4, **options})


def filled_cache() -> transformers.DynamicCache:
    cache = transformers.DynamicCache()
    cache.update(torch.ones(1, 2, 2, 8), torch.ones(1, 2, 2, 8), 0)
    return cache


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "num_beams is 2: specdec decodes each sequence once, without beams; set it to 1"),
        (
            {"output_scores": True, "return_dict_in_generate": True},
            "output_scores is True: .*does not keep them; unset",
        ),
        ({"guidance_scale": 1.5}, "guidance_scale is 1.5: it runs the model once more for every token; unset it"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha is 0.6: contrastive search"),
        ({"dola_layers": "high"}, "dola_layers is 'high': DoLa"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens is 3: .* give drafter='prompt_lookup'"),
        ({"assistant_early_exit": 1}, "assistant_early_exit is 1: .* give drafter='kangaroo'"),
        ({"use_mtp": True}, "use_mtp is True: .* name one of specdec's"),
        ({"cache_implementation": "offloaded"}, "cache_implementation is 'offloaded': .* unset it"),
        ({"position_ids": torch.tensor([[5, 6, 7]])}, r"position_ids are \[\[5, 6, 7\]\]; .* leave them out"),
        ({"inputs_embeds": torch.ones(1, 3, 32, dtype=torch.float64)}, "inputs_embeds was given; .* token ids alone"),
        ({"past_key_values": filled_cache()}, "past_key_values was given, and holds 2 tokens; .* leave it out"),
        ({"mask": torch.tensor([[1, 1, 0]])}, "attention_mask holds zeros behind ones; .*padded on the left"),
        ({"ours": {"synced_gpus": True}}, "synced_gpus=True .*specdec's steps differ"),
        ({"ours": {"stop": "x"}}, "stop strings and streams need a tokenizer"),
        ({"ours": {"drafter": "jacoby"}}, "unknown drafter 'jacoby'; did you mean 'jacobi'"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*assistant_early_exit|.*cache_implementation")
def test_custom_generate(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        custom([[3, 4, 5]], **options)


def test_custom_generate_takes_what_says_nothing() -> None:
    """Options at the values that switch them off, and inputs that generate or a tokenizer adds by itself."""
    plain = custom([[3, 4, 5]]).tolist()
    assert custom([[3, 4, 5]], guidance_scale=1.0, use_cache=False, cache_implementation="static").tolist() == plain
    assert custom([[3, 4, 5]], position_ids=torch.tensor([[0, 1, 2]])).tolist() == plain


def test_custom_generate_of_a_batch() -> None:
    with pytest.raises(ConfigError, match="a streamer shows one sequence, and there are 2; leave it out"):
        custom([[3, 4, 5], [6, 7, 8]], ours={"streamer": SimpleNamespace(put=print, end=print)})


def test_custom_generate_with_anothers_target() -> None:
    with pytest.raises(
        ConfigError, match="target wraps another LlamaForCausalLM than the one whose generate was called"
    ):
        custom([[3, 4, 5]], ours={"target": TransformersTarget(new_model("llama", seed=2))})
