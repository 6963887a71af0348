"""The drafter ``mtp``: guesses held against transformers' own model of these layers, and checkpoints that have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from drafters.heads.mtp_finding import own_layers
from specdec import Engine
from specdec.costs.curve import roofline
from specdec.decoder.names import CHOICE
from specdec.drafting.registry import describe_weights, make_drafter
from specdec.errors import CheckpointError, SpecdecWarning
from specdec.models.described_target import DescribedTarget
from specdec.models.transformers_target import TransformersTarget
from tests import heads
from tests.fakes import Oracle
from tests.integration.test_heads_reference import Beside, proposed
from tests.models import BASE, VOCAB, prompt_of, reference

_MOE = {
    "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "num_hidden_layers": 2, "head_dim": 16, "use_qk_norm": True,
    "routed_scaling_factor": 1.5,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4": ("Glm4Moe", {**BASE, **_MOE, "num_mtp_layers": 1}),
    "glm4, 2 layers": ("Glm4Moe", {**BASE, **_MOE, "num_mtp_layers": 2}),
    "glm4, 3 layers": ("Glm4Moe", {**BASE, **_MOE, "num_mtp_layers": 3}),
    "mellum": (
        "Mellum",
        {**BASE, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16,
         "num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6,
         "num_mtp_layers": 1},
    ),
}  # fmt: skip
"""Name -> prefix of transformers' classes, and a config: experts, parts of heads, windows; one layer and several."""


@cache
def made(name: str, dtype: torch.dtype = torch.float64) -> tuple[PreTrainedModel, MtpModel]:
    """A model of random weights, and transformers' own model of its layers; do not change them."""
    prefix, values = MODELS[name]
    config = getattr(transformers, f"{prefix}Config")(**values, attn_implementation="eager")
    config._experts_implementation = "eager"  # the others take no float64
    torch.manual_seed(1)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).to(dtype).eval()
    layers = MtpModel(model, config.num_mtp_layers).to(dtype).eval()
    with torch.no_grad():
        for name, buffer in (*model.named_buffers(), *layers.named_buffers()):
            if name.endswith(CHOICE):
                buffer.normal_(std=0.2)
        for parameter in (*model.parameters(), *layers.layers.parameters()):
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
            elif parameter.ndim == 1 and parameter.numel() > 4:  # norms
                parameter.normal_(1.0, 0.2)
    return model, layers


def published(name: str) -> tuple[dict[str, Any], heads.Tensors]:
    """The layers as their authors publish them, experts one by one."""
    model, layers = made(name)
    first, tensors = int(model.config.num_hidden_layers), heads.Tensors()
    own = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}
    for key, tensor in layers.state_dict().items():
        if not key.startswith("layers."):
            continue
        _, number, part, rest = key.split(".", 3)
        if name == "mellum":
            plain = f"mtp.layers.{number}.{rest}" if part == "mtp_block" else f"mtp.{own[part]}.{rest}"
        else:
            place = f"model.layers.{first + int(number)}"
            part = "shared_head.norm" if part == "post_norm" else part
            plain = f"{place}.{rest}" if part == "mtp_block" else f"{place}.{part}.{rest}"
        tensors |= _by_expert(plain, tensor.detach().clone())
    if name != "mellum":  # what the files hold twice
        tensors[f"model.layers.{first}.embed_tokens.weight"] = torch.zeros(VOCAB, BASE["hidden_size"])
        tensors[f"model.layers.{first}.shared_head.head.weight"] = torch.zeros(VOCAB, BASE["hidden_size"])
    return {"model_type": model.config.model_type, "vocab_size": VOCAB}, tensors


def _by_expert(name: str, tensor: torch.Tensor) -> heads.Tensors:
    place, _, part = name.rpartition(".")
    if part == "gate_up_proj":
        halves = zip(("gate_proj", "up_proj"), tensor.chunk(2, 1), strict=True)
        return {f"{place}.{n}.{half}.weight": own[n].clone() for half, own in halves for n in range(len(own))}
    if part == "down_proj":
        return {f"{place}.{number}.down_proj.weight": own.clone() for number, own in enumerate(tensor)}
    return {name: tensor}


def their_guess(name: str) -> Callable[[list[int], list[int]], torch.Tensor]:
    """[V] logits behind a path, by transformers' layers: each once, in turn, and then the last one's cache goes on."""
    model, layers = made(name)

    @torch.no_grad()
    def guess(tokens: list[int], path: list[int]) -> torch.Tensor:
        ids, given = torch.tensor([tokens[:-1]]), torch.tensor([[*tokens, *path]])
        size, most = len(tokens) - 1, len(layers.layers)
        mask = torch.ones_like(ids)
        states = model(ids, attention_mask=mask, output_hidden_states=True, use_cache=False).hidden_states[-1]
        cache = MtpCache(config=model.config.get_mtp_config())
        reached = min(most, len(tokens) - 1)  # a layer lacks a row of the text more than the one before it
        for depth in range(len(path) + 1):
            if depth < reached:
                rows = slice(1 + depth, 1 + depth + size)
                places = torch.arange(rows.start, rows.stop)[None]
                states = layers.forward_layer(depth, states, places, cache, input_ids=given[:, rows])
            else:
                row = depth + size
                places = torch.tensor([[row]])
                own = given[:, row : row + 1]
                states = layers.forward_layer(reached - 1, states[:, -1:], places, cache, input_ids=own)
        return layers.shared_head(states[0, -1])

    return guess


SHAPES: tuple[dict[str, Any], ...] = ({"branch": 1, "tokens": 4}, {"rows": 12, "tokens": 3})  # a chain, and a tree


def guesses(name: str, folder: Path, shape: dict[str, Any]) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """In each step of a text whose blocks are accepted as they come: the text, a path below its root, and the tokens
    that are proposed behind it.
    """
    model, prompt, new = made(name)[0], prompt_of(7), 16
    truth = reference(model, prompt, new)
    target = DescribedTarget.from_model(model)
    heads.write(folder, *published(name))
    inner = make_drafter({"name": "mtp", "head": str(folder), "min_chance": 0.0, **shape}, target)
    drafter = Beside(inner, Oracle([*prompt, *truth], VOCAB))
    out = Engine(target, None, drafter, max_rows=24, prefill_chunk=3, costs=roofline()).generate(prompt, new)
    assert out.token_ids == truth
    assert len(set(out.stats.acceptance_lengths)) > 2  # blocks of several lengths were committed
    yield from proposed(drafter.found, deepest=2 + (shape.get("branch") == 1))


def checkpoint(folder: Path) -> Path:
    """A model's folder whose file holds its layers behind the model's own, in float32."""
    model, _ = made("glm4")
    model.float().save_pretrained(folder)
    model.double()
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: tensor.float() for name, tensor in published("glm4")[1].items()},
              folder / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    return folder


def test_a_checkpoint_brings_its_own_layers(tmp_path: Path) -> None:
    """With nothing to name: they are read from where the model was loaded from, and ``auto`` has them, too."""
    folder = checkpoint(tmp_path)
    target = TransformersTarget.from_pretrained(folder)
    prompt, plain = prompt_of(7), Engine(target, None, "none").generate(prompt_of(7), 12).token_ids
    for drafter in ({"name": "mtp", "min_chance": 0.0}, "auto"):
        engine = Engine(target, None, drafter, max_rows=16, costs=roofline())
        assert engine.generate(prompt, 12).token_ids == plain
    assert "mtp" in [part.name for part in engine.drafter.parts]
    assert own_layers(target) == folder
    name, lines = describe_weights(folder)
    assert name == "mtp"
    assert "layer, 1: numbered on" in lines[0]
    assert "glm4_moe: width 32, vocabulary 32" in lines[1]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("deepseek_v3", "there is none for this DeepseekV3ForCausalLM: its model_type 'deepseek_v3' is none of cohere"),
        ("glm4_moe", r"Glm4MoeForCausalLM is run by its own .* take a copy of it \(Engine.from_model\), or load"),
    ],
)
def test_a_model_that_no_description_runs_is_refused(kind: str, says: str, tmp_path: Path) -> None:
    """By its family, or as it is handed in; and ``auto`` does without its layers."""
    name, values = MODELS["glm4"]
    latent = {"head_dim": 8, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8}
    if kind == "deepseek_v3":
        name, values = "DeepseekV3", {**values, **latent, "qk_nope_head_dim": 8, "v_head_dim": 16}
    config = getattr(transformers, f"{name}Config")(**values)
    target = TransformersTarget(getattr(transformers, f"{name}ForCausalLM")(config).eval())
    folder = heads.write(tmp_path, *published("glm4"))
    with pytest.raises(CheckpointError, match=says):
        make_drafter({"name": "mtp", "head": str(folder)}, target)
    target.path = str(folder)
    assert own_layers(target) is None
    assert "mtp" not in [part.name for part in make_drafter("auto", target).parts]


def test_layers_that_do_not_fit_leave_auto_without_them(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.hnorm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    target = TransformersTarget.from_pretrained(folder)
    with pytest.raises(CheckpointError, match=r"layer 0 of format .* has no 'hnorm' weight"):
        make_drafter("mtp", target)
    with pytest.warns(SpecdecWarning, match="without the model's own layers: .*hnorm"):
        assert "mtp" not in [part.name for part in make_drafter("auto", target).parts]


def test_other_extra_tensors_are_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    # The config counts one such layer.
    tensors["model.layers.3.hnorm.weight"] = tensors["model.layers.2.hnorm.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 extra, such as model\.layers\.3"):
        TransformersTarget.from_pretrained(folder)


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", SHAPES, ids=["chain", "tree"])
@pytest.mark.parametrize("name", MODELS)
def test_guesses_are_those_of_transformers(name: str, shape: dict[str, Any], tmp_path: Path) -> None:
    guess = their_guess(name)
    for tokens, path, children in guesses(name, tmp_path, shape):
        likeliest = guess(tokens, path).topk(len(children)).indices.tolist()
        assert children == likeliest, (len(tokens), path)
