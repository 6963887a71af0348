"""Tiny models with random weights, one per family, and what each registered drafter needs to run on them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from drafters.kangaroo.adapter import Adapter, AdapterConfig, fitting_heads
from drafters.medusa.heads import HeadsConfig, MedusaHeads
from drafters.rest.datastore import build_datastore
from drafters.shared.fingerprint import fingerprint, known_tokenizer
from specdec.bench.own_model import own_model
from specdec.models.described_target import DescribedTarget
from specdec.models.transformers_target import TransformersTarget
from specdec.target import Target
from tests import heads, seam

WINDOW = 8
VOCAB = 32
BOS, PAD = 1, 0

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": BOS,
    "eos_token_id": None,  # tests of the end choose their own
    "pad_token_id": PAD,
}
# Untied: a random tied model repeats its last token for ever.
_GEMMA = {**BASE, "head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16, "tie_word_embeddings": False}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_SCALES = {"embedding_multiplier": 2.0, "logits_scaling": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3}

# Family -> prefix of its transformers classes, and its config. All have grouped heads, but GPT-NeoX.
_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "LlamaConfig", BASE),
    "mistral": ("Mistral", "MistralConfig", {**BASE, "sliding_window": WINDOW}),
    "qwen2": (
        "Qwen2",
        "Qwen2Config",
        {**BASE, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", "Qwen3Config", {**BASE, "head_dim": 16}),
    "gemma": ("Gemma", "GemmaConfig", {**BASE, "head_dim": 16, "tie_word_embeddings": False}),
    "gemma2": ("Gemma2", "Gemma2Config", {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}),
    "gemma3": ("Gemma3", "Gemma3TextConfig", {**_GEMMA, "layer_types": _MIXED}),
    "phi3": ("Phi3", "Phi3Config", {**BASE, "sliding_window": WINDOW}),
    "olmo2": ("Olmo2", "Olmo2Config", BASE),
    "starcoder2": ("Starcoder2", "Starcoder2Config", {**BASE, "sliding_window": WINDOW}),
    # With fewer rows in its MLP the text is one token for ever, and shows nothing.
    "neox": (
        "GPTNeoX",
        "GPTNeoXConfig",
        {**{k: v for k, v in BASE.items() if k != "num_key_value_heads"}, "intermediate_size": 64},
    ),
    "lfm2": (
        "Lfm2",
        "Lfm2Config",
        {
            **BASE,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_multiple_of": 8,
            "tie_word_embeddings": False,
        },
    ),
    "mixtral": ("Mixtral", "MixtralConfig", {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        "Qwen3MoeConfig",
        {
            **BASE,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
        },
    ),
    "mellum": (
        "Mellum",
        "MellumConfig",
        {
            **BASE,
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "layer_types": _MIXED,
            "sliding_window": WINDOW,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        "Glm4MoeConfig",
        {
            **BASE,
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    "olmoe": ("Olmoe", "OlmoeConfig", {**BASE, "hidden_size": 64, "num_experts": 6, "num_experts_per_tok": 2}),
    "granite": ("Granite", "GraniteConfig", {**BASE, **_SCALES}),
    "granitemoe": ("GraniteMoe", "GraniteMoeConfig", {**BASE, **_SCALES, "num_local_experts": 6}),
    "granitemoeshared": (
        "GraniteMoeShared",
        "GraniteMoeSharedConfig",
        {**BASE, **_SCALES, "num_local_experts": 6, "shared_intermediate_size": 24},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        "GraniteMoeHybridConfig",
        {
            **BASE,
            **_SCALES,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 40,
            "position_embedding_type": "rope",
            "layer_types": ["full_attention"] * 3,
            "mamba_n_heads": 4,
        },
    ),
    "gpt_oss": ("GptOss", "GptOssConfig", {**BASE, "head_dim": 16, "num_local_experts": 5, "sliding_window": WINDOW}),
    "ministral3": (
        "Ministral3",
        "Ministral3Config",
        {
            **{**BASE, "head_dim": 16, "sliding_window": WINDOW},
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 500.0, "llama_4_scaling_beta": 0.4},
                "original_max_position_embeddings": 4,
            },
        },
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        "Qwen2MoeConfig",
        {
            **{**BASE, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
            "shared_expert_intermediate_size": 40,
        },
    ),
    "hunyuan_v1_dense": ("HunYuanDenseV1", "HunYuanDenseV1Config", {**BASE, "head_dim": 16}),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1",
        "HunYuanMoEV1Config",
        {**BASE, "head_dim": 16, "num_experts": 6, "moe_topk": 2},
    ),
    "smollm3": ("SmolLM3", "SmolLM3Config", {**BASE, "no_rope_layers": [1, 0, 1], "tie_word_embeddings": False}),
    "exaone_moe": (
        "ExaoneMoe",
        "ExaoneMoeConfig",
        {
            **BASE,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "num_shared_experts": 2,
            "sliding_window": WINDOW,
            "layer_types": _MIXED,
        },
    ),
    "glm": ("Glm", "GlmConfig", {**BASE, "head_dim": 16, "attention_bias": False}),
    "glm4": ("Glm4", "Glm4Config", {**BASE, "head_dim": 16, "attention_bias": False}),
    "olmo3": ("Olmo3", "Olmo3Config", {**BASE, "sliding_window": WINDOW, "layer_types": _MIXED}),
    "exaone4": ("Exaone4", "Exaone4Config", {**BASE, "sliding_window": WINDOW, "layer_types": _MIXED}),
    "cohere": ("Cohere", "CohereConfig", {**BASE, "logit_scale": 0.3, "tie_word_embeddings": False}),
    "cohere2": (
        "Cohere2",
        "Cohere2Config",
        {**BASE, "logit_scale": 0.3, "tie_word_embeddings": False, "sliding_window": WINDOW, "layer_types": _MIXED},
    ),
    "seed_oss": ("SeedOss", "SeedOssConfig", {**BASE, "head_dim": 16, "attention_bias": False}),
    "ernie4_5": ("Ernie4_5", "Ernie4_5Config", {**BASE, "head_dim": 16, "tie_word_embeddings": False}),
}
MIXTURES = ("mixtral", "qwen3_moe")
"""Families with experts."""
_ALIKE = (
    *("gemma", "olmoe", "granite", "smollm3", "glm4", "olmo3", "exaone4", "cohere", "cohere2", "seed_oss", "ernie4_5"),
    *("mellum", "glm4_moe", "exaone_moe", "glm", "lfm2", "granitemoe", "granitemoeshared", "granitemoehybrid"),
    *("gpt_oss", "ministral3", "qwen2_moe", "hunyuan_v1_dense", "hunyuan_v1_moe"),
)
# Others have the parts of most of these; the last one's convolutions are run by its description alone.
FAMILIES = tuple(family for family in _FAMILIES if family not in _ALIKE)

OF_LAYERS = ("kangaroo", "layer_skip", "mtp")
"""Drafters that run some of the target's layers, or layers by its description, which ``modules`` has not."""

FUSED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "lfm2", "mixtral", "olmoe", "qwen3_moe")
"""Families that a spec describes; the others are run by their own forward."""

WINDOWS = {
    "llama": [None, None, None],
    "mistral": [WINDOW] * 3,
    "qwen2": [None, WINDOW, WINDOW],
    "qwen3": [None, None, None],
    "gemma2": [WINDOW, None, WINDOW],
    "gemma3": [WINDOW, None, WINDOW],
    "phi3": [WINDOW] * 3,
    "olmo2": [None, None, None],
    "starcoder2": [WINDOW] * 3,
    "neox": [None, None, None],
    "lfm2": [3, None, 3],
    "mixtral": [None, None, None],
    "qwen3_moe": [None, None, None],
}
"""Family -> the sliding window of each layer."""


def new_model(family: str, dtype: torch.dtype = torch.float64, *, seed: int = 1, **changes: Any) -> PreTrainedModel:
    """A fresh model of a family; ``changes`` go into its config.

    Large weights make the next token depend sharply on the text, and greedy text fall into loops that n-gram drafters
    can follow.
    """
    name, config_name, values = _FAMILIES[family]
    config = getattr(transformers, config_name)(**{**values, **changes})
    if dtype == torch.float64:
        config._experts_implementation = "eager"  # the others take no float64
    torch.manual_seed(seed)
    model: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    turns = {name: own for name, own in model.named_buffers() if name.endswith("inv_freq")}
    model.to(dtype)
    for name, own in turns.items():  # as in a model that was loaded in this dtype
        place, _, buffer = name.rpartition(".")
        setattr(model.get_submodule(place), buffer, own)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    return model


def model_of(family: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """The family's model, made once; do not change it."""
    return _model_of(family, dtype)


def target_of(family: str, dtype: torch.dtype = torch.float64, execution: str | None = None) -> Any:
    """The family's target, made once; run by its own modules, it is around the one model of the family.

    Unless told otherwise it is run as an engine would run it in float64, which takes half the time, and by its own
    modules in a precision in which ways to run a layer round differently.
    """
    chosen = execution or ("auto" if dtype == torch.float64 else "modules")
    return _target_of(family, dtype, "modules" if chosen == "auto" and family not in FUSED else chosen)


def target_for(model: PreTrainedModel, *, execution: str = "auto", attention: str = "auto") -> Any:
    """A target of a model: run by its own forward, or a copy of it by an executor; with the ``model``."""
    if execution == "modules":
        return TransformersTarget(model)
    target: Any = DescribedTarget.from_model(model, execution=execution, attention=attention)
    target.model = model
    return target


@cache  # which takes f(x) and f(x, default) for two calls, hence the functions above
@torch.inference_mode(False)
def _model_of(family: str, dtype: torch.dtype) -> PreTrainedModel:
    return new_model(family, dtype)


@cache
@torch.inference_mode(False)  # which a test may be in
def _target_of(family: str, dtype: torch.dtype, execution: str) -> Any:
    return target_for(_model_of(family, dtype), execution=execution)


def logits_of(target: Target, tokens: Any, chunk: int = 64) -> torch.Tensor:
    """[T, V] of a text that is run in chunks."""
    own, found = seam.text(target, rows=64), []
    with target.active():
        for first in range(0, len(tokens), chunk):
            part = tokens[first : first + chunk]
            output = own.run(part).logits
            assert output is not None
            found.append(output.clone())
            own.commit(range(len(part)))
    return torch.cat(found)


@cache
def prompt_of(size: int, seed: int = 0) -> tuple[int, ...]:
    """``size`` random tokens, none of them special."""
    generator = torch.Generator().manual_seed(1000 * seed + size)
    return tuple(torch.randint(BOS + 1, VOCAB, (size,), generator=generator).tolist())


def reference(model: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int, **options: Any) -> list[int]:
    """The new tokens of the model's own ``generate``, greedy unless told otherwise.

    The mask has to be given: without one, ``generate`` hides prompt tokens that equal the padding token.
    """
    ids = torch.tensor([list(prompt)], device=model.device)
    options = {"do_sample": False, **options}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, **options)
    new: list[int] = output[0, len(prompt) :].tolist()
    return new


@cache
def greedy(family: str, prompt: tuple[int, ...], max_new_tokens: int) -> list[int]:
    """``reference`` of the family's own model, computed once."""
    return reference(model_of(family), prompt, max_new_tokens)


def random_adapter(
    target: Target, folder: Path, *, exit_layer: int = 1, variant: str = "attention", seed: int = 0, **options: Any
) -> Adapter:
    """Write an untrained adapter that fits ``target``: it drafts badly, and exactness must not mind."""
    size = target.hidden_size
    config = AdapterConfig(
        hidden_size=size,
        vocab_size=target.vocab_size,
        exit_layer=exit_layer,
        heads=fitting_heads(size, 4),
        variant=variant,
        intermediate_size=2 * size if variant in ("layer", "mlp") else 0,
        target=fingerprint(target),
        **options,
    )
    adapter = Adapter(config)
    adapter.start_from(target, seed=seed)
    adapter.save_pretrained(folder)
    return adapter


def random_heads(
    target: Target,
    folder: Path,
    *,
    heads: int = 3,
    layers: int = 1,
    sees_root: bool = False,
    own_head: bool = False,
    draft_vocab: int = 0,
    seed: int = 0,
) -> MedusaHeads:
    """Write heads with random weights that fit ``target``: they draft badly, and exactness must not mind."""
    made = MedusaHeads(
        HeadsConfig(
            heads=heads,
            layers=layers,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            sees_root=sees_root,
            own_head=own_head,
            draft_vocab=draft_vocab,
            target=fingerprint(target),
        )
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    made.save_pretrained(folder)
    return made


Options = Mapping[str, Any]


def _kangaroo(target: Target, tmp: Path) -> list[Options]:
    """Untrained adapters of every variant: no ``eta``, siblings (``branch``), rounds of one guess (``eta`` 1)."""
    made: list[Options] = []
    half = target.vocab_size // 2
    for layer, variant, sizes, options in (
        (1, "attention", {"eta": None}, {}),
        (2, "layer", {"key_heads": 1, "draft_vocab": half}, {"branch": 3, "eta": 0.3}),
        (2, "mlp", {}, {"branch": 2, "eta": 1.0}),
        (1, "head", {"draft_vocab": half}, {"eta": 0.0, "gamma": 3}),
    ):
        folder = tmp / f"kangaroo-{variant}"
        random_adapter(target, folder, exit_layer=layer, variant=variant, **sizes)
        made.append({"adapter": str(folder), **options})
    return [*made, {"exit_layer": 2, "eta": 0.0, "gamma": 2}]


def _medusa(target: Target, tmp: Path) -> list[Options]:
    """Random heads that see the root and that do not, with and without matrices of their own; trees from a chain to
    what the room cannot hold.
    """
    made: list[Options] = []
    for number, (sizes, tree) in enumerate(
        (
            ({"heads": 3, "sees_root": True}, None),
            ({"heads": 2, "layers": 2, "own_head": True}, [[0, 1], [0], [2], [1], [2, 0], [2, 3]]),
            ({"heads": 5, "draft_vocab": target.vocab_size // 2}, "chain"),
        )
    ):
        folder = tmp / f"medusa-{number}"
        random_heads(target, folder, seed=number, **sizes)
        made.append({"heads": str(folder), "tree": tree})
    return made


def _draft_model(target: Target, tmp: Path) -> list[Options]:
    """A stranger, who is mostly wrong, and the target itself, all of whose drafts are right."""
    for name, model in (
        ("stranger", new_model("llama", target.dtype, seed=2, vocab_size=target.vocab_size)),
        ("itself", live(target)),
    ):
        model.save_pretrained(tmp / name)
    return [
        {"model": str(tmp / "stranger"), "widths": [3, 2], "min_confidence": 0.1, "check_tokenizer": False},
        {"model": str(tmp / "itself"), "tokens": 5, "min_confidence": 0.0},
        {"model": str(tmp / "itself"), "tokens": 3, "widths": [2, 2, 2], "min_confidence": 0.0},
    ]


def _eagle(target: Target, tmp: Path) -> list[Options]:
    """Random heads of every kind: trees, a chain, all depths at once; the target's embedding and head, or their own."""
    size, vocab = target.hidden_size, target.vocab_size
    made: list[Options] = []
    for number, ((config, tensors), options) in enumerate(
        (
            (heads.eagle3(size, vocab, draft=vocab // 2 + 1, norms="each", norm_output=True), {"min_chance": 0.0}),
            (heads.eagle1(size, vocab), {"tokens": 4, "rows": 9, "min_chance": 0.01}),
            (heads.peagle(size, vocab), {"branch": 3, "min_chance": 0.0}),
            (
                heads.eagle3(size, vocab, embedding=True, bias=True, norm_before_residual=True),
                {"branch": 1, "tokens": 3, "min_chance": 0.0},
            ),
            (heads.eagle3(size, vocab, norms="whole"), {}),
        )
    ):
        folder = heads.write(tmp / f"eagle-{number}", config, tensors)
        made.append({"head": str(folder), **options})
    return made


def _dflash(target: Target, tmp: Path) -> list[Options]:
    """Random heads of every kind: trees and a chain; a bias by the token before, a selector, windows."""
    size, vocab = target.hidden_size, target.vocab_size
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
    made: list[Options] = []
    for number, ((config, tensors), options) in enumerate(
        (
            (heads.dflash(size, vocab, kind="dspark", markov="vanilla", draft=vocab // 2 + 1), {"min_chance": 0.0}),
            (heads.dflash(size, vocab, **windows), {"rows": 9, "min_chance": 0.0}),
            (
                heads.dflash(size, vocab, kind="dflash2", selector_top_k=min(6, vocab)),
                {"branch": 3, "min_chance": 0.01},
            ),
            (heads.dflash(size, vocab, kind="dspark", markov="rnn", own=True), {"tokens": 3, "min_chance": 0.0}),
            (heads.dflash(size, vocab, taps=(2, 0)), {"branch": 1}),
        )
    ):
        folder = heads.write(tmp / f"dflash-{number}", config, tensors)
        made.append({"head": str(folder), **options})
    return made


def live(target: Any) -> PreTrainedModel:
    """The model that a target runs, or that it is of."""
    known: PreTrainedModel | None = getattr(target, "model", None)
    return own_model(target) if known is None else known


def mtp_layers(target: Target, layers: int = 1, *, seed: int = 0) -> tuple[dict[str, Any], heads.Tensors]:
    """Multi-token-prediction layers with random weights, of the target's own class of layers."""
    random, size, tensors = heads.Random(seed), target.hidden_size, heads.Tensors()
    decoder: Any = live(target).get_decoder()
    first = target.num_layers
    last: Any = next(layer for layer in reversed(decoder.layers) if not hasattr(layer, "conv"))
    norm = next(module for name, module in last.named_modules() if "norm" in name).state_dict()
    for number in range(first, first + layers):
        place = f"model.layers.{number}"
        tensors[f"{place}.eh_proj.weight"] = random.matrix(size, 2 * size, gain=2.0)
        shapes = {f"{part}.{kind}": (size,) for part in ("enorm", "hnorm", "shared_head.norm") for kind in norm}
        shapes |= {name: tuple(tensor.shape) for name, tensor in last.state_dict().items()}
        for name, shape in shapes.items():
            one = random.matrix(*shape) if len(shape) > 1 else random.norm(*shape)
            tensors[f"{place}.{name}"] = 0.1 * one if name.endswith("bias") else one
    return {"vocab_size": target.vocab_size, "num_hidden_layers": first}, tensors


def _mtp(target: Target, tmp: Path) -> list[Options]:
    """Random layers, one and several: trees, a chain, what is behind the last layer; and one that is run anew."""
    made: list[Options] = []
    for layers, options in (
        (1, {"min_chance": 0.0, "tokens": 3}),
        (3, {"branch": 3, "rows": 9, "tokens": 4, "min_chance": 0.01}),
        (1, {"branch": 1}),
    ):
        folder = heads.write(tmp / f"mtp-{len(made)}", *mtp_layers(target, layers, seed=len(made)))
        made.append({"head": str(folder), **options})
    config, tensors = mtp_layers(target, seed=5)
    names = {"eh_proj": "input_proj", "enorm": "token_layernorm", "hnorm": "hidden_layernorm"}
    names |= {"shared_head.norm": "final_layernorm", f"model.layers.{target.num_layers}.": "mtp_layers.0."}
    for theirs, name in names.items():
        tensors = {own.replace(theirs, name): tensor for own, tensor in tensors.items()}
    told = {"speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]}}
    config = {"speculators_model_type": "mtp", "transformer_layer_config": config, **told}
    folder = heads.write(tmp / "mtp-again", config, tensors)
    return [*made, {"head": str(folder), "rows": 8, "min_chance": 0.0}]


class Numerals:
    """A tokenizer for texts such as ``"3 1 4"``."""

    def __init__(self, vocab_size: int) -> None:
        self._size = vocab_size

    def __len__(self) -> int:
        return self._size

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(self._size)}


def _corpus(target: Target, tmp: Path) -> str:
    """A datastore of random tokens, few of them, so that every pair occurs."""
    generator = torch.Generator().manual_seed(0)
    for number in range(3):
        tokens = torch.randint(min(target.vocab_size, VOCAB), (1500,), generator=generator).tolist()
        (tmp / f"{number}.txt").write_text(" ".join(map(str, tokens)), encoding="utf-8")
    sources = [tmp / f"{number}.txt" for number in range(3)]
    store = build_datastore(sources, Numerals(target.vocab_size), tmp / "datastore")
    # Random tokens are of any tokenizer of this size, the target's too.
    (store.path / "meta.json").write_text(json.dumps({**store.meta, "tokenizer": known_tokenizer(target)}))
    return str(store.path)


def _suffix_automaton(target: Target, tmp: Path) -> list[Options]:
    return [{}, {"min_match": 1, "max_tokens": 12, "factor": 3.0, "corpus": _corpus(target, tmp)}]


def _rest(target: Target, tmp: Path) -> list[Options]:
    datastore = _corpus(target, tmp)
    return [{"datastore": datastore}, {"datastore": datastore, "min_suffix": 1, "rows": 20, "tokens": 4}]


def _union(target: Target, tmp: Path) -> list[Options]:
    """The default; and parts with every habit: probes, drafts of a model, taking up and forgetting rows."""
    model = {"name": "draft_model", **_draft_model(target, tmp)[2]}
    return [
        {},
        {
            "parts": ["jacobi", {"name": "lookahead", "window": 4, "verify_window": "none"}, model, "token_recycling"],
            "rows": 23,
        },
        {"parts": ["lookahead", {"name": "union", "parts": ["prompt_lookup", "jacobi"]}], "rows": 7, "memory": 0.0},
    ]


def _auto(target: Target, tmp: Path) -> list[Options]:
    """The default; and parts that learn from rows which others proposed or which were left out."""
    model = {"name": "draft_model", **_draft_model(target, tmp)[2]}
    parts = ["jacobi", {"name": "lookahead", "window": 4, "verify_window": "none"}, model, "union"]
    return [{}, {"parts": parts, "rows": 15, "memory": 0.5}]


DRAFTER_OPTIONS: dict[str, Callable[[Target, Path], Sequence[Options]]] = {
    "auto": _auto,
    "dflash": _dflash,
    "draft_model": _draft_model,
    "eagle": _eagle,
    "jacobi": lambda target, tmp: [{"guesses": 1}, {"guesses": 7}],
    "kangaroo": _kangaroo,
    "layer_skip": lambda target, tmp: [
        {"skip": [1], "min_chance": 0.0, "tokens": 3},
        {"skip": [0, 2], "rows": 9, "min_chance": 0.01},
        {"branch": 1, "min_chance": 0.0},
        {"exit_layer": 2, "tokens": 3},
    ],
    "lookahead": lambda target, tmp: [
        {},
        {"window": 5, "ngram": 5, "guesses": 5},
        {"window": 1, "ngram": 2},
        {"window": 3, "ngram": 3, "guesses": 3, "verify_window": "none", "pool_from_prompt": False},
        {"window": 4, "ngram": 4, "verify": False, "verify_window": "column"},
    ],
    "medusa": _medusa,
    "mtp": _mtp,
    "prompt_lookup": lambda target, tmp: [
        {},
        {"matches": 3, "max_ngram": 1, "tokens": 4},
        {"max_ngram": 2, "match": "leftmost", "overlap": False, "tokens": 10},
    ],
    "rest": _rest,
    "suffix_automaton": _suffix_automaton,
    "token_recycling": lambda target, tmp: [
        {},
        {"rows": 25, "persistent": True},
        {"successors": 2, "from_prompt": False},
    ],
    "union": _union,
}
"""Drafter -> the settings that the suites run it with; a drafter without an entry runs with its defaults.

A drafter that needs weights or a datastore gets an entry that writes them for this target into the folder.
"""


def settings_of(drafter: str, target: Target, tmp: Path) -> list[Options]:
    """Specs of a registered drafter, as ``Engine`` takes them."""
    options = DRAFTER_OPTIONS.get(drafter, lambda target, tmp: [{}])(target, tmp)
    return [{"name": drafter, **chosen} for chosen in options]
