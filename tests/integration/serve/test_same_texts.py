"""Texts over HTTP are those of the engine, whatever else is asked, cancelled and streamed beside them."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from specdec import Engine, SamplingParams
from specdec.serve.json_grammar import Grammars
from specdec.serve.processors import Penalties, bias_of
from tests.integration.serve.test_client import SCHEMA
from tests.serving import Running

COUNT = 50
PROMPTS = ("def add(a, b):\n", "import os\n", "x = 1\n" * 9, "class A:\n    def __init__(self", "for i in range(")


@dataclass(frozen=True)
class Asked:
    """A request, and the texts that the engine has for it, one for each of ``n``."""

    chat: bool
    fields: dict[str, Any]
    stream: bool
    leaves_after: int | None
    wanted: list[str]


def asked(number: int, engine: Engine, grammars: Grammars) -> Asked:
    """A request of mixed kind; equal numbers make equal requests."""
    dice = random.Random(number)
    prompt = dice.choice(PROMPTS)
    messages = [{"role": "user", "content": prompt}]
    chat, budget = dice.random() < 0.5, dice.randint(1, 24)
    tokens = engine.encode(messages if chat else prompt)
    fields: dict[str, Any] = {"messages": messages} if chat else {"prompt": dice.choice([prompt, tokens])}
    sampling: dict[str, Any] = {"temperature": dice.choice([0.0, 0.0, 0.8, 1.3]), "seed": dice.randint(0, 99)}
    for name, values in (("top_p", (0.9,)), ("top_k", (20,)), ("min_p", (0.05,)), ("repetition_penalty", (1.2,))):
        if dice.random() < 0.25:
            sampling[name] = dice.choice(values)
    options: dict[str, Any] = {}
    chain: list[Any] = []
    if dice.random() < 0.2:
        fields["stop"] = options["stop"] = dice.choice(["(", "\n\n", ["self", "return"]])
    if dice.random() < 0.15:
        fields["logit_bias"] = {"300": 5, "20": -100}
        chain.append(bias_of(fields["logit_bias"], engine.target.vocab_size))
    if dice.random() < 0.15:
        fields["presence_penalty"], fields["frequency_penalty"] = 0.5, 0.7
        chain.append(Penalties(len(tokens), 0.5, 0.7))
    if dice.random() < 0.1:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        chain.append(grammars.of(SCHEMA))
    if dice.random() < 0.2:
        fields["logprobs"] = True if chat else 1
    if dice.random() < 0.4:
        fields["speculation"] = {"drafter": dice.choice(["none", "auto", "lookahead", "suffix_automaton"])}
    if dice.random() < 0.1:
        fields["prediction"] = {"type": "content", "content": PROMPTS[0] * 3}
    fields["n"] = dice.choice([1, 1, 1, 2])
    wanted = [
        engine.generate(
            tokens,
            budget,
            SamplingParams(**{**sampling, "seed": sampling["seed"] + number}),
            logits_processor=chain,
            **options,
        ).text
        for number in range(fields["n"])
    ]
    stream = dice.random() < 0.6
    leaves = dice.randint(0, 3) if stream and dice.random() < 0.25 else None
    return Asked(chat, {"model": "tiny", "max_tokens": budget, **fields, **sampling}, stream, leaves, wanted)


async def answer(client: openai.AsyncOpenAI, one: Asked, dice: random.Random) -> list[str] | None:
    """The texts that a client reads; None where it left before the end."""
    for _ in range(dice.randint(0, 5)):
        await asyncio.sleep(0)
    known = {"messages", "prompt", "model", "max_tokens", "temperature", "seed", "top_p", "stop", "logit_bias"}
    known |= {"presence_penalty", "frequency_penalty", "logprobs", "n"}  # by the client, in both kinds of request
    extra = {name: value for name, value in one.fields.items() if name not in known}
    fields: Any = {name: value for name, value in one.fields.items() if name not in extra}
    api: Any = client.chat.completions if one.chat else client.completions
    made = await api.create(**fields, extra_body=extra, stream=one.stream)
    if not one.stream:
        return [(choice.message.content if one.chat else choice.text) for choice in made.choices]
    texts, count = [""] * one.fields["n"], 0
    async for chunk in made:
        if count == one.leaves_after:
            await made.close()
            return None
        choice = chunk.choices[0]
        texts[choice.index] += (choice.delta.content or "") if one.chat else choice.text
        count += 1
    return texts


async def all_answers(client: openai.AsyncOpenAI, those: list[Asked]) -> list[list[str] | None]:
    dice = random.Random(0)
    async with client:
        return await asyncio.gather(*(answer(client, one, dice) for one in those))


@pytest.mark.slow
def test_texts_are_the_engine_s(running: Running, served_engine: Engine) -> None:
    engine = served_engine
    grammars = Grammars(engine.tokenizer, engine.target.vocab_size, engine.target.eos_ids)
    those = [asked(number, engine, grammars) for number in range(COUNT)]
    found = asyncio.run(all_answers(running.async_openai(), those))
    left = [one for one, texts in zip(those, found, strict=True) if texts is None]
    assert len(left) < COUNT // 2
    differ = [
        (json.dumps(one.fields), one.wanted, texts)
        for one, texts in zip(those, found, strict=True)
        if texts is not None and texts != one.wanted
    ]
    assert not differ, f"{len(differ)} of {COUNT} differ, such as {differ[0]}"
    running.settle()
    assert running.service.metrics.cached_bytes == 0
