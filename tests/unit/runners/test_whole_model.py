"""Models whose layers cannot be walked, run by their own whole forward: texts are their own, or they are refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers

from specdec import Engine, PrefixCache, SamplingParams, TransformersTarget, custom_generate
from specdec.engine.requests import Request
from specdec.engine.scheduler import Scheduler
from specdec.errors import ConfigError, TargetError
from tests import seam
from tests.models import prompt_of, reference

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
    assert target.runner.name == "modules"
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


@pytest.mark.parametrize("kind", ["gpt2", "chunks"])
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
        assert engine.target.version() != version
        assert engine.generate(prompt, 12).token_ids == reference(model, prompt, 12) != before
    finally:
        hook.remove()


def test_what_is_not_there_says_why() -> None:
    target = target_of("gpt2")
    assert "the model's own forward as a whole: GPT2LMHeadModel is no decoder" in target.plan.reason
    with pytest.raises(TargetError, match=r"whole forward, so its embedding.*choose a drafter that reads tokens alone"):
        target.embed([3])
    with pytest.raises(TargetError, match="which nothing can leave early or enter late"):
        Engine(target, drafter="layer_skip").generate(prompt_of(5), 4)
    for execution in ("native", "fused"):
        with pytest.raises(ConfigError, match=f"execution='{execution}' cannot run this model: .*leave it at auto"):
            TransformersTarget(model_of("gpt2"), execution=execution)


def test_a_model_in_training_mode_is_refused() -> None:
    engine = Engine(target_of("gpt2"), drafter="none")
    model_of("gpt2").train()
    try:
        with pytest.raises(TargetError, match=r"training mode, in which dropout would change its texts; call its eval"):
            engine.generate(prompt_of(5), 4)
    finally:
        model_of("gpt2").eval()


def test_a_forward_that_takes_no_tree_is_refused() -> None:
    """MPT adds biases by the distance of keys, and BERT sees later tokens."""
    mpt = transformers.MptConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, max_seq_len=64)
    bert = transformers.BertConfig(**SIZES)
    for model in (transformers.MptForCausalLM(mpt), transformers.BertLMHeadModel(bert)):
        with pytest.raises(TargetError, match=r"nor (do the logits of its whole forward|can it be run as a whole)"):
            TransformersTarget(model.double().eval())
