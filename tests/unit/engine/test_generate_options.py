"""Every option and argument of transformers' ``generate``: followed by custom_generate, or refused by its name."""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, GenerationMixin, LogitsProcessor, LogitsProcessorList
from transformers.cache_utils import StaticCache
from transformers.generation.configuration_utils import (
    CompileConfig,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria

import specdec
from specdec import Engine, SamplingParams
from specdec.engine import generate_options as table
from specdec.errors import ConfigError, TargetError
from tests.fakes import Drawing, Oracle
from tests.models import VOCAB, greedy, model_of, new_model, prompt_of, reference, target_of

PROMPT, NEW = prompt_of(9), 14
TEXT = greedy("llama", PROMPT, NEW)
IDS = torch.tensor([PROMPT])
FLOATS = torch.zeros(1, len(PROMPT), 32, dtype=torch.float64)


def generate(drafter: Any = None, *, ours: dict[str, Any] | None = None, **options: Any) -> Any:
    """``generate`` of the shared model: by custom_generate if a drafter is given."""
    if drafter is not None:
        target = target_of("llama", execution="modules")
        options["custom_generate"] = functools.partial(
            specdec.custom_generate, drafter=drafter, target=target, **{"policy": "off", **(ours or {})}
        )
    options = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(IDS), **options}
    return model_of("llama").generate(options.pop("inputs", IDS), **options)


def long_blocks() -> Oracle:
    return Oracle([*PROMPT, *TEXT], VOCAB)


def test_every_option_of_this_transformers_is_in_the_table() -> None:
    """A new one has to be read before it is put there."""
    config = GenerationConfig()  # type: ignore[no-untyped-call]
    known = [*table.FOLLOWED, *table.WITHOUT_EFFECT, *table.REFUSED]
    assert len(known) == len(set(known))
    assert {name for name in vars(config) if not name.startswith("_")} == set(known)
    assert set(inspect.signature(GenerationMixin.generate).parameters) == set(table.ARGUMENTS)


def test_an_option_of_another_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = GenerationConfig()  # type: ignore[no-untyped-call]
    config.think_twice = True
    monkeypatch.setattr(table, "_options", lambda: frozenset(vars(config)) - {"_from_model_config"})
    with pytest.raises(ConfigError, match="think_twice is True, an option that this release of specdec does not know"):
        table.check_options(config)
    config.think_twice = None
    table.check_options(config)


WITHOUT_EFFECT: dict[str, dict[str, Any]] = {
    "use_cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "prefill_chunk_size": {"prefill_chunk_size": 4},
    "compile_config": {"compile_config": CompileConfig()},
    "low_memory": {"low_memory": True},
    "negative prompt without guidance": {"negative_prompt_ids": IDS},
    "logits_to_keep": {"logits_to_keep": 3},
    "position_ids": {"position_ids": torch.arange(len(PROMPT))[None]},
    "output_router_logits": {"output_router_logits": True},
}


@pytest.mark.few(4)
@pytest.mark.parametrize("case", WITHOUT_EFFECT)
def test_what_changes_no_token_is_taken(case: str) -> None:
    assert generate("prompt_lookup", **WITHOUT_EFFECT[case])[0, len(PROMPT) :].tolist() == TEXT


FOLLOWED: dict[str, dict[str, Any]] = {
    "watermark": {"watermarking_config": WatermarkingConfig(bias=4.0)},
    "sequence_bias": {"sequence_bias": {(TEXT[0],): -9.0}},
    "decay": {"exponential_decay_length_penalty": (3, 2.0), "eos_token_id": 7},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 2.0},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda row, ids: [3, 4, 5 + int(ids[-1]) % 9]},
    "max_time": {"max_time": 0.0},
}


@pytest.mark.few(2)
@pytest.mark.parametrize("case", FOLLOWED)
def test_what_is_followed(case: str) -> None:
    expected = generate(**FOLLOWED[case])
    assert expected[0, len(PROMPT) :].tolist() != TEXT
    for drafter in (long_blocks(), "prompt_lookup"):
        assert torch.equal(generate(drafter, **FOLLOWED[case]), expected)


def test_several_sequences_of_a_prompt() -> None:
    """As ``generate`` writes the prompt out so often, each has a seed of its own."""
    out = generate("prompt_lookup", ours={"seed": 4}, do_sample=True, num_return_sequences=3)
    texts = [generate("prompt_lookup", ours={"seed": seed}, do_sample=True)[0].tolist() for seed in (4, 5, 6)]
    assert out.tolist() == texts
    assert len({*map(tuple, texts)}) == 3


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "streamer": (
        {"streamer": SimpleNamespace(put=lambda tokens: None, end=lambda: None)},
        "streamer was given to generate, .*custom_generate, streamer=streamer",
    ),
    "assistant_model": ({"assistant_model": model_of("llama")}, "assistant_model was given.*'draft_model'"),
    "synced_gpus": ({"synced_gpus": True}, "synced_gpus=True .*specdec's steps differ"),
    "is_assistant": ({"is_assistant": True}, "is_assistant is True: .*unset it"),
    "output_logits": ({"output_logits": True, "return_dict_in_generate": True}, "output_logits is True: .*unset it"),
    "an empty cache": ({"past_key_values": DynamicCache()}, "past_key_values was given.*leave it out"),
    "a static cache": (
        {"past_key_values": StaticCache(config=model_of("llama").config, max_cache_len=64)},
        "past_key_values was given.*leave it out",
    ),
    "embeddings of zeros": ({"inputs_embeds": FLOATS}, "inputs_embeds was given"),
    "embeddings alone": ({"inputs": None, "inputs_embeds": FLOATS}, "inputs_embeds was given"),
    "labels": ({"labels": IDS}, "labels was given"),
    "a mask of halves": ({"attention_mask": torch.full((1, 9), 0.5)}, "attention_mask holds 0.5"),
    "a mask of twos": ({"attention_mask": torch.full((1, 9), 2)}, "attention_mask holds 2;"),
    "a watermark with a memory": (
        {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3])},
        "SynthIDTextWatermarkLogitsProcessor keeps the contexts",
    ),
    "guidance by a processor": (
        {"logits_processor": LogitsProcessorList([UnbatchedClassifierFreeGuidanceLogitsProcessor(2.0, None)])},
        "UnbatchedClassifierFreeGuidanceLogitsProcessor runs the model itself",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore:.*is_assistant")
def test_what_is_refused(case: str) -> None:
    options, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        generate("prompt_lookup", **options)


def test_ranks_that_step_alike_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``generate`` decides by itself, and does not tell a custom loop."""
    monkeypatch.setattr(table, "is_fsdp_managed_module", lambda model: True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match="synced_gpus=True"):
        table.check_arguments(model_of("llama"))


def test_a_call_without_generate_is_refused() -> None:
    """Its options' processors and criteria would be missing."""
    with pytest.raises(ConfigError, match="needs the logits processors and stopping criteria that generate makes"):
        specdec.custom_generate(model_of("llama"), IDS)


# -- Masks and criteria ------------------------------------------------------------------------------------------------


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bool, torch.uint8, torch.int32])
def test_a_mask_of_any_dtype(dtype: torch.dtype) -> None:
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9], dtype=dtype)
    batch = {"inputs": torch.tensor([PROMPT, prompt_of(9, seed=4)]), "attention_mask": mask}
    assert torch.equal(generate("prompt_lookup", **batch), generate(**batch))


class EosLater(EosTokenCriteria):
    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        return super().__call__(input_ids, scores) & (input_ids.shape[1] > 14)


class Shorter(MaxLengthCriteria):
    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 13)


CRITERIA: dict[str, tuple[StoppingCriteria, dict[str, Any]]] = {
    "an end token": (EosTokenCriteria(TEXT[5]), {}),
    "an end token in place of the config's": (EosTokenCriteria(TEXT[5]), {"eos_token_id": TEXT[3]}),
    "end tokens": (EosTokenCriteria([TEXT[5], TEXT[9]]), {"eos_token_id": 1}),
    "an end token's subclass": (EosLater(TEXT[1]), {}),
    "a length": (MaxLengthCriteria(12), {}),
    "a longer length": (MaxLengthCriteria(30), {}),
    "a length that the prompt has": (MaxLengthCriteria(4), {}),
    "a length's subclass": (Shorter(100), {}),
}


@pytest.mark.few(7)
@pytest.mark.parametrize("case", CRITERIA)
def test_a_user_s_own_criteria_of_transformers(case: str) -> None:
    criterion, options = CRITERIA[case]
    expected = generate(stopping_criteria=[criterion], **options)
    assert expected[0, len(PROMPT) :].tolist() != TEXT
    for drafter in (long_blocks(), "prompt_lookup"):
        assert torch.equal(generate(drafter, stopping_criteria=[criterion], **options), expected)


@pytest.mark.parametrize("form", [bool, int, torch.tensor, lambda said: torch.tensor([said])])
def test_what_a_criterion_says(form: Any) -> None:
    def twelve(ids: torch.Tensor, scores: Any) -> Any:
        return form(ids.shape[1] >= 12)

    expected = generate(stopping_criteria=[twelve])
    assert expected.shape[1] == 12
    assert torch.equal(generate(long_blocks(), stopping_criteria=[twelve]), expected)


@pytest.mark.parametrize("form", ["np.bool_(said)", "np.array(said)", "np.array([said])", "[said]", "(said,)"])
def test_what_a_criterion_may_say_beyond_what_generate_takes(form: str) -> None:
    import numpy as np

    def twelve(ids: torch.Tensor, scores: Any) -> Any:
        return eval(form, {"np": np, "said": ids.shape[1] >= 12})

    assert generate(long_blocks(), stopping_criteria=[twelve]).shape[1] == 12


@pytest.mark.parametrize("said", [None, 0.0, "yes", [True, False], [], torch.zeros(1), {}])
def test_what_a_criterion_may_not_say(said: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"the stopping criterion .*<lambda> returned .*; it is asked about one sequence"
    ):
        generate("prompt_lookup", stopping_criteria=[lambda ids, scores: said])


def test_texts_that_no_end_token_ends_go_on_together() -> None:
    """``generate`` pads a text that has ended only where there is an end token."""
    batch: dict[str, Any] = {"inputs": torch.tensor([prompt_of(9, seed=4), PROMPT, prompt_of(9, seed=5)])}
    batch["attention_mask"] = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 9, [1] * 9])

    def at(lengths: tuple[int, ...]) -> Any:
        def ends(ids: torch.Tensor, scores: Any) -> Any:
            return torch.tensor(
                [
                    ids.shape[1] >= length
                    for row in ids
                    for prompt, length in zip(batch["inputs"], lengths, strict=True)
                    if torch.equal(row[:9], prompt)
                ]
            )

        return ends

    for lengths in ((11, 15, 13), (18, 12, 12), (11, 12, 99)):
        for options in ({}, {"eos_token_id": 1}):
            expected = generate(**batch, stopping_criteria=[at(lengths)], **options)
            assert torch.equal(generate("lookahead", **batch, stopping_criteria=[at(lengths)], **options), expected)


# -- Processors that keep something between calls ----------------------------------------------------------------------


class Counts(LogitsProcessor):
    """Every third call favours another token."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores = scores.clone()
        scores[:, 7 * self.calls % VOCAB] += 50.0 * (self.calls % 3 == 0)
        return scores


def test_a_processor_with_a_memory_is_asked_as_in_plain_decoding() -> None:
    expected = generate(logits_processor=LogitsProcessorList([Counts()]))
    text = expected[0].tolist()
    for drafter in (Oracle(text, VOCAB), "lookahead"):
        assert torch.equal(generate(drafter, logits_processor=LogitsProcessorList([Counts()])), expected)


def test_drafts_that_are_drawn_ask_it_no_more_often() -> None:
    """``auto`` means ``match`` beside it, whose text is plain sampling's; ``reject`` would ask about siblings."""
    engine = Engine(target_of("llama"))
    sampling = SamplingParams(temperature=1.0, seed=3)
    expected = engine.generate(PROMPT, NEW, sampling, logits_processor=[Counts()]).token_ids
    drawn = engine.with_drafter(Drawing(torch.full((VOCAB, VOCAB), 1 / VOCAB), (3, 2)))
    counts = Counts()
    assert drawn.generate(PROMPT, NEW, sampling, logits_processor=[counts]).token_ids == expected
    assert counts.calls == NEW
    assert drawn.generate(PROMPT, NEW, sampling).token_ids != engine.generate(PROMPT, NEW, sampling).token_ids


def test_several_sequences_would_mix_it_up() -> None:
    batch = {"inputs": IDS.expand(2, -1), "attention_mask": torch.ones(2, 9)}
    with pytest.raises(ConfigError, match=r"Counts keeps something between calls \(calls\).* decode them one by one"):
        generate("prompt_lookup", **batch, logits_processor=LogitsProcessorList([Counts()]))


class Favours(LogitsProcessor):
    """Adds numbers that were made in inference mode, of which torch counts no writes."""

    def __init__(self) -> None:
        with torch.inference_mode():
            self.added = torch.arange(VOCAB, dtype=torch.float64) % 5

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + self.added


def test_several_sequences_share_a_tensor_of_inference_mode() -> None:
    batch = {"inputs": IDS.expand(2, -1), "attention_mask": torch.ones(2, 9)}
    expected = generate(**batch, logits_processor=LogitsProcessorList([Favours()]))
    found = generate("prompt_lookup", **batch, logits_processor=LogitsProcessorList([Favours()]))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("nested", [False, True])
def test_an_engine_refuses_processors_that_run_the_model(nested: bool) -> None:
    guidance: Any = UnbatchedClassifierFreeGuidanceLogitsProcessor(2.0, model_of("llama"))
    guidance = LogitsProcessorList([guidance]) if nested else guidance
    with pytest.raises(ConfigError, match="UnbatchedClassifierFreeGuidanceLogitsProcessor runs the model itself"):
        Engine(target_of("llama")).generate(PROMPT, 4, logits_processor=[guidance])


# -- Models that feed themselves more than token ids -------------------------------------------------------------------


def test_a_loop_of_a_class_s_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As some of transformers' audio models have."""
    model: Any = new_model("llama")
    monkeypatch.setattr(type(model), "_prefill", GenerationMixin.generate, raising=False)
    with pytest.raises(TargetError, match="LlamaForCausalLM decodes in a loop of its own"):
        table.check_preparation(model, IDS, {})


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({}, None),
        ({"token_type_ids": torch.zeros(1, 9)}, None),
        ({"token_type_ids": torch.ones(1, 9)}, "token_type_ids"),
        ({"input_ids": IDS.flip(-1)}, "input_ids"),
        ({"input_ids": None, "inputs_embeds": FLOATS}, "input_ids, inputs_embeds"),
        ({"position_ids": torch.arange(1, 10)[None]}, None),
        ({"position_ids": torch.arange(0, 18, 2)[None]}, "position_ids"),
        ({"cache_position": torch.arange(9)}, None),
    ],
)
def test_what_a_class_of_transformers_prepares_is_looked_at(
    more: dict[str, Any], named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(self: Any, input_ids: torch.Tensor, **options: Any) -> dict[str, Any]:
        return {"input_ids": input_ids, **(more if input_ids.shape[1] == 9 else {})}

    model: Any = new_model("llama")
    monkeypatch.setattr(type(model), "prepare_inputs_for_generation", prepare)
    if named is None:
        table.check_preparation(model, IDS, {})
        return
    with pytest.raises(
        TargetError, match=f"prepare_inputs_for_generation of LlamaForCausalLM makes {named} of token ids"
    ):
        table.check_preparation(model, IDS, {})


def test_phi3_prepares_nothing_more() -> None:
    """Its class has a method of its own."""
    model = new_model("phi3")
    assert type(model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
    expected = reference(model, PROMPT, NEW)
    assert (
        reference(model, PROMPT, NEW, custom_generate=functools.partial(specdec.custom_generate, policy="off"))
        == expected
    )
