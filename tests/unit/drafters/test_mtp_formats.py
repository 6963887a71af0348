"""Multi-token-prediction layers in a folder: layouts told apart, converted, and refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from drafters.heads.mtp import Mtp, MtpConfig, convert_mtp
from drafters.heads.mtp_layout import find_mtp, mtp_names
from drafters.heads.mtp_step import mtp_checkpoint
from specdec.drafting.registry import describe_weights, make_drafter
from specdec.errors import CheckpointError, ConfigError
from tests import heads
from tests.models import mtp_layers, new_model, settings_of, target_for, target_of

SIZE = 32
NAMES = {
    "numbered on": ("model.layers.61.eh_proj.weight", "model.layers.61.mlp.up_proj.weight"),
    "Qwen3-Next": ("mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"),
    "speculators": ("mtp_layers.0.input_proj.weight", "mtp_layers.0.mlp.up_proj.weight"),
    "MiMo": ("model.mtp_layers.0.input_proj.weight", "model.mtp_layers.0.mlp.up_proj.weight"),
}


def written(folder: Path, change: Callable[[heads.Tensors], object] = lambda _: None, **told: object) -> Path:
    config, tensors = mtp_layers(target_of("llama"))
    change(tensors)
    return heads.write(folder, config | told, tensors)


@pytest.mark.parametrize("layout", NAMES)
def test_layouts_are_told_apart_by_names(layout: str) -> None:
    found = mtp_names([*NAMES[layout], "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"])
    assert found is not None
    assert layout in found[0].name
    ours = ["layers.0.eh_proj.weight"], ["layers.0.block.mlp.up_proj.weight"]
    assert found[1] == dict(zip(NAMES[layout], ours, strict=True))
    assert found[0].hidden_first == (layout == "MiMo")


def test_one_product_is_every_layers() -> None:
    names = ["mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.x", "mtp.layers.1.x"]
    found = mtp_names(names)
    assert found is not None
    assert found[1]["mtp.norm.weight"] == ["layers.0.post_norm.weight", "layers.1.post_norm.weight"]
    assert found[1]["mtp.layers.1.x"] == ["layers.1.block.x"]


def test_layers_of_a_folder_of_their_own_are_not_the_models(tmp_path: Path) -> None:
    """Where both count from 0, the ones beside the product are meant."""
    found = mtp_names(["model.mtp.layers.0.eh_proj.weight", "model.mtp.layers.0.x", "model.layers.0.x"])
    assert found is not None
    assert sorted(found[1]) == ["model.mtp.layers.0.eh_proj.weight", "model.mtp.layers.0.x"]


def test_conversion_keeps_all(tmp_path: Path) -> None:
    target = target_of("llama")
    for number, settings in enumerate(settings_of("mtp", target, tmp_path)):
        source, out = Path(settings["head"]), tmp_path / f"out-{number}"
        convert_mtp(source, out, target)
        before, after = find_mtp(source), find_mtp(out)
        first, second = before.source, after.source
        assert first.shapes == second.shapes
        assert all(torch.equal(second.read(name), first.read(name)) for name in first.shapes)
        assert (after.repeated, after.depth, after.hidden_first) == (before.repeated, before.depth, before.hidden_first)
        assert describe_weights(out)[0] == "mtp"
    with pytest.raises(CheckpointError, match="trained for Llama"):
        make_drafter({"name": "mtp", "head": str(out)}, target_of("mistral"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.3.eh_proj.weight"), "no multi-token-prediction layers"),
        (lambda t: t.pop("model.layers.3.enorm.weight"), "layer 0 of format .* has no 'enorm' weight"),
        (lambda t: t.pop("model.layers.3.mlp.up_proj.weight"), r"1 missing, such as layers.0.block.mlp.up_proj.weight"),
        (lambda t: t.update({"model.layers.3.more": torch.ones(2)}), r"1 extra, such as layers.0.block.more"),
        (
            lambda t: t.update({"model.layers.3.eh_proj.weight": torch.ones(SIZE, SIZE)}),
            r"'layers.0.eh_proj.weight' is \[32, 32\]; it joins two vectors",
        ),
        (
            lambda t: t.update({"model.layers.3.eh_proj.weight": torch.ones(16, SIZE)}),
            "their width is 16, the model's is 32",
        ),
        (
            lambda t: t.update({"model.layers.3.enorm.weight": torch.full((SIZE,), torch.nan)}),
            "layers.0.enorm.weight holds NaN",
        ),
    ],
    ids=["product", "norm", "missing", "left over", "shape", "width", "NaN"],
)
def test_what_does_not_fit_is_named(change: Callable[[heads.Tensors], object], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        make_drafter({"name": "mtp", "head": str(written(tmp_path, change))}, target_of("llama"))


def test_another_models_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="their vocabulary is 33, the model's is 32"):
        make_drafter({"name": "mtp", "head": str(written(tmp_path / "more", vocab_size=33))}, target_of("llama"))
    with pytest.raises(CheckpointError, match=r"missing, such as layers\.0\.block\.\w+_feedforward_layernorm.weight"):
        make_drafter({"name": "mtp", "head": str(written(tmp_path / "own"))}, target_of("gemma2"))
    with pytest.raises(CheckpointError, match=r"head of kind 'eagle'"):
        Mtp.describe_weights(written(tmp_path / "kind", format="specdec-head", kind="eagle"))
    with pytest.raises(CheckpointError, match="drafts 65 tokens"):
        Mtp.describe_weights(written(tmp_path / "deep", depth=65))


@pytest.mark.few(1)
@pytest.mark.parametrize("dense", [[], [0], [2], [0, 1, 2]], ids=str)
def test_tensors_tell_which_layers_have_experts(dense: list[int], tmp_path: Path) -> None:
    """The model's config numbers the model's own layers; these are like its last one."""
    target = target_for(new_model("qwen3_moe", mlp_only_layers=dense, intermediate_size=80))
    folder = heads.write(tmp_path, *mtp_layers(target, 2))
    layers = mtp_checkpoint(find_mtp(folder), target).spec.layers
    assert [layer.mlp for layer in layers] == [target.spec.layers[-1].mlp] * 2


def test_a_pickle_is_not_run(tmp_path: Path) -> None:
    folder = written(tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save({"a": pytest.raises}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="no multi-token-prediction layers in"):
        make_drafter({"name": "mtp", "head": str(folder)}, target_of("llama"))


def test_models_without_layers_say_so() -> None:
    with pytest.raises(CheckpointError, match=r"LlamaForCausalLM was loaded from has no multi-token-prediction layers"):
        make_drafter("mtp", target_of("llama"))
    with pytest.raises(ConfigError, match=r"mtp\.tokens"):
        MtpConfig(tokens=0)
