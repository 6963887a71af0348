"""Random models whose text is known: it needs every layer's attention and MLP, and no rounding reaches it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from specdec import Engine, TransformersTarget
from specdec.bench.shapes import BACK, SHAPES, random_model, random_prompt, weight_bytes, write_rule
from specdec.errors import ConfigError
from tests.models import new_model, reference

TOY = (256, 25, 10, 2)  # vocabulary, values of x and of y, layers
NEW = 64
PROMPTS = [random_prompt(256, size) for size in (1, 20, 300)]


def by_the_rule(prompt: list[int], count: int, shape: tuple[int, int, int, int] = TOY, seed: int = 0) -> list[int]:
    """The text as the docstring of ``write_rule`` has it, without a model."""
    vocabulary, xs, ys, layers = shape
    number = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(seed)).tolist()
    token_of = {n: token for token, n in enumerate(number)}
    text = list(prompt)
    for last in range(len(prompt) - 1, len(prompt) + count - 1):
        x = number[text[last]] % xs
        y = number[text[max(0, last - BACK * layers)]] // xs % ys
        text.append(token_of[(x + 1) % xs + xs * ((y + 1) % ys)])
    return text[len(prompt) :]


@pytest.fixture(scope="module")
def toy() -> PreTrainedModel:
    return random_model("toy")


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_text_follows_the_rule_in_every_precision(dtype: torch.dtype) -> None:
    model = random_model("toy", dtype)
    engine = Engine(TransformersTarget(model))
    for prompt in PROMPTS:
        text = by_the_rule(prompt, NEW)
        assert reference(model, prompt, NEW) == text
        assert engine.generate(prompt, NEW).token_ids == text
        assert len(set(text[:25])) == 25  # no loop of a few tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", [0, 1])
def test_gaps_are_wide(dtype: torch.dtype, seed: int) -> None:
    """Ten nats between the best two logits of 20 and 10, of which bfloat16 keeps a sixteenth apart."""
    model, prompt = random_model("toy", dtype, seed=seed), PROMPTS[-1]
    ids = torch.tensor([[*prompt, *by_the_rule(prompt, NEW, seed=seed)]])
    with torch.inference_mode():
        best = model(ids).logits[0].float().topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 9


@pytest.mark.slow
def test_many_layers_add_up_no_error() -> None:
    config = LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=24, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=512, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    write_rule(model)
    prompt = random_prompt(1000, 100)
    assert reference(model, prompt, 12) == by_the_rule(prompt, 12, (1000, 130, 5, 24))


def noise(module: torch.nn.Module, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """As large as what attention brings."""
    return (torch.randn(given[0].shape, generator=torch.Generator().manual_seed(0)) * given[0].std(),)


def uniform(module: torch.nn.Module, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """What attention brings, whatever the position."""
    return (given[0].mean(1, keepdim=True).expand_as(given[0]),)


def nothing(module: torch.nn.Module, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (torch.zeros_like(given[0]),)


def one_head_less(module: torch.nn.Module, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    kept = given[0].clone()
    kept[..., :16] = noise(module, given)[0][..., :16]
    return (kept,)


def late(module: torch.nn.Module, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """Each row gets the row before's: attention by one key off."""
    return (given[0].roll(1, 1),)


@pytest.mark.few(4)
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("broken", [noise, uniform, nothing, late, one_head_less])
def test_text_needs_every_layer_s_attention(layer: int, broken: Callable[..., Any]) -> None:
    model, prompt = random_model("toy"), PROMPTS[1]
    model.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(broken)
    count = 40 if broken is one_head_less else 8  # a head has its share of the values of y, and they come one by one
    assert greedy_without_cache(model, prompt, count) != by_the_rule(prompt, count)


@pytest.mark.parametrize("layer", [0, 1])
def test_text_needs_every_layer_s_mlp(layer: int) -> None:
    model, prompt = random_model("toy"), PROMPTS[1]
    model.model.layers[layer].mlp.down_proj.register_forward_pre_hook(noise)
    assert greedy_without_cache(model, prompt, 8) != by_the_rule(prompt, 8)


def test_text_needs_the_key_that_it_looks_at(toy: PreTrainedModel) -> None:
    """Of 20 tokens, only the last one and the one BACK x 2 before it change what comes next."""
    prompt = PROMPTS[1]
    text = greedy_without_cache(toy, prompt, 1)
    changing = [
        place for place in range(20) if greedy_without_cache(toy, [*prompt[:place], 7, *prompt[place + 1 :]], 1) != text
    ]
    assert changing == [19 - 2 * BACK, 19]


@torch.inference_mode()
def greedy_without_cache(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_other_models_may_have_the_rule(family: str) -> None:
    texts = []
    for dtype in (torch.float32, torch.bfloat16):
        model = new_model(family, dtype)
        write_rule(model)
        texts.append(reference(model, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], NEW))
    assert texts[0] == texts[1] == by_the_rule([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], NEW, (32, 10, 3, 3))


@pytest.mark.few(1)
@pytest.mark.parametrize(("shape", "billions", "read"), [("mistral-7b", 7.24, 14.22), ("llama-7b", 6.74, 13.21)])
def test_large_shapes_have_the_published_sizes(shape: str, billions: float, read: float) -> None:
    model = random_model(shape, torch.bfloat16, "meta")
    assert sum(weight.numel() for weight in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)
    assert weight_bytes(model) / 1e9 == pytest.approx(read, abs=0.01)


def test_unknown_shape() -> None:
    assert "0.5b" in SHAPES
    with pytest.raises(ConfigError, match="unknown shape 'mistral-7'; did you mean 'mistral-7b'"):
        random_model("mistral-7")
