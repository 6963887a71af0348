"""GGUF models whose blocks stay quantised: transformers' model classes around weights that are not dequantised.

Transformers' tables map a file's settings and tensors to its own names, and undo llama.cpp's changes to their values:
another order of rows, which is applied to the blocks as well, and changed norms, which are small. Embeddings are read
where they lie in the file. Weights of products are copied into panels, one after the other, and their pages of the
file are released.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    Gemma2TensorProcessor,
    LlamaTensorProcessor,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from specdec.errors import CheckpointError
from specdec.models.gguf_joined import joined_from, own_names
from specdec.models.gguf_rope import factors_read
from specdec.models.gguf_table import TensorEntry, TensorTable
from specdec.models.gguf_tensors import check_known, check_read
from specdec.native.formats import formats
from specdec.native.library import library
from specdec.runners.block_weight import BlockTensor, BlockWeight
from specdec.runners.experts import MIXTURES, PackedExperts
from specdec.runners.linear import ModuleRef, PackedLinear, PackedModule, TiedEmbedding

__all__ = [
    "Filling",
    "check_tensors",
    "dequantised_model",
    "described",
    "described_rows",
    "model_in_blocks",
    "why_dequantised",
    "why_not_native",
]

_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3")  # native layers run all of these
_DTYPES = (torch.bfloat16, torch.float32)
_ATTENTION = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",))
_MLP = (("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",))
_PROCESSORS = {
    **TENSOR_PROCESSORS,
    "gemma": Gemma2TensorProcessor,
    **dict.fromkeys(("granite", "granitemoe", "smollm3", "mistral3"), LlamaTensorProcessor),
}
"""Architecture -> what undoes llama.cpp's changes to its tensors."""
_OPTIONAL = re.compile(r".*\.(self_attn|mlp)\.\w+\.bias")  # zeros where the file lacks one, as in llama.cpp


def why_dequantised(table: TensorTable, dtype: torch.dtype, device: Any, *, int8: bool = False) -> str | None:
    """The reason why a file's blocks must be dequantised, or None where they can stay as they are.

    ``int8``: the rows that multiply them are to be rounded to bytes.
    """
    kept = [formats()[entry.type] for entry in table.entries if len(entry.shape) == 2 and _stays(entry, dtype)]
    if not kept:
        return "none of its weights are in blocks that native layers read"
    if int8 and not any(one.has_integers for one in kept):
        return "none of its weights are in blocks of integers"
    if (family := table.metadata["general.architecture"]) not in _FAMILIES:
        return f"native layers do not run the architecture {family!r}"
    return why_not_native(dtype, device)


def _stays(entry: TensorEntry, dtype: torch.dtype) -> bool:
    """Whether a model in this dtype can hold a matrix as it is in the file.

    One in float16 it does in float32. In bfloat16 it is rounded, as that of any other checkpoint.
    """
    if (one := formats().get(entry.type)) is None:
        return False
    return not one.is_float16 or (dtype is torch.float32 and entry.shape[-1] % int(one.values) == 0)


def why_not_native(dtype: torch.dtype, device: Any) -> str | None:
    """Why native layers do not run here, or in this dtype, or None where they do."""
    if library() is None:
        return "native layers need a C compiler (cc, gcc or clang), and none works here"
    if dtype not in _DTYPES:
        return f"native layers compute in float32 and bfloat16, and the model in {str(dtype)[6:]}"
    if device is not None and torch.device(device).type != "cpu":
        return f"native layers run on a CPU, and the model is to be on {device}"
    return None


def model_in_blocks(table: TensorTable, config: Any, dtype: torch.dtype, *, int8: bool = False) -> PreTrainedModel:
    """A transformers model whose linears, embedding and head hold the blocks of a file.

    Args:
        table: the file's table of tensors.
        config: the model's config.
        dtype: dtype of the computation and of the few weights that are not quantised.
        int8: whether the rows that multiply blocks are rounded to bytes.

    Raises:
        CheckpointError: a tensor is missing, or its shape differs from the model's.
    """
    return _GgufFilling(table, config, dtype, int8).filled()


def dequantised_model(table: TensorTable, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """The same with dense weights.

    Raises:
        CheckpointError: a tensor is missing, or its shape differs from the model's.
    """
    return _GgufFilling(table, config, dtype, in_blocks=False).filled()


def check_tensors(table: TensorTable, config: Any) -> None:
    """Raises CheckpointError where a file's tensors are not those of the config's model; no weight is read or made."""
    _GgufFilling(table, config, torch.float32, in_blocks=False)


def described(model: nn.Module) -> str:
    """The formats of a model's blocks, the most frequent first, and their size in memory, as text."""
    stores = _stores(model)
    counts = Counter(part.format.name for store in stores.values() for part in store.parts)
    size = sum(store.nbytes for store in stores.values())
    formats = ", ".join(f"{count} in {name}" for name, count in counts.most_common())
    kind = "float16" if {*counts} == {"F16"} else "quantised blocks"
    told = f"{kind} as in the file: {formats}; {size / 1e6:.0f} MB in panels"
    return told + described_rows(model)


def described_rows(model: nn.Module) -> str:
    """That rows are rounded to bytes which a model's blocks are multiplied with, or nothing."""
    if not any(store.int8 for store in _stores(model).values()):
        return ""
    told = "; rows that they are multiplied with in int8"
    if dense := [name for name, module in model.named_modules() if _keeps_rows(module)]:
        told += f", but not those of {len(dense)} other matrices, such as {dense[0]}"
    return told


def _keeps_rows(module: nn.Module) -> bool:
    """Whether a linear rounds no rows to bytes where blocks of integers do."""
    if isinstance(module, PackedLinear):
        return isinstance(module.store, BlockWeight) and not module.store.int8
    return isinstance(module, nn.Linear)


def _stores(model: nn.Module) -> dict[int, BlockWeight]:
    """The weights in blocks of a model's modules."""
    packed = (module for module in model.modules() if isinstance(module, PackedModule))
    return {id(store): store for module in packed for store in module.stores if isinstance(store, BlockWeight)}


class Filling:
    """A model of transformers while it is filled with a checkpoint's weights.

    Args:
        config: of the model.
        dtype: that it computes in.
        int8: rows that blocks are multiplied with are rounded to bytes.
        where: the checkpoint, as errors name it.
    """

    _in_blocks: bool

    def __init__(self, config: Any, dtype: torch.dtype, int8: bool, where: str) -> None:
        self._dtype, self._config, self._int8, self._where = dtype, config, int8, where
        classes: Any = AutoModelForCausalLM
        with init_empty_weights(include_buffers=False):
            self.model: PreTrainedModel = classes.from_config(config, dtype=dtype)
        self._names = {id(module): name for name, module in self.model.named_modules()}

    def fill(self) -> None:
        model: Any = self.model
        decoder = model.get_decoder()
        for layer in decoder.layers if self._in_blocks else ():
            mixed = type(layer.mlp) in MIXTURES
            for group in _ATTENTION if mixed else (*_ATTENTION, *_MLP):
                self._place([ModuleRef.at(layer, name) for name in group])
            if mixed:
                self._place_experts(ModuleRef.at(layer, "mlp.experts"))
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        tied = bool(self._config.tie_word_embeddings)
        below = self._tensor(f"{self._names[id(embedding)]}.weight", embedding.weight.shape)
        if isinstance(below, BlockTensor):
            store = BlockWeight([below], None, self._dtype, as_in_file=not tied, int8=self._int8)
            ModuleRef.at(model, self._names[id(embedding)]).put(TiedEmbedding(store, embedding))
            if tied:
                ModuleRef.at(model, self._names[id(head)]).put(PackedLinear(store, 0, store.outputs))
        if not tied:
            self._place([ModuleRef.at(model, self._names[id(head)])])
        for name, parameter in list(model.named_parameters()):
            if parameter.is_meta and not (tied and name == f"{self._names[id(head)]}.weight"):
                owner, _, kind = name.rpartition(".")
                dense = self._dense(name, parameter.shape)
                setattr(model.get_submodule(owner), kind, nn.Parameter(dense, requires_grad=parameter.requires_grad))
        if tied and isinstance(model.get_input_embeddings(), nn.Embedding):
            model.tie_weights()
        model.eval()

    def _place(self, places: Sequence[ModuleRef]) -> None:
        """Replace linears that multiply the same rows with their blocks from the file."""
        names = [self._names[id(place.module)] for place in places]
        tensors = [
            self._tensor(f"{name}.weight", place.module.weight.shape) for name, place in zip(names, places, strict=True)
        ]
        blocks = [tensor for tensor in tensors if isinstance(tensor, BlockTensor)]
        if len(blocks) < len(tensors):
            return  # at least one has no blocks, so all are filled in densely
        biased = [
            (name, bias) for name, place in zip(names, places, strict=True) if (bias := place.module.bias) is not None
        ]
        if 0 < len(biased) < len(places):
            return
        biases = [self._dense(f"{name}.bias", bias.shape) for name, bias in biased]
        store = BlockWeight(blocks, torch.cat(biases) if biases else None, self._dtype, int8=self._int8)
        store.install(places)

    def _place_experts(self, place: ModuleRef) -> None:
        """Replace a layer's experts with their blocks from the file; where it has none, they are filled in densely."""

    def _tensor(self, name: str, shape: Sequence[int]) -> Any:
        """A weight's BlockTensor, or anything else where it has no blocks."""
        raise NotImplementedError

    def _dense(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """A weight as any other checkpoint would have it."""
        raise NotImplementedError

    def _unfit(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint {self._where} does not fit {type(self.model).__name__}: tensors {what}; "
            "it was saved from another architecture or is incomplete"
        )


class _GgufFilling(Filling):
    def __init__(
        self, table: TensorTable, config: Any, dtype: torch.dtype, int8: bool = False, in_blocks: bool = True
    ) -> None:
        super().__init__(config, dtype, int8, table.where)
        self._table, self._in_blocks = table, in_blocks
        self._family = family = str(table.metadata["general.architecture"])
        sizes = {name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
        processor: Any = _PROCESSORS.get(family, TensorProcessor)
        self._process = processor(config=sizes).process
        shell: Any = SimpleNamespace(
            config=self.model.config, state_dict=self.model.state_dict, named_children=lambda: []
        )
        self._factors = factors_read(family)
        names = get_gguf_hf_weights_map(shell, processor(config=sizes), family)
        names |= own_names([*self.model.state_dict()])
        self._entries = {names.get(entry.name, entry.name): entry for entry in table.entries}
        self._check()

    def filled(self) -> PreTrainedModel:
        self.fill()
        return self.model

    def _check(self) -> None:
        """Raises CheckpointError unless the file has all tensors that the model needs, in its shapes, and no others."""
        model: Any = self.model
        tied = f"{self._names[id(model.get_output_embeddings())]}.weight"
        shapes = {name: weight.shape for name, weight in self.model.named_parameters(remove_duplicate=False)}
        if self._config.tie_word_embeddings:
            shapes.pop(tied, None)
        split = {name: shape for name, shape in shapes.items() if joined_from(name, self._family) is not None}
        needed = [name for name in shapes if name not in split and not self._is_absent(name)]
        have = {self._entries[name].name for name in needed if name in self._entries} | {*self._factors}
        have |= {part for name in split for part in joined_from(name, self._family).parts}  # type: ignore[union-attr]
        check_known(self._table, have)
        for name in needed:
            self._entry(name, shapes[name])
        for name, shape in split.items():
            self._joined_entries(name, shape)
        check_read(self._table, have)

    def _tensor(self, name: str, shape: Sequence[int]) -> BlockTensor | TensorEntry:
        """The blocks of a weight; where it has none, its entry in the table."""
        entry = self._entry(name, shape)
        if self._is_dense(entry):
            return entry
        order = self._processed(np.arange(shape[0]), entry.name)
        same = np.array_equal(order, np.arange(shape[0]))
        return BlockTensor(formats()[entry.type], self._table.rows(entry), None if same else order)

    def _place_experts(self, place: ModuleRef) -> None:
        module, name = place.module, self._names[id(place.module)]
        kinds = {kind: getattr(module, kind).shape for kind in PackedExperts.names}
        tensors = [self._joined_entries(f"{name}.{kind}", shape) for kind, shape in kinds.items()]
        if any(self._is_dense(entry) for entries in tensors for entry in entries):
            return
        gate_up, down = ([self._store(parts) for parts in zip(*map(self._each, own), strict=True)] for own in tensors)
        place.put(PackedExperts(gate_up, down, module))

    def _store(self, parts: Sequence[BlockTensor]) -> BlockWeight:
        return BlockWeight(parts, None, self._dtype, int8=self._int8)

    def _each(self, entry: TensorEntry) -> list[BlockTensor]:
        """The blocks of each expert in a tensor of all."""
        rows = np.split(self._table.rows(entry), entry.shape[0])
        return [BlockTensor(formats()[entry.type], own) for own in rows]

    def _joined_entries(self, name: str, shape: Sequence[int]) -> list[TensorEntry]:
        """The tensors of a file that make a weight: of gate and of up, or of down."""
        joined: Any = joined_from(name, self._family)
        return [self._entry(part, joined.shape_of_part(shape)) for part in joined.parts]

    def _is_absent(self, name: str) -> bool:
        return name not in self._entries and _OPTIONAL.fullmatch(name) is not None

    def _is_dense(self, entry: TensorEntry) -> bool:
        return not (self._in_blocks and _stays(entry, self._dtype))

    def _dense(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """The weight as a dense tensor."""
        if self._is_absent(name):
            return torch.zeros(*shape, dtype=self._dtype)
        if (joined := joined_from(name, self._family)) is not None:
            parts = [self._table.dequantised(entry) for entry in self._joined_entries(name, shape)]
            return torch.tensor(joined.join(parts)).to(self._dtype)
        entry = self._entry(name, shape)
        values = self._processed(self._table.dequantised(entry), entry.name)
        return torch.tensor(values).to(self._dtype)

    def _processed(self, values: np.ndarray, name: str) -> np.ndarray:
        """A tensor's values after transformers has undone llama.cpp's changes to them."""
        found: np.ndarray = self._process(
            weights=values, name=name, tensor_key_mapping={}, parsed_parameters={}
        ).weights
        return found

    def _entry(self, name: str, shape: Sequence[int]) -> TensorEntry:
        if (entry := self._entries.get(name)) is None:
            raise self._unfit(f"1 missing, such as {name}")
        if entry.shape != tuple(shape) and (1, *entry.shape) != tuple(shape):  # llama.cpp has a matrix of one row flat
            raise self._unfit(f"1 misshapen, such as {name}, {list(entry.shape)} in place of {list(shape)}")
        return entry
