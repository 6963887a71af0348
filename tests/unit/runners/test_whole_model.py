"""Models that are run by their own whole forward: texts are their own, or they are refused."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from transformers.masking_utils import create_chunked_causal_mask

from specdec import Draft, Engine, PrefixCache, SamplingParams, TransformersTarget, custom_generate
from specdec.engine.requests import Request
from specdec.engine.scheduler import Scheduler
from specdec.errors import CheckpointError, ConfigError, TargetError
from specdec.runners import whole_model
from specdec.step.step_io import LayerPlan, Part
from specdec.target import FINAL
from tests import seam
from tests.models import FAMILIES, new_model, prompt_of, reference
from tests.models import model_of as model_in

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256, "eos_token_id": None}
LLAMA4 = {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 16}
GEMMA3N = {"head_dim": 8, "sliding_window": 12, "num_kv_shared_layers": 1, "vocab_size_per_layer_input": 64}
GEMMA3N |= {
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "altup_num_inputs": 2,
    "activation_sparsity_pattern": None,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "stablelm": ("StableLmForCausalLM", SIZES),
    "chunks": ("Llama4ForCausalLM", SIZES | LLAMA4),  # and layers of all keys
    "shared keys": (
        "Gemma3nForCausalLM",
        SIZES | GEMMA3N | {"layer_types": ["sliding_attention", *["full_attention"] * 2]},
    ),
}
if "block_sequence_ids" not in inspect.signature(create_chunked_causal_mask).parameters:
    del KINDS["chunks"]  # transformers 5.19 gives it to this function, which does not take it
TEXT_DRAFTERS = ("lookahead", "jacobi", "prompt_lookup", "suffix_automaton", "token_recycling", "auto")


@cache
def model_of(kind: str) -> Any:
    name, sizes = KINDS[kind]
    cls = getattr(transformers, name)
    torch.manual_seed(1)
    config = cls.config_class(**sizes)
    config._experts_implementation = "eager"  # which takes float64
    model = cls._from_config(config).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=3.0 / weight.shape[-1] ** 0.5)
    return model


@cache
def target_of(kind: str) -> TransformersTarget:
    return TransformersTarget(model_of(kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_the_model_s_own(kind: str) -> None:
    prompt = prompt_of(40)
    target, expected = target_of(kind), reference(model_of(kind), prompt, 30)
    assert target.options["runner"] == "modules"
    assert len(set(expected)) > 1
    for drafter in TEXT_DRAFTERS:
        engine = Engine(target, drafter=drafter, max_rows=16, prefill_chunk=16, policy="off")
        assert engine.generate(prompt, 30).token_ids == expected, drafter


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_batches_prefixes_and_draws_are_plain_decoding_s(kind: str) -> None:
    target, sampling = target_of(kind), SamplingParams(temperature=0.9, seed=3)
    plain, drafted = (Engine(target, drafter=name, policy="off", max_rows=16) for name in ("none", "token_recycling"))
    prompts = [list(prompt_of(length)) for length in (23, 5, 31)]
    expected = [plain.generate(prompt, 20, sampling=sampling).token_ids for prompt in prompts]
    scheduler, found = Scheduler(drafted, batch=2), dict[int, list[int]]()
    handles = [scheduler.submit(Request(prompt, 20, sampling)) for prompt in prompts]
    while not scheduler.idle:
        for event in scheduler.step():
            assert event.error is None
            if event.last:
                found[event.index] = event.decoding.result().token_ids
    assert [found[handle.index] for handle in handles] == expected
    cache = PrefixCache()
    again = [drafted.generate(prompts[0] + tail, 8, prefix_cache=cache) for tail in ([], [7, 7], [7, 9, 4])]
    assert [one.token_ids for one in again] == [
        plain.generate(prompts[0] + tail, 8).token_ids for tail in ([], [7, 7], [7, 9, 4])
    ]
    assert again[2].stats.reused_tokens >= 23


@pytest.mark.parametrize("kind", [kind for kind in ("gpt2", "chunks") if kind in KINDS])
def test_logits_of_some_rows_are_those_of_all(kind: str) -> None:
    target, parents = target_of(kind), [-1, 0, 0, 2, 1]
    own = seam.text(target, capacity=32, rows=8)
    with target.active():
        own.run(list(prompt_of(8)), rows=())
        own.commit(range(8))
        every = own.run([5, 6, 7, 8, 9], parents).logits
        some = own.run([5, 6, 7, 8, 9], parents, rows=[1, 3, 4]).logits
        late = own.run([7, 8, 9], parents, first=2, rows=[0, 2]).logits
    assert every is not None
    assert some is not None
    assert late is not None
    assert torch.allclose(some, every[[1, 3, 4]], atol=1e-10)
    assert torch.allclose(late, every[[2, 4]], atol=1e-10)


def test_custom_generate_runs_them() -> None:
    model, prompt = model_of("gpt2"), prompt_of(20)
    ids = torch.tensor([prompt])
    expected = reference(model, prompt, 12)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, custom_generate=custom_generate)
    assert out[0, 20:].tolist() == expected


def test_edits_and_hooks_of_the_model_are_followed() -> None:
    model, prompt = model_of("gpt2"), prompt_of(12)
    engine = Engine(target_of("gpt2"), drafter="prompt_lookup", policy="off")
    before, version = engine.generate(prompt, 12).token_ids, engine.target.version()
    hook = model.transformer.h[1].mlp.register_forward_hook(lambda module, given, output: 2 * output)
    try:
        assert engine.generate(prompt, 12).token_ids == reference(model, prompt, 12) != before
    finally:
        hook.remove()
    weight = model.transformer.h[1].mlp.c_fc.weight
    assert engine.target.version() == version
    with torch.no_grad():
        weight.neg_()
        assert engine.target.version() != version
        assert engine.generate(prompt, 12).token_ids == reference(model, prompt, 12) != before
        weight.neg_()


def test_what_is_not_there_says_why() -> None:
    target = target_of("gpt2")
    with pytest.raises(TargetError, match=r"GPT2LMHeadModel .* something between embedding and layers.*reads tokens"):
        target.embed([3])
    with pytest.raises(
        CheckpointError, match="there is none for this GPT2LMHeadModel: its model_type 'gpt2' is none of"
    ):
        Engine(target, drafter={"name": "mtp", "head": "somewhere"})
    with pytest.raises(TargetError, match="no copy of this GPT2LMHeadModel can be made: its model_type 'gpt2' is none"):
        Engine.from_model(model_of("gpt2"))


def test_a_model_in_training_mode_with_dropout_is_refused() -> None:
    engine = Engine(target_of("gpt2"), drafter="none")
    model_of("gpt2").train()
    try:
        for ask in (lambda: engine.generate(prompt_of(5), 4), lambda: TransformersTarget(model_of("gpt2"))):
            with pytest.raises(
                TargetError, match=r"training mode, in which dropout of transformer.drop .*; call its eval"
            ):
                ask()
    finally:
        model_of("gpt2").eval()


@pytest.mark.parametrize("what", [None, "attention_dropout", "gradient checkpointing"])
def test_training_modes_are_refused_where_they_change_numbers(what: str | None) -> None:
    model = new_model("llama", attention_dropout=0.5 if what == "attention_dropout" else 0.0)
    expected = reference(model, prompt_of(9), 9)
    if what == "gradient checkpointing":
        new = hasattr(model, "activation_checkpointing_enable")  # older transformers has the former name
        getattr(model, f"{'activation' if new else 'gradient'}_checkpointing_enable")()
    engine = Engine(TransformersTarget(model), drafter="lookahead")
    model.train()
    if what is None:
        assert engine.generate(prompt_of(9), 9).token_ids == expected
        assert model.training
        return
    with pytest.raises(TargetError, match=f"training mode, in which {what}.* of model.*; call its eval"):
        engine.generate(prompt_of(9), 9)


def test_a_forward_by_flash_attention_is_refused() -> None:
    model: Any = new_model("llama")
    engine = Engine(TransformersTarget(model))
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(TargetError, match=r"flash_attention_2, which takes no mask of a tree; .*'sdpa'"):
        engine.generate(prompt_of(5), 4)


@pytest.mark.parametrize("name", ["kangaroo", "layer_skip"])
def test_drafters_that_run_some_layers_are_refused(name: str) -> None:
    target = TransformersTarget(new_model("llama"))
    options: dict[str, Any] = {"exit_layer": 1} if name == "kangaroo" else {"skip": [1]}
    said = f"{name} runs some of the target's layers, and this LlamaForCausalLM .*'modules': the model was handed in"
    with pytest.raises(ConfigError, match=rf"{said}.*; run a copy of it .*Engine\.from_model.*such as lookahead"):
        Engine(target, drafter={"name": name, **options})
    plan = LayerPlan(1) if name == "kangaroo" else LayerPlan(parts=(Part.BOTH, Part(0), Part.BOTH))
    own = seam.text(target)
    with target.active(), pytest.raises(ConfigError, match="runs some of the target's layers"):
        target.forward(own.rows([1, 2], plan=plan))


@pytest.mark.few(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_the_model_s(family: str) -> None:
    """Of a chain's rows and of a tree's, of several texts at once; the head makes the logits of the last ones."""
    model, prompt = model_in(family), list(prompt_of(12))
    target = TransformersTarget(model)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt]), output_hidden_states=True, use_cache=False).hidden_states
    own, other = (seam.text(target, capacity=32, rows=16) for _ in range(2))
    with target.active():
        own.fill(prompt[:7], 16)
        tree, parents = [prompt[7], 3, *prompt[8:]], [-1, 0, 0, 2, 3, 4]  # a wrong sibling first
        asked = {0, 2, FINAL}
        found = seam.run_together([own, other], [Draft(tuple(tree), tuple(parents)), Draft.chain(prompt)], taps=asked)
        tapped = own.run(tree, parents, taps=asked, rows=[0, 3])
        assert {*tapped.hidden} == asked
        for tap in asked:
            last = expected[tap][0]
            for rows in (found.hidden[tap][:6], tapped.hidden[tap]):
                torch.testing.assert_close(rows[[0, 2, 3, 4, 5]], last[7:], rtol=0, atol=1e-5)
            torch.testing.assert_close(found.hidden[tap][6:], last, rtol=0, atol=1e-5)
        logits = target.head(tapped.hidden[FINAL][[0, 3]])
        assert tapped.logits is not None
        torch.testing.assert_close(logits, tapped.logits, rtol=0, atol=1e-9)
        torch.testing.assert_close(target.embed(tree), tapped.hidden[0], rtol=0, atol=0)
        before = own.run(tree, parents, taps={3}).hidden[3]
        torch.testing.assert_close(target.norm(before), tapped.hidden[FINAL], rtol=0, atol=0)
        assert not target.runner.norm._forward_pre_hooks


def test_all_hidden_states_are_returned_where_none_can_be_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_model, "_SELECTS", False)  # as with transformers before 5.23
    test_hidden_states_are_the_model_s("mistral")


def test_a_forward_that_takes_no_tree_is_refused() -> None:
    """MPT adds biases by the distance of keys, and BERT sees later tokens."""
    mpt = transformers.MptConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, max_seq_len=64)
    bert = transformers.BertConfig(**SIZES)
    for model in (transformers.MptForCausalLM(mpt), transformers.BertLMHeadModel(bert)):
        with pytest.raises(TargetError, match=r"(forward over a tree are not those of each path|keeps .* keys of)"):
            TransformersTarget(model.double().eval())
