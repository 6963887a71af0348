"""Target: the model whose text is decoded, as a walk over its decoder layers.

The walk calls *a layer*, whatever it is made of, with the block in place of a transformers cache. It is what makes
early exits, entries and taps possible without a copy of any modelling file. At load it is compared with the model's own
forward, and a model for which the two differ is refused by name.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specdec.attention import check_backend, layer_attention, mix
from specdec.block import Block
from specdec.cache import KVCache, LayerSpec
from specdec.draft import Draft, Entry
from specdec.errors import CheckpointError, ConfigError, NumericalError, TargetError
from specdec.lowering import (
    LoweredLayer,
    check_kernels,
    check_optimize,
    choose_kernels,
    lower,
    lower_head,
    lower_norm,
)
from specdec.lowering.pages import forget
from specdec.lowering.products import PRODUCTS, Part, Product
from specdec.rotary import Rotary
from specdec.static import Backend, StaticLayers, check_compiler

__all__ = ["FINAL", "Target", "TargetOutput", "TransformersTarget", "embedded_model"]

FINAL = -1
"""Tap for the hidden states after the last norm, which the head reads."""

_ATTENTION, _PROBE = "specdec", "specdec_probe"
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_RECURRENT = ("ssm_cfg", "state_size", "mamba_d_state", "conv_kernel", "lru_width")  # options of such layers alone
# Relative; transformers takes some softmaxes in float32 whatever the dtype, so float64 is checked to float32 rounding.
_ROUNDING = {torch.float64: 1e-5, torch.float32: 1e-3}
_NORMS = ("norm", "final_layer_norm", "final_layernorm")


def embedded_model() -> Path:
    """Folder of the small model inside the package, known as ``"tiny"``."""
    return Path(__file__).parent / "assets" / "tiny"


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """What one forward gave.

    Attributes:
        logits: [R, V] of the rows asked for, in the target's dtype; None where none were, or the walk left early.
        hidden: [T, D] residual stream after the last layer that ran.
        taps: hidden layer number -> [T, D] residual stream after that many layers; ``FINAL``: after the last norm.
    """

    logits: torch.Tensor | None
    hidden: torch.Tensor
    taps: dict[int, torch.Tensor] = field(default_factory=dict)


class Target(Protocol):
    """What engine and drafters need of a model."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    context_length: int
    eos_ids: frozenset[int]
    device: torch.device
    head_device: torch.device
    dtype: torch.dtype
    backend: str

    def new_cache(self, *, capacity: int, rows: int) -> KVCache:
        """An empty cache for a text of ``capacity`` tokens and forwards of up to ``rows`` rows."""

    def forward(
        self,
        block: Block,
        *,
        entry: Entry | None = None,
        exit_layer: int | None = None,
        taps: Collection[int] = (),
        rows: Sequence[int] | None = None,
    ) -> TargetOutput:
        """Run the block's rows through layers [entry.layer or 0, exit_layer or all).

        ``rows``: those whose logits are wanted; None for all, empty for none.
        """

    def active(self) -> Any:
        """A context manager inside which ``forward`` may be called."""

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of hidden states [..., D] that passed the last norm."""


class TransformersTarget:
    """An unmodified transformers decoder.

    Args:
        model: any ``...ForCausalLM`` whose layers are attention and MLP.
        attention: ``auto``, ``sdpa`` or ``split``, see :mod:`specdec.attention`.
        optimize: ``auto`` lowers the layers that :mod:`specdec.lowering` knows; ``off`` leaves all as they are.
        kernels: of lowered layers on a CPU. ``auto`` measures once per machine which one each shape gets; ``linear``,
            ``transposed`` and ``packed`` say it. With the latter two ``model`` itself still computes the same, but
            slowly if packed, and its linears' weights can no longer be changed; ``plain_model`` gives one as it was.
        compile: run steps as compiled graphs of static shapes (:mod:`specdec.static`), each compiled at its first use;
            a name is another backend of torch.compile. It needs ``optimize="auto"`` and a model whose layers are known.
        owned: nobody else holds the model's weights, so the pages of those that are repacked can go at once.

    Raises:
        ConfigError: an unknown choice, or ``compile`` without a compiler or for a model that it does not cover.
        TargetError: the model cannot be driven exactly; the message says which part.
        NumericalError: its own logits are NaN or infinite.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        attention: str = "auto",
        optimize: str = "off",
        kernels: str = "auto",
        compile: Backend = False,
        owned: bool = False,
    ) -> None:
        self.backend = check_backend(attention)
        check_optimize(optimize)
        check_kernels(kernels)
        model.train(False)
        self.model = model
        self.name = type(model).__name__
        config = model.config.get_text_config()
        self.config = config
        _refuse_unfit(self.name, config)
        self.decoder, self.layers, self.norm = _parts(self.name, model)
        self._layers = tuple(self.layers)  # indexing a ModuleList costs a microsecond per layer and step
        self.embedding: Any = model.get_input_embeddings()
        self.rotary: Any = getattr(self.decoder, "rotary_emb", None)
        if self.rotary is None:
            raise TargetError(f"{self.name} has no rotary_emb; specdec drives decoders with rotary positions")
        self.lm_head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self.softcap = getattr(config, "final_logit_softcapping", None)
        self.vocab_size = int(self.lm_head.weight.shape[0])
        self.hidden_size = int(config.hidden_size)
        self.num_layers = len(self.layers)
        self.context_length = _context_length(config)
        self.eos_ids = _eos_ids(model)
        self.device, self.dtype = _device(self.embedding), next(self.embedding.parameters()).dtype
        self.head_device = _device(self.lm_head)
        self._layer_types: list[str] | None = getattr(config, "layer_types", None)
        self._typed_rotary = "layer_type" in inspect.signature(self.rotary.forward).parameters
        self._angles = Rotary(self.rotary, config)
        self._norm: Callable[[torch.Tensor], torch.Tensor] = self.norm
        self._head: Product | None = None
        self._static: StaticLayers | None = None
        self._plain: weakref.ref[PreTrainedModel] | None = None
        layer_arguments = inspect.signature(self.layers[0].forward).parameters
        self._cache_argument = "layer_past" if "layer_past" in layer_arguments else "past_key_values"
        # Attention modules look their function up in their own config object; a layer's may be a sub-config.
        self._configs = {id(c): c for m in self.layers.modules() if (c := getattr(m, "config", None)) is not None}
        AttentionInterface.register(_ATTENTION, layer_attention)
        AttentionInterface.register(_PROBE, _note_layer)
        self.specs = self._self_check()
        backend = compile if isinstance(compile, bool | str) else getattr(compile, "__name__", type(compile).__name__)
        self.options = {"attention": attention, "optimize": optimize, "kernels": kernels, "compile": backend}
        if compile:
            check_compiler(compile, self.device)
        if optimize == "auto":
            self._lower("linear" if compile else kernels, owned)  # a compiler knows better than a packed layout
        if compile:
            self._compile(compile)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        device_map: str | dict[str, Any] | None = None,
        attention: str = "auto",
        optimize: str = "auto",
        kernels: str = "auto",
        compile: Backend = False,
        trust_remote_code: bool = False,
    ) -> TransformersTarget:
        """Load a checkpoint: ``"tiny"`` (the embedded model), a folder, or a hub id. Safetensors only.

        Raises:
            CheckpointError: no model there, a broken file, or tensors missing or left over.
            TargetError: a model that specdec cannot drive.
        """
        place = embedded_model() if str(path) == "tiny" else path
        try:
            config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
            _refuse_unfit(type(config).__name__.removesuffix("Config"), config.get_text_config())
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                place,
                config=config,
                dtype=dtype,
                device_map=device_map,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
            )
        except (OSError, SafetensorError, RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"cannot load a causal language model from {str(path)!r}: {_first_line(error)}; give 'tiny', a folder "
                "with config.json and *.safetensors, or a hub id that this machine can reach"
            ) from error
        model, info = loaded
        kinds = {"missing": "missing_keys", "extra": "unexpected_keys", "misshapen": "mismatched_keys"}
        broken = {kind: sorted(map(str, info[key])) for kind, key in kinds.items() if info.get(key)}
        if broken:
            what = "; ".join(f"{len(names)} {kind}, such as {names[0]}" for kind, names in broken.items())
            raise CheckpointError(
                f"the checkpoint {str(path)!r} does not fit {type(model).__name__}: tensors {what}; "
                "it was saved from another architecture or is incomplete"
            )
        if device is not None and device_map is None:
            model = model.to(device)
        return cls(model, attention=attention, optimize=optimize, kernels=kernels, compile=compile, owned=True)

    def new_cache(self, *, capacity: int, rows: int) -> KVCache:
        return KVCache(self.specs, capacity=capacity, rows=rows, static=self._static is not None)

    @contextmanager
    def active(self, attention: str = _ATTENTION) -> Iterator[None]:
        """While inside, the model's attention modules call specdec's function; afterwards the model is as it was."""
        former = [(config, config._attn_implementation) for config in self._configs.values()]
        try:
            for config, _ in former:
                config._attn_implementation = attention
            with torch.inference_mode():
                yield
        finally:
            for config, implementation in former:
                config._attn_implementation = implementation

    def forward(
        self,
        block: Block,
        *,
        entry: Entry | None = None,
        exit_layer: int | None = None,
        taps: Collection[int] = (),
        rows: Sequence[int] | None = None,
    ) -> TargetOutput:
        first, hidden = (0, self.embedding(block.tokens)[0]) if entry is None else (entry.layer, entry.hidden)
        last = self.num_layers if exit_layer is None else exit_layer
        found: dict[int, torch.Tensor] = {}
        arguments = {self._cache_argument: block, "use_cache": True, "block": block}
        hidden = self._walk(hidden, block, first, last, found, taps, arguments)
        if last < self.num_layers:
            return TargetOutput(None, hidden, found)
        if FINAL in taps:
            found[FINAL] = normed = self._norm(hidden)
        if rows is not None and not rows:
            return TargetOutput(None, hidden, found)
        chosen = normed if FINAL in taps else hidden
        if rows is not None:
            chosen = chosen[list(rows)]
        return TargetOutput(self.head(chosen if FINAL in taps else self._norm(chosen)), hidden, found)

    def _walk(
        self,
        hidden: torch.Tensor,
        block: Block,
        first: int,
        last: int,
        found: dict[int, torch.Tensor],
        taps: Collection[int],
        arguments: dict[str, Any],
    ) -> torch.Tensor:
        """[T, D] through layers [first, last), keeping what ``taps`` names in ``found``.

        ``arguments`` go to layers that are not lowered.
        """
        arguments["attention_mask"] = None
        types = self._layer_types if self._typed_rotary else None
        if types is None:
            cos, sin, signed = self._angles.of(block, hidden)
            if self._static is not None and self._static.fits(block):
                hidden, tapped = self._static.run(hidden, block, cos, signed, first, last, taps)
                found |= tapped if last not in taps else {**tapped, last: hidden}
                return hidden
            arguments["position_embeddings"] = (cos[None], sin[None])
            rotary, attention = {}, partial(mix, block)
        else:
            rotary = {kind: self.rotary(hidden[None], block.positions, kind) for kind in set(types[first:last])}
        for number in range(first, last):
            if number in taps:
                found[number] = hidden
            layer = self._layers[number]
            if isinstance(layer, LoweredLayer):
                hidden = layer(hidden, attention, cos, signed)
                continue
            if types is not None:
                arguments["position_embeddings"] = rotary[types[number]]
            hidden = layer(hidden[None], position_ids=block.positions, **arguments)[0]
        if last in taps:
            found[last] = hidden
        return hidden

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._head is None:
            logits: torch.Tensor = self.lm_head(hidden)
        else:
            logits = self._head(hidden.reshape(-1, self.hidden_size)).view(*hidden.shape[:-1], -1)
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def plain_model(self) -> PreTrainedModel:
        """The model as transformers made it: ``model`` itself, or where weights were repacked, a copy with its own."""
        if not any(isinstance(module, Part) for module in self.model.modules()):
            return self.model
        plain = self._plain() if self._plain is not None else None
        if plain is None:
            plain = copy.deepcopy(self.model)
            self._plain = weakref.ref(plain)  # callers share it, and it goes with the last of them
        return plain

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's parameters, sorted by transformers' names; repacked ones are brought back one at a time."""
        sources: dict[str, torch.Tensor | Part] = dict(self.model.named_parameters())
        for name, module in self.model.named_modules():
            if isinstance(module, Part):
                sources |= {
                    f"{name}.{kind}": module for kind in ("weight", "bias") if getattr(module, kind) is not None
                }
        for name in sorted(sources):
            source = sources[name]
            yield name, getattr(source, name.rsplit(".", 1)[-1]) if isinstance(source, Part) else source

    def _compile(self, backend: Backend) -> None:
        lowered = [layer for layer in self._layers if isinstance(layer, LoweredLayer)]
        if len(lowered) < len(self._layers) or len({spec.device for spec in self.specs}) > 1:
            raise ConfigError(
                f"compile needs all layers lowered and on one device; of {self.name}'s {len(self._layers)}, "
                f"{len(lowered)} are lowered: use optimize='auto' with a Llama, Mistral or Qwen model, or no compile"
            )
        self._static = StaticLayers(lowered, backend)

    def _lower(self, kernels: str, owned: bool) -> None:
        """Replace layers by their lean equivalents, each one compared with its original first."""
        lowered = [lower(layer, owned=owned) for layer in self._layers]
        head = lower_head(self.model, self.lm_head, self.embedding)
        weights = [weight for layer in lowered if layer is not None for weight in layer.weights]
        chosen = choose_kernels([*weights, *([head[0].weight] if head else [])], kernels)
        del weights
        layers: list[Any] = list(self._layers)
        for number, lean in enumerate(lowered):
            if lean is None:
                continue
            lean.use(chosen)
            if self._agrees(number, layers[number], lean):
                lean.install()
                layers[number] = lean
        self._layers = tuple(layers)
        self._norm = lower_norm(self.norm) or self.norm
        if head is not None:
            product, site = head
            kernel = chosen.get(tuple(product.weight.shape), "linear")
            self._head = PRODUCTS[kernel](product.weight, product.bias) if kernel != "linear" else product
            self._head.install([site])
            if owned and self._head is not product:
                forget(product.weight)
            self.lm_head = site.linear

    def _agrees(self, number: int, layer: nn.Module, lowered: LoweredLayer) -> bool:
        """Whether a lowered layer computes what its original does; if not, a warning says which layer stays."""
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(5, self.hidden_size, generator=generator, dtype=torch.float64)
        sample = hidden.to(self.specs[number].device, self.specs[number].dtype)
        what = f"{self.name}: layer {number} ({type(layer).__name__})"
        try:
            expected, got = (self._run_alone(number, candidate, sample) for candidate in (layer, lowered))
        except RuntimeError as error:
            warnings.warn(f"{what} cannot be lowered, and stays as it is: {_first_line(error)}", stacklevel=5)
            return False
        scale = float(expected.double().abs().max())
        off = float((expected.double() - got.double()).abs().max())
        if off <= _ROUNDING.get(self.dtype, 0.1) * scale:
            return True
        warnings.warn(
            f"{what} differs by {off:.3g} on values up to {scale:.3g} when lowered, and stays as it is", stacklevel=5
        )
        return False

    def _run_alone(self, number: int, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        """One layer over a prefix of two rows and a tree of three; ``hidden`` and the result are [5, D]."""
        former, self._layers = self._layers, (*self._layers[:number], layer, *self._layers[number + 1 :])
        try:
            with self.active():
                cache = KVCache(self.specs, capacity=8, rows=8)
                rows: list[TargetOutput] = []
                for draft in (Draft.chain((0, 0)), Draft((0, 0, 0), (-1, 0, 0))):
                    part = hidden[len(rows) * 2 :][: len(draft)]
                    block = Block.of(draft, cache, self.device, self.backend)
                    entry = Entry(number, part)
                    rows.append(self.forward(block, entry=entry, exit_layer=number + 1, taps=(number + 1,)))
                    cache.commit(range(len(draft)))
                return torch.cat([output.taps[number + 1] for output in rows])
        finally:
            self._layers = former

    def _self_check(self) -> list[LayerSpec]:
        """Compare the walk, over two blocks, the second of them a tree, with the model's own forward.

        Returns what each layer caches, as seen on the way.
        """
        generator = torch.Generator().manual_seed(0)
        high = min(self.vocab_size, self.embedding.weight.shape[0])
        tokens: list[int] = torch.randint(high, (9,), generator=generator).tolist()
        specs: list[LayerSpec] = []
        expected = self._own_logits(tokens)[4:]
        try:
            with self.active(_PROBE):
                block = Block(KVCache([], capacity=1, rows=1), tokens[:1], device=self.device)
                hidden = self.embedding(block.tokens)[0]
                self._walk(hidden, block, 0, self.num_layers, {}, (), {"use_cache": False, "note": specs.append})
            with self.active():
                cache = KVCache(specs, capacity=16, rows=16)
                self.forward(Block(cache, tokens[:4], device=self.device, backend=self.backend), rows=())
                cache.commit(range(4))
                # Below the root: a wrong sibling first, then the text, so that a row's place and depth differ.
                tree = Draft((tokens[4], tokens[0], *tokens[5:]), (-1, 0, 0, 2, 3, 4))
                walked = self.forward(Block.of(tree, cache, self.device, self.backend)).logits
        except (TypeError, AttributeError, RuntimeError, IndexError, ValueError) as error:
            raise TargetError(
                f"{self.name} cannot be walked layer by layer: {type(error).__name__}: {_first_line(error)}"
            ) from error
        assert walked is not None
        walked = walked[[0, 2, 3, 4, 5]]
        scale = float(expected.double().abs().max())
        if not math.isfinite(scale):
            raise NumericalError(
                f"{self.name}: the model's own logits are {scale} on a few tokens; the weights are broken, or "
                f"{self.dtype} is too narrow for them: use float32 or bfloat16"
            )
        off = float((walked.double() - expected.to(walked.device).double()).abs().max())
        bound = _ROUNDING.get(self.dtype, 0.1) * max(scale, 1e-3)
        if not off <= bound:
            raise TargetError(
                f"{self.name}: the layer walk differs from the model's own forward by {off:.3g} on logits up to "
                f"{scale:.3g} (at most {bound:.3g} is rounding); its architecture does something between the layers "
                "that specdec does not know, so it is refused rather than decoded wrongly"
            )
        return specs

    def _own_logits(self, tokens: list[int]) -> torch.Tensor:
        """[n, V] logits of the model's own forward."""
        ids = torch.tensor([tokens], device=self.device)
        try:
            with torch.inference_mode():
                logits: torch.Tensor = self.model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
        except (TypeError, AttributeError, RuntimeError, IndexError, ValueError) as error:
            raise TargetError(
                f"{self.name}: the model's own forward fails in {self.dtype} on {self.device}, without specdec: "
                f"{type(error).__name__}: {_first_line(error)}; mend its config, or load it with another dtype"
            ) from error
        return logits


def _note_layer(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    note: Callable[[LayerSpec], None] | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function that only notes what its layer will cache, [1, heads, 1, dim], and its window.

    Raises:
        TargetError: the layer keeps its arguments to itself, and ``note`` with them.
    """
    if note is None:
        raise TargetError(
            f"{type(module).__name__} is not handed the arguments that its decoder layer was given, so specdec's rows "
            "do not reach the attention; such models are not supported"
        )
    note(LayerSpec(key.shape[1], key.shape[-1], value.shape[-1], sliding_window, key.device, key.dtype))
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None


def _device(module: nn.Module) -> torch.device:
    """Where a module computes: beside its weights, or where accelerate brings weights that it has offloaded."""
    device = next(module.parameters()).device
    hook: Any = getattr(module, "_hf_hook", None)
    place = getattr(hook, "execution_device", None)
    return device if device.type != "meta" or place is None else torch.device(place)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _refuse_unfit(name: str, config: Any) -> None:
    """Raises TargetError for models whose state is not a list of keys and values per token."""
    odd = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    recurrent = [key for key in _RECURRENT if hasattr(config, key)]
    if odd or recurrent:
        raise TargetError(
            f"{name} has layers that specdec cannot roll back ({', '.join(odd or recurrent)}); recurrent and chunked "
            "layers keep no keys per token. Use a decoder with full or sliding-window attention"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise TargetError(f"{name} is an encoder-decoder; specdec drives decoder-only models")


def _parts(name: str, model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList, nn.Module]:
    """The decoder, its layers and its last norm."""
    decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
    if decoder is None or decoder is model:
        decoder = model.base_model
    layers = getattr(decoder, "layers", None)
    norm = next((getattr(decoder, name) for name in _NORMS if hasattr(decoder, name)), None)
    if not isinstance(layers, nn.ModuleList) or norm is None:
        raise TargetError(
            f"{name} is no decoder that specdec knows: {type(decoder).__name__} has no `layers` and last `norm`"
        )
    return decoder, layers, norm


def _context_length(config: Any) -> int:
    """Longest text in tokens. Where rotary frequencies depend on the length, the length up to which they do not."""
    longest = int(getattr(config, "max_position_embeddings", 1 << 20))
    rope = getattr(config, "rope_parameters", None) or {}
    scaled = rope.get("rope_type") in ("dynamic", "longrope")
    return int(rope.get("original_max_position_embeddings") or longest) if scaled else longest


def _eos_ids(model: PreTrainedModel) -> frozenset[int]:
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        ids = model.config.get_text_config().eos_token_id
    return frozenset(() if ids is None else [ids] if isinstance(ids, int) else map(int, ids))
