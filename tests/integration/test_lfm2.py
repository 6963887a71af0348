"""LFM2, whose layers are convolutions and attention: every drafter, alone and beside others, from a kept beginning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import Engine, PrefixTree, SamplingParams
from specdec.drafting.registry import drafter_names
from specdec.errors import CheckpointError, ConfigError, TargetError
from specdec.models.described_target import DescribedTarget
from specdec.models.live_model import load_model
from specdec.models.transformers_target import TransformersTarget
from tests.fakes import Drawing
from tests.gguf_files import new_llama, write_gguf
from tests.joint import assert_joint, five_token_target, joint_of
from tests.models import greedy, new_model, prompt_of, reference, settings_of, target_of
from tests.tiers import FEW

SIZES = {"max_rows": 24, "prefill_chunk": 16}
PROMPTS = [prompt_of(size) for size in (20, 1, 2, 40)]
HOT = SamplingParams(temperature=0.8, seed=3, acceptance="match")
CHEAP = ("none", "prompt_lookup", "suffix_automaton", "token_recycling", "layer_skip")


@pytest.mark.parametrize(
    "drafter",
    [pytest.param(name, marks=() if name in (*CHEAP, *FEW) else pytest.mark.slow) for name in drafter_names()],
)
def test_texts_are_those_of_generate(drafter: str, tmp_path: Path) -> None:
    """Alone and several at once, greedy; and drawn, those of the seed."""
    target, plain = target_of("lfm2"), Engine(target_of("lfm2"), None)
    for place, settings in enumerate(settings_of(drafter, target, tmp_path)):
        engine = Engine(target, None, settings, **SIZES)
        assert engine.generate(PROMPTS[0], 24).token_ids == greedy("lfm2", PROMPTS[0], 24)
        if not place:
            found = engine.generate_batch(PROMPTS, 16, batch=3)
            assert [one.token_ids for one in found] == [greedy("lfm2", prompt, 16) for prompt in PROMPTS]
            drawn = engine.generate_batch(PROMPTS[:2], 16, HOT, batch=2)
            assert [one.token_ids for one in drawn] == [plain.generate(p, 16, HOT).token_ids for p in PROMPTS[:2]]


def test_texts_share_beginnings_where_the_window_is_known() -> None:
    """While one runs and when it has ended; a text that branches off further up than windows are known begins anew."""
    engine, tree, prompt = Engine(target_of("lfm2"), None, "lookahead", **SIZES), PrefixTree(10**7), PROMPTS[3]
    running = engine.start(prompt, 9, prefix_cache=tree)
    with engine.target.active():
        running.prefill()
    reused = []
    for text in ((*prompt, 5), (*prompt, 5, 6), prompt, (*prompt[:4], 9)):
        found = engine.generate(text, 9, prefix_cache=tree)
        assert found.token_ids == greedy("lfm2", text, 9)
        reused.append(found.stats.reused_tokens)
    assert reused[1:] == [41, 39, 0]
    assert reused[0] >= 39  # its last token is not run before it is a root


@pytest.mark.slow
def test_drawn_drafts_keep_the_joint_distribution() -> None:
    """Rejected siblings leave no trace in the windows."""
    target, model = five_token_target("Lfm2", ("conv", "full_attention", "conv"))
    bigrams = torch.softmax(torch.randn(5, 5, generator=torch.Generator().manual_seed(9), dtype=torch.float64), -1)
    engine = Engine(target, None, Drawing(bigrams, (2, 2)), max_rows=16)
    params = [SamplingParams(temperature=1.0, seed=seed, acceptance="auto") for seed in range(2000)]
    texts = [one.token_ids for one in engine.generate_batch([[4, 2, 0, 1]] * 2000, 3, params, batch=64)]
    assert_joint(texts, joint_of(model, [4, 2, 0, 1], 3))


@pytest.mark.parametrize("changes", [{}, {"conv_bias": True, "conv_L_cache": 5, "tie_word_embeddings": True}])
def test_a_folder_and_a_copy_of_a_live_model_run_and_the_model_itself_is_refused(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    model = new_model("lfm2", **changes)
    expected = reference(model, PROMPTS[0], 16)
    with pytest.raises(
        TargetError, match=r"cannot roll back \(conv\); its description can be run: .*Engine.from_model"
    ):
        TransformersTarget(model)
    model.save_pretrained(tmp_path)
    own = load_model(tmp_path, dtype="auto", device=None, device_map=None)
    assert reference(own, PROMPTS[0], 16) == expected
    for target in (DescribedTarget.from_model(model), TransformersTarget.from_pretrained(tmp_path)):
        assert target.options["runner"] == "fused"
        assert Engine(target, None, "none").chunk_rows == 512, "a convolution's window is none of attention"
        assert Engine(target, None, "token_recycling", **SIZES).generate(PROMPTS[0], 16).token_ids == expected


def test_half_precision_runs_by_torch(tmp_path: Path) -> None:
    """The library is asked for, and computes no convolution."""
    new_model("lfm2", torch.bfloat16).save_pretrained(tmp_path)
    target: Any = TransformersTarget.from_pretrained(tmp_path)
    assert target.others["native"] == "native layers compute attention, and no ShortConv"
    plain, drafted = (Engine(target, None, drafter, **SIZES) for drafter in ("none", "prompt_lookup"))
    assert len(drafted.generate(PROMPTS[0], 16).token_ids) == len(plain.generate(PROMPTS[0], 16).token_ids) == 16
    with pytest.raises(ConfigError, match="native layers compute attention, and no ShortConv"):
        TransformersTarget.from_pretrained(tmp_path, execution="native")


def test_a_gguf_file_is_refused_by_name(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "lfm2.gguf", new_llama(), architecture="lfm2")
    with pytest.raises(CheckpointError, match="the architecture 'lfm2' of"):
        TransformersTarget.from_pretrained(file)
