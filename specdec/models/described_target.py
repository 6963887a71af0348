"""DescribedTarget: a model as a target by what its config says, whose modules are not called."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.costs.machine import Threads
from specdec.decoder.spec import UnknownDecoder
from specdec.decoder.weights.checkpoint import Checkpoint
from specdec.errors import CheckpointError, ConfigError, TargetError, check_choice
from specdec.execute.choose import executor_of
from specdec.execute.torch import TorchExecutor
from specdec.models import describe
from specdec.models.described_checkpoint import DescribedCheckpoint
from specdec.models.inspection import eos_ids_of
from specdec.models.live_weights import read_live
from specdec.models.self_check import check_finite, differs, own_logits, tokens_for
from specdec.models.warming import warm_up
from specdec.runners import ATTENTIONS
from specdec.runners.attention import check_runs
from specdec.runners.block_weight import BlockWeight
from specdec.runners.linear import PackedWeight
from specdec.sampling.sampler import Sampler
from specdec.settings.copies import NotCopied
from specdec.step import device_copies, torch_switches
from specdec.target import Target

__all__ = ["DescribedTarget"]

_HOST = torch.device("cpu")
_OF_EXECUTOR = (  # what are its own, as they are
    *("embed", "head", "head_of", "most_bytes", "named_weights", "new_cache", "norm"),
    *("packed_head", "pages", "recording"),
)
_PAGES_SHARE = 0.9  # of the bytes that a device has left; vLLM's gpu_memory_utilization is the same by default


class DescribedTarget(NotCopied, Target):
    """A decoder that a spec describes, and the executor that runs it.

    It has the weights that were in the checkpoint, or in the live model, when it was made; later changes of either are
    not followed.

    Args:
        checkpoint: its weights, which are read once.
        dtype, device: of the computation.
        execution, attention: as of :class:`specdec.models.transformers_target.TransformersTarget`.
        int8: rows that quantised blocks are multiplied with are rounded to bytes.
        eos_ids: the tokens that end a text.
        config, generation_config: of transformers.
        path: where it was loaded from.

    Attributes:
        spec: what the decoder is.
        executor: what runs it.
        reason: why that was chosen.
        others: why the others were not, by their names.

    Raises:
        ConfigError: the named executor cannot run it; the message has the reason.
        NumericalError: its logits are NaN or infinite.
    """

    instead = (
        "share it: Engine(target, ...); in another process (started by 'spawn') load a new one: "
        "TransformersTarget.from_pretrained(...)"
    )
    generation_config: Any = None

    @torch_switches.makes
    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        device: torch.device = _HOST,
        execution: str = "auto",
        attention: str = "auto",
        int8: bool = False,
        eos_ids: frozenset[int] = frozenset(),
        config: Any = None,
        generation_config: Any = None,
        path: str = "",
    ) -> None:
        Threads.check()
        self.backend = check_choice("attention", attention, ATTENTIONS)
        self.dtype, self.eos_ids, self.path = dtype, eos_ids, path
        self.config, self.generation_config = config, generation_config
        self.device = self.head_device = device
        self.layer_weights, self.sublayer_weights = checkpoint.layer_weights, checkpoint.sublayer_weights
        self._parameters = checkpoint.parameters
        self._copied = False
        self._quantised: Callable[[], str] | None = None
        self._why_dense: str | None = None
        chosen = executor_of(
            checkpoint, dtype=dtype, device=device, execution=execution, attention=attention, int8=int8
        )
        self.executor: TorchExecutor
        self.executor, self.reason, self.others = chosen
        self.executor.measure_rows()
        self.forward = self.executor.run  # type: ignore[method-assign]  # a call less in every step
        for name in _OF_EXECUTOR:
            setattr(self, name, getattr(self.executor, name))
        self.spec, self.specs = self.executor.spec, self.executor.specs
        check_runs(attention, self.specs)
        self.name, self.vocab_size, self.hidden_size = self.spec.architecture, self.spec.vocab, self.spec.hidden
        self.num_layers, self.context_length = len(self.spec.layers), self.spec.context
        self.options: dict[str, Any] = {"attention": attention, "runner": self.executor.name}
        if int8 and any(isinstance(kernel, BlockWeight) and kernel.int8 for _, kernel in self.executor.kernels()):
            self.activations = self.options["activations"] = "int8"
        self._version = object()

    @classmethod
    def of(cls, found: DescribedCheckpoint, **options: Any) -> DescribedTarget:
        """A checkpoint's; ``options``: execution, attention, device and int8 of the class."""
        target = cls(
            found.checkpoint,
            dtype=found.dtype,
            eos_ids=found.eos_ids,
            config=found.config,
            generation_config=found.generation_config,
            path=found.path,
            **options,
        )
        target._quantised, target._why_dense = found.quantised, found.why_dense
        if options.get("int8") and target.activations is None:
            raise ConfigError(
                "activations='int8' needs quantised blocks, and none of its matrices is in such; leave it out"
            )
        check_finite(target)
        return target

    @classmethod
    @torch_switches.makes
    def from_model(cls, model: PreTrainedModel, **options: Any) -> DescribedTarget:
        """A copy of a live model's weights, which does not follow later changes and needs the model no more.

        ``options``: execution and attention of the class.

        Raises:
            TargetError: no spec describes it, a part of it is not as its class makes it, or its logits of a few tokens
                are others than the copy's.
        """
        remedy = "use the model as it is (TransformersTarget(model)), or load it from its folder"
        try:
            checkpoint, weight = read_live(model), next(model.parameters())
        except (UnknownDecoder, CheckpointError) as unknown:
            raise TargetError(f"no copy of this {type(model).__name__} can be made: {unknown}; {remedy}") from unknown
        own: dict[str, Any] = {
            "dtype": weight.dtype,
            "device": weight.device,
            "config": model.config,
            "generation_config": model.generation_config,
            "eos_ids": eos_ids_of(model),
            "path": str(getattr(model, "name_or_path", "") or ""),
        }
        target = cls(checkpoint, **own, **options)
        target._copied = True
        tokens = tokens_for(target.vocab_size)
        expected = own_logits(model, target, tokens)
        with target.executor.every_expert():  # as the model's own had
            off = differs(expected, target, tokens)
        if off is not None and not cls._rounds_much(model):
            raise TargetError(
                f"a copy of this {target.name} computes other logits than the model itself: {off}; {remedy}"
            )
        return target

    @classmethod
    def _rounds_much(cls, model: PreTrainedModel) -> bool:
        """Whether a model in half precision is its copy's in float32, so that rounding parts them by so much."""
        if next(model.parameters()).dtype not in (torch.bfloat16, torch.float16):
            return False
        wide: Any = copy.deepcopy(model)
        try:
            cls.from_model(wide.float(), execution="fused")
        except TargetError:
            return False
        return True

    def __copy__(self) -> DescribedTarget:
        """A target of the same weights, whose attributes may be set apart."""
        return self._sharing()

    @property
    def batch_invariant(self) -> bool:
        return self.executor.varies is None

    @property
    def embedding_rows(self) -> PackedWeight | torch.Tensor | None:
        return self.executor.embedding_rows

    def cache_room(self) -> int | None:
        left = device_copies.free_bytes(self.device) if self.pages else None
        return None if left is None else int(_PAGES_SHARE * left) + sum(pool.free_bytes for pool in self.executor.pools)

    def warm_up(
        self,
        rows: int,
        *,
        sequences: int = 1,
        taps: Collection[int] = (),
        exit_layer: int | None = None,
        levels: int = 0,
    ) -> None:
        if self.launches:
            options: dict[str, Any] = {"sequences": sequences, "taps": taps, "exit_layer": exit_layer, "levels": levels}
            warm_up(self, self.executor.choose_cuts, rows, **options)

    def greet(self, sampler: Sampler, **others: Any) -> None:
        """One process agrees with itself."""

    def check_layers(self, asked: str) -> None:
        """Every layer, and each part of it, can be run by itself."""

    def active(self) -> AbstractContextManager[None]:
        Threads.check()
        return torch_switches.steps()

    def check_unchanged(self) -> None:
        """The weights are this target's own and stay as they are, so only the process is checked.

        Raises:
            ForkError: this process cannot run it, see :class:`specdec.costs.machine.Threads`.
        """
        Threads.check()

    def version(self) -> object:
        return self._version

    def describe(self) -> dict[str, dict[str, Any]]:
        """What runs, and why: section -> name -> value."""
        executor = self.executor
        return {
            "model": describe.model(self, self._parameters, self._described_weights()),
            "execution": {
                "runner": executor.name,
                "because": self.reason,
                **{f"not {name}": reason for name, reason in self.others.items()},
                "experts": executor.experts,
                "attention": executor.attention(),
                "batch-invariant": "yes" if self.batch_invariant else f"no: {executor.varies}; {describe.WHAT_FOLLOWS}",
                "CUDA graphs": executor.graphs(),
                "cuts of products": executor.cuts(),
                "cache": describe.cache_text(executor.pools) if self.pages else None,
                "threads": None if self.launches else torch.get_num_threads(),
            },
            "machine": describe.machine(self.device),
        }

    def _described_weights(self) -> str | None:
        """How its weights are held, if not densely from a folder."""
        if self._copied:
            return "a copy of a live model's, which does not follow later changes"
        if self._quantised is None:
            return None
        held, why = _in_blocks(self.executor, self._quantised()), self._why_dense
        if why is None:
            return held
        some = any(isinstance(kernel, BlockWeight) for _, kernel in self.executor.kernels())
        return f"{held}; others dequantised: {why}" if some else f"dequantised: {why}"


def _in_blocks(executor: TorchExecutor, kind: str) -> str:
    """How many matrices are in blocks of a kind, or of which formats where a file has several, the most frequent first;
    their size, and whether rows are rounded.
    """
    every = [*executor.kernels()]
    blocks = [kernel for _, kernel in every if isinstance(kernel, BlockWeight)]
    counts = Counter(getattr(part.blocks, "called", part.format.name) for kernel in blocks for part in kernel.parts)
    size = f"{sum(kernel.nbytes for kernel in blocks) / 1e6:.0f} MB in panels"
    told = f"{kind} in blocks: {counts.total()} matrices, {size}"
    if not kind:
        listed = ", ".join(f"{count} in {name}" for name, count in counts.most_common())
        told = f"{'float16' if {*counts} == {'F16'} else 'quantised blocks'} as in the file: {listed}; {size}"
    if any(kernel.int8 for kernel in blocks):
        told += "; rows that they are multiplied with in int8"
        rounded = (isinstance(kernel, BlockWeight) and kernel.int8 for _, kernel in every)
        dense = [name for (names, _), one in zip(every, rounded, strict=True) if not one for name in names]
        if dense:
            told += f", but not those of {len(dense)} other matrices, such as {dense[0].removesuffix('.weight')}"
    return told
