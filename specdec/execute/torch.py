"""TorchExecutor: a decoder in torch, by its spec, on any device and in any dtype: the reference of all executors.

On a CPU in float32 and bfloat16, products and attention are the native library's where there is one, as
:mod:`specdec.runners.linear` and :mod:`specdec.runners.attention` choose. A row's results depend on no other row then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specdec.decoder.rope import Angles, RopeTables, grown
from specdec.decoder.spec import Attention, Experts, Head, Mixer
from specdec.decoder.weights.checkpoint import Checkpoint
from specdec.execute.layer import layer, layer_around
from specdec.execute.short_conv import gated_conv
from specdec.execute.weights import DecoderWeights, Kernel, bias_of, look_up, rows_of
from specdec.native.invariance import layer_varies, products_vary
from specdec.runners.attention import attend, describe_backend
from specdec.runners.linear import DenseLinear, HeadOf, PackedWeight, kernel_for, linear_kernel
from specdec.runners.native_attention import computes
from specdec.runners.recording import Recording
from specdec.runners.rows import Rows
from specdec.runners.sent_rows import rows_on
from specdec.step.cache import KVCache
from specdec.step.first_time import FirstTimes
from specdec.step.joining import beginning
from specdec.step.pages import PagePool
from specdec.step.state import LayerSpec
from specdec.step.step_io import FINAL, NOTHING, Entering, Part, StepInput, Wanted
from specdec.step.step_output import StepOutput

__all__ = ["TorchExecutor", "stored_and_attended"]

_CHAINS = 4  # so that where results are rounded to bfloat16, some of them differ in what is left


class TorchExecutor:
    """Runs forwards of a decoder.

    Args:
        checkpoint: its weights, and what it is.
        dtype, device: of the computation.
        backend: attention kernels, see :mod:`specdec.runners.attention`.
        int8: rows that quantised blocks are multiplied with are rounded to bytes.

    Attributes:
        spec: what the decoder is.
        specs: what each layer caches.
        varies: why a row's results depend on other rows in the forward; None if they do not.
        experts: how many experts a row reads, as text; None for a decoder without experts, or in torch.
        pages: whether caches are in pages.
        pools: the pages of all texts.
        recording: what drafters on its device have their passes recorded by.
    """

    name = "fused"
    experts: str | None = None
    pages = False
    pools: Collection[PagePool] = ()
    recording: Recording | None = None

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        device: torch.device,
        backend: str = "auto",
        int8: bool = False,
    ) -> None:
        self._int8 = int8
        self.spec, self.dtype, self.device, self.backend = checkpoint.spec, dtype, device, backend
        self._layers = self.spec.layers
        self._weights = self._read(checkpoint)
        self._ropes, ropes = RopeTables(dtype, device), self.spec.ropes
        mixers = [own.mixer for own in self.spec.layers]
        self._kinds = [ropes.index(own.rope) if isinstance(own, Attention) else -1 for own in mixers]
        self._scale = torch.tensor(self.spec.embedding.scale, dtype=dtype, device=device)
        self.specs = [*map(self._cached, mixers)]
        self.varies = self._why_varying()

    @property
    def packed_head(self) -> PackedWeight | None:
        """The packed weight that the head is; None where it is not packed, or logits are scaled or have a cap."""
        head = self._weights.head
        return head if isinstance(head, PackedWeight) and self.spec.head.is_product else None

    @property
    def embedding_rows(self) -> PackedWeight | torch.Tensor | None:
        """The table that embeddings are looked up in; None where they are scaled."""
        return self._weights.embedding if self.spec.embedding.scale == 1.0 else None

    def kernels(self) -> Iterator[tuple[list[str], Kernel]]:
        """Every product, and a table in blocks, with transformers' names of the weights in it."""
        return self._weights.kernels()

    def measure_rows(self) -> None:
        """Run a layer of each kind in forwards of several sizes, where ``varies`` depends on that."""
        kinds = {(type(own.mixer), type(own.mlp)): number for number, own in enumerate(self._layers)}
        for number in kinds.values():
            self.varies = self.varies or layer_varies(partial(self._chains, number))

    def _chains(self, number: int, counts: Sequence[int]) -> torch.Tensor:
        """[N, D] random rows of several chains through a layer, in forwards of these numbers of rows."""
        total, found = sum(counts), []
        for seed in range(_CHAINS):
            generator = torch.Generator().manual_seed(seed)
            hidden = torch.randn(total, self.spec.hidden, generator=generator).to(self.dtype)
            cache = self.new_cache(capacity=total, rows=total)
            for part in torch.split(hidden, [*counts]):
                found.append(self._through_one(part, StepInput.of(cache, [0] * len(part)), number))
                cache.commit(range(len(part)))
        return torch.cat(found)

    def _through_one(self, hidden: torch.Tensor, step: StepInput, number: int) -> torch.Tensor:
        """[T, D] rows through a layer."""
        return self._through(hidden, rows_on(self.device, step, self.backend), number, number + 1, ())[0]

    def _why_varying(self) -> str | None:
        """Why a row's results depend on other rows, as far as it is known before a layer runs."""
        if isinstance(self._weights.head, DenseLinear):
            return "torch's products and attention sum in another order for other numbers of rows"
        sizes = {(own.key_dim, own.value_dim) for own in map(self._cached, self.spec.attentions)}
        by_torch = [size for size in sizes if not computes(self.device, self.dtype, *size)]
        if by_torch or self.backend != "auto":
            which = f"which computes heads of {by_torch[0][0]}" if by_torch else "which was asked for"
            return f"torch's attention, {which}, sums in another order for other numbers of rows"
        return products_vary()

    def attention(self) -> str:
        """Which kernels compute it."""
        cap = next((own.cap for own in self.spec.attentions if own.cap), None)
        return describe_backend(self.backend, [*map(self._cached, self.spec.attentions)], cap)

    def graphs(self) -> str | None:
        """How steps are replayed as CUDA graphs, or why they are not; None on a CPU."""
        on_cpu = self.device.type == "cpu"
        return None if on_cpu else f"not used: {self.name} layers are launched operation by operation"

    def cuts(self) -> str | None:
        """How products are cut that have several ways of the same numbers, and why; None where there is one way."""
        return None

    def choose_cuts(self, most: int) -> None:
        """Choose among them by the time of whole steps of up to ``most`` rows; does nothing where it cannot."""

    def _cached(self, own: Mixer) -> LayerSpec:
        """What a layer remembers of a text: keys and values, or the last inputs of a convolution."""
        if isinstance(own, Attention):
            return LayerSpec(own.kv_heads, own.head_dim, own.head_dim, own.window, self.device, self.dtype)
        return LayerSpec(1, self.spec.hidden, 0, own.width, self.device, self.dtype)

    def _read(self, checkpoint: Checkpoint) -> DecoderWeights:
        kernel = kernel_for(self.dtype, self.device)
        return DecoderWeights(checkpoint, self.dtype, self.device, kernel, int8=self._int8)

    def new_cache(self, *, capacity: int, rows: int) -> KVCache:
        """An empty cache for a text of ``capacity`` tokens and forwards of up to ``rows`` rows."""
        return KVCache(self.specs, capacity=capacity, rows=rows)

    def most_bytes(self, *, capacity: int, rows: int, drafted: int) -> int:
        """Bytes that such a cache may come to hold; ``drafted``: most rows behind the text's end."""
        return KVCache.most_bytes(self.specs, capacity=capacity, rows=rows)

    def run(self, step: StepInput) -> StepOutput:
        """Run rows of one sequence or several, as ``step`` says."""
        last, first_times = len(self.spec.layers) if step.plan.last is None else step.plan.last, FirstTimes.seen
        if step.entering is None:
            output = self._run(step, 0, last, None)
        else:
            output = self._run_stages(step, step.entering, last)
        output.first_time = FirstTimes.seen != first_times
        return output

    def _run_stages(self, step: StepInput, entering: Entering, last: int) -> StepOutput:
        """Rows with hidden states join at their layer; the other rows are run up to that layer first."""
        layers: Any = entering.layer
        stages, wanted = sorted({*layers}), Wanted(NOTHING.logits, 0, step.wanted.hidden)
        hidden, found, given = None, dict[int, torch.Tensor](), iter(entering.hidden)
        for first, after in zip(stages, (*stages[1:], last), strict=True):
            joining = [next(given) for one in layers if one == first >= 0]
            parts = joining if hidden is None else [hidden, *joining]
            own = step if first == stages[-1] else beginning(step, sum(one <= first for one in layers), wanted)
            brought = parts[0] if len(parts) == 1 else torch.cat(parts) if parts else None  # one is not copied
            output = self._run(own, max(first, 0), after, brought)
            hidden = output.out
            found |= output.hidden
        output.hidden = found
        return output

    def _run(self, step: StepInput, first: int, last: int, hidden: torch.Tensor | None) -> StepOutput:
        """Rows through layers [first, last), and behind the last one through norm and head."""
        rows = rows_on(self.device, step, self.backend)
        return self._finished(rows, last, *self._through(hidden, rows, first, last, step.wanted.hidden))

    def _through(
        self, hidden: torch.Tensor | None, rows: Rows, first: int, last: int, taps: Collection[int]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Rows through layers [first, last), and the inputs of the layers in ``taps`` among them.

        ``hidden``: None where the rows begin with their tokens.
        """
        hidden = self._embedded(rows.tokens[0].to(self.device)) if hidden is None else hidden
        angles, parts, found = dict[int, Angles](), rows.step.plan.parts, dict[int, torch.Tensor]()
        mixer: Any
        for number in range(first, last):
            if number in taps:
                found[number] = hidden
            own, which = self._layers[number], parts[number] if parts else Part.BOTH
            weights, mixer = self._weights.layers[number], own.mixer
            if weights.taps is None:
                if (kind := self._kinds[number]) not in angles:
                    angles[kind] = self._ropes.of(mixer.rope, rows)
                mix = partial(stored_and_attended, rows, number, mixer, weights.sinks)
                hidden = layer(own, weights, hidden, angles[kind], mix, which)
            else:
                hidden = layer_around(own, weights, hidden, partial(gated_conv, rows, number, weights), which)
        return hidden, found

    def _finished(self, rows: Rows, last: int, hidden: torch.Tensor, found: dict[int, torch.Tensor]) -> StepOutput:
        """What is wanted of rows that passed the layers before ``last``; ``found``: inputs of layers."""
        if last in rows.step.wanted.hidden:
            found[last] = hidden
        logits = self._logits(hidden, rows, found) if last == len(self.spec.layers) else None
        return StepOutput(logits, rows.step.wanted.scored, out=hidden, hidden=found, sent=rows)

    def _logits(self, hidden: torch.Tensor, rows: Rows, found: dict[int, torch.Tensor]) -> torch.Tensor | None:
        """[R, V] logits of the rows that the step names. If it names ``FINAL``, ``found`` gets the head's input."""
        wanted = rows.step.wanted
        if FINAL in wanted.hidden:
            found[FINAL] = self.norm(hidden)
        if wanted.nothing:
            return None
        chosen = found.get(FINAL, hidden)
        if wanted.logits is not None:
            chosen = chosen.index_select(0, rows.index(chosen.device))
        return self.head(chosen if FINAL in found else self.norm(chosen))

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        found = look_up(self._weights.embedding, tokens)
        return found if self.spec.embedding.scale == 1.0 else found * self._scale

    def embed(self, tokens: torch.Tensor | Sequence[int] | npt.NDArray[np.int64]) -> torch.Tensor:
        """[N, D] what the first layer reads for tokens [N]."""
        held = tokens if isinstance(tokens, torch.Tensor) else torch.as_tensor(tokens, dtype=torch.int64)
        return self._embedded(held.to(self.device))

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [..., D] through the last norm."""
        return self._weights.norm(hidden)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of hidden states [..., D] that passed the last norm."""
        logits = self._weights.head(hidden.flatten(0, -2)).view(*hidden.shape[:-1], -1)
        return logits if self.spec.head.is_product else _finished(self.spec.head, logits)

    def head_of(
        self, tokens: torch.Tensor | None, *, dtype: torch.dtype | None = None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """The head for tokens [d], or for all, as a function from [..., D] to [..., d]; it copies their rows.

        With a ``dtype`` gradients may pass, as in training.
        """
        head, own = self._weights.head, self.spec.head
        after = None if own.is_product else partial(_finished, own)
        if tokens is None and dtype is None:
            return HeadOf(head, after)
        rows = range(self.spec.vocab) if tokens is None else tokens
        weight, bias = rows_of(head, rows), bias_of(head, rows)
        if dtype is None:
            return HeadOf(linear_kernel(weight, bias), after)
        return HeadOf(DenseLinear(weight.to(dtype), None if bias is None else bias.to(dtype)), after)

    @contextmanager
    def every_expert(self) -> Iterator[None]:
        """While inside, each row has all experts: of nearly even logits, two roundings choose others."""
        self._layers = tuple(
            replace(own, mlp=replace(own.mlp, chosen=own.mlp.count)) if isinstance(own.mlp, Experts) else own
            for own in self.spec.layers
        )
        try:
            yield
        finally:
            self._layers = self.spec.layers

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The decoder's weights as transformers has them, sorted by its names."""
        return self._weights.named()


def _finished(head: Head, logits: torch.Tensor) -> torch.Tensor:
    """Logits, scaled and with their cap."""
    logits = logits if head.scale == 1.0 else logits * head.scale
    return torch.tanh(logits / head.cap) * head.cap if head.cap else logits


def stored_and_attended(
    rows: Rows,
    number: int,
    own: Attention,
    sinks: torch.Tensor | None,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """[1, H, T, d] attention of the rows over what each of them sees, after their keys and values are stored."""
    rows.store(keys, values, number)
    if own.growth is not None:
        query = query * grown(own.growth, rows.positions[0].to(query.device)).to(query.dtype)[:, None]
    return attend(query, rows, number, own.scale, own.cap or None, sinks)
