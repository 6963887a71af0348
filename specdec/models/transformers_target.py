"""TransformersTarget: a live model of transformers as a target, run by its own forward as a whole.

It follows whatever is done to the model. Layers are not run by themselves; what needs that takes a copy of the model
(:class:`specdec.models.described_target.DescribedTarget`). At load the logits over a tree are compared with those of
each path, and a model that cannot be driven exactly is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from accelerate.utils import align_module_device
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PreTrainedModel

from specdec.costs.machine import Threads
from specdec.costs.measuring import measure
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
    why_special,
)
from specdec.models.live_model import load_live
from specdec.models.loading import check_place
from specdec.models.long_context import bound_context
from specdec.models.masks import register_masks, whole_masks
from specdec.models.outline import Outline
from specdec.models.self_check import (
    differs,
    own_logits,
    tokens_for,
)
from specdec.runners import ACTIVATIONS, ATTENTIONS, EXECUTIONS
from specdec.runners.boundary_ops import Joint, Joints, read_joints
from specdec.runners.linear import (
    DenseLinear,
    HeadOf,
    LinearKernel,
    PackedWeight,
    linear_kernel,
)
from specdec.runners.replicas import Replicas
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

__all__ = ["TransformersTarget", "time_runners"]

_Reference: Any = StorageWeakRef  # which keeps no memory, but what tells one piece of it from the next
_TIMED_ROWS = (1, 8)  # a plain step, and a small tree

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
        self._joints: Joints | None = None
        self.options: dict[str, Any] = {"attention": "auto", "runner": "modules"}
        self._find_parts()
        tokens = tokens_for(len(weight_of(embedding)))
        expected = own_logits(model, self, tokens)
        self.vocab_size = int(expected.shape[-1])
        self._run_whole(expected, tokens)
        self._around = Outline(config, embedding)

    def _find_parts(self) -> None:
        """Find the decoder, its layers and its last norm, as far as specdec knows them; heads do."""
        model: Any = self.model
        self.decoder: nn.Module = model
        self._norm: nn.Module | None
        self.layers, self._norm = nn.ModuleList(), None
        self.layer_weights = self._parameters - weights_in(model.get_input_embeddings())
        self._unread: TargetError | None = None
        try:
            self.decoder, self.layers, self._norm = decoder_parts(self.name, model)
            self.num_layers, self.layer_weights = len(self.layers), weights_in(self.layers)
        except TargetError as error:
            self._unread = error
        self.whole = Whole(model, self.decoder)

    def _run_whole(self, expected: torch.Tensor, tokens: Sequence[int]) -> None:
        """Have the model's own whole forward run, if that computes its logits over a tree.

        Raises:
            TargetError: it cannot be called so, or how the logits differ.
        """
        try:
            masks = whole_masks(self.model)
            norm = None if self._unread is not None else partial(last_norm, self.name, self.model)
            self.runner = WholeModelRunner(self.model, norm, self.num_layers, self.device, masks, tokens)
            self.specs = self.runner.specs
            off = self._differs(expected, tokens)
        except SpecdecError:
            raise
        except Exception as error:  # code of others, called in a way of ours: it may raise anything
            off = f"it fails: {type(error).__name__}: {first_line(error)}"
        if off is not None:
            raise TargetError(
                f"{self.name}: the logits of its own forward over a tree are not those of each path: {off}; it is "
                "refused rather than decoded wrongly, so use plain generate"
            )

    def _differs(self, expected: torch.Tensor, tokens: Sequence[int]) -> str | None:
        with self.runner.every_expert():
            return differs(expected, self, tokens)

    def _check_again(self) -> None:
        """Raises TargetError where a forward that was replaced since does not compute each path's logits of a tree."""
        tokens = tokens_for(self.vocab_size)
        with torch_switches.loading():
            try:
                off = self._differs(own_logits(self.model, self, tokens), tokens)
            except SpecdecError:
                raise
            except Exception as error:  # code of others
                off = f"it fails: {type(error).__name__}: {first_line(error)}"
        if off is not None:
            raise TargetError(
                f"the forward of {self.name}, or its attention, was changed after it was loaded, and its logits over a "
                f"tree are not those of each path: {off}; put it back, or use plain generate"
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
            in_blocks = execution in ("auto", "native") and attention == "auto"
            found = DescribedCheckpoint.opened(path, in_blocks=in_blocks, int8=int8, **place)
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
        if not isinstance(tokens, torch.Tensor):
            tokens = torch.tensor(tokens)
        return self.joints.embedding(self.runner.embed(tokens.to(self.device)[None])[0])

    @property
    def embedding_rows(self) -> PackedWeight | torch.Tensor | None:
        if self.joints.embedding != Joint():
            return None
        module: Any = self.model.get_input_embeddings()
        plain = type(module) is nn.Embedding and module.max_norm is None and why_special(module) is None
        weight: torch.Tensor | None = module.weight.detach() if plain else None
        return weight

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.runner.norm(hidden)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.joints.logits(self.runner.head(self.joints.hidden(hidden)))

    def head_of(
        self, tokens: torch.Tensor | None, *, dtype: torch.dtype | None = None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        head: Any = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        plain = type(head) is nn.Linear and head.bias is None and why_special(head) is None
        if not plain:  # only the head's own module knows what it does to its logits
            every = slice(None) if tokens is None else tokens
            return lambda hidden: self.head(hidden.to(self.dtype))[..., every]
        weight = head.weight.detach()
        weight = weight if tokens is None else weight[tokens.to(self.head_device)]
        kernel: LinearKernel = linear_kernel(weight) if dtype is None else DenseLinear(weight.to(dtype))
        joints = self.joints
        return HeadOf(kernel) if joints.plain else HeadOf(kernel, joints.hidden, joints.logits)

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
            self._check_again()
        if (changed := self._around.changed()) is not None:
            raise TargetError(
                f"{self.name} was changed after its target was made, which would not follow: {changed}; make a new "
                "engine of it"
            )

    def version(self) -> object:
        """Where parameters and buffers are, how often they were written to, and which adapters of peft are active."""
        weights = tuple(map(_state, chain(self.model.parameters(), self.model.buffers())))
        adapted = (own for module in self.model.modules() if "_active_adapter" in (own := vars(module)))
        return weights, tuple((str(own["_active_adapter"]), own.get("_disable_adapters")) for own in adapted)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in sorted(self.model.named_parameters()):
            if not weight.is_meta:
                yield name, weight
                continue
            owner, _, kind = name.rpartition(".")
            with align_module_device(module := self.model.get_submodule(owner)):
                yield name, getattr(module, kind)

    def describe(self) -> dict[str, dict[str, Any]]:
        """What runs, and why: section -> name -> value."""
        between = None if self._joints is None else str(self._joints) or None
        own = getattr(self.config, "_attn_implementation", "of its class")
        return {
            "model": describe.model(self, self._parameters, self._weights, between),
            "execution": {
                "runner": "modules",
                "because": self.reason,
                "experts": None,
                "attention": f"the model's own ({own})",
                "batch-invariant": f"no: {self.runner.varies}; {describe.WHAT_FOLLOWS}",
                "CUDA graphs": "not used: the model's own forward is called as a whole",
                "threads": torch.get_num_threads() if self.device.type == "cpu" else None,
            },
            "machine": describe.machine(self.device),
        }

    @property
    def joints(self) -> Joints:
        """The operations of the model between its parts; those of a model that is run as a whole are read when asked.

        Raises:
            TargetError: they are not known, so that its embedding and its head cannot be called by themselves.
        """
        if self._joints is None:
            try:
                if self._unread is not None:
                    raise self._unread
                embedding: Any = self.model.get_input_embeddings()
                self._joints = self._read_joints(tokens_for(len(weight_of(embedding))))
            except Exception as error:  # code of others: it may raise anything
                raise TargetError(
                    f"{self.name} is run by its own forward as a whole, and its embedding, last norm and head cannot "
                    f"be called by themselves: {first_line(error)}; choose a drafter that reads tokens alone, such as "
                    "prompt_lookup or lookahead"
                ) from error
        return self._joints

    def _read_joints(self, tokens: Sequence[int]) -> Joints:
        """The operations of the model between its parts, recorded while it runs with its own attention."""
        model: Any = self.model
        ids = torch.tensor([list(tokens)], device=self.device)
        replicas = Replicas(model, whole=True)  # others may call the model meanwhile
        forward = partial(replicas.root, ids, attention_mask=torch.ones_like(ids), use_cache=False)
        places = {"embedding": model.get_input_embeddings(), "head": model.get_output_embeddings()}
        places |= {"layer": self.layers[0], "norm": self._norm}
        with torch.inference_mode():
            return read_joints(
                self.name, self.config, forward, **{name: replicas.of(at) for name, at in places.items()}
            )


def _state(weight: torch.Tensor) -> tuple[object, tuple[int, ...], int | None]:
    """Where a weight is, how it lies there, and how often it was written to, as far as torch tells.

    Memory that was given back may be another weight's at once, so an address alone does not tell them apart.
    """
    own: Any = getattr(weight, "_local_tensor", weight)  # of a DTensor
    try:
        place: object = own.data_ptr(), _Reference(own.untyped_storage())
    except (RuntimeError, NotImplementedError):  # a tensor that is made of others has none
        place = id(weight)
    return place, own.stride(), torch_switches.writes_to(own)


def time_runners(path: str | Path, **options: Any) -> dict[str, dict[str, float] | str]:
    """Runner -> rows -> seconds of whole steps, or the reason why it cannot run the model.

    ``options``: those of :meth:`TransformersTarget.from_pretrained` without ``execution``.
    """
    found: dict[str, dict[str, float] | str] = {}
    for name in EXECUTIONS[1:]:
        try:
            target = TransformersTarget.from_pretrained(path, **{**options, "execution": name})
        except (ConfigError, TargetError) as error:
            found[name] = str(error)
            continue
        curve = measure(target, rows=_TIMED_ROWS, lengths=(256,), seconds=2.0)
        found[name] = {str(rows): seconds for rows, seconds in zip(curve.rows, curve.seconds[0], strict=True)}
    return found
