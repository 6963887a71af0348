"""A script's own settings of torch: a text is the same inside them, whatever was made inside or outside of them."""

from __future__ import annotations

import functools
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from specdec import Engine, PrefixCache, SamplingParams, TransformersTarget, custom_generate
from specdec.drafting.registry import drafter_names
from specdec.engine.requests import Request
from specdec.engine.scheduler import Scheduler
from tests import models
from tests.models import OF_LAYERS, model_of, new_model, prompt_of, settings_of, target_of
from tests.switches import SWITCHES
from tests.tiers import once, turns

FAMILIES = {"native": "qwen3", "modules": "llama"}
SAMPLED = SamplingParams(temperature=0.9, seed=3, acceptance="match")
PROMPT, NEW = prompt_of(20), 16


def target_for(execution: str) -> TransformersTarget:
    return target_of(FAMILIES[execution], torch.float32, execution)


def texts(engine: Engine) -> list[Any]:
    """Greedy and sampled, alone and with others, whole and from a kept beginning."""
    kept = PrefixCache()
    alone = [engine.generate(PROMPT, NEW, sampling, prefix_cache=kept).token_ids for sampling in (None, SAMPLED)]
    return [*alone, *(one.token_ids for one in engine.generate_batch([PROMPT, PROMPT[3:]], NEW, SAMPLED))]


@functools.cache
def expected(execution: str) -> list[Any]:
    """Plain decoding's, where nothing is set."""
    return texts(Engine(target_for(execution)))


def is_followed(execution: str, switch: str) -> bool:
    """Modules round by autocast and by the number of threads; `generate` of such a model does, too."""
    return execution == "modules" and switch in ("autocast", "two threads")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("drafter", "switch", "execution"),
    turns(drafter_names(), list(SWITCHES), list(FAMILIES)),
)
def test_every_drafter_s_text_is_the_same(drafter: str, switch: str, execution: str, tmp_path: Path) -> None:
    execution = "native" if drafter in OF_LAYERS else execution
    target = target_for(execution)
    spec = settings_of(drafter, target, tmp_path)[0]
    engine = Engine(target, None, spec)
    with SWITCHES[switch]():
        found = [texts(engine), texts(Engine(target, None, spec))]
    assert found == [expected(execution)] * 2 or is_followed(execution, switch)


@pytest.mark.few(1)
@pytest.mark.parametrize(("switch", "execution"), once(SWITCHES, FAMILIES))
def test_a_model_that_is_loaded_inside_is_the_same(switch: str, execution: str) -> None:
    model = new_model(FAMILIES[execution], torch.float32)
    with SWITCHES[switch]():
        engine = Engine(models.target_for(model, execution=execution), None, "lookahead")
        inside = texts(engine)
    assert texts(engine) == expected(execution)
    assert inside == expected(execution) or is_followed(execution, switch)


@pytest.mark.parametrize("execution", ["native", "fused", "modules"])
def test_a_model_that_was_made_in_inference_mode(execution: str) -> None:
    """Of its weights torch counts no writes."""
    family = FAMILIES.get(execution, "llama")
    with torch.inference_mode():
        model = new_model(family, torch.float32)
    own = Engine(models.target_for(model, execution=execution), None, "lookahead")
    assert texts(own) == texts(Engine(target_of(family, torch.float32, execution)))


@pytest.mark.slow
@pytest.mark.parametrize("switch", ["a default device", "a wide dtype", "a narrow dtype", "autocast", "inference mode"])
def test_a_checkpoint_is_the_same(switch: str) -> None:
    text = Engine.from_pretrained("tiny", policy="off").generate("import os\n", NEW).token_ids
    with SWITCHES[switch]():
        engine = Engine.from_pretrained("tiny", "medusa", policy="off")
        assert engine.target.dtype is torch.float32
        assert engine.generate("import os\n", NEW).token_ids == text
        streamed = [token for chunk in engine.stream("import os\n", NEW) for token in chunk.token_ids]
    assert streamed == text


@pytest.mark.slow
def test_a_stream_leaves_the_caller_s_world_between_its_steps() -> None:
    engine = Engine.from_pretrained("tiny", "lookahead", policy="off")
    with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in engine.stream("import os\n", 4):
            assert torch.get_default_device().type == "meta"
            assert torch.is_autocast_enabled("cpu")


def test_a_scheduler_s_thread_and_those_that_submit() -> None:
    """Each thread has a default device of its own."""
    scheduler = Scheduler(Engine(target_for("native")))
    handles, found = [], {}
    with torch.device("meta"):
        handles += [scheduler.submit(Request(PROMPT, NEW, drafter=name)) for name in ("lookahead", "jacobi")]

    def run() -> None:
        torch.set_default_device("meta")
        while not scheduler.idle:
            found.update({event.index: event.generation().token_ids for event in scheduler.step() if event.last})

    thread = Thread(target=run)
    thread.start()
    thread.join()
    assert [found[handle.index] for handle in handles] == [expected("native")[0]] * 2


def test_modules_follow_autocast_as_they_do_in_generate() -> None:
    """What a module computes is what the caller asked it for; a cache that was made outside holds it."""
    model = model_of("llama", torch.float32)
    seen = set()
    hook = model.model.layers[0].mlp.down_proj.register_forward_hook(
        lambda module, args, output: seen.add(output.dtype)
    )
    try:
        engine = Engine(TransformersTarget(model))
        seen.clear()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            engine.generate(PROMPT, 2)
        assert seen == {torch.bfloat16}
        assert engine.generate(PROMPT, NEW).token_ids == expected("modules")[0]
    finally:
        hook.remove()


@pytest.mark.few(2)
@pytest.mark.parametrize("switch", ["a wide dtype", "inference mode", "gradients"])
def test_inside_generate(switch: str) -> None:
    model = model_of("llama", torch.float32)
    ids = torch.tensor([PROMPT])
    own = functools.partial(custom_generate, drafter="lookahead")
    with SWITCHES[switch]():
        whole = model.generate(ids, max_new_tokens=NEW, do_sample=False, custom_generate=own)
    assert whole[0, len(PROMPT) :].tolist() == expected("modules")[0]


@pytest.mark.slow
def test_a_compiled_caller() -> None:
    """The engine's part runs as it is, between what the compiler makes of the caller's own."""
    engine = Engine(target_for("native"), None, "lookahead")

    def around(numbers: torch.Tensor) -> tuple[torch.Tensor, list[int], list[int]]:
        doubled = numbers * 2
        (whole,) = engine.generate_batch([PROMPT], NEW)
        return doubled + 1, engine.generate(PROMPT, NEW).token_ids, whole.token_ids

    numbers, *found = torch.compile(around, backend="eager")(torch.ones(2))
    assert (numbers.tolist(), found) == ([3, 3], [expected("native")[0]] * 2)


def test_torch_s_own_random_numbers_are_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    engine = Engine(models.target_for(new_model("qwen3", torch.float32), execution="native"), None, "lookahead")
    torch.set_rng_state(before)  # the model's weights were drawn
    engine.generate(PROMPT, NEW, SAMPLED)
    Engine(engine.target, None, "layer_skip").generate(PROMPT, NEW)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("switch", ["a default device", "a narrow dtype"])
def test_packed_modules_that_the_caller_calls(switch: str) -> None:
    """C writes what they return, into memory that is there, of the dtype that it writes."""
    model: Any = target_for("native").model
    rows = torch.ones(3, 48, dtype=torch.float32)
    project = model.model.layers[0].mlp.down_proj
    alone = project(rows)
    with SWITCHES[switch]():
        assert torch.equal(project(rows), alone)


def test_threads_and_gradients_that_change_between_the_steps() -> None:
    engine, number = Engine(target_for("native"), None, "lookahead"), 0
    one = engine.start(PROMPT, NEW)
    with torch.no_grad():  # which a test leaves as it was
        while one.finish_reason is None:
            torch.set_num_threads(1 + number % 2)
            torch.set_grad_enabled(bool(number % 3))
            with engine.target.active():
                one.prefill() if one.sequence.prefilling else one.step()
            number += 1
    torch.set_num_threads(1)
    assert number > 3
    assert one.tokens[len(PROMPT) :] == expected("native")[0]
