"""Known layers on a CUDA device, by nine launches of Triton kernels per layer.

In half precision a row's results do not depend on the other rows (:mod:`specdec.runners.kernels.product`,
:mod:`specdec.runners.kernels.step`), in a step or a prompt, recorded or launched, of one sequence or several. So a text
does not depend on the drafts. In full precision, and with attention chosen by name, products are cuBLAS's, whose order
of summation depends on the number of rows.

Steps, of one sequence or several, are recorded as CUDA graphs (:mod:`specdec.runners.graphs`); chunks of prompts are
launched kernel by kernel, those of several sequences together. A layer returns the residual stream and the term to be
added to it, so that the sum is computed together with the next norm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from specdec.errors import TargetError
from specdec.runners.attention import attend
from specdec.runners.boundary_ops import Joints
from specdec.runners.cuts import ChosenCuts, Weight, weight_of
from specdec.runners.ends import Head, Norm, any_rows, is_plain_embedding, why_ends_special
from specdec.runners.graphs import LOGITS, PICKED, CosSin, Recorder, StepGraphs, StepInputs
from specdec.runners.known_layers import KnownLayer
from specdec.runners.layers import LayerByLayer, stack_linears
from specdec.runners.linear import DenseLinear
from specdec.runners.memory_pages import FilePages
from specdec.runners.recording import Recording
from specdec.runners.rotary import Tables
from specdec.runners.rows import Rows, TextRows
from specdec.runners.runner import FINAL
from specdec.runners.sent_rows import Group, SentRows, SentText
from specdec.runners.visibility import bucket
from specdec.step.cache import KVCache
from specdec.step.first_time import FirstTimes
from specdec.step.pages import PagePool
from specdec.step.slots import LayerSpec
from specdec.step.step_output import StepOutput

__all__ = ["CudaLayer", "CudaRunner"]

_HALF = (torch.float16, torch.bfloat16)
_MOST_ROWS = 256  # for which kernels are compiled; more rows are several programs' affair
_GATE_UP = 2  # place of the product that is of two, among a layer's
_ALIGN = 16  # bytes, to a multiple of which the kernel of products reads ahead


def _why_varying(weight: torch.Tensor) -> str | None:
    """Why the kernel of products does not support a weight, so that results depend on the rows; None if it does."""
    if weight.dtype not in _HALF:
        return f"in {str(weight.dtype).removeprefix('torch.')} products are cuBLAS's"
    if not weight.is_contiguous() or weight.storage_offset() * weight.element_size() % _ALIGN:
        return f"a weight of shape {list(weight.shape)} is a part of a larger one"
    return None


class Together:
    """A batch whose attention takes one launch for all sequences of a group, in the place of one for each.

    Attributes:
        groups: each with the places in ``cos_sin`` of its rows.
        order: see :meth:`specdec.runners.sent_rows.SentRows.groups`.
    """

    def __init__(self, rows: SentRows, turns: torch.Tensor) -> None:
        self.parts, self.order = rows.groups()
        self.backend, self.end = rows.backend, rows.end
        self.groups = [(group, turns.index_select(0, group.rows)) for group in self.parts]


class CudaLayer:
    """A known layer in nine launches; with ``files`` its linears become views of the stacked weights.

    ``cuts``: how its products are cut.

    Attributes:
        varies: why a row of its products depends on the rows beside it; None if it does not.
        norm: weight [D] and epsilon of its first norm.
        store: key heads and their width.
    """

    def __init__(self, layer: KnownLayer, files: FilePages | None, kernels: ModuleType, cuts: ChosenCuts) -> None:
        self._number, self._scale = layer.number, layer.scale
        self._shape = layer.query_heads, layer.key_heads, layer.head_dim
        self._products = stack_linears(layer, files)
        self._norms = [(norm.weight.data, norm.variance_epsilon) for norm in layer.norms]
        self._head_norms = None
        if layer.head_norms:
            query, key = layer.head_norms
            self._head_norms = (query.weight.data, key.weight.data, query.variance_epsilon)
        self.norm, self.store = self._norms[0], self._shape[1:]
        self._kernels, self._cuts = kernels, cuts
        self.varies = next(filter(None, (_why_varying(product.weight) for product in self._products)), None)

    def own(self, rows: Rows | StepInputs | Together) -> bool:
        """Whether these rows take no product and no attention but the kernels'."""
        return self.varies is None and rows.backend == "auto"

    def __call__(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        rows: SentRows | StepInputs | Together,
        cos_sin: CosSin,
        segments: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Residual [T, D] and the term to be added to it, from before the layer to after it.

        ``cos_sin``: cosines and sines [positions, d], and each row's place in them; ``segments``: most of a text.
        """
        qkv, out, gate_up, down = self._products
        kernels, (cos, sin, at), own = self._kernels, cos_sin, self.own(rows)
        residual, normed = kernels.add_norm(residual, delta, *self._norms[0])
        heads = self._product(normed, qkv, own)
        if isinstance(rows, Together):
            parts = [
                self._attend(heads.index_select(-2, group.rows), group, (cos, sin, turns), own, segments)
                for group, turns in rows.groups
            ]
            mixed = (parts[0] if len(parts) == 1 else torch.cat(parts)).index_select(0, rows.order)
        else:  # each sequence's rows are stored in its own cache by a launch of their own
            parts = [
                self._attend(
                    heads[..., part.begins : part.ends, :], part, (cos, sin, at[part.begins : part.ends]), own, segments
                )
                for part in rows.parts
            ]
            mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        residual, normed = kernels.add_norm(residual, self._product(mixed, out, own), *self._norms[1])
        if own:
            cuts = self._cuts.of(weight_of(gate_up.weight, gated=True))
            gated = kernels.product(normed, gate_up.weight, gate_up.bias, gated=True, cuts=cuts)
        else:
            gated = kernels.gate(F.linear(normed, gate_up.weight, gate_up.bias))
        return residual, self._product(gated, down, own)

    def _product(self, rows: torch.Tensor, linear: DenseLinear, own: bool) -> torch.Tensor:
        if not own:
            return F.linear(rows, linear.weight, linear.bias)
        cuts = self._cuts.of(weight_of(linear.weight))
        product: torch.Tensor = self._kernels.product(rows, linear.weight, linear.bias, cuts=cuts)
        return product

    def products(self) -> Iterator[tuple[Weight, DenseLinear]]:
        """Its four products, each with its shape."""
        for number, linear in enumerate(self._products):
            yield weight_of(linear.weight, gated=number == _GATE_UP), linear

    def _attend(
        self, heads: torch.Tensor, rows: SentText | Group | StepInputs, cos_sin: CosSin, own: bool, segments: int
    ) -> torch.Tensor:
        """Rows [T, heads x d], of one sequence or a group, to what they attend to, [T, query heads x d]."""
        number, where = self._number, rows.where()
        query = self._kernels.turn_and_store(heads.contiguous(), *cos_sin, self._head_norms, where, number, self._shape)
        if own or isinstance(rows, StepInputs):
            window = rows.cache.group_of[number].window if isinstance(rows, SentText) else rows.windows[number]
            mixed: torch.Tensor = self._kernels.step_attention(
                query, where, number, self._shape[1], window, self._scale, segments
            )
            return mixed
        assert isinstance(rows, TextRows)
        return attend(query, rows, number, self._scale).transpose(1, 2).reshape(rows.rows, -1)


class CudaRunner(LayerByLayer):
    """A loop over CUDA layers, recorded by ``recorder``; see :class:`LayerByLayer`.

    ``longest``: the model's context length in tokens; a longer text has the graphs recorded again. ``cuts``: how the
    products of the layers and the head are cut.

    Attributes:
        pages: whether caches are in pages. They are where all attention is the kernels' own, which read them.
        looks_up: see :class:`specdec.runners.runner.LayerRunner`. A recorded step embeds its tokens by itself.
    """

    def __init__(
        self,
        layers: Sequence[CudaLayer],
        recorder: Recorder,
        kernels: ModuleType,
        longest: int,
        cuts: ChosenCuts,
        **parts: Any,
    ) -> None:
        norm, head = parts["norm"], parts["head"]
        special = why_ends_special(norm, head, layers[0].norm[0])
        self.varies = next(filter(None, (layer.varies for layer in layers)), special) or _why_varying(head.weight.data)
        self._ends = special is None
        read = [*parts["modules"], head] if self._ends else [*parts["modules"]]
        embedding, like, rotary = parts["embedding"], layers[0].norm[0], parts["rotary"]
        self._tables = Tables(rotary, like) if rotary.fixed else None
        self.looks_up = self._tables is not None and is_plain_embedding(embedding, like)
        self._embedding = embedding.weight.data if self.looks_up else None
        read += [embedding] if self.looks_up else []
        super().__init__("fused", [], **{**parts, "modules": read})
        self._known, self._kernels, self._longest, self._cuts = tuple(layers), kernels, longest, cuts
        self._graphs = StepGraphs(recorder, self._launch)
        self.recording = Recording(kernels, recorder, longest)
        stores = {layer.store for layer in layers}
        self._store = stores.pop() if len(stores) == 1 else None  # one launch commits what all layers stored
        self._launched: set[tuple[int, bool, str]] = set()  # kinds of rows that were launched kernel by kernel
        self.pages, self._pools = self.batch_invariant, dict[tuple[LayerSpec, int], PagePool]()
        if self.batch_invariant:
            self.norm, self.head = Norm(kernels, norm), Head(kernels, head, cuts)

    def run(
        self, hidden: torch.Tensor | None, rows: Rows, first: int, last: int, taps: Collection[int]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        if rows.end > self._longest:
            self._longest = self._graphs.kind = 2 * rows.end
        if self._graphs.takes(rows):
            outcome = self._graphs.run(hidden, rows, first, last, taps, self._turns(hidden, rows))
            if outcome is not None:
                return outcome
        hidden = self.enter(rows) if hidden is None else hidden
        if not isinstance(rows, SentRows):  # the embedding is on the host
            rows = SentRows(rows.step, hidden.device, rows.backend)
        cos_sin = self._rotary.cos_sin(rows, hidden)
        kind = bucket(min(rows.rows, _MOST_ROWS)), len(rows.parts) > 1, rows.backend
        known = kind in self._launched
        self._launched.add(kind)
        with nullcontext() if known else FirstTimes.during():  # kernels are compiled for it
            return self._launch(hidden, rows, first, last, taps, cos_sin)

    def _turns(self, hidden: torch.Tensor | None, rows: Rows) -> CosSin | None:
        """Cosines and sines for a recorded step; None where it looks them up."""
        if self._tables is not None:
            self._tables.reach(rows.end)
            return None
        assert hidden is not None
        return self._rotary.cos_sin(rows, hidden)

    def finish(self, hidden: torch.Tensor | None, rows: Rows, first: int, last: int, joints: Joints) -> StepOutput:
        """As a runner's; where a step is recorded, so are the last norm, the head, argmax, draws, walk and commit.

        Raises:
            TargetError: rows that were committed already are entered again, whose first layers' slots have others now.
        """
        step, wanted = rows.step, rows.step.wanted
        if first and any(text.moved for text in step.texts):
            raise TargetError("rows that a step has committed cannot enter it again; run all layers for them")
        for text in step.texts:
            text.moved = False
        if not (self._ends and joints.plain and self._graphs.takes(rows)):
            return super().finish(hidden, rows, first, last, joints)
        hidden, found = self.run(hidden, rows, first, last, {*wanted.hidden, LOGITS})
        ends = [found.pop(name, None) for name in (LOGITS, PICKED)]  # not the second where recording failed
        if ends[1] is not None and self._store is not None:
            for part in rows.parts:
                part.cache.moved = part.decide is not None and part.rows > 1
        if wanted.nothing:
            return StepOutput(out=hidden, hidden=found)
        if wanted.logits is not None:
            index = rows.index(hidden.device)
            ends = [None if end is None else end.index_select(0, index) for end in ends]
        return StepOutput(ends[0], wanted.scored, out=hidden, hidden=found, picked=ends[1])

    def new_cache(self, specs: Sequence[LayerSpec], *, capacity: int, rows: int) -> KVCache:
        if not self.pages:
            return super().new_cache(specs, capacity=capacity, rows=rows)
        pools = {}
        for spec, layers in Counter(specs).items():
            pools[spec] = self._pools.setdefault((spec, layers), PagePool(spec, layers))
        return KVCache(specs, capacity=capacity, rows=rows, pools=pools)

    @property
    def pools(self) -> Collection[PagePool]:
        return self._pools.values()

    def graphs(self, backend: str) -> str:
        return self._graphs.describe(backend)

    def cuts(self) -> str | None:
        return self._cuts.describe() if self.batch_invariant else None

    def choose_cuts(self, rows: Callable[[int], Rows], most: int) -> None:
        if not self.batch_invariant or self._cuts.card is None or not self._graphs.takes(rows(1)):
            return
        first, *others = self._cuts.buckets()
        counts = {first: 1, **{size: min(size, most) for size in others if size < 2 * most}}
        head: Any = self.head
        products: dict[Weight, Any] = {weight_of(head.weight): head}
        products |= {weight: linear for layer in self._known for weight, linear in layer.products()}

        @contextmanager
        def recording(bucket: int) -> Iterator[Callable[[], Callable[[], None]]]:
            step = rows(counts[bucket])
            assert isinstance(step, SentRows)
            hidden = None if self.looks_up else self.enter(step)
            with self._graphs.aside(hidden, step, self._turns(hidden, step)) as record:
                yield lambda: record(self._whole)

        def same(weight: Weight, bucket: int, cut: Any) -> bool:
            own, activations = products[weight], any_rows(bucket, products[weight].weight)
            given = {"gated": weight[-1], "whole": own is head}
            one, other = (
                self._kernels.product(activations, own.weight, own.bias, cuts=cuts, **given)
                for cuts in ({}, {bucket: cut})
            )
            return torch.equal(one, other)

        for weight in products:
            self._cuts.of(weight)
        if self._cuts.choose([*counts], recording, same):
            self._graphs.forget()

    def _whole(self, inputs: StepInputs) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """A step of all layers, with its logits."""
        return self._launch(inputs.hidden, inputs, 0, len(self._known), {LOGITS}, inputs.cos_sin)

    def _launch(
        self,
        hidden: torch.Tensor | None,
        rows: SentRows | StepInputs | Together,
        first: int,
        last: int,
        taps: Collection[int],
        cos_sin: CosSin | None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        if cos_sin is None:
            assert isinstance(rows, StepInputs)
            hidden, cos_sin = self._look_up(hidden, rows)
        assert hidden is not None
        found: dict[int, torch.Tensor] = {}
        delta: torch.Tensor | None = None
        if isinstance(rows, SentRows) and len(rows.step.texts) > 1 and all(layer.own(rows) for layer in self._known):
            rows = Together(rows, cos_sin[2])
        if isinstance(rows, StepInputs):  # whose graph is for texts of every length
            segments = self._kernels.segments_of(self._longest)
            self._find_paths(rows)
        else:
            segments = self._kernels.segments_of(rows.end)
            if any(layer.own(rows) for layer in self._known):
                self._find_paths(rows)
        for number in range(first, last):
            if number in taps:
                hidden, delta = self._sum(hidden, delta, number), None
                found[number] = hidden
            hidden, delta = self._known[number](hidden, delta, rows, cos_sin, segments)
        hidden = self._sum(hidden, delta, last - 1)
        if LOGITS in taps:
            normed = self.norm(hidden)
            found[LOGITS] = self.head(normed)
            if isinstance(rows, StepInputs):
                found[PICKED] = self._kernels.pick(found[LOGITS], rows.where())
                if rows.where()["tokens"].shape[-1] > 1:  # else a path is the root alone
                    self._kernels.walk(found[PICKED], rows.where(), self._store, found[LOGITS])
            if FINAL in taps:
                found[FINAL] = normed
        return hidden, found

    def _look_up(self, hidden: torch.Tensor | None, inputs: StepInputs) -> tuple[torch.Tensor, CosSin]:
        """What a recorded step begins with: hidden states, unless its rows bring them, and cosines and sines."""
        assert self._tables is not None
        weight = self._embedding if hidden is None else None
        tables, like = self._tables, self._known[0].norm[0]
        found, cos, sin = self._kernels.look_up(inputs.where(), tables.addresses, tables.width, like, weight)
        return found if hidden is None else hidden, (cos, sin, inputs.order)

    def _sum(self, hidden: torch.Tensor, delta: torch.Tensor | None, number: int) -> torch.Tensor:
        """What goes on from a layer, added as the next norm would add it."""
        if delta is None:
            return hidden
        total: torch.Tensor = self._kernels.add_norm(hidden, delta, *self._known[number].norm)[0]
        return total

    def _find_paths(self, rows: SentRows | StepInputs | Together) -> None:
        """Have what attention reads of each row's way through the tree; of a chain it is known."""
        for part in rows.parts:
            where = part.where()
            if "closure" in where:
                where["paths"] = self._kernels.paths(where)
            elif "paths" not in where:
                if isinstance(part, SentText):
                    where["places"] = part.positions[0]
                count, device = where["places"].numel(), where["places"].device
                depths = torch.arange(where["places"].shape[-1], dtype=torch.int32, device=device)
                where["paths"] = depths.repeat(count, 1)
