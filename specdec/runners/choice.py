"""Choice: which runner a model gets, decided once by the time of whole steps.

``auto`` takes ``native`` where the library can run the model, unless its decoding steps are slower than ``fused`` by
more than noise. On a tie native wins, as its results do not depend on other rows. Both are timed once per machine,
model, dtype and number of threads, and their curves are kept (:mod:`specdec.costs.measuring`). A model object that the
user passed is run by its own forward unless a runner is named, as other runners hold its weights a second time.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from types import ModuleType
from typing import Any

import torch
from torch import nn

from specdec.errors import SpecdecWarning, TargetError, first_line
from specdec.runners.cuda import CudaLayer, CudaRunner
from specdec.runners.cuts import ChosenCuts
from specdec.runners.graphs import CudaRecorder
from specdec.runners.known_layers import KnownHead, KnownLayer, UnknownModule, in_blocks
from specdec.runners.layers import FusedLayer, LayerByLayer, ModuleLayer
from specdec.runners.linear import ModuleRef, PackedModule
from specdec.runners.memory_pages import FilePages
from specdec.runners.native import NativeRunner, why_not
from specdec.runners.rotary import Rotary
from specdec.runners.runner import LayerRunner
from specdec.step import device_copies

__all__ = ["TIMED_ROWS", "Plan", "RunnerMaker", "choose_runner"]

TIMED_ROWS = (1, 8)
"""Rows of the steps by which runners are compared: a plain one, and a small tree."""

# Native steps may take this much longer before fused ones are taken: what two minima of a busy machine can differ by.
_MARGIN = 1.25
# Bytes of weights. A smaller model is all overhead, which native has least of; a larger one waits for memory, which
# native reads at the limit, and a comparison would take long.
_SMALL, _LARGE = 1 << 20, 1 << 31

Times = Mapping[str, list[float]]  # runner -> seconds of steps of TIMED_ROWS rows


@dataclass(frozen=True, slots=True)
class Plan:
    """A runner, why it was taken, and why the others were not."""

    runner: LayerRunner
    reason: str
    others: Mapping[str, str]


class RunnerMaker:
    """Makes the runners of one model.

    Args:
        model: whose layers are to be run.
        decoder: the module that holds them.
        layers, norm: of the decoder.
        config: of the decoder's texts.
        owned: the target alone holds the model, so its weights may be laid out anew.
    """

    def __init__(
        self, model: Any, decoder: Any, layers: nn.ModuleList, norm: nn.Module, config: Any, *, owned: bool
    ) -> None:
        self.model, self.layers, self.norm, self.owned = model, layers, norm, owned
        self.rotary = Rotary(decoder.rotary_emb, config)
        self._holders = _holders(model, layers, (norm, model.get_input_embeddings(), model.get_output_embeddings()))
        self._kinds = getattr(config, "layer_types", None) if self.rotary.by_kind else None
        self._longest = int(getattr(config, "max_position_embeddings", None) or 1)
        arguments = inspect.signature(layers[0].forward).parameters
        self._cache_argument = "layer_past" if "layer_past" in arguments else "past_key_values"

    @cached_property
    def known(self) -> list[KnownLayer | UnknownModule]:
        """Each layer as it was read, or why only its own module can run it."""
        found: list[KnownLayer | UnknownModule] = []
        for number, layer in enumerate(self.layers):
            try:
                found.append(KnownLayer.of(layer, number))
            except UnknownModule as unread:
                found.append(unread)
        return found

    @property
    def _fusible(self) -> list[KnownLayer | UnknownModule]:
        """The same for fused layers, which know Llama's alone."""
        if self.rotary.by_kind:
            return [UnknownModule("rotary positions differ by layer")]
        return [
            UnknownModule(f"layer {layer.number} is a {type(layer.module).__name__}")
            if isinstance(layer, KnownLayer) and not layer.like_llama
            else layer
            for layer in self.known
        ]

    def why_not(self, name: str) -> str | None:
        """Why ``fused`` or ``native`` cannot run this model, or None."""
        if name == "fused":
            if any(map(in_blocks, self.layers.modules())):
                return "fused layers multiply dense weights, and these are quantised blocks"
            if any(isinstance(layer, KnownLayer) for layer in self._fusible):
                return None
            return f"fused layers are Llama-like ones, and {self._fusible[0]}"
        unread = [layer for layer in self.known if isinstance(layer, UnknownModule)]
        if unread:
            return f"native layers need all layers to be like Llama's or Gemma's, and {unread[0]}"
        known = [layer for layer in self.known if isinstance(layer, KnownLayer)]
        if self.rotary.by_kind and not self.rotary.fixed:
            return "native layers read rotary positions from a table, and here they depend on a text's length"
        like = torch.empty(1, 1, device=next(self.layers.parameters()).device)
        where = torch.zeros(1, 1, dtype=torch.long, device=like.device)
        rotated = {self.rotary.compute(like, where, kind)[0].shape[-1] for kind in set(self._kinds or [None])}
        return why_not(known, min(rotated))

    def make(self, name: str) -> LayerRunner:
        """``fused`` or ``native``, where ``why_not`` does not rule it out; any other name runs the own modules."""
        if name == "native":
            known = [layer for layer in self.known if isinstance(layer, KnownLayer)]
            head = KnownHead.of(self.model, self.model.get_output_embeddings(), self.model.get_input_embeddings())
            return NativeRunner(
                self.model,
                known,
                head,
                norm=self.norm,
                rotary=self.rotary,
                kinds=self._kinds,
                holders=self._holders,
                owned=self.owned,
            )
        layers: list[Any] = [self.module_layer(number) for number in range(len(self.layers))]
        modules: list[nn.Module] = []
        files = FilePages() if self.owned else None
        if name == "fused" and (kernels := self._kernels()) is not None:
            known = [layer for layer in self._fusible if isinstance(layer, KnownLayer)]
            modules = [module for layer in known for module in layer.module.modules()]
            weight = next(self.layers.parameters())
            cuts = ChosenCuts(kernels, weight.device, weight.dtype)
            cuda = [CudaLayer(layer, files, kernels, cuts) for layer in known]
            recorder = CudaRecorder(weight.device)
            return CudaRunner(cuda, recorder, kernels, self._longest, cuts, **self._parts(modules))
        if name == "fused":
            for layer in self._fusible:
                if isinstance(layer, KnownLayer):
                    layers[layer.number] = FusedLayer(layer, files)
                    modules += layer.module.modules()
        return self.of_layers(name, layers, modules)

    def of_layers(self, name: str, layers: list[Any], modules: list[nn.Module]) -> LayerByLayer:
        """A runner of these layers."""
        return LayerByLayer(name, layers, **self._parts(modules))

    def _parts(self, modules: list[nn.Module]) -> dict[str, Any]:
        return {
            "embedding": self.model.get_input_embeddings(),
            "norm": self.norm,
            "head": self.model.get_output_embeddings(),
            "rotary": self.rotary,
            "holders": self._holders,
            "modules": modules,
        }

    def _kernels(self) -> ModuleType | None:
        """Triton's kernels, where all layers are known, on one CUDA device and in no more than full precision."""
        weights = {(weight.device, weight.dtype) for weight in self.layers.parameters()}
        known = [layer for layer in self._fusible if isinstance(layer, KnownLayer)]
        if len(weights) > 1 or len(known) < len(self.layers):
            return None
        ((device, dtype),) = weights
        if device.type != "cuda" or dtype == torch.float64:
            return None
        shapes = {(layer.query_heads, layer.key_heads, layer.head_dim, bool(layer.head_norms)) for layer in known}
        return layer_kernels(device, dtype, frozenset(shapes))

    def module_layer(self, number: int, kind: type[ModuleLayer] = ModuleLayer, **arguments: Any) -> ModuleLayer:
        """A layer that is run by its own module."""
        of_kind = None if self._kinds is None else self._kinds[number]
        return kind(self.layers[number], of_kind, self._cache_argument, **arguments)

    def unpack(self) -> None:
        """Give a model that is owned its own linears back, where packed ones were put."""
        for owner in list(self.model.modules()):
            for name, child in list(owner.named_children()):
                if isinstance(child, PackedModule):
                    ModuleRef(owner, name).put(copy.deepcopy(child))
        self.model.tie_weights()
        self.__dict__.pop("known", None)  # it names the modules of before


def _holders(model: nn.Module, layers: nn.ModuleList, others: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules in which these hang, from the model down; the list of layers is one of them."""
    parts = {*map(id, others), *map(id, layers)}
    paths = [name for name, module in model.named_modules() if id(module) in parts]
    above = {name[:end] for name in paths for end in (0, *(at for at, sign in enumerate(name) if sign == "."))}
    return [module for name, module in model.named_modules() if name in above]


@cache
def layer_kernels(
    device: torch.device, dtype: torch.dtype, shapes: frozenset[tuple[int, int, int, bool]]
) -> ModuleType | None:
    """The Triton kernels of layers, tried once on these shapes; None, with a warning, if they are missing or fail.

    ``shapes``: query heads, key heads, their width, and whether heads are normed.
    """
    try:
        kernels = importlib.import_module("specdec.runners.kernels.layer")
        rows = torch.zeros(1, 64, dtype=dtype, device=device)
        kernels.gate(kernels.add_norm(rows, rows, rows[0], 1e-6)[1])
        counts = torch.zeros(3, dtype=torch.long, device=device)  # no row is stored
        where = {
            "counts": counts,
            "table": torch.ones(1, 3 if dtype == torch.float32 else 2, dtype=torch.long, device=device),
        }
        where |= {"places": counts[:1], "closure": torch.zeros(1, 1, dtype=torch.bool, device=device)}
        where["tokens"] = counts[:1]
        tables = torch.full((2,), device_copies.address(rows), device=device)
        kernels.look_up(where, tables, rows.shape[1], rows, rows)
        for query_heads, key_heads, width, normed in shapes:
            heads = torch.zeros(1, (query_heads + 2 * key_heads) * width, dtype=dtype, device=device)
            cos_sin, norms = heads[:, :width], (heads[0], heads[0], 1e-6) if normed else None
            shape = query_heads, key_heads, width
            query = kernels.turn_and_store(heads, cos_sin, cos_sin, counts[:1], norms, where, 0, shape)
            where["paths"] = kernels.paths(where)
            kernels.step_attention(query, where, 0, key_heads, None, 1.0, 1)
        where |= {"draws": counts[:2], "above": counts[:1]}
        kernels.walk(kernels.pick(rows, where), where, None, rows)
        if dtype != torch.float32:
            kernels.product(kernels.product(rows, rows, None, whole=True), rows[:, :1], None)
    except Exception as error:  # the compiler's, the driver's and the linker's share no class but this
        warnings.warn(
            f"Triton's kernels for layers are not used, and torch's operations do their work, more slowly: "
            f"{type(error).__name__}: {first_line(error)}",
            SpecdecWarning,
            stacklevel=2,
        )
        return None
    return kernels


def choose_runner(
    maker: RunnerMaker,
    execution: str,
    *,
    modules: Callable[[], LayerRunner],
    differs: Callable[[LayerRunner], str | None],
    kept: Callable[[str], list[float] | None],
    seconds: Callable[[LayerRunner], list[float] | None],
) -> Plan:
    """Make the runner that ``execution`` asks for: ``auto``, ``native`` or ``fused``.

    Args:
        modules: makes the runner of the model's own forward.
        differs: returns how a runner's logits differ from the model's, or None.
        kept: returns kept seconds of whole steps of ``TIMED_ROWS`` rows for a runner's name, or None.
        seconds: the same for a runner, measured now and kept; None if the machine was too busy.

    Raises:
        TargetError: the named runner computes something else than the model.
    """
    if execution != "auto":
        runner = maker.make(execution)
        if (off := differs(runner)) is not None:
            raise TargetError(f"execution={execution!r} does not compute what this model does: {off}; leave it at auto")
        return Plan(runner, "it was asked for", {})
    return _choose(maker, modules, differs, kept, seconds)


def _choose(
    maker: RunnerMaker,
    modules: Callable[[], LayerRunner],
    differs: Callable[[LayerRunner], str | None],
    kept: Callable[[str], list[float] | None],
    seconds: Callable[[LayerRunner], list[float] | None],
) -> Plan:
    others = {name: reason for name in ("native", "fused") if (reason := maker.why_not(name)) is not None}

    def attempt(name: str) -> LayerRunner | None:
        runner = maker.make(name)
        off = differs(runner)
        if off is None:
            return runner
        others[name] = f"its logits differ from the model's own: {off}"
        warnings.warn(f"{name} layers are not used: {others[name]}", SpecdecWarning, stacklevel=6)
        maker.unpack()
        return None

    size = sum(weight.nbytes for weight in maker.layers.parameters())
    if "native" not in others:
        timed = _SMALL <= size <= _LARGE and "fused" not in others
        known = {name: times for name in ("fused", "native") if timed and (times := kept(name)) is not None}
        if timed and "fused" not in known and (fused := attempt("fused")) is not None:
            if (times := seconds(fused)) is not None:
                known["fused"] = times
            del fused  # and with it the weights that are about to be packed
        native = None if _slower(known) else attempt("native")
        if native is not None:
            if "fused" in known and "native" not in known and (times := seconds(native)) is not None:
                known["native"] = times
            if not _slower(known):
                return Plan(native, _told(known), others)
            maker.unpack()
        if _slower(known):
            others["native"] = _told(known)
    if "fused" not in others:
        fused = attempt("fused")
        if fused is not None:
            return Plan(fused, others.get("native", ""), others)
    return Plan(modules(), others.get("fused", ""), others)


def _slower(times: Times) -> bool:
    """Whether native steps are slower than fused ones, and not only by noise."""
    return len(times) == 2 and sum(times["native"]) > _MARGIN * sum(times["fused"])


def _told(times: Times) -> str:
    if len(times) < 2:
        return "all layers run in one call"
    steps = (f"{1e3 * n:.2f} ms against {1e3 * f:.2f}" for n, f in zip(times["native"], times["fused"], strict=True))
    rows = " and ".join(map(str, TIMED_ROWS))
    return f"whole steps of {rows} rows took {' and '.join(steps)} fused"
