"""Replicas: what specdec calls is told things that no other caller of the model sees, and edits are followed."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

from specdec import Engine, TransformersTarget, custom_generate
from specdec.results import Step
from specdec.runners.replicas import Replicas
from tests.models import new_model, prompt_of, reference

PROMPT, OTHER, NEW = prompt_of(9), prompt_of(21, seed=1), 12


def model_of(attention: str = "sdpa", family: str = "mistral") -> Any:
    model: Any = new_model(family)
    model.set_attn_implementation(attention)
    return model


def in_a_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0] if found else None


# What others call meanwhile.


def plain_text(model: Any) -> str:
    return str(reference(model, OTHER, NEW))


def text_with_a_static_cache(model: Any) -> str:
    return str(reference(model, OTHER, NEW, cache_implementation="static", disable_compile=True))


def logits(model: Any) -> str:
    with torch.no_grad():
        return str(model(torch.tensor([OTHER, OTHER])).logits.tolist())


def padded_logits(model: Any) -> str:
    ids = torch.tensor([OTHER, OTHER])
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with torch.no_grad():
        return str(model(ids, attention_mask=mask).logits.tolist())  # the padding's are NaN, by some functions


def trained(model: Any) -> str:
    """Loss and a gradient with dropout, which only training mode has."""
    ids = torch.tensor([OTHER])
    with torch.enable_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        loss = model(ids, labels=ids).loss
        (gradient,) = torch.autograd.grad(loss, [model.model.layers[0].self_attn.q_proj.weight])
    return str((float(loss.detach()), gradient.tolist()))


def implementation(model: Any) -> str:
    return str([module.config._attn_implementation for module in model.modules() if hasattr(module, "config")])


CALLS = (plain_text, text_with_a_static_cache, logits, padded_logits, implementation)


def dropping(model: Any) -> Any:
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    return model.train()


@pytest.mark.few(1)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("beside", [in_a_thread, lambda work: work()], ids=["in a thread", "in a callback"])
def test_plain_calls_while_a_target_decodes(attention: str, beside: Callable[..., Any]) -> None:
    """To the last bit what they are without specdec, and the text is as if there were none."""
    model = model_of(attention)
    expected, calls = reference(model, PROMPT, NEW), [call(model) for call in CALLS]
    found: list[Any] = []

    def at_a_step(step: Step) -> None:
        if step.index == 1:
            found.extend(beside(functools.partial(call, model)) for call in CALLS)

    engine = Engine(TransformersTarget(model), drafter="lookahead")
    assert engine.generate(PROMPT, NEW, on_step=at_a_step).token_ids == expected
    assert found == calls


@pytest.mark.few(1)
@pytest.mark.parametrize("place", ["processor", "criterion"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_plain_calls_inside_callbacks_of_custom_generate(attention: str, place: str) -> None:
    model = model_of(attention)
    calls, found = [call(model) for call in (*CALLS, trained)], []

    def ask(ids: torch.Tensor, scores: Any) -> Any:
        if ids.shape[1] == len(PROMPT) + 3:
            found.extend(call(model) for call in (*CALLS, trained))
        return scores if place == "processor" else False

    given = {"logits_processor" if place == "processor" else "stopping_criteria": [ask]}
    assert reference(model, PROMPT, NEW, custom_generate=custom_generate, **given) == reference(model, PROMPT, NEW)
    assert found
    assert found[: len(calls)] == calls


class Interrupted(nn.Module):
    """A head, beside which others call the model."""

    def __init__(self, head: nn.Module, work: Callable[[], Any]) -> None:
        super().__init__()
        self.head, self._work, self.found = head, work, list[Any]()
        self.busy = False

    @property
    def weight(self) -> torch.Tensor:
        return self.head.weight  # type: ignore[return-value]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.busy:
            self.busy = True
            self.found.append(in_a_thread(self._work))
            self.busy = False
        output: torch.Tensor = self.head(hidden)
        return output


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_plain_calls_while_a_target_is_made(dtype: torch.dtype) -> None:
    """At every forward by which a model is looked at."""
    model: Any = new_model("mistral", dtype)
    expected = logits(model)
    model.lm_head = Interrupted(model.lm_head, lambda: logits(model))
    TransformersTarget(model)
    found = model.lm_head.found
    assert len(found) > 2
    assert all(each == expected for each in found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_hooks_are_called_with_the_model_s_own_modules(dtype: torch.dtype) -> None:
    """From the first look at a model on: what hooks know, they know by the module."""
    model: Any = new_model("mistral", dtype)
    names, heard = {module: name for name, module in model.named_modules()}, set()
    for module in (*model.model.layers, model.model.layers[1].self_attn, model.model.norm):
        module.register_forward_hook(lambda module, *_: heard.add(names[module]))
        module.register_forward_pre_hook(lambda module, *_: heard.add(names[module] + " before"))
    assert Engine(TransformersTarget(model)).generate(PROMPT, NEW).token_ids
    assert len(heard) == 10


def test_targets_are_made_while_another_decodes() -> None:
    """And ``custom_generate`` twice at once, each of which makes its own."""
    model = model_of()
    expected, found = reference(model, PROMPT, NEW), list[Any]()

    def text() -> list[int]:
        return reference(model, PROMPT, NEW, custom_generate=custom_generate)

    def at_a_step(step: Step) -> None:
        if step.index == 2:
            found.extend((text(), in_a_thread(text), Engine(TransformersTarget(model)).generate(PROMPT, NEW).token_ids))

    assert Engine(TransformersTarget(model)).generate(PROMPT, NEW, on_step=at_a_step).token_ids == expected
    assert found == [expected] * 3


# What is changed in a model is followed.


def by_closure(layer: Any) -> None:
    own = type(layer).forward
    layer.forward = lambda *given, **options: own(layer, *given, **options).roll(1, -1)


def by_bound_method(layer: Any) -> None:
    former = layer.forward
    layer.forward = lambda *given, **options: former(*given, **options).roll(1, -1)


def by_default(layer: Any) -> None:
    def forward(*given: Any, former: Any = layer.forward, **options: Any) -> Any:
        return former(*given, **options).roll(1, -1)

    layer.forward = forward


def by_method(layer: Any) -> None:
    def forward(self: Any, *given: Any, **options: Any) -> Any:
        return type(self).forward(self, *given, **options).roll(1, -1)

    layer.forward = MethodType(forward, layer)


def by_partial(layer: Any) -> None:
    def forward(self: Any, *given: Any, **options: Any) -> Any:
        return self.before(*given, **options).roll(1, -1)

    layer.before = layer.forward
    layer.forward = functools.partial(forward, layer)


def of_attention(layer: Any) -> None:
    attention, former = layer.self_attn, layer.self_attn.forward

    def forward(*given: Any, **options: Any) -> Any:
        mixed, weights = former(*given, **options)
        return 5 * mixed + attention.layer_idx, weights

    attention.forward = forward


def by_hook(layer: Any) -> None:
    def hook(module: Any, given: Any, output: Any) -> Any:
        assert module is layer
        module.calls = getattr(module, "calls", 0) + 1
        return output.roll(module.calls, -1)

    layer.register_forward_hook(hook)


def by_hook_before(layer: Any) -> None:
    def hook(module: Any, given: Any, options: Any) -> Any:
        assert module is layer.self_attn
        return given, {**options, "hidden_states": options["hidden_states"].roll(1, -1)}

    layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True)


def by_scale(layer: Any) -> None:
    layer.self_attn.scaling *= 30


class Counted(nn.Module):
    """An attention module that keeps something between calls."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.attention, self.calls = attention, 0

    def forward(self, *given: Any, **options: Any) -> Any:
        self.calls += 1
        mixed, weights = self.attention(*given, **options)
        return mixed.roll(self.calls, -1), weights


def by_wrapper(layer: Any) -> None:
    layer.self_attn = Counted(layer.self_attn)


EDITS = (
    *(by_closure, by_bound_method, by_default, by_method, by_partial, of_attention),
    *(by_hook, by_hook_before, by_scale, by_wrapper),
)


@pytest.mark.few(2)
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_edits_between_generations_are_followed(edit: Callable[[Any], None]) -> None:
    """With one row a step, so that what counts calls counts them as plain decoding does."""
    model, same, prompt = model_of(), model_of(), PROMPT[:1]
    engine = Engine(TransformersTarget(model))
    before = engine.generate(prompt, NEW).token_ids
    for one in (model, same):
        edit(one.model.layers[1])
    expected = reference(same, prompt, NEW)
    assert engine.generate(prompt, NEW).token_ids == expected != before


def test_a_replica_is_in_eval_mode_and_has_the_weights() -> None:
    model = model_of().train()
    replica: Any = Replicas(model).root
    assert not any(module.training for module in replica.modules())
    assert all(module.training for module in model.modules())
    assert type(replica) is type(model)
    assert all(own is model.get_parameter(name) for name, own in replica.named_parameters())


def test_a_forward_of_a_module_s_own_runs_the_replica() -> None:
    module = nn.Dropout(0.5).train()
    module.forward = module.forward  # bound to the module, as accelerate's are
    ones = torch.ones(99)
    assert torch.equal(Replicas(module).root(ones), ones)


def test_a_module_that_hangs_in_two_places_has_one_replica() -> None:
    shared = nn.Linear(3, 3)
    both = nn.ModuleDict({"first": shared, "second": nn.Sequential(shared)})
    replicas = Replicas(both)
    root: Any = replicas.root
    assert root["first"] is root["second"][0] is replicas.of(shared)
    assert root["first"] is not shared
