"""The torch executor: transformers' logits in float64, by a family's spec."""

from __future__ import annotations

import json
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.shared.fingerprint import fingerprint
from specdec import Draft
from specdec.models.loading import embedded_model
from specdec.models.transformers_target import TransformersTarget
from specdec.step.step_io import Entering, LayerPlan, Part
from tests import models, seam
from tests.decoders import ALL, BIASED, Decoder, checkpoint_of, new_model, reference_logits
from tests.tiers import each_once

PROMPT, OTHER = models.prompt_of(9), models.prompt_of(5, seed=3)
TREE = Draft((3, 4, 5, 6, 7, 8, 9), (-1, 0, 0, 1, 2, 3, 5))


def path_of(row: int) -> list[int]:
    """The tokens from the tree's root to a row."""
    return [*(path_of(TREE.parents[row]) if row else []), TREE.tokens[row]]


def expected_tree(model: Any, prompt: Sequence[int]) -> torch.Tensor:
    return torch.stack([reference_logits(model, [*prompt, *path_of(row)])[-1] for row in range(len(TREE.tokens))])


def close(found: torch.Tensor | None, expected: torch.Tensor) -> None:
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11 * float(expected.abs().max()))


@pytest.mark.parametrize(("family", "changed"), each_once(ALL, [False, True]))
def test_logits_are_those_of_transformers(family: str, changed: bool, tmp_path: Path) -> None:
    """Prompts in chunks, past windows; chains, trees at once and level by level, and texts beside each other."""
    attention = {"attn_implementation": "eager"} if family == "gemma2" else {}  # the others lose the cap of scores
    model = new_model(family, **(BIASED[family] if changed else {}), **attention)
    if family.startswith("gemma"):  # whose scale is rounded where a model is cast, and not where it is loaded so
        model.model.embed_tokens.embed_scale.fill_(model.config.hidden_size**0.5)
    target = Decoder(checkpoint_of(model, tmp_path))
    chain, tree = models.prompt_of(17), expected_tree(model, PROMPT)
    with target.active():
        own, other = seam.text(target).fill(PROMPT, 4), seam.text(target).fill(OTHER, 16)
        close(own.run(chain).logits, reference_logits(model, [*PROMPT, *chain])[len(PROMPT) :])
        close(own.run(TREE).logits, tree)
        close(own.run(TREE.tokens[:3], TREE.parents[:3]).logits, tree[:3])
        close(own.run(TREE.tokens[3:], TREE.parents, first=3).logits, tree[3:])
        both = seam.run_together([own, other], [TREE, Draft.chain(chain[:3])])
        close(both.logits, torch.cat([tree, reference_logits(model, [*OTHER, *chain[:3]])[len(OTHER) :]]))
        own.run(TREE)
        own.commit([0, 2, 4])
        close(own.run(chain[:1]).logits, reference_logits(model, [*PROMPT, *path_of(4), chain[0]])[-1:])


@pytest.mark.parametrize("family", ["llama", "smollm3"])  # one has layers that turn nothing
@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn", "longrope"])
def test_scaled_positions_are_those_of_transformers(rope: str, family: str) -> None:
    more: dict[str, Any] = {
        "linear": {"factor": 4.0},
        "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "yarn": {"factor": 4.0},
        "longrope": {"factor": 4.0, "short_factor": [1.0, 1.5, 2.0, 4.0], "long_factor": [1.0] * 4},
    }[rope]
    if rope != "linear":
        more["original_max_position_embeddings"] = 64
    model = new_model(family, rope_parameters={"rope_type": rope, "rope_theta": 100.0, **more})
    target = Decoder(checkpoint_of(model))
    text = models.prompt_of(40)
    with target.active():
        close(seam.text(target, rows=64).run(text).logits, reference_logits(model, text))


def test_sinks_take_their_share_of_attention_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of long prompts and wide trees: a prefix that all rows see, and a masked tail."""
    monkeypatch.setattr("specdec.runners.attention.SPLIT_FROM", 0)
    model = new_model("gpt_oss")
    target, chain = Decoder(checkpoint_of(model)), models.prompt_of(17)
    with target.active():
        own = seam.text(target).fill(PROMPT, 4)
        close(own.run(chain).logits, reference_logits(model, [*PROMPT, *chain])[len(PROMPT) :])
        close(own.run(TREE).logits, expected_tree(model, PROMPT))


@pytest.mark.parametrize("family", ALL)
def test_weights_are_named_as_transformers_names_them(family: str, tmp_path: Path) -> None:
    """By which fingerprints of trained heads are made."""
    model = new_model(family, **BIASED[family])
    live = model.named_parameters() if family == "lfm2" else TransformersTarget(model).named_weights()
    expected = sorted(live, key=itemgetter(0))  # what has convolutions is run by its spec alone
    found = [*Decoder(checkpoint_of(model, tmp_path)).executor.named_weights()]
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert all(torch.equal(own, weight) for (_, own), (_, weight) in zip(found, expected, strict=True))


def test_shipped_heads_know_their_model_by_its_spec() -> None:
    found, folder = fingerprint(TransformersTarget.from_pretrained("tiny")), embedded_model().parent
    for head in ("tiny-medusa", "tiny-kangaroo"):
        assert json.loads((folder / head / "config.json").read_text())["target"] == found


def test_parts_of_layers_run_and_rows_enter_a_layer() -> None:
    model, without = new_model("qwen3"), new_model("qwen3")
    with torch.no_grad():  # what adds nothing is as good as left out
        without.model.layers[1].self_attn.o_proj.weight.zero_()
        without.model.layers[2].mlp.down_proj.weight.zero_()
    target, plan = Decoder(checkpoint_of(model)), LayerPlan(parts=(Part.BOTH, Part.MLP, Part.ATTENTION))
    with target.active():
        own = seam.text(target)
        close(target.forward(own.rows(TREE, plan=plan)).logits, expected_tree(without, []))
        early = target.forward(own.rows(TREE, plan=LayerPlan(1))).out.clone()
        late = target.forward(own.rows(TREE, entry=Entering(1, early))).logits
        close(late, expected_tree(model, []))


def test_ends_of_a_decoder_are_the_models() -> None:
    model = new_model("gemma2")
    target, tokens = Decoder(checkpoint_of(model)).executor, [3, 9, 4]
    hidden = torch.randn(2, 3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scaled = model.model.embed_tokens(torch.tensor(tokens))
    torch.testing.assert_close(target.embed(tokens), scaled, rtol=1e-6, atol=0)  # transformers rounds the root
    expected = torch.tanh(model.lm_head(hidden) / 8.0) * 8.0
    assert torch.equal(target.head(hidden), expected)
    few = torch.tensor([5, 2])
    torch.testing.assert_close(target.head_of(few)(hidden), expected[..., few], rtol=0, atol=1e-12)
    asked = hidden.float().requires_grad_()
    target.head_of(None, dtype=torch.float32)(asked).sum().backward()
    assert asked.grad is not None
