"""GGUF models as transformers runs them: its model classes, filled with a file's weights, dequantised.

Transformers' tables map a file's settings and tensors to its own names, and undo llama.cpp's changes to their values:
another order of rows, and changed norms.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

from specdec.errors import CheckpointError
from specdec.models.gguf_joined import joined_from, own_names
from specdec.models.gguf_rope import factors_read
from specdec.models.gguf_source import PROCESSORS
from specdec.models.gguf_table import TensorEntry, TensorTable
from specdec.models.gguf_tensors import check_known, check_read

__all__ = ["check_tensors", "dequantised_model"]

_OPTIONAL = re.compile(r".*\.(self_attn|mlp)\.\w+\.bias")  # zeros where the file lacks one, as in llama.cpp


def dequantised_model(table: TensorTable, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """A transformers model with a file's weights.

    Args:
        table: the file's table of tensors.
        config: the model's config.
        dtype: of the weights and of the computation.

    Raises:
        CheckpointError: a tensor is missing, or its shape differs from the model's.
    """
    return _Filling(table, config, dtype).filled()


def check_tensors(table: TensorTable, config: Any) -> None:
    """Raises CheckpointError where a file's tensors are not those of the config's model; no weight is read or made."""
    _Filling(table, config, torch.float32)


class _Filling:
    """A model of transformers while it is filled with a file's weights."""

    def __init__(self, table: TensorTable, config: Any, dtype: torch.dtype) -> None:
        self._dtype, self._config, self._table = dtype, config, table
        classes: Any = AutoModelForCausalLM
        with init_empty_weights(include_buffers=False):
            self.model: PreTrainedModel = classes.from_config(config, dtype=dtype)
        self._names = {id(module): name for name, module in self.model.named_modules()}
        self._family = family = str(table.metadata["general.architecture"])
        sizes = {name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
        processor: Any = PROCESSORS.get(family, TensorProcessor)
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
        model: Any = self.model
        tied = bool(self._config.tie_word_embeddings)
        head = f"{self._names[id(model.get_output_embeddings())]}.weight"
        for name, parameter in list(model.named_parameters()):
            if parameter.is_meta and not (tied and name == head):
                owner, _, kind = name.rpartition(".")
                dense = self._dense(name, parameter.shape)
                setattr(model.get_submodule(owner), kind, nn.Parameter(dense, requires_grad=parameter.requires_grad))
        if tied:
            model.tie_weights()
        model.eval()
        return self.model

    def _unfit(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint {self._table.where} does not fit {type(self.model).__name__}: tensors {what}; "
            "it was saved from another architecture or is incomplete"
        )

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

    def _joined_entries(self, name: str, shape: Sequence[int]) -> list[TensorEntry]:
        """The tensors of a file that make a weight: of gate and of up, or of down."""
        joined: Any = joined_from(name, self._family)
        return [self._entry(part, joined.shape_of_part(shape)) for part in joined.parts]

    def _is_absent(self, name: str) -> bool:
        return name not in self._entries and _OPTIONAL.fullmatch(name) is not None

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
