"""The `modules` runner: a live model's own whole forward, called once for each sequence of a step.

What is done between its layers, before and after them is the model's own code, hooks and adapters included. It needs
nothing of a model but that its forward takes ``position_ids``, a mask of four dimensions and a cache. A row of a tree
sees the committed text, its ancestors and itself, as far as the model's own masks let a token see. Hidden states are
those that the forward returns. There is no entry behind the first layers, no exit before the last one, and no sublayer
is left out. A model is called as it is, and nothing of it is changed.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.utils import output_capturing

from specdec.errors import TargetError
from specdec.runners.experts import choose_all
from specdec.runners.replicas import Replicas
from specdec.runners.rows import Rows, TextRows
from specdec.step.state import LayerSpec
from specdec.step.step_io import FINAL
from specdec.step.step_output import StepOutput

__all__ = ["Sees", "WholeModelRunner"]

Sees = Callable[..., torch.Tensor]
"""(batch, head, query position, key position) -> bool, all of them tensors: what a model's own mask lets through."""

_MASKLESS = ("flash", "flex")  # in the names of attention functions that take no mask of four dimensions
_ALIKE = ("eager", "sdpa")  # which do; one may take the other's place
_SELECTS = hasattr(output_capturing, "resolve_hidden_states_indices")  # older transformers counts from another layer on


class WholeModelRunner:
    """A model's own forward.

    Args:
        model: any ``...ForCausalLM`` that decodes with keys and values of every token.
        norm: returns the model's last norm; None where the model has none that is known.
        layers: how many it has.
        device: where it takes tokens.
        sees: its masks by layer type, or the one of all layers; None where it makes them without transformers' helpers.
        tokens: some tokens, by which the shapes of its keys and values are read.

    Attributes:
        varies: why a row's results depend on other rows in the forward.
        specs: what each layer that stores keys and values caches.
        norm: its last norm by itself.

    Raises:
        TargetError: its attention takes no mask of ours, or it keeps no keys and values of every token.
    """

    norm: Callable[[torch.Tensor], torch.Tensor]
    varies = "a model's own operations sum in another order for other numbers of rows"

    def __init__(
        self,
        model: PreTrainedModel,
        norm: Callable[[], nn.Module] | None,
        layers: int,
        device: torch.device,
        sees: Mapping[str, Sees] | Sees | None,
        tokens: Sequence[int],
    ) -> None:
        self._model: Any = model
        self._called = type(model).__name__
        self._device, self._sees, self._layers = device, sees, layers
        self._norm_of = norm
        self.look()
        self._was = self._way()
        self.specs, self._numbers = self._read_specs(tokens)

    def _read_specs(self, tokens: Sequence[int]) -> tuple[list[LayerSpec], dict[int, int]]:
        """What each layer that stores keys and values caches, and which of these a layer's number is."""
        cache = DynamicCache()
        self._forward(torch.tensor([list(tokens)], device=self._device), past_key_values=cache)
        specs: list[LayerSpec] = []
        numbers: dict[int, int] = {}
        for layer, held in enumerate(cache.layers):
            keys, values = getattr(held, "keys", None), getattr(held, "values", None)
            if keys is None or values is None:
                continue  # it reads another one's
            if keys.shape[:3:2] != (1, len(tokens)) or values.shape[:3] != keys.shape[:3]:
                raise TargetError(
                    f"{self._called} keeps {tuple(keys.shape)} keys of {len(tokens)} tokens in layer "
                    f"{layer}; specdec drives models that keep keys and values of every token"
                )
            numbers[layer] = len(specs)
            specs.append(LayerSpec(keys.shape[1], keys.shape[3], values.shape[3], None, keys.device, keys.dtype))
        if not specs:
            raise TargetError(f"{self._called} gives its cache no keys and values, so none can be kept")
        return specs, numbers

    def _no_norm(self, _: Any) -> Any:
        raise TargetError(f"{self._called} has no last norm that specdec knows; {_BY_TOKENS}")

    @contextmanager
    def every_expert(self) -> Iterator[None]:
        """While inside, each row has all experts, where a known router chooses some: for the check at load."""
        former = self._model
        self._model = Replicas(former).root
        choose_all(self._model)
        try:
            yield
        finally:
            self._model = former

    def _attention(self) -> str:
        return str(getattr(self._model.config.get_text_config(), "_attn_implementation", None))

    def _way(self) -> tuple[Any, ...]:
        """What decides whether a forward keeps to masks of ours, which was checked."""
        attention, called = self._attention(), (self._model, self._model.get_decoder())
        own = [(type(one).forward, vars(one).get("forward")) for one in called if one is not None]
        return (_ALIKE if attention in _ALIKE else attention, *own)

    def renewed(self) -> bool:
        """Whether its forward or attention function is another one than when this was asked before."""
        was, self._was = self._was, self._way()
        return was != self._was

    def look(self) -> None:
        """Look what the model would do now.

        Raises:
            TargetError: its attention takes no mask of ours, or it is in a training mode that changes its numbers.
        """
        self._keeps = _takes(self._model, "logits_to_keep")
        self._last_norm = None if self._norm_of is None else self._norm_of()
        self.norm = self._no_norm if self._last_norm is None else self._last_norm
        attention = self._attention()
        if any(name in attention for name in _MASKLESS):
            raise TargetError(
                f"{self._called} attends by {attention}, which takes no mask of a tree; "
                "model.set_attn_implementation('sdpa') has it take one"
            )
        for name, module in self._model.named_modules():
            if module.training and (what := _at_random(module)) is not None:
                raise TargetError(
                    f"{self._called} is in training mode, in which {what} of {name or 'the model'} would change its "
                    "texts; call its eval()"
                )

    def run(self, rows: Rows) -> StepOutput:
        """Run rows of one sequence or several; what is made is ``rows.step.wanted``."""
        wanted = rows.step.wanted
        every = range(rows.rows) if wanted.logits is None else wanted.logits.tolist()
        logits, taps = [], dict[int, list[torch.Tensor]]()
        for part in rows.parts:
            own = [row - part.begins for row in every if part.begins <= row < part.ends]
            with self._before_norm(self._layers in wanted.hidden) as before:
                output = self._run(part, own, wanted.hidden)
            if not isinstance(getattr(output, "logits", None), torch.Tensor):
                raise TargetError(
                    f"{self._called}'s forward returns a {type(output).__name__} without logits; set its config's "
                    "return_dict to True, and make a new engine"
                )
            logits.append(_chosen(output.logits[0], own, part.rows))
            for tap in wanted.hidden:
                taps.setdefault(tap, []).append(self._tap(output, before, tap, part.rows))
        found = {tap: parts[0] if len(parts) == 1 else torch.cat(parts) for tap, parts in taps.items()}
        joined = logits[0] if len(logits) == 1 else torch.cat(logits)
        out = joined.new_empty(rows.rows, 0)
        return StepOutput(None if wanted.nothing else joined, wanted.scored, out=out, hidden=found, sent=rows)

    def _run(self, part: TextRows, rows: Sequence[int], taps: Collection[int]) -> Any:
        """The forward of one sequence's rows, of which the logits of these are read."""
        options: dict[str, Any] = {"position_ids": part.positions.to(self._device)}
        if part.parents is not None:
            options["attention_mask"] = self._masks(part)
        if taps:
            options["output_hidden_states"] = not _SELECTS or sorted(self._layers if t == FINAL else t for t in taps)
        if self._keeps and (count := _last_of(rows, part.rows)):
            options["logits_to_keep"] = count  # the head of a prompt's rows would be the largest tensor by far
        cache: Any = _TextCache(part, self._numbers)
        return self._forward(part.tokens.to(self._device), past_key_values=cache, **options)

    def _forward(self, tokens: torch.Tensor, **options: Any) -> Any:
        with torch.inference_mode():
            return self._model(tokens, use_cache=True, **options)

    @contextmanager
    def _before_norm(self, wanted: bool) -> Iterator[list[torch.Tensor]]:
        """What this thread's forwards give to the last norm meanwhile, if it is wanted: they return what it makes."""
        found: list[torch.Tensor] = []
        if not wanted or self._last_norm is None:
            yield found
            return
        thread = threading.get_ident()

        def note(_: nn.Module, given: Any) -> None:
            if threading.get_ident() == thread:
                found.append(given[0])

        hook = self._last_norm.register_forward_pre_hook(note)
        try:
            yield found
        finally:
            hook.remove()

    def _tap(self, output: Any, last: Sequence[torch.Tensor], tap: int, rows: int) -> torch.Tensor:
        """[T, D] hidden states behind ``tap`` layers; ``last``: those behind the last one, before its norm."""
        states = [*(getattr(output, "hidden_states", None) or ())]
        normed = states.pop() if states else None
        if tap == FINAL:
            found = normed
        elif tap == self._layers:
            found = last[-1] if last else None
        else:
            found = states[tap] if tap < len(states) else None
        if found is None or found.ndim != 3 or found.shape[:2] != (1, rows):
            raise TargetError(f"{self._called} does not return one hidden state of each token and layer; {_BY_TOKENS}")
        kept: torch.Tensor = found[0]
        return kept

    def _masks(self, part: TextRows) -> Any:
        """Additive masks [1, 1, T, keys], one of each layer type where the model has several."""
        if not isinstance(self._sees, Mapping):
            return self._mask(part, self._sees)
        return {kind: self._mask(part, sees) for kind, sees in self._sees.items()}

    def _mask(self, part: TextRows, sees: Sees | None) -> torch.Tensor:
        device, dtype = self._device, self.specs[0].dtype
        visible = torch.ones(part.rows, part.length + part.last, dtype=torch.bool, device=device)
        visible[:, part.length :] = part.seen(part.last, device)
        if sees is not None:
            places = torch.cat((torch.arange(part.length, device=device), part.places(device)))
            none = torch.zeros((), dtype=torch.long, device=device)
            visible &= sees(none, none, part.positions.to(device)[0, :, None], places[None])
        mask = torch.zeros(visible.shape, dtype=dtype, device=device)
        return mask.masked_fill_(~visible, torch.finfo(dtype).min)[None, None]


_BY_TOKENS = "choose a drafter that reads tokens alone, such as prompt_lookup or lookahead"


def _last_of(rows: Sequence[int], count: int) -> int:
    """How many of the last of ``count`` rows hold these, and one at least; 0 for all.

    By number: an index of single rows would lie on another device than the hidden states where a model has several.
    """
    kept = count - rows[0] if rows else 1
    return 0 if kept == count else kept


def _chosen(logits: torch.Tensor, rows: Sequence[int], count: int) -> torch.Tensor:
    """[R, V] of these rows, of the logits [n, V] of the last n of ``count`` rows."""
    if len(rows) == len(logits):
        return logits
    first = count - len(logits)
    return logits.index_select(0, torch.tensor([row - first for row in rows], dtype=torch.long, device=logits.device))


def _takes(model: Any, option: str) -> bool:
    """Whether a forward takes an option, itself or, where it is a wrapper's that hands on all others, the wrapped."""
    taken = inspect.signature(model.forward).parameters
    if option in taken or not hasattr(model, "get_base_model"):
        return option in taken
    handed_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    return handed_on and option in inspect.signature(model.get_base_model().forward).parameters


def _at_random(module: nn.Module) -> str | None:
    """What a module in training mode does to its numbers, or None."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return "dropout" if module.p else None
    if getattr(module, "gradient_checkpointing", False):
        return "gradient checkpointing, without a cache,"
    names = (name for name, value in vars(module).items() if type(value) is float and value)
    return next((name for name in names if "drop" in name or "jitter" in name), None)


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
