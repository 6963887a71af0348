"""A decoder's layers, last norm and head on a CUDA device, as Triton kernels run them, launched or recorded."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain
from types import ModuleType

import torch

from specdec.decoder.spec import DecoderSpec
from specdec.execute.cuda_layer import CudaLayer, Together, why_varying
from specdec.execute.cuda_rope import PlacedTables
from specdec.execute.weights import DecoderWeights
from specdec.runners.cuts import ChosenCuts, Weight, weight_of
from specdec.runners.graphs import LOGITS, PICKED, CosSin, Outcome, StepInputs
from specdec.runners.linear import DenseLinear
from specdec.runners.sent_rows import SentRows, SentText
from specdec.step.step_io import FINAL

__all__ = ["CudaLayers"]


class CudaLayers:
    """The layers one after the other, and what is behind them.

    Args:
        spec: a decoder that the kernels compute.
        weights: its own, dense.
        kernels: Triton's.
        cuts: how products are cut.
        tables: rotary positions.
        backend: attention kernels of rows that are launched, see :mod:`specdec.runners.attention`.

    Attributes:
        varies: why a row's results depend on other rows in the forward; None if they do not.
        longest: tokens of a text that attention of a recorded step has room for.
        store: key heads and their width, if those of all layers are the same.
        products: every product by its shape.
        head: the product of these that gives logits.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        kernels: ModuleType,
        cuts: ChosenCuts,
        tables: PlacedTables,
        backend: str,
    ) -> None:
        self._kernels, self._cuts, self._tables, self.longest = kernels, cuts, tables, spec.context
        assert isinstance(weights.head, DenseLinear)
        assert isinstance(weights.embedding, torch.Tensor)
        self.head, self._norm, self._embedding = weights.head, weights.norm, weights.embedding.contiguous()
        each = zip(spec.layers, weights.layers, strict=True)
        self._layers = [CudaLayer(*pair, number, kernels, cuts) for number, pair in enumerate(each)]
        every = [(weight_of(self.head.weight), self.head)]
        every += chain.from_iterable(layer.products for layer in self._layers)
        self.products: dict[Weight, DenseLinear] = dict(every)
        self.varies = next(filter(None, (why_varying(linear.weight) for _, linear in every)), None)
        if self.varies is None and backend != "auto":
            self.varies = f"attention={backend!r} asks for kernels that sum in another order for other numbers of rows"
        for layer in self._layers:
            layer.takes_own = self.varies is None
        for weight in self.products if self.varies is None else ():
            cuts.of(weight)  # reads what is kept for it
        stores = {layer.store for layer in self._layers}
        self.store = stores.pop() if len(stores) == 1 else None

    def run(
        self,
        hidden: torch.Tensor | None,
        rows: SentRows | StepInputs | Together,
        first: int,
        last: int,
        taps: Collection[int],
        cos_sin: CosSin | None,
    ) -> Outcome:
        """Rows through layers [first, last), and the inputs of the layers in ``taps`` among them.

        Args:
            hidden: [T, D]; None where a recorded step embeds its tokens by itself.
            rows: of a step that is launched, or the inputs of one that is recorded.
            first, last: the layers.
            taps: layers; with ``LOGITS`` the last norm and the head are run as well.
            cos_sin: cosines and sines [positions, d], and each row's place in them; None where they are looked up, too.
        """
        if isinstance(rows, StepInputs):  # whose graph is for texts of every length
            segments = self._kernels.segments_of(self.longest)
            hidden, cos_sin = self._look_up(hidden, rows)
        else:
            segments = self._kernels.segments_of(rows.end)
        assert hidden is not None
        assert cos_sin is not None
        if self.varies is None and isinstance(rows, SentRows) and len(rows.step.texts) > 1:
            rows = Together(rows, cos_sin[2])
        if self.varies is None or isinstance(rows, StepInputs):
            self._find_paths(rows)
        found = dict[int, torch.Tensor]()
        delta: torch.Tensor | None = None
        for number in range(first, last):
            if number in taps:
                hidden, delta = self._sum(hidden, delta, number), None
                found[number] = hidden
            hidden, delta = self._layers[number](hidden, delta, rows, cos_sin, segments)
        hidden = self._sum(hidden, delta, last - 1)
        if LOGITS in taps:
            self._end(hidden, rows, taps, found)
        return hidden, found

    def _end(
        self,
        hidden: torch.Tensor,
        rows: SentRows | StepInputs | Together,
        taps: Collection[int],
        found: dict[int, torch.Tensor],
    ) -> None:
        """Add what is behind the last layer to what was found."""
        normed = self.normed(hidden)
        logits = found[LOGITS] = self.logits(normed)
        if isinstance(rows, StepInputs):
            found[PICKED] = self._kernels.pick(logits, rows.where())
            if rows.where()["tokens"].shape[-1] > 1:  # else a path is the root alone
                self._kernels.walk(found[PICKED], rows.where(), self.store, logits)
        if FINAL in taps:
            found[FINAL] = normed

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [..., D] through the last norm."""
        if self.varies is not None:
            return self._norm(hidden)
        rows, own = hidden.reshape(-1, hidden.shape[-1]), self._norm
        normed: torch.Tensor = self._kernels.add_norm(rows, None, own.by, own.norm.eps)[1]
        return normed.view(hidden.shape)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of hidden states [..., D] that passed the last norm."""
        rows, own = hidden.reshape(-1, hidden.shape[-1]), self.head
        if self.varies is not None:
            return own(rows).view(*hidden.shape[:-1], -1)
        cuts = self._cuts.of(weight_of(own.weight))
        logits: torch.Tensor = self._kernels.product(rows, own.weight, own.bias, cuts=cuts, whole=True)
        return logits.view(*hidden.shape[:-1], -1)

    def _look_up(self, hidden: torch.Tensor | None, inputs: StepInputs) -> tuple[torch.Tensor, CosSin]:
        """What a recorded step begins with: hidden states, unless its rows bring them, and cosines and sines."""
        weight = self._embedding if hidden is None else None
        tables, like = self._tables, self._layers[0].norm[0]
        found, cos, sin = self._kernels.look_up(inputs.where(), tables.addresses, tables.width, like, weight)
        return found if hidden is None else hidden, (cos, sin, inputs.order)

    def _sum(self, hidden: torch.Tensor, delta: torch.Tensor | None, number: int) -> torch.Tensor:
        """What goes on from a layer, added as the next norm would add it."""
        if delta is None:
            return hidden
        total: torch.Tensor = self._kernels.add_norm(hidden, delta, *self._layers[number].norm)[0]
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
