"""TransformersTarget: a live model of transformers as a target, run by its own forward as a whole.

It follows whatever is done to the model. Layers are not run by themselves; what needs that takes a copy of the model
(:class:`specdec.models.described_target.DescribedTarget`). At load the logits over a tree are compared with those of
each path, and a model that cannot be driven exactly is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.costs.machine import Threads
from specdec.errors import ConfigError, SpecdecError, TargetError, check_choice, first_line
from specdec.models import describe
from specdec.models.around_layers import LOOP, Whole
from specdec.models.described_checkpoint import DescribedCheckpoint
from specdec.models.described_target import DescribedTarget
from specdec.models.inspection import (
    context_length_of,
    decoder_parts,
    device_of,
    eos_ids_of,
    last_norm,
    refuse_unfit,
    weight_of,
    weights_in,
)
from specdec.models.live_ends import LiveEnds
from specdec.models.live_model import load_live
from specdec.models.loading import check_place
from specdec.models.long_context import bound_context
from specdec.models.masks import register_masks, whole_masks
from specdec.models.outline import Outline, version_of, weights_of
from specdec.models.self_check import check_again, differs, own_logits, tokens_for
from specdec.runners import ACTIVATIONS, ATTENTIONS, EXECUTIONS
from specdec.runners.linear import PackedWeight
from specdec.runners.sent_rows import rows_on
from specdec.runners.whole_model import WholeModelRunner
from specdec.sampling.sampler import Sampler
from specdec.settings.arguments import checked
from specdec.settings.copies import NotCopied
from specdec.step import torch_switches
from specdec.step.cache import KVCache
from specdec.step.step_io import StepInput
from specdec.step.step_output import StepOutput
from specdec.target import Target

__all__ = ["TransformersTarget"]

register_masks()


class TransformersTarget(NotCopied, Target):
    """A live model of transformers, which is called as it is and never changed.

    Changes of weights, modules and hooks are followed.

    Args:
        model: any ``...ForCausalLM`` that keeps keys and values of every token.

    Raises:
        TargetError: the model cannot be driven exactly; the message names the part.
        NumericalError: its own logits are NaN or infinite.
        ForkError: see :class:`specdec.costs.machine.Threads`.
    """

    instead = (
        "share it: Engine(target, ...); in another process (started by 'spawn') load a new one: "
        "TransformersTarget.from_pretrained(...)"
    )

    @torch_switches.makes
    @checked
    def __init__(
        self,
        model: PreTrainedModel,
        *,
        execution: str = "auto",
    ) -> None:
        check_choice("execution", execution, EXECUTIONS)
        if execution not in ("auto", "modules"):
            raise ConfigError(
                f"execution={execution!r} runs a copy of a model, and TransformersTarget(model) the model itself: make "
                f"the copy with Engine.from_model(model, ..., execution={execution!r}), or load the model from its "
                "folder"
            )
        self.backend = "auto"
        Threads.check()
        self.model, self.path = model, str(getattr(model, "name_or_path", "") or "")
        self.name = type(model).__name__
        self.config = config = model.config.get_text_config()
        refuse_unfit(self.name, config)
        embedding: Any = model.get_input_embeddings()
        head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if embedding is None or head is None:
            raise TargetError(f"{self.name} has no embedding and head of its own; load a ...ForCausalLM")
        self.hidden_size = int(config.hidden_size)
        self.num_layers = int(config.num_hidden_layers)
        self.context_length = context_length_of(config)
        self.eos_ids = eos_ids_of(model)
        self.device, self.dtype = device_of(embedding), weight_of(embedding).dtype
        self.head_device = device_of(head)
        self._parameters = weights_in(model)
        self._weights: str | None = None
        self.reason = "the model was handed in, and is followed"
        self._ends: LiveEnds | None = None
        self.options: dict[str, Any] = {"attention": "auto", "runner": "modules"}
        self._find_parts()
        tokens = tokens_for(len(weight_of(embedding)))
        expected = own_logits(model, self, tokens)
        self.vocab_size = int(expected.shape[-1])
        self._run_whole(expected, tokens)
        self._around = Outline(config, embedding)

    def _find_parts(self) -> None:
        """Find the decoder, its layers and its last norm, as far as specdec knows them; heads need that norm."""
        model: Any = self.model
        decoder: nn.Module = model
        self.layer_weights = self._parameters - weights_in(model.get_input_embeddings())
        self._norm: Callable[[], nn.Module] | None = None
        with suppress(TargetError):
            decoder, layers, _ = decoder_parts(self.name, model)
            self.num_layers, self.layer_weights = len(layers), weights_in(layers)
            self._norm = partial(last_norm, self.name, model)
        self.whole = Whole(model, decoder)

    def _run_whole(self, expected: torch.Tensor, tokens: Sequence[int]) -> None:
        """Have the model's own whole forward run, if that computes its logits over a tree.

        Raises:
            TargetError: it cannot be called so, or how the logits differ.
        """
        try:
            masks = whole_masks(self.model)
            self.runner = WholeModelRunner(self.model, self._norm, self.num_layers, self.device, masks, tokens)
            self.specs = self.runner.specs
            with self.runner.every_expert():
                off = differs(expected, self, tokens)
        except SpecdecError:
            raise
        except Exception as error:  # code of others, called in a way of ours: it may raise anything
            off = f"it fails: {type(error).__name__}: {first_line(error)}"
        if off is not None:
            raise TargetError(
                f"{self.name}: the logits of its own forward over a tree are not those of each path: {off}; it is "
                "refused rather than decoded wrongly, so use plain generate"
            )

    @classmethod
    @torch_switches.makes
    @checked
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        device_map: str | dict[str, Any] | None = None,
        execution: str = "auto",
        attention: str = "auto",
        activations: str = "default",
        trust_remote_code: bool = False,
        revision: str | None = None,
        subfolder: str | None = None,
        max_model_len: int | None = None,
    ) -> Target:
        """Load a checkpoint: a named model, a folder or hub id (safetensors only), or a GGUF file.

        Where a description covers its decoder, a :class:`DescribedTarget` runs it, which makes no module of
        transformers; else, and with ``execution="modules"`` or a ``device_map``, transformers loads it.
        ``activations="int8"`` rounds the rows that a GGUF file's quantised blocks are multiplied with to 8 bits, 32
        values at a time: faster, and another model than the default, which rounds less than bfloat16 does.
        ``max_model_len`` is the most tokens of a text; for more than its original context a model takes the rotary
        factors that it has for long texts, in all texts and from the first token.

        Raises:
            ConfigError: an unknown choice, a named executor that cannot run the model, or there are no quantised blocks
                whose rows could be rounded.
            CheckpointError: no model there, a broken file, or tensors missing or left over.
            TargetError: a model that specdec cannot drive.
        """
        check_choice("execution", execution, EXECUTIONS)
        check_choice("activations", activations, ACTIVATIONS)
        check_choice("attention", attention, ATTENTIONS)
        check_place(device, device_map)
        place: dict[str, Any] = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
        place |= {"revision": revision, "subfolder": subfolder, "max_model_len": max_model_len}
        int8 = activations == "int8"
        why = "it was asked for" if execution == "modules" else "it is spread over devices"
        if execution != "modules" and device_map is None:
            found = DescribedCheckpoint.opened(path, int8=int8, **place)
            if isinstance(found, DescribedCheckpoint):
                at = torch.device(device or "cpu")
                own = DescribedTarget.of(found, execution=execution, attention=attention, device=at, int8=int8)
                bound_context(own, max_model_len)
                return own
            why = found
            if execution != "auto" or attention != "auto":
                asked = f"attention={attention!r}" if execution == "auto" else f"execution={execution!r}"
                raise ConfigError(f"{asked} cannot run this model: {why}; leave it at auto")
        elif attention != "auto":
            raise ConfigError(f"attention={attention!r} is of specdec's own kernels, and {why}; leave it at auto")
        model, weights = load_live(path, device_map=device_map, activations=activations, **place)
        model.requires_grad_(False)
        target = cls(model)
        target._weights, target.reason = weights, why
        bound_context(target, max_model_len)
        return target

    def __copy__(self) -> TransformersTarget:
        """A target of the same weights, whose attributes may be set apart."""
        return self._sharing()

    @property
    def generation_config(self) -> Any:
        return self.model.generation_config

    @property
    def batch_invariant(self) -> bool:
        return False

    def new_cache(self, *, capacity: int, rows: int) -> KVCache:
        return KVCache(self.specs, capacity=capacity, rows=rows)

    def active(self) -> AbstractContextManager[None]:
        Threads.check()
        return torch_switches.steps(autocast=True)  # the model is called as it is

    def forward(self, step: StepInput) -> StepOutput:
        if step.entering is not None or step.plan.parts or step.plan.last not in (None, self.num_layers):
            raise self._no_layers("the drafter")
        return self.runner.run(rows_on(self.device, step))

    def check_layers(self, asked: str) -> None:
        raise self._no_layers(asked)

    def _no_layers(self, asked: str) -> ConfigError:
        """What to say where some of the layers are to be run."""
        return ConfigError(
            f"{asked} runs some of the target's layers, and this {self.name} is run by its own forward as a whole "
            f"(execution 'modules': {self.reason}); run a copy of it where its layers are like Llama's "
            "(Engine.from_model), or choose a drafter that does not, such as lookahead, medusa or eagle"
        )

    def embed(self, tokens: torch.Tensor | Sequence[int] | npt.NDArray[np.int64]) -> torch.Tensor:
        return self.ends.embed(tokens)

    @property
    def embedding_rows(self) -> PackedWeight | torch.Tensor | None:
        return self.ends.rows

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.runner.norm(hidden)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.ends.logits(hidden)

    def head_of(
        self, tokens: torch.Tensor | None, *, dtype: torch.dtype | None = None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        return self.ends.logits_of(tokens, dtype, self.dtype)

    def greet(self, sampler: Sampler, **others: Any) -> None:
        """As :meth:`Target.greet`: one process agrees with itself."""

    def check_methods(self, names: Collection[str]) -> None:
        self.whole.check_methods(names)

    def check_unchanged(self) -> None:
        """Called before every generation.

        Raises:
            TargetError: the model was changed in a way that cannot be followed.
            ForkError: this process cannot run it, see :class:`specdec.costs.machine.Threads`.
        """
        Threads.check()
        self.whole.check_methods(LOOP)
        self.runner.look()
        if self.runner.renewed():
            check_again(self.model, self, self.runner.every_expert)
        if (changed := self._around.changed()) is not None:
            raise TargetError(
                f"{self.name} was changed after its target was made, which would not follow: {changed}; make a new "
                "engine of it"
            )

    def version(self) -> object:
        return version_of(self.model)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return weights_of(self.model)

    def describe(self) -> dict[str, dict[str, Any]]:
        """What runs, and why: section -> name -> value."""
        return describe.whole(self, self._parameters, self._weights)

    @property
    def ends(self) -> LiveEnds:
        """Its embedding and its head by themselves, which are looked at when they are first asked for.

        Raises:
            TargetError: they cannot be called by themselves.
        """
        if self._ends is None:
            self._ends = LiveEnds.of(self.model, self)
        return self._ends
