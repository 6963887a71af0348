"""DescribedTarget: a model as a target by what its config says, whose modules are not called."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from specdec.costs.machine import Threads
from specdec.decoder.families import FAMILIES, spec_of
from specdec.decoder.settings import Settings
from specdec.decoder.weights.checkpoint import Checkpoint
from specdec.decoder.weights.quantised import opened_source
from specdec.errors import ConfigError, TargetError
from specdec.execute import cuda_kernels
from specdec.execute.cuda import CudaExecutor
from specdec.execute.native import NativeExecutor, why_not
from specdec.execute.torch import TorchExecutor
from specdec.models.gguf import GgufFile
from specdec.models.gguf_source import GGUF_NAMES, GgufSource
from specdec.models.gguf_tokenizer import ends_of
from specdec.models.inspection import eos_ids_of
from specdec.models.live_weights import read_live
from specdec.models.self_check import Reference, own_logits, tokens_for
from specdec.models.warming import warm_up
from specdec.runners.recording import Recording
from specdec.sampling.sampler import Sampler
from specdec.settings.copies import NotCopied
from specdec.step import device_copies, torch_switches
from specdec.step.cache import KVCache
from specdec.step.pages import PAGE
from specdec.step.slots import LayerSpec
from specdec.step.step_io import StepInput
from specdec.step.step_output import StepOutput

__all__ = ["DescribedTarget"]

_HOST = torch.device("cpu")
_PAGES_SHARE = 0.9  # of the bytes that a device has left; vLLM's gpu_memory_utilization is the same by default
_WHAT_FOLLOWS = "texts may part from plain decoding's where two logits are as good as equal"


class DescribedTarget(NotCopied):
    """A decoder that a spec describes, and the executor that runs it; as of :class:`specdec.target.Target`.

    Args:
        checkpoint: its weights, which are read once.
        dtype, device: of the computation.
        execution: ``torch``, which on a CUDA device is by Triton's kernels where they compute the decoder; ``native``;
            or ``auto``, which is native where that runs.
        attention: kernels of ``torch``, see :mod:`specdec.runners.attention`.
        int8: of ``native``, see :class:`specdec.execute.native.NativeExecutor`.
        eos_ids: the tokens that end a text.
        config: of transformers, whose sizes measurements are kept by.

    Attributes:
        spec: what the decoder is.
        executor: what runs it.

    Raises:
        ConfigError: the native library cannot run it.
    """

    shared = False
    instead = "share it: Engine(target, ...)"

    @torch_switches.makes
    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        device: torch.device = _HOST,
        execution: str = "torch",
        attention: str = "auto",
        int8: bool = False,
        eos_ids: frozenset[int] = frozenset(),
        config: Any = None,
    ) -> None:
        Threads.check()
        self.spec, self.backend, self.dtype, self.eos_ids = checkpoint.spec, attention, dtype, eos_ids
        self.device = self.head_device = device
        self.executor: TorchExecutor
        why = why_not(self.spec, dtype, device)
        if execution == "native" and why is not None:
            raise ConfigError(f"execution={execution!r} cannot run this model: {why}; leave it at auto")
        if execution == "native" or (execution == "auto" and attention == "auto" and why is None):
            self.executor = NativeExecutor(checkpoint, dtype=dtype, int8=int8)
        else:
            by_torch = cuda_kernels.why_not(self.spec, dtype, device) is not None
            kind = TorchExecutor if by_torch else CudaExecutor
            self.executor = kind(checkpoint, dtype=dtype, device=device, backend=attention)
        self.name, self.vocab_size, self.hidden_size = self.spec.architecture, self.spec.vocab, self.spec.hidden
        self.num_layers, self.context_length = len(self.spec.layers), self.spec.context
        self.layer_weights, self.config = checkpoint.layer_weights, config
        self.specs: Sequence[LayerSpec] = self.executor.specs
        self.options: dict[str, Any] = {"attention": attention, "runner": self.executor.name}
        self._version = object()

    @classmethod
    def from_folder(cls, folder: Path, *, dtype: torch.dtype | None = None, **options: Any) -> DescribedTarget:
        """A folder's model; ``dtype``: None for the config's. ``options``: of the class.

        Raises:
            UnknownDecoder: no description covers it.
            CheckpointError: its tensors are missing, misshapen or left over.
        """
        config = AutoConfig.from_pretrained(folder).get_text_config()
        spec = spec_of(config.model_type, Settings.of(config))
        source = opened_source(folder, getattr(config, "quantization_config", None), int8=options.get("int8", False))
        checkpoint = Checkpoint(spec, FAMILIES[config.model_type].names, source)
        ends = _ends(folder, config)
        return cls(checkpoint, dtype=dtype or config.dtype or torch.float32, eos_ids=ends, config=config, **options)

    @classmethod
    def from_gguf(cls, path: Path, *, dtype: torch.dtype | None = None, **options: Any) -> DescribedTarget:
        """A GGUF file's model; ``dtype``: None for the file's. ``options``: of the class.

        Raises:
            UnknownDecoder: no description covers it.
            CheckpointError: the file is broken, or its tensors are missing, misshapen or left over.
            ConfigError: there is no package to read it with.
        """
        file = GgufFile.read(path)
        config = file.config().get_text_config()
        spec, names = spec_of(config.model_type, Settings.of(config)), FAMILIES[config.model_type].names
        checkpoint = Checkpoint(spec, names, GgufSource(file.table, config), GGUF_NAMES)
        return cls(checkpoint, dtype=dtype or file.dtype, eos_ids=frozenset(ends_of(path)), config=config, **options)

    @classmethod
    def from_model(cls, model: PreTrainedModel, **options: Any) -> DescribedTarget:
        """A copy of a live model's weights, which does not follow later changes and needs the model no more.

        ``options``: of the class, but for dtype and device, which are the model's.

        Raises:
            UnknownDecoder: no description covers it, or a part of it is not as its class makes it.
            TargetError: its logits of a few tokens are others than the copy's.
        """
        checkpoint, weight = read_live(model), next(model.parameters())
        own: dict[str, Any] = {
            "dtype": weight.dtype,
            "device": weight.device,
            "config": model.config,
            "eos_ids": eos_ids_of(model),
        }
        target = cls(checkpoint, **own, **options)
        tokens = tokens_for(target.vocab_size)
        expected = own_logits(model, target, tokens)
        with target.executor.every_expert():  # as the model's own had
            off = Reference(model, expected, target, target.specs, tokens).differs()
        if off is not None:
            raise TargetError(
                f"a copy of this {target.name} computes other logits than the model itself: {off}; use the model as it "
                "is (TransformersTarget(model)), or load it from its folder"
            )
        return target

    @property
    def batch_invariant(self) -> bool:
        return self.executor.varies is None

    def new_cache(self, *, capacity: int, rows: int) -> KVCache:
        return self.executor.new_cache(capacity=capacity, rows=rows)

    def forward(self, step: StepInput) -> StepOutput:
        return self.executor.run(step)

    def greet(self, sampler: Sampler, **others: Any) -> None:
        """As :meth:`specdec.target.Target.greet`: one process agrees with itself."""

    def check_layers(self, asked: str) -> None:
        """Every layer, and each part of it, can be run by itself."""

    def active(self) -> AbstractContextManager[None]:
        Threads.check()
        return torch_switches.steps()

    def check_unchanged(self) -> None:
        """Nobody else has its weights.

        Raises:
            ForkError: this process cannot run it, see :class:`specdec.costs.machine.Threads`.
        """
        Threads.check()

    def version(self) -> object:
        return self._version

    def embed(self, tokens: torch.Tensor | Sequence[int] | npt.NDArray[np.int64]) -> torch.Tensor:
        return self.executor.embed(tokens)

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.executor.norm(hidden)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.executor.head(hidden)

    def head_of(
        self, tokens: torch.Tensor | None, *, dtype: torch.dtype | None = None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """As :meth:`specdec.target.Target.head_of`, of all tokens for None; with a ``dtype`` gradients may pass."""
        return self.executor.head_of(tokens, dtype=dtype)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Its weights as transformers has them, sorted by its names."""
        return self.executor.named_weights()

    @property
    def pages(self) -> bool:
        """Whether caches are in pages."""
        return self.executor.pages

    @property
    def recording(self) -> Recording | None:
        """What drafters on its device have their passes recorded by; None where nothing is recorded."""
        return self.executor.recording

    def warm_up(
        self,
        rows: int,
        *,
        sequences: int = 1,
        taps: Collection[int] = (),
        exit_layer: int | None = None,
        levels: int = 0,
    ) -> None:
        if device_copies.is_apart(self.device):
            options: dict[str, Any] = {"sequences": sequences, "taps": taps, "exit_layer": exit_layer, "levels": levels}
            warm_up(self, self.executor.choose_cuts, rows, **options)

    def cache_room(self) -> int | None:
        """Bytes that the pages of further texts may have; None where caches are not in pages, and there is no telling.

        It is what is free of the pages that there are, and most of what the device has left. The rest is for what
        forwards compute, and for the drafters' own caches.
        """
        left = device_copies.free_bytes(self.device) if self.pages else None
        return None if left is None else int(_PAGES_SHARE * left) + sum(pool.free_bytes for pool in self.executor.pools)

    def _describe_cache(self) -> str | None:
        """The pages of all texts; None where each text's cache is its own."""
        if not self.pages:
            return None
        pools = self.executor.pools
        used, pages, size = (sum(getattr(pool, name) for pool in pools) for name in ("used", "pages", "nbytes"))
        return f"in pages of {PAGE} tokens; {used} of {pages} in use, {size / 1e6:.1f} MB"

    def describe(self) -> dict[str, dict[str, Any]]:
        """What runs: section -> name -> value."""
        return {
            "model": {
                "class": self.name,
                "layers": self.num_layers,
                "hidden size": self.hidden_size,
                "vocabulary": self.vocab_size,
                "context": self.context_length,
                "dtype": str(self.dtype).removeprefix("torch."),
                "device": str(self.device),
            },
            "execution": {
                "runner": self.executor.name,
                "batch-invariant": "yes" if self.batch_invariant else f"no: {self.executor.varies}; {_WHAT_FOLLOWS}",
                "attention": self.executor.attention(),
                "CUDA graphs": self.executor.graphs() if self.device.type == "cuda" else None,
                "cuts of products": self.executor.cuts(),
                "cache": self._describe_cache(),
            },
        }


def _ends(folder: Path, config: Any) -> frozenset[int]:
    """The tokens that end a text, by the generation config or, if it has none, the config."""
    ids = getattr(config, "eos_token_id", None)
    if (folder / "generation_config.json").exists():
        known = GenerationConfig.from_pretrained(folder).eos_token_id
        ids = ids if known is None else known
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)
