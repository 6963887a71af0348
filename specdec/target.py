"""Target: the model whose text is decoded, as a walk over its decoder layers.

The walk calls *a layer*, whatever it is made of, with the block in place of a transformers cache. It is what makes
early exits, entries and taps possible without a copy of any modelling file. At load :mod:`specdec.selfcheck` compares
it with the model's own forward, and a model for which the two differ is refused by name.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, PreTrainedModel

from specdec.attention import check_backend, layer_attention, mix
from specdec.block import Block
from specdec.cache import KVCache
from specdec.draft import Entry
from specdec.errors import ConfigError, TargetError
from specdec.lowering import LoweredLayer, check_kernels, check_optimize, lower_head, lower_layers, lower_norm
from specdec.lowering.parts import Part, Rows
from specdec.lowering.products import Product
from specdec.native.walk import NativeLayers
from specdec.pretrained import (
    context_length_of,
    decoder_parts,
    device_of,
    embedded_model,
    eos_ids_of,
    load_model,
    refuse_unfit,
)
from specdec.rotary import Rotary
from specdec.selfcheck import PROBE, agrees, native_agrees, note_layer, self_check
from specdec.static import Backend, StaticLayers, check_compiler

__all__ = ["FINAL", "Target", "TargetOutput", "TransformersTarget", "embedded_model"]

FINAL = -1
"""Tap for the hidden states after the last norm, which the head reads."""

_ATTENTION = "specdec"


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
        attention: ``auto``, ``sdpa`` or ``split``, see :mod:`specdec.attention`; the latter two rule out native layers.
        optimize: ``auto`` lowers the layers that :mod:`specdec.lowering` knows; ``off`` leaves all as they are.
        kernels: of lowered layers on a CPU. ``auto`` measures once per machine which one each shape gets; ``linear``,
            ``transposed``, ``packed`` and ``tiled`` say it. With the latter three ``model`` itself still computes the
            same, but slowly if packed or tiled, and its linears' weights can no longer be changed; ``plain_model``
            gives one as it was. Where all are tiled, the layers run in one native call (:mod:`specdec.native`).
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
        refuse_unfit(self.name, config)
        self.decoder, self.layers, self.norm = decoder_parts(self.name, model)
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
        self.context_length = context_length_of(config)
        self.eos_ids = eos_ids_of(model)
        self.device, self.dtype = device_of(self.embedding), next(self.embedding.parameters()).dtype
        self.head_device = device_of(self.lm_head)
        self._layer_types: list[str] | None = getattr(config, "layer_types", None)
        self._typed_rotary = "layer_type" in inspect.signature(self.rotary.forward).parameters
        self._angles = Rotary(self.rotary, config)
        self._norm: Callable[[torch.Tensor], torch.Tensor] = self.norm
        self._head: Product | None = None
        self._static: StaticLayers | None = None
        self._native: NativeLayers | None = None
        self._plain: weakref.ref[PreTrainedModel] | None = None
        layer_arguments = inspect.signature(self.layers[0].forward).parameters
        self._cache_argument = "layer_past" if "layer_past" in layer_arguments else "past_key_values"
        # Attention modules look their function up in their own config object; a layer's may be a sub-config.
        self._configs = {id(c): c for m in self.layers.modules() if (c := getattr(m, "config", None)) is not None}
        AttentionInterface.register(_ATTENTION, layer_attention)
        AttentionInterface.register(PROBE, note_layer)
        self.specs = self_check(self)
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
        model = load_model(path, dtype=dtype, device=device, device_map=device_map, trust_remote_code=trust_remote_code)
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
        hidden = self.walk(hidden, block, first, last, found, taps, arguments)
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

    def walk(
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
            whole = self._static or self._native
            if whole is not None and whole.fits(block):
                hidden, tapped = whole.run(hidden, block, cos, signed, first, last, taps)
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
        if self._head is None or hidden.requires_grad:  # our kernels know no gradients
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
            plain.tie_weights()
            self._plain = weakref.ref(plain)  # callers share it, and it goes with the last of them
        return plain

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's parameters, sorted by transformers' names; repacked ones are brought back one at a time."""
        sources: dict[str, torch.Tensor | Part | Rows] = dict(self.model.named_parameters())
        tied = any(isinstance(module, Rows) for module in self.model.modules())
        for name, module in self.model.named_modules():
            # A head that shares its weight with the embedding goes by the embedding's name, as in transformers.
            kinds = ("bias",) if tied and module is self.lm_head else ("weight", "bias")
            if isinstance(module, Part | Rows):
                sources |= {f"{name}.{kind}": module for kind in kinds if getattr(module, kind, None) is not None}
        for name in sorted(sources):
            source = sources[name]
            yield name, source if isinstance(source, torch.Tensor) else getattr(source, name.rsplit(".", 1)[-1])

    @property
    def native(self) -> bool:
        """Whether the layers run in one native call."""
        return self._native is not None

    @contextmanager
    def layer_by_layer(self) -> Iterator[None]:
        """While inside, no layers run in one native call."""
        native, self._native = self._native, None
        try:
            yield
        finally:
            self._native = native

    @contextmanager
    def replaced(self, number: int, layer: Any) -> Iterator[None]:
        """While inside, the walk runs ``layer`` in the place of layer ``number``."""
        former, self._layers = self._layers, (*self._layers[:number], layer, *self._layers[number + 1 :])
        try:
            with self.layer_by_layer():
                yield
        finally:
            self._layers = former

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
        head = lower_head(self.model, self.lm_head, self.embedding)
        layers, self._head = lower_layers(
            self._layers, head, kernels=kernels, owned=owned, agrees=partial(agrees, self)
        )
        self._layers = tuple(layers)
        # A backend that was asked for by name is torch's.
        self._native = NativeLayers.of(self._layers) if self.backend == "auto" else None
        if self._native is not None and not native_agrees(self):
            self._native = None
        self._norm = lower_norm(self.norm) or self.norm
        self.embedding, self.lm_head = self.model.get_input_embeddings(), self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
