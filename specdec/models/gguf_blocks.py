"""GGUF models whose blocks stay quantised: transformers' model classes around weights that are not dequantised.

Transformers' tables map a file's settings and tensors to its own names, and undo llama.cpp's changes to their values:
another order of rows, which is applied to the blocks as well, and changed norms, which are small. Embeddings are read
where they lie in the file. Weights of products are copied into panels, one after the other, and their pages of the
file are released.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from specdec.errors import CheckpointError
from specdec.models.gguf_table import TensorEntry, TensorTable
from specdec.native.formats import formats
from specdec.native.library import library
from specdec.runners.block_weight import BlockTensor, BlockWeight
from specdec.runners.linear import ModuleRef, PackedLinear, PackedModule, TiedEmbedding

__all__ = [
    "Filling",
    "config_of",
    "described",
    "described_rows",
    "model_in_blocks",
    "why_dequantised",
    "why_not_native",
]

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3")  # native layers run all of these
_DTYPES = (torch.bfloat16, torch.float32)
_GROUPS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


def why_dequantised(table: TensorTable, dtype: torch.dtype, device: Any) -> str | None:
    """The reason why a file's blocks must be dequantised, or None where they can stay quantised."""
    if not any(entry.type in formats() and len(entry.shape) == 2 for entry in table.entries):
        return "none of its weights are in blocks that native layers read"
    if (family := table.metadata["general.architecture"]) not in _FAMILIES:
        return f"native layers do not run the architecture {family!r}"
    return why_not_native(dtype, device)


def why_not_native(dtype: torch.dtype, device: Any) -> str | None:
    """Why native layers do not run here, or in this dtype, or None where they do."""
    if library() is None:
        return "native layers need a C compiler (cc, gcc or clang), and none works here"
    if dtype not in _DTYPES:
        return f"native layers compute in float32 and bfloat16, and the model in {str(dtype)[6:]}"
    if device is not None and torch.device(device).type != "cpu":
        return f"native layers run on a CPU, and the model is to be on {device}"
    return None


def config_of(metadata: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The config that transformers makes of a file. Its own way reads the whole vocabulary for a size, in seconds."""
    own = str(metadata["general.architecture"])
    family = "mistral" if "llama" in own and metadata.get("general.name") == "mistral" else own
    values: dict[str, Any] = {"tie_word_embeddings": "output.weight" not in names}
    values |= GGUF_CONFIG_DEFAULTS_MAPPING.get(family, {})
    for key, value in metadata.items():
        prefix, _, setting = key.replace(own, family).partition(".")
        names_of: Any = GGUF_CONFIG_MAPPING
        name = names_of[prefix].get(setting) if prefix in ("general", family) else None
        if name not in (None, -1):
            values[name] = value.replace(own, family) if isinstance(value, str) else value
    if values["model_type"] == "gemma3":
        values["model_type"] = "gemma3_text"
    values.setdefault("vocab_size", metadata.get("tokenizer.ggml.tokens", 0))
    return AutoConfig.for_model(values.pop("model_type")).from_dict(values)


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
    return _GgufFilling(table, config, dtype, int8).model


def described(model: nn.Module) -> str:
    """The formats of a model's blocks, the most frequent first, and their size in memory, as text."""
    stores = _stores(model)
    counts = Counter(part.format.name for store in stores.values() for part in store.parts)
    size = sum(store.nbytes for store in stores.values())
    formats = ", ".join(f"{count} in {name}" for name, count in counts.most_common())
    told = f"quantised blocks as in the file: {formats}; {size / 1e6:.0f} MB in panels"
    return told + described_rows(model)


def described_rows(model: nn.Module) -> str:
    """That rows are rounded to bytes which a model's blocks are multiplied with, or nothing."""
    if not any(store.int8 for store in _stores(model).values()):
        return ""
    told = "; rows that they are multiplied with in int8"
    if dense := [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]:
        told += f", but not those of {len(dense)} other matrices, such as {dense[0]}"
    return told


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

    def __init__(self, config: Any, dtype: torch.dtype, int8: bool, where: str) -> None:
        self._dtype, self._config, self._int8, self._where = dtype, config, int8, where
        classes: Any = AutoModelForCausalLM
        with init_empty_weights(include_buffers=False):
            self.model: PreTrainedModel = classes.from_config(config, dtype=dtype)
        self._names = {id(module): name for name, module in self.model.named_modules()}

    def fill(self) -> None:
        model: Any = self.model
        decoder = model.get_decoder()
        for layer in decoder.layers:
            for group in _GROUPS:
                self._place([ModuleRef.at(layer, name) for name in group])
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
    def __init__(self, table: TensorTable, config: Any, dtype: torch.dtype, int8: bool) -> None:
        super().__init__(config, dtype, int8, table.where)
        self._table = table
        family = str(table.metadata["general.architecture"])
        sizes = {name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
        processor: Any = TENSOR_PROCESSORS.get(family, TensorProcessor)
        self._process = processor(config=sizes).process
        shell: Any = SimpleNamespace(
            config=self.model.config, state_dict=self.model.state_dict, named_children=lambda: []
        )
        names = get_gguf_hf_weights_map(shell, processor(config=sizes))
        self._entries = {names[entry.name]: entry for entry in table.entries if entry.name in names}
        self.fill()

    def _tensor(self, name: str, shape: Sequence[int]) -> BlockTensor | TensorEntry:
        """The blocks of a weight; where it has none, its entry in the table."""
        entry = self._entry(name, shape)
        if entry.type not in formats():
            return entry
        order = self._processed(np.arange(shape[0]), entry.name)
        same = np.array_equal(order, np.arange(shape[0]))
        return BlockTensor(formats()[entry.type], self._table.rows(entry), None if same else order)

    def _dense(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """The weight as a dense tensor."""
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
        if entry.shape != tuple(shape):
            raise self._unfit(f"1 misshapen, such as {name}, {list(entry.shape)} in place of {list(shape)}")
        return entry
