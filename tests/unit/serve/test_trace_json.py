"""The object that a chunk has of its step."""

from __future__ import annotations

import json

from specdec import Engine
from specdec.serve.figures import trace_json


def test_a_step_as_json(tiny_engine: Engine) -> None:
    engine = tiny_engine.with_drafter("prompt_lookup", policy="off")
    text, ids = "", list[int]()
    for number, chunk in enumerate(engine.stream("def add(a, b):\n    return a + b\n\ndef ", 20, trace=True)):
        assert chunk.step is not None
        value = trace_json(chunk.step, engine.tokenizer)
        assert json.loads(json.dumps(value)) == value
        tree = value["tree"]
        assert (value["index"], value["drafter"], value["rows"]) == (number, "prompt_lookup", len(tree["token_ids"]))
        assert len({len(tree[key]) for key in ("token_ids", "texts", "parents", "sources")}) == 1
        assert value["sources"] == [*["prompt_lookup"] * (len(value["token_ids"]) - 1), "target"]
        text += "".join(value["texts"])
        ids += value["token_ids"]
    assert text == engine.tokenizer.decode(ids)
