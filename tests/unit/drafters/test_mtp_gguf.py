"""Multi-token-prediction layers of GGUF files: drafts as of the same checkpoint's folder, and files that lack parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from drafters.heads.mtp import convert_mtp
from drafters.heads.mtp_finding import own_layers
from drafters.shared.own_cache import Nodes
from specdec import Context, Draft, Engine, Observation, SamplingParams
from specdec.costs.curve import roofline
from specdec.decoder.names import CHOICE
from specdec.drafter import DrafterWrapper, DraftSession
from specdec.drafting.registry import describe_weights, make_drafter
from specdec.errors import CheckpointError, SpecdecWarning
from specdec.models.transformers_target import TransformersTarget
from specdec.native import library as native
from specdec.runners.block_weight import BlockWeight
from specdec.step.cache import KVCache
from specdec.step.step_io import StepInput
from tests.gguf_families import predicting_of, write_family, write_file
from tests.models import BASE, mtp_layers, prompt_of, target_for

Arrays = dict[str, np.ndarray]
_EXACT = {"rms_norm_eps": 2.0**-17, "head_dim": 16}  # a header holds float32
_MOE = {
    "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True, "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}  # fmt: skip
_RULES = {"exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 3}, "glm4": {"attention_bias": True}}
KINDS = {"glm4moe": "Glm4Moe", "glm4": "Glm4", "exaone4": "Exaone4"}
"""llama.cpp's name of an architecture that may have such layers -> prefix of transformers' classes."""
NEXTN = "blk.3.nextn."
SHAPES: tuple[dict[str, Any], ...] = ({"branch": 1, "tokens": 4}, {"rows": 12, "tokens": 3})  # a chain, and a tree


@cache
def tensors_of(kind: str, layers: int) -> tuple[Any, Mapping[str, torch.Tensor]]:
    """A random model's config, and its tensors by transformers' names, with layers behind the model's own."""
    values = {**BASE, **_EXACT, **(_MOE if kind == "glm4moe" else _RULES[kind])}
    torch.manual_seed(1)
    model = getattr(transformers, f"{KINDS[kind]}ForCausalLM")(
        getattr(transformers, f"{KINDS[kind]}Config")(**values, num_nextn_predict_layers=layers)
    ).eval()
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
            elif name.endswith(("norm.weight", "bias", CHOICE)):
                parameter.normal_("norm" in name, 0.2)
    behind = mtp_layers(target_for(model), layers)[1]
    for number in range(3, 3 + layers):  # which published files hold twice
        behind[f"model.layers.{number}.embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
        behind[f"model.layers.{number}.shared_head.head.weight"] = model.get_output_embeddings().weight.detach().clone()
    return model, {**model.state_dict(), **behind}


def folder_of(path: Path, kind: str, layers: int) -> Path:
    model, tensors = tensors_of(kind, layers)
    model.save_pretrained(path)
    saved = load_file(path / "model.safetensors")
    places = "model.layers.3.", "model.layers.4."
    behind = {name: tensor for name, tensor in tensors.items() if name.startswith(places)}
    save_file(saved | behind, path / "model.safetensors", metadata={"format": "pt"})
    return path


def arrays_of(kind: str, layers: int) -> Arrays:
    """The same tensors by llama.cpp's names, as its converter's table has them."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[{"glm4moe": "GLM4_MOE"}.get(kind, kind.upper())], 3 + layers)
    around, found = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM4_MOE, 3 + layers), Arrays()
    for name, tensor in tensors_of(kind, layers)[1].items():
        place, _, part = name.replace(CHOICE, "e_score_correction.bias").rpartition(".")
        own = {f"{place}.{part}": tensor}
        if part == "gate_up_proj":
            halves = zip(("gate_proj", "up_proj"), tensor.chunk(2, 1), strict=True)
            own = {f"{place}.{one}.weight": half for one, half in halves}
        elif part == "down_proj":
            own = {f"{name}.weight": tensor}
        for full, numbers in own.items():
            stem, _, end = full.rpartition(".")
            found[f"{names.get_name(stem) or around.get_name(stem)}.{end}"] = numbers.numpy()
    return found


def header_of(kind: str, layers: int) -> dict[str, Any]:
    config: Any = tensors_of(kind, layers)[0].config
    said = {
        "context_length": 256, "block_count": 3 + layers, "nextn_predict_layers": layers, "embedding_length": 32,
        "feed_forward_length": 48, "attention.head_count": 4, "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 2.0**-17, "attention.key_length": 16, "attention.value_length": 16,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "rope.dimension_count": int(16 * config.rope_parameters.get("partial_rotary_factor", 1.0)),
    }  # fmt: skip
    experts = {
        "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32, "expert_shared_count": 1,
        "expert_weights_scale": 1.5, "expert_weights_norm": True, "expert_gating_func": 2,
        "leading_dense_block_count": 1,
    }  # fmt: skip
    return {**said, **(experts if kind == "glm4moe" else {})}


def file_of(
    path: Path, kind: str, layers: int, change: Callable[[Arrays], object] = lambda _: None, **said: object
) -> Path:
    arrays = arrays_of(kind, layers)
    change(arrays)
    return write_file(path, kind, header_of(kind, layers) | said, arrays)


def target_in(place: Path, dtype: str = "float32") -> Any:
    target: Any = TransformersTarget.from_pretrained(place, dtype=dtype)
    target.eos_ids = frozenset()  # a file has an end, and a folder none
    return target


class Kept(DrafterWrapper):
    """Keeps what a drafter proposes."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.drafts: list[tuple[Any, ...]] = []

    def start(self, context: Context) -> KeptSession:
        return KeptSession(self.inner.start(context), self.drafts)


class KeptSession:
    def __init__(self, inner: DraftSession, drafts: list[tuple[Any, ...]]) -> None:
        self._inner, self._drafts = inner, drafts

    def propose(self, row_budget: int) -> Draft:
        draft = self._inner.propose(row_budget)
        self._drafts.append(([*draft.tokens], [*draft.parents], [*draft.hints.chances]))
        return draft

    def observe(self, seen: Observation) -> None:
        self._inner.observe(seen)


def drafted(target: Any, options: Mapping[str, Any], sampling: Any = None) -> tuple[list[int], list[tuple[Any, ...]]]:
    """A text, and all drafts of it."""
    drafter = Kept(make_drafter({"name": "mtp", "min_chance": 0.0, **options}, target))
    engine = Engine(target, None, drafter, max_rows=24, prefill_chunk=3, costs=roofline())
    return engine.generate(prompt_of(7), 24, sampling=sampling).token_ids, drafter.drafts


@pytest.mark.few(1)
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_folder(kind: str, layers: int, tmp_path: Path) -> None:
    """Token by token, with parents and chances, and texts are those of plain decoding."""
    folder, file = folder_of(tmp_path / "folder", kind, layers), file_of(tmp_path / "a.gguf", kind, layers)
    targets = [target_in(folder), target_in(file)]
    for sampling in (None, SamplingParams(temperature=1.0, seed=1)):
        plain = Engine(targets[1], None, "none").generate(prompt_of(7), 24, sampling=sampling).token_ids
        for shape in SHAPES:
            (text, drafts), (own_text, own_drafts) = (drafted(target, shape, sampling) for target in targets)
            assert own_drafts == drafts
            assert own_text == text == plain
            assert max(len(tokens) for tokens, *_ in own_drafts) > 3
    drawing = SamplingParams(temperature=1.0, seed=1, acceptance="reject")
    drawn = [drafted(target, SHAPES[1], drawing) for target in targets]
    assert drawn[0] == drawn[1]  # with children that are drawn, too
    given, alone = drafted(targets[0], {**SHAPES[0], "head": str(file)}), drafted(targets[0], SHAPES[0])
    assert given == alone  # a file's layers for a folder's model


def guess(target: Any, head: Path) -> torch.Tensor:
    """[8, V] the first layer's logits for fixed hidden states and tokens."""
    step = make_drafter({"name": "mtp", "head": str(head)}, target).step
    random = torch.Generator().manual_seed(4)
    states = torch.randn(8, target.hidden_size, generator=random).to(target.dtype)
    rows = StepInput.of(KVCache(step.specs[:1], capacity=8, rows=8), [3, 1, 4, 1, 5, 9, 2, 6])
    (found,) = step.stages[0]([Nodes(rows, states, asked=8)])
    return found.logits


def changed(name: str, factor: float) -> Callable[[Arrays], object]:
    """One tensor in another file: turned round, so that no scale undoes it."""
    return lambda arrays: arrays.update({name: np.ascontiguousarray(factor * arrays[name][::-1])})


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("own", "of_model"),
    [
        ("shared_head_norm", "output_norm.weight"),
        ("embed_tokens", "token_embd.weight"),
        ("shared_head_head", "output.weight"),
    ],
)
def test_what_a_layer_has_none_of_its_own_is_the_models(own: str, of_model: str, tmp_path: Path) -> None:
    """As in llama.cpp; and a layer's own one counts."""
    name = f"{NEXTN}{own}.weight"
    like = lambda arrays: arrays.update({name: arrays[of_model]})  # noqa: E731
    plain = target_in(file_of(tmp_path / "plain.gguf", "glm4moe", 1))
    without = guess(plain, file_of(tmp_path / "none.gguf", "glm4moe", 1, lambda arrays: arrays.pop(name)))
    assert torch.equal(without, guess(plain, file_of(tmp_path / "same.gguf", "glm4moe", 1, like)))
    other = file_of(tmp_path / "other.gguf", "glm4moe", 1, changed(of_model, 2.0))
    own_one = guess(plain, file_of(tmp_path / "own.gguf", "glm4moe", 1, changed(name, 2.0)))
    assert not torch.equal(own_one, guess(plain, Path(plain.path)))
    if own != "shared_head_norm":  # a model with that part, which its layer's own one is, too
        shared = file_of(tmp_path / "shared.gguf", "glm4moe", 1, lambda arrays: both_changed(arrays, name, of_model))
        assert torch.equal(own_one, guess(target_in(other), shared))


def both_changed(arrays: Arrays, *names: str) -> None:
    for name in names:
        changed(name, 2.0)(arrays)


@pytest.mark.slow
def test_quantised_blocks_stay_what_they_are(tmp_path: Path) -> None:
    """And their drafts are those of the numbers that they stand for."""
    experts = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    types = {f"blk.3.{name}.weight": "Q8_0" for name in ("attn_q", "ffn_up_shexp", *experts)}
    types |= {f"{NEXTN}{name}.weight": "Q8_0" for name in ("eh_proj", "shared_head_norm")}
    arrays, said = arrays_of("glm4moe", 1), header_of("glm4moe", 1)
    file = write_file(tmp_path / "a.gguf", "glm4moe", said, arrays, types=types)
    kind = gguf.GGMLQuantizationType.Q8_0
    plain = {name: gguf.quants.dequantize(gguf.quants.quantize(arrays[name], kind), kind) for name in types}
    target = target_in(file)
    if native.library() is not None:
        weights = make_drafter("mtp", target).step._weights
        assert isinstance(weights.joins[0], BlockWeight)
        assert isinstance(weights.layers[0].mlp.each[0].down, BlockWeight)
    dense = target_in(write_file(tmp_path / "b.gguf", "glm4moe", said, arrays | plain))
    for shape in SHAPES:
        found, wanted = drafted(target, shape), drafted(dense, shape)
        assert found[0] == wanted[0]
        assert [draft[:2] for draft in found[1]] == [draft[:2] for draft in wanted[1]]


def test_a_file_of_these_layers_alone(tmp_path: Path) -> None:
    """Beside the model's, as llama.cpp's converter writes them; it is no model, and says what it is for."""

    def alone(arrays: Arrays) -> None:
        for name in [name for name in arrays if name.startswith(("blk.0.", "blk.1.", "blk.2."))]:
            del arrays[name]

    whole, file = file_of(tmp_path / "a.gguf", "glm4moe", 1), file_of(tmp_path / "mtp.gguf", "glm4moe", 1, alone)
    target = target_in(whole)
    assert drafted(target, {**SHAPES[1], "head": str(file)}) == drafted(target, SHAPES[1])
    with pytest.raises(CheckpointError, match=r"prediction alone, from blk\.3 on, and no model; .* as mtp\.head"):
        target_in(file)
    assert "layer, 1: numbered on" in describe_weights(file)[1][0]
    with pytest.raises(CheckpointError, match="only folders are converted"):
        convert_mtp(file, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop(f"{NEXTN}enorm.weight"), r"there is no blk\.3\.nextn\.enorm\.weight among its tensors"),
        (lambda a: a.pop("blk.3.ffn_up_exps.weight"), r"4 missing, such as blk\.3\.ffn_up_exps\.0\.weight"),
        (lambda a: a.pop("blk.3.attn_q.weight"), r"1 missing, such as blk\.3\.attn_q\.weight"),
        (lambda a: a.update({"blk.3.more.weight": np.ones(2)}), r"1 extra, such as blk\.3\.more\.weight"),
        (
            lambda a: a.update({f"{NEXTN}eh_proj.weight": np.ones((32, 32))}),
            r"blk\.3\.nextn\.eh_proj\.weight, \[32, 32\] in place of \[32, 64\]",
        ),
        (
            lambda a: a.update({f"{NEXTN}hnorm.weight": np.full(32, np.nan)}),
            r"blk\.3\.nextn\.hnorm\.weight holds NaN or infinity",
        ),
        (
            lambda a: [a.pop(name) for name in [*a] if name.startswith("blk.3.")],
            r"the last 1 of its layers are such layers, and there is no blk\.3\.nextn\.enorm\.weight",
        ),
    ],
    ids=["norm", "experts", "queries", "left over", "shape", "NaN", "all"],
)
def test_layers_that_lack_parts_are_refused_by_name(
    change: Callable[[Arrays], object], message: str, tmp_path: Path
) -> None:
    """The model runs without them, and ``auto`` says why it does."""
    target = target_in(file_of(tmp_path / "a.gguf", "glm4moe", 1, change))
    with pytest.raises(CheckpointError, match=message):
        make_drafter("mtp", target)
    with pytest.warns(SpecdecWarning, match=f"without the model's own layers: .*{message}"):
        parts = [part.name for part in make_drafter("auto", target).parts]
    assert "mtp" not in parts


def test_files_without_layers_say_so(tmp_path: Path) -> None:
    target = target_in(file_of(tmp_path / "a.gguf", "glm4", 0))
    assert own_layers(target) is None
    with pytest.raises(CheckpointError, match="was loaded from has no multi-token-prediction layers; give a folder or"):
        make_drafter("mtp", target)
    with pytest.raises(CheckpointError, match="nextn_predict_layers 0, or nothing of it"):
        make_drafter({"name": "mtp", "head": target.path}, target)
    half = file_of(tmp_path / "half.gguf", "glm4", 2, lambda a: [a.pop(n) for n in [*a] if n.startswith("blk.4.")])
    with pytest.raises(CheckpointError, match=r"says glm4\.block_count 5 and has tensors of 4 layers"):
        target_in(half)
    wide = write_family(tmp_path / "wide.gguf", "glm4", {"block_count": 4, "nextn_predict_layers": 1},
                        predicting_of("glm4"))  # fmt: skip
    with pytest.raises(CheckpointError, match="their width is 64, the model's is 32"):
        make_drafter({"name": "mtp", "head": str(wide)}, target)
