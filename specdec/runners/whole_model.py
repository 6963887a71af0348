"""Running a model by its own whole forward: what is done between its layers, before and after them is its own code.

It needs nothing of a model but that its forward takes ``position_ids``, a mask of four dimensions and a cache. A row of
a tree sees the committed text, its ancestors and itself, as far as the model's own masks let a token see. There is no
entry behind the first layers and no exit before the last one, and hidden states are not returned.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from specdec.errors import TargetError
from specdec.runners.boundary_ops import Joints
from specdec.runners.experts import choose_all
from specdec.runners.replicas import Replicas
from specdec.runners.rows import Rows, TextRows
from specdec.runners.runner import LayerRunner
from specdec.step.slots import LayerSpec
from specdec.step.step_output import StepOutput

__all__ = ["Sees", "WholeModelRunner"]

Sees = Callable[..., torch.Tensor]
"""(batch, head, query position, key position) -> bool, all of them tensors: what a model's own mask lets through."""

_FLASH = "flash"  # in the names of attention functions that take no mask of four dimensions


class WholeModelRunner(LayerRunner):
    """A model's own forward, called once for each sequence of a step.

    Args:
        model: any ``...ForCausalLM`` that decodes with keys and values of every token.
        sees: its masks by layer type, or the one of all layers; None where it makes them without transformers' helpers.
        tokens: some tokens, by which the shapes of its keys and values are read.

    Raises:
        TargetError: its attention takes no mask of ours, or it keeps no keys and values of every token.
    """

    name = "modules"
    borrows = True
    looks_up = True
    varies = "a model's own operations sum in another order for other numbers of rows"

    def __init__(self, model: PreTrainedModel, sees: Mapping[str, Sees] | Sees | None, tokens: Sequence[int]) -> None:
        self._model: Any = model
        self._sees = sees
        self.embed = self.norm = self.head = self._refuse
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        attention = str(getattr(model.config.get_text_config(), "_attn_implementation", None))
        if _FLASH in attention:
            raise TargetError(
                f"{type(model).__name__} attends by {attention}, which takes no mask of a tree; "
                "model.set_attn_implementation('sdpa') has it take one"
            )
        self.specs, self._numbers = self._read_specs(tokens)

    def _read_specs(self, tokens: Sequence[int]) -> tuple[list[LayerSpec], dict[int, int]]:
        """What each layer that stores keys and values caches, and which of these a layer's number is."""
        cache = DynamicCache()
        self._forward(torch.tensor([list(tokens)], device=self._model.device), past_key_values=cache)
        specs: list[LayerSpec] = []
        numbers: dict[int, int] = {}
        for layer, held in enumerate(cache.layers):
            keys, values = getattr(held, "keys", None), getattr(held, "values", None)
            if keys is None or values is None:
                continue  # it reads another one's
            if keys.shape[:3:2] != (1, len(tokens)) or values.shape[:3] != keys.shape[:3]:
                raise TargetError(
                    f"{type(self._model).__name__} keeps {tuple(keys.shape)} keys of {len(tokens)} tokens in layer "
                    f"{layer}; specdec drives models that keep keys and values of every token"
                )
            numbers[layer] = len(specs)
            specs.append(LayerSpec(keys.shape[1], keys.shape[3], values.shape[3], None, keys.device, keys.dtype))
        if not specs:
            raise TargetError(f"{type(self._model).__name__} gives its cache no keys and values, so none can be kept")
        return specs, numbers

    def _refuse(self, *_: Any) -> Any:
        raise TargetError(
            f"{type(self._model).__name__} is run by its whole forward, so its embedding, last norm and head cannot be "
            "called by themselves; choose a drafter that reads tokens alone, such as prompt_lookup or lookahead"
        )

    def run(
        self, hidden: torch.Tensor | None, rows: Rows, first: int, last: int, taps: Collection[int]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        raise TargetError(
            f"{type(self._model).__name__} is run by its whole forward, which nothing can leave early or enter late; "
            "choose a drafter that reads tokens alone, such as prompt_lookup or lookahead"
        )

    @contextmanager
    def every_expert(self) -> Iterator[None]:
        former = self._model
        self._model = Replicas(former, whole=True).root
        choose_all(self._model)
        try:
            yield
        finally:
            self._model = former

    def look(self) -> None:
        if self._model.training:
            raise TargetError(
                f"{type(self._model).__name__} is in training mode, in which dropout would change its texts; call its "
                "eval()"
            )

    def finish(self, hidden: torch.Tensor | None, rows: Rows, first: int, last: int, joints: Joints) -> StepOutput:
        wanted = rows.step.wanted
        if hidden is not None or wanted.hidden:
            self.run(hidden, rows, first, last, wanted.hidden)
        every = range(rows.rows) if wanted.logits is None else wanted.logits.tolist()
        found = []
        for part in rows.parts:
            found.append(self._logits(part, [row - part.begins for row in every if part.begins <= row < part.ends]))
        logits = torch.cat(found)
        out = logits.new_empty(rows.rows, 0)
        return StepOutput(out=out) if wanted.nothing else StepOutput(logits, wanted.scored, out=out)

    def _logits(self, part: TextRows, rows: Sequence[int]) -> torch.Tensor:
        """[R, V] of one sequence's rows, of which the logits of these are read."""
        options: dict[str, Any] = {"position_ids": part.positions.to(self._model.device)}
        if part.parents is not None:
            options["attention_mask"] = self._masks(part)
        cache: Any = _TextCache(part, self._numbers)
        tokens, whole = part.tokens.to(self._model.device), len(rows) == part.rows
        if self._keeps and not whole:  # the head of a prompt's rows would be the largest tensor by far
            options["logits_to_keep"] = torch.tensor(rows, device=tokens.device) if rows else 1
        logits: torch.Tensor = self._forward(tokens, past_key_values=cache, **options).logits[0]
        if whole or (self._keeps and rows):
            return logits
        return logits.index_select(0, torch.tensor(rows, dtype=torch.long, device=logits.device))

    def _forward(self, tokens: torch.Tensor, **options: Any) -> Any:
        with torch.inference_mode():
            return self._model(tokens, use_cache=True, **options)

    def _masks(self, part: TextRows) -> Any:
        """Additive masks [1, 1, T, keys], one of each layer type where the model has several."""
        if not isinstance(self._sees, Mapping):
            return self._mask(part, self._sees)
        return {kind: self._mask(part, sees) for kind, sees in self._sees.items()}

    def _mask(self, part: TextRows, sees: Sees | None) -> torch.Tensor:
        device = self._model.device
        visible = torch.ones(part.rows, part.length + part.last, dtype=torch.bool, device=device)
        visible[:, part.length :] = part.seen(part.last, device)
        if sees is not None:
            places = torch.cat((torch.arange(part.length, device=device), part.places(device)))
            none = torch.zeros((), dtype=torch.long, device=device)
            visible &= sees(none, none, part.positions.to(device)[0, :, None], places[None])
        dtype = self._model.dtype
        mask = torch.zeros(visible.shape, dtype=dtype, device=device)
        return mask.masked_fill_(~visible, torch.finfo(dtype).min)[None, None]


class _TextCache(Cache):
    """A sequence's cache, as a model's own forward reads and writes it for one sequence's rows."""

    def __init__(self, rows: TextRows, numbers: Mapping[int, int]) -> None:
        super().__init__(layers=[])
        self._rows, self._numbers, self._held = rows, numbers, rows.length + rows.first

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        number, end = self._numbers[layer_idx], self._held + self._rows.rows
        self._rows.store(key_states, value_states, number)
        cache = self._rows.cache
        return cache.keys[number][:, :, :end], cache.values[number][:, :, :end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._held

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._held + query_length, 0
