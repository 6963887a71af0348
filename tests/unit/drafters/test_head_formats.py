"""Published layouts of heads: what is read of them, and what is refused by name."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters.heads.config import ChainConfig
from drafters.heads.layout import find
from drafters.heads.loading import convert, describe, load_head
from drafters.shared.fingerprint import fingerprint
from drafters.shared.weights import weights_folder
from specdec.drafting.registry import describe_weights, make_drafter
from specdec.errors import CheckpointError, ConfigError, SpecdecWarning
from specdec.target import FINAL
from tests import heads
from tests.models import VOCAB, random_heads, target_of
from training.cli import CONVERTED, TRAINABLE

SIZE = 32


def written(folder: Path, made: tuple[dict[str, Any], heads.Tensors], **changes: Any) -> Path:
    return heads.write(folder, {**made[0], **changes}, made[1])


def test_taps_are_counted_as_each_format_counts_them(tmp_path: Path) -> None:
    """The authors name layers whose outputs are meant, and ``speculators`` how many come before."""
    assert find(written(tmp_path / "eagle3", heads.eagle3(SIZE, VOCAB, taps=(0, 2)))).config.taps == [1, 3]
    assert find(written(tmp_path / "peagle", heads.peagle(SIZE, VOCAB))).config.taps == [1, 2, 3]
    assert find(written(tmp_path / "eagle1", heads.eagle1(SIZE, VOCAB))).config.taps == [FINAL]


def test_unnamed_taps_follow_from_the_target(tmp_path: Path) -> None:
    config, tensors = heads.eagle3(SIZE, VOCAB)
    del config["eagle_config"]
    folder, target = heads.write(tmp_path, config, tensors), target_of("llama")
    with pytest.warns(SpecdecWarning, match=r"names no hidden layers, so EAGLE-3's default is read: \[0, 1, 2\]"):
        head = load_head(folder, "eagle", target)
    assert head.config.taps == [0, 1, 2]  # 2, n // 2 and n - 3 of three layers
    assert "3 hidden layers, chosen by the model's depth" in describe(folder, "eagle")[2]


@pytest.mark.parametrize("made", [heads.eagle3, heads.peagle])
def test_taps_at_the_top_level_count_the_layers_before(tmp_path: Path, made: Any) -> None:
    """As vLLM, which looks there first; a file for both engines has both numbers."""
    config, tensors = made(SIZE, VOCAB)
    for eagle_config in ({}, {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}):
        changed = {**config, "eagle_aux_hidden_state_layer_ids": [1, 2, 3], "eagle_config": eagle_config}
        assert find(heads.write(tmp_path / str(len(eagle_config)), changed, tensors)).config.taps == [1, 2, 3]


def test_a_head_that_denies_its_taps_reads_the_last_state(tmp_path: Path) -> None:
    """As vLLM and SGLang, which pass over ``fc`` then."""
    config, tensors = heads.eagle3(SIZE, VOCAB)
    folder = heads.write(tmp_path, {**config, "eagle_config": {"use_aux_hidden_state": False}}, tensors)
    head = load_head(folder, "eagle", target_of("llama"))
    assert (head.config.taps, head.config.fused) == ([FINAL], False)
    assert "fc.weight" not in head.state_dict()


def test_an_index_says_which_file_counts(tmp_path: Path) -> None:
    """A file that another version left there is not read; without an index, two files may not hold one tensor."""
    config, tensors = heads.eagle3(SIZE, VOCAB)
    folder = heads.write(tmp_path, config, {})
    names = sorted(tensors)
    parts = {"model-1-of-2.safetensors": names[::2], "model-2-of-2.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / "z.safetensors")
    with pytest.raises(ConfigError, match=r"z\.safetensors holds .*, which another file"):
        find(folder)
    places = {name: file for file, part in parts.items() for name in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    found = find(folder).tensors
    assert torch.equal(found["fc.weight"], tensors["fc.weight"])
    assert torch.equal(found["norm.weight"], tensors["norm.weight"])
    for odd in ({names[0]: parts["model-2-of-2.safetensors"][0]}, {names[0]: "../x.safetensors"}, ["x"]):
        index.write_text(json.dumps({"weight_map": odd}))
        with pytest.raises((ConfigError, OSError), match=r"no weight_map|No such file"):
            find(folder)
    index.write_text(json.dumps({"weight_map": {**places, "extra": "model-1-of-2.safetensors"}}))
    with pytest.raises(ConfigError, match=r"says that model-1-of-2\.safetensors holds 'extra', and it does not"):
        find(folder)


@pytest.mark.parametrize("nested", ["model", "transformer_layer_config"])
def test_eagle_1_with_its_layers_config_in_a_section(tmp_path: Path, nested: str) -> None:
    """As vLLM's class for it, and ``speculators``, which calls the layer otherwise."""
    config, tensors = heads.eagle1(SIZE, VOCAB)
    wanted = find(heads.write(tmp_path / "plain", config, tensors))
    changed = {nested: config}
    if nested != "model":
        changed["speculators_model_type"] = "eagle"
        tensors = {name.replace("layers.0.", "transformer."): tensor for name, tensor in tensors.items()}
    found = find(heads.write(tmp_path / "nested", changed, tensors))
    assert found.config == wanted.config
    assert found.tensors.keys() == wanted.tensors.keys()


def test_layers_are_those_that_have_tensors(tmp_path: Path) -> None:
    """The config says 40, as a published one does."""
    folder = written(tmp_path, heads.eagle3(SIZE, VOCAB))
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 40
    assert find(folder).config.layers == 1


@pytest.mark.parametrize("absolute", [False, True])
def test_draft_tokens_are_brought_into_order(absolute: bool, tmp_path: Path) -> None:
    """Rows in any order, and entries of ``d2t`` that are tokens already, which ``t2d`` shows."""
    config, tensors = heads.eagle3(SIZE, VOCAB, draft=9)
    tokens = tensors["d2t"] + torch.arange(9)
    shuffled = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    tensors["lm_head.weight"], numbered = tensors["lm_head.weight"][shuffled], tokens[shuffled]
    tensors["d2t"] = numbered if absolute else numbered - torch.arange(9)
    found = find(heads.write(tmp_path, config, tensors))
    assert found.tensors["draft_tokens"].tolist() == tokens.tolist()
    assert torch.equal(found.tensors["lm_head.weight"], tensors["lm_head.weight"][shuffled.argsort()])


def test_positions_of_transformers_4_and_5(tmp_path: Path) -> None:
    made = heads.eagle3(SIZE, VOCAB)
    for number, told in enumerate(
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_theta": None, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
        )
    ):
        found = find(written(tmp_path / str(number), made, **told)).config.rope
        assert found == {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}


def test_a_pickle_of_tensors_is_read_and_any_other_refused(tmp_path: Path) -> None:
    config, tensors = heads.eagle1(SIZE, VOCAB)
    folder = heads.write(tmp_path, config, tensors)
    (folder / "model.safetensors").unlink()
    named = {f"module.{name}": tensor for name, tensor in tensors.items()}  # as several GPUs save it
    torch.save(named | {"module.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, folder / "pytorch_model.bin")
    assert set(find(folder).tensors) == set(tensors)

    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Harm()}))
    with pytest.raises(CheckpointError, match=r"no head in .*pickle of more than tensors.*take safetensors") as told:
        load_head(folder, "eagle", target_of("llama"))
    assert "weights_only" not in str(told.value)  # torch's advice to run it all the same
    assert not (tmp_path / "ran").exists()


def test_converted_is_the_same_head(tmp_path: Path) -> None:
    """One clean folder, which says for which model it is; of any format, in the dtype that it had."""
    target = target_of("llama")
    for number, made in enumerate(
        (heads.eagle1(SIZE, VOCAB), heads.eagle3(SIZE, VOCAB, draft=9), heads.peagle(SIZE, VOCAB))
    ):
        half = (made[0], {n: t.bfloat16() if t.is_floating_point() else t for n, t in made[1].items()})
        source, out = written(tmp_path / f"source-{number}", half), tmp_path / f"out-{number}"
        convert(source, out, "eagle", target)
        before, after = load_head(source, "eagle", target), load_head(out, "eagle", target)
        for name, tensor in before.state_dict().items():
            assert torch.equal(tensor, after.state_dict()[name]), name
        assert after.config.target == fingerprint(target)
        assert load_file(out / "model.safetensors")["fc.weight"].dtype is torch.bfloat16


def test_check_says_who_drafts_with_it(tmp_path: Path) -> None:
    folder = written(tmp_path / "head", heads.eagle3(SIZE, VOCAB, draft=9))
    name, lines = describe_weights(folder)
    assert name == "eagle"
    assert lines[0].startswith("format eagle3, ")
    assert "width 32, vocabulary 32" in lines[1]
    assert "among 9 tokens" in lines[2]
    random_heads(target_of("llama"), tmp_path / "medusa")
    assert describe_weights(tmp_path / "medusa")[0] == "medusa"
    (tmp_path / "none").mkdir()
    with pytest.raises(CheckpointError, match=r"no drafter reads .*eagle: .*kangaroo: .*medusa: "):
        describe_weights(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"there is no folder .*absent'; give the one that holds"):
        describe_weights(tmp_path / "absent")


@pytest.mark.parametrize(
    ("name", "trained", "held"),
    [("eagle", "eagle3", r"; what the package holds is for LlamaForCausalLM-30x576-\S+"), ("dflash", "dspark", "")],
)
def test_no_head_is_said_with_where_they_come_from(name: str, trained: str, held: str) -> None:
    """The remedies that a message names are commands that exist."""
    with pytest.raises(
        CheckpointError, match=rf"{name} has no head for this model \(\S+\){held}\. Train .* as {name}\.head"
    ) as told:
        make_drafter(name, target_of("llama"))
    assert f"`specdec train {trained} --model ...`" in str(told.value)
    assert f"`specdec convert {name}`" in str(told.value)
    assert trained in TRAINABLE
    assert name in CONVERTED


Spoil = Callable[[dict[str, Any], heads.Tensors], object]
WRONG: dict[str, tuple[Spoil, str]] = {
    "no query": (
        lambda c, t: t.pop("midlayer.self_attn.q_proj.weight"),
        "'layers.0.self_attn.q_proj.weight' is missing",
    ),
    "no norm": (
        lambda c, t: t.pop("midlayer.hidden_norm.weight"),
        "'layers.0.self_attn.q_proj.weight' reads 64|no head",
    ),
    "no last norm": (lambda c, t: t.pop("norm.weight"), r"'norm.weight' is missing, expected \(32,\)"),
    "no fc": (lambda c, t: t.pop("fc.weight"), "'fc.weight' is missing"),
    "more": (
        lambda c, t: t.update({"midlayer.gate.weight": torch.ones(3)}),
        "'layers.0.gate.weight' is .*none of that",
    ),
    "no map": (lambda c, t: t.pop("d2t"), "'d2t' is missing: 'lm_head.weight' has 9 rows"),
    "map too long": (lambda c, t: t.update(d2t=torch.zeros(10).long()), "'d2t' has 10 entries, and 'lm_head.weight' 9"),
    "map of numbers": (lambda c, t: t.update(d2t=torch.zeros(9)), "'d2t' is torch.float32"),
    "map outside": (lambda c, t: (t.pop("t2d"), t.update(d2t=torch.arange(9) * 9)), r"leads to tokens in \[0, 80\]"),
    "map twice": (lambda c, t: (t.pop("t2d"), t.update(d2t=-torch.arange(9))), "1 of 9 distinct"),
    "maps disagree": (lambda c, t: t["t2d"].logical_not_(), "contradict each other"),
    "heads": (
        lambda c, t: c.update(num_attention_heads=8),
        "num_attention_heads in its config is 8, and the tensors have 4",
    ),
    "key heads": (lambda c, t: c.update(num_key_value_heads=4), "num_key_value_heads in its config is 4"),
    "odd heads": (lambda c, t: c.update(num_attention_heads=5, head_dim=None), "must divide 32 outputs"),
    "activation": (lambda c, t: c.update(hidden_act="swish9"), "unknown hidden_act"),
    "positions": (lambda c, t: c.update(rope_scaling={"rope_type": "odd"}), "rotary positions"),
    "taps": (lambda c, t: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids="0"), "must be a list of layers"),
    "few taps": (lambda c, t: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[0, 1]), "its target 48"),
    "deep taps": (
        lambda c, t: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[0, 1, 7]),
        "reads hidden layers",
    ),
    "many layers": (lambda c, t: c.update(num_target_layers=12), "of a model of 12 layers, and this one has 3"),
    "NaN": (lambda c, t: t["fc.weight"].fill_(torch.nan), "fc.weight in .* holds NaN"),
    "wide target": (lambda c, t: c.update(target_hidden_size=48), "needs embed_tokens.weight"),
    "map unfilled": (lambda c, t: (t.pop("t2d"), t["d2t"].zero_()), "'d2t' is zero throughout"),
    "maps unfilled": (lambda c, t: (t["t2d"].zero_(), t["d2t"].zero_()), "'t2d' marks no token"),
    "two counts": (
        lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[0, 1, 2]),
        r"names hidden layers \[0, 1, 2\], and eagle_config\.\S+, which .* names \[1, 2, 3\]; delete",
    ),
    "norms that are not there": (lambda c, t: c.update(fc_norm=True), "'fc_norm.0.weight' is missing, and fc_norm in"),
    "norm that is not there": (lambda c, t: c.update(norm_before_fc=True), "'input_norm.weight' is missing, and"),
    "fp8": (lambda c, t: t.update({"fc.weight": t["fc.weight"].to(torch.float8_e4m3fn)}), "fc.weight .* its scales"),
    "vocabulary": (lambda c, t: t.update(t2d=torch.ones(64).bool()), "contradict|vocabulary"),
    "kind": (lambda c, t: c.update(speculators_model_type="eagle9"), "unknown speculators_model_type 'eagle9'"),
}


@pytest.mark.few(22)
@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case: str, tmp_path: Path) -> None:
    spoil, message = WRONG[case]
    config, tensors = heads.eagle3(SIZE, VOCAB, draft=9)
    spoil(config, tensors)
    folder = heads.write(tmp_path, config, tensors)
    with pytest.raises(CheckpointError, match=message):
        make_drafter({"name": "eagle", "head": str(folder)}, target_of("llama"))


BLOCKS: dict[str, tuple[Spoil, str]] = {
    "no size": (lambda c, t: c.pop("block_size"), "block_size in its config is None"),
    "no mask": (lambda c, t: c["dflash_config"].pop("mask_token_id"), "mask_token_id"),
    "mask outside": (lambda c, t: c["dflash_config"].update(mask_token_id=99), "mask_token is 99"),
    "no taps": (lambda c, t: c["dflash_config"].pop("target_layer_ids"), "head.taps is empty|no 3 hidden states"),
    "no norm": (
        lambda c, t: t.pop("layers.1.self_attn.k_norm.weight"),
        r"'layers.1.self_attn.k_norm.weight' is missing",
    ),
    "no second layer": (lambda c, t: [t.pop(n) for n in [*t] if n.startswith("layers.0.")], "'layers.0.* is missing"),
    "half a bias": (lambda c, t: t.pop("markov_head.markov_w2.weight"), "'markov_head.markov_w2.weight' is missing"),
    "odd confidence": (
        lambda c, t: t.update({"confidence_head.proj.weight": torch.ones(1, 3)}),
        r"is \(1, 3\), expected",
    ),
    "deep": (lambda c, t: c.update(num_target_layers=36), "of a model of 36 layers, and this one has 3"),
    "kind of bias": (lambda c, t: c.update(markov_head_type="lstm"), "head.markov is 'lstm'"),
}


@pytest.mark.parametrize("case", BLOCKS)
def test_what_is_wrong_with_a_block_is_named(case: str, tmp_path: Path) -> None:
    spoil, message = BLOCKS[case]
    config, tensors = heads.dflash(SIZE, VOCAB, kind="dspark", markov="vanilla")
    spoil(config, tensors)
    folder = heads.write(tmp_path, config, tensors)
    with pytest.raises(CheckpointError, match=message):
        make_drafter({"name": "dflash", "head": str(folder)}, target_of("llama"))


def test_blocks_are_told_apart_by_their_tensors(tmp_path: Path) -> None:
    for number, (kind, own) in enumerate((("dflash", {}), ("dspark", {"markov": "gated"}), ("dflash2", {}))):
        folder = written(tmp_path / str(number), heads.dflash(SIZE, VOCAB, kind=kind, **own))
        found = find(folder)
        assert found.format.name == kind
        assert found.config.taps == [1, 2]  # the outputs of layers 0 and 1
        assert describe(folder, "dflash")[2].endswith(f"blocks of {5 if kind == 'dspark' else 4} tokens")
        out = tmp_path / f"out-{number}"
        convert(folder, out, "dflash", target_of("llama"))
        before, after = (load_head(place, "dflash", target_of("llama")).state_dict() for place in (folder, out))
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_last_layers_state_is_the_normed_one(tmp_path: Path) -> None:
    """As transformers counts hidden states; ``speculators`` counts what the layers give."""
    folder = written(tmp_path / "plain", heads.dflash(SIZE, VOCAB, taps=(0, 2)))
    assert load_head(folder, "dflash", target_of("llama")).config.taps == [1, FINAL]
    config, tensors = heads.dflash(SIZE, VOCAB, taps=(0, 2))
    told = {"aux_hidden_state_layer_ids": [1, 3], "block_size": 5, "mask_token_id": 0}
    folder = heads.write(tmp_path / "speculators", heads.speculators("dflash", config, 2, **told), tensors)
    assert load_head(folder, "dflash", target_of("llama")).config.taps == [1, 3]


def test_another_targets_head_is_refused(tmp_path: Path) -> None:
    target = target_of("llama")
    for made, message in (
        (heads.eagle3(48, VOCAB), "their width is 48, the model's is 32"),
        (heads.eagle3(SIZE, 64), "their vocabulary is 64, the model's is 32"),
        (heads.eagle1(48, VOCAB), "their width is 48, the model's is 32"),
    ):
        folder = written(tmp_path, made)
        with pytest.raises(CheckpointError, match=message):
            load_head(folder, "eagle", target)
    convert(written(tmp_path / "own", heads.eagle1(SIZE, VOCAB)), tmp_path / "ours", "eagle", target)
    with pytest.raises(CheckpointError, match="were trained for"):
        load_head(tmp_path / "ours", "eagle", target_of("olmo2"))
    assert isinstance(load_head(tmp_path / "ours", "eagle", target_of("olmo2"), check_target=False).config, ChainConfig)


@pytest.mark.parametrize("option", ["kangaroo.adapter", "medusa.heads"])
def test_a_quantised_copy_is_told_whose_weights_to_try(option: str) -> None:
    """A model of the same class and sizes, with other weights."""
    sizes = {"num_layers": 16, "hidden_size": 192, "vocab_size": 4096}
    copy: Any = SimpleNamespace(name="LlamaForCausalLM", named_weights=lambda: (), **sizes)
    drafter = option.partition(".")[0]
    with pytest.raises(
        CheckpointError, match=rf"for a quantised copy, {option}=\S+-{drafter} with {drafter}\.check_target=false"
    ):
        weights_folder(None, copy, option)
