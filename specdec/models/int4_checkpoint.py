"""GPTQ and AWQ checkpoints: 4-bit codes whose groups of inputs have a scale and a zero, as native layers' blocks.

Such checkpoints have a matrix as words of eight codes, input by input. They are packed into blocks a few rows at a
time, when these are laid in panels or dequantised, so that neither a dense matrix nor a second one in 4 bits is ever
held.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers import GenerationConfig, PreTrainedModel

from specdec.errors import CheckpointError, ConfigError
from specdec.models.gguf_blocks import Filling, described_rows, why_not_native
from specdec.models.int4_settings import Int4Settings
from specdec.native.formats import WeightFormat, formats
from specdec.runners.block_weight import BlockTensor, BlockWeight
from specdec.runners.linear import PackedLinear
from specdec.runners.memory_pages import FilePages
from specdec.settings.files import read_object

__all__ = ["quantised_model"]

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")  # whose layers native layers run
_BLOCKS = (128, 64, 32)  # values of a block, and its format's number with the sign turned
_PLACES = {"gptq": (0, 1, 2, 3, 4, 5, 6, 7), "awq": (0, 4, 1, 5, 2, 6, 3, 7)}
"""Method -> which four bits of a word, counted from the lowest, have the first output, the second, ..."""
_DEQUANTISED = 1 << 20  # weights of a dense matrix at once


def quantised_model(
    place: str | Path,
    config: Any,
    dtype: str | torch.dtype,
    device: Any,
    *,
    in_blocks: bool,
    spread: bool,
    int8: bool,
) -> tuple[PreTrainedModel, str] | None:
    """The model of a GPTQ or AWQ checkpoint, and how its weights are held; None where transformers is to load it.

    Args:
        place: a folder, or a hub id.
        config: of the checkpoint.
        dtype: ``auto``: bfloat16, unless the config says float32.
        in_blocks: they may be held in blocks, where native layers run them; otherwise they are dequantised.
        spread: over devices or processes.
        int8: rows that blocks are multiplied with are rounded to bytes.

    Raises:
        CheckpointError: weights that have no place in blocks, and packages with which transformers would load them are
            not installed; or tensors are missing, left over, or not as the config says.
        ConfigError: no blocks, whose rows could be rounded.
    """
    told = getattr(config, "quantization_config", None)
    try:
        if (settings := Int4Settings.of(told, repr(str(place)))) is None:
            return None
        if (why := _why_not_packed(config, spread)) is not None:
            raise CheckpointError(
                f"{str(place)!r} is quantised by {settings.method}, and {why}: install the packages gptqmodel and "
                "optimum, with which transformers loads it, or give a checkpoint that is not quantised"
            )
        if dtype == "auto":
            dtype = torch.float32 if config.dtype in ("float32", torch.float32) else torch.bfloat16
        computed: Any = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        why = why_not_native(computed, device) if in_blocks else "another way to run its layers was asked for"
        if why is not None and int8:
            raise ConfigError(f"activations='int8' needs quantised blocks as they lie, and {why}; leave it out")
        if why is not None and Int4Settings.transformers_loads(told):
            return None
        folder = place if isinstance(place, Path) else _fetched(place)
        model = _Int4Filling(folder, config, settings, computed, why is None, int8).model
    except CheckpointError:
        if Int4Settings.transformers_loads(told):
            return None
        raise
    if device is not None:
        model.to(device)  # in place
    return model, _described(model, settings) if why is None else f"dequantised: {why}"


def _why_not_packed(config: Any, spread: bool) -> str | None:
    """Why a checkpoint is not read here, or None where it is."""
    if config.model_type not in _FAMILIES:
        return f"its architecture {config.model_type!r} is none of {', '.join(_FAMILIES)}"
    return "device_map and ranks spread weights that are not quantised" if spread else None


def _fetched(name: str) -> Path:
    """The folder of a hub id's files."""
    return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))


def _described(model: PreTrainedModel, settings: Int4Settings) -> str:
    """How a model's 4-bit weights are held."""
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    stores = {id(module.store): module.store for module in packed if isinstance(module.store, BlockWeight)}
    size = sum(store.nbytes for store in stores.values()) / 1e6
    groups = "one group an output" if settings.group_size == -1 else f"groups of {settings.group_size}"
    told = f"int4 ({settings.method.upper()}, {groups}) in blocks: {len(packed)} matrices, {size:.0f} MB in panels"
    return told + described_rows(model)


def _outputs_of(words: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """[n, 8 words] uint8: four bits each, of int32 words [n, words], in the order of outputs."""
    own = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    return torch.stack((own & 15, own >> 4), -1).flatten(-2)[..., list(places)].flatten(1)


class _PackedRows:
    """A matrix's blocks, packed as they are read: a float16 scale, its zero as a float16, codes two by two."""

    def __init__(
        self,
        settings: Int4Settings,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        inputs: int,
        pages: FilePages,
    ) -> None:
        self._codes, zeros, scales = tensors
        self._method, self._pages, self._outputs = settings.method, pages, scales.shape[1]
        group = inputs if settings.group_size == -1 else settings.group_size
        self.values = next(values for values in _BLOCKS if group % values == 0 and inputs % values == 0)
        stored = _outputs_of(zeros, _PLACES[self._method])
        self._heads = torch.stack((scales, (stored + settings.zero_offset).to(torch.float16)), -1)  # [groups, out, 2]
        self._groups = torch.arange(0, inputs, self.values) // group  # of each block
        self.shape = self._outputs, inputs // self.values * (4 + self.values // 2)

    def __len__(self) -> int:
        return self._outputs

    def __getitem__(self, rows: slice) -> np.ndarray:
        first, last, _ = rows.indices(self._outputs)
        heads = self._heads[self._groups, first:last].transpose(0, 1).contiguous().view(torch.uint8)  # [n, blocks, 4]
        codes = self._pairs(first, last).reshape(last - first, len(self._groups), -1)
        packed: np.ndarray = torch.cat((heads, codes), -1).flatten(1).numpy()
        return packed

    def _pairs(self, first: int, last: int) -> torch.Tensor:
        """[n, in / 2] codes of some outputs, an even input's in the low bits."""
        if self._method == "gptq":
            words = self._codes[:, first:last].contiguous()
            return words.view(torch.uint8).view(*words.shape, 4).transpose(0, 1).flatten(1)
        begin = first // 8
        codes = _outputs_of(self._codes[:, begin : -(-last // 8)], _PLACES["awq"])
        codes = codes[:, first - 8 * begin : last - 8 * begin].t()
        return codes[:, ::2] | codes[:, 1::2] << 4

    def dense(self, first: int, last: int) -> torch.Tensor:
        """[n, in] float32."""
        heads = self._heads[self._groups, first:last].transpose(0, 1).float()
        pairs = self._pairs(first, last)
        codes = torch.stack((pairs & 15, pairs >> 4), -1).view(last - first, len(self._groups), self.values)
        return (heads[..., :1] * (codes.float() - heads[..., 1:])).flatten(1)

    def release(self) -> None:
        self._pages.release([self._codes])


class _Int4Filling(Filling):
    def __init__(
        self, folder: Path, config: Any, settings: Int4Settings, dtype: torch.dtype, in_blocks: bool, int8: bool
    ) -> None:
        super().__init__(config, dtype, int8, repr(str(folder)))
        self._settings, self._in_blocks = settings, in_blocks
        self._files = {name: file for file in self._opened(folder) for name in file.keys()}  # noqa: SIM118
        if not any(name.endswith(".qweight") for name in self._files):
            raise CheckpointError(
                f"the config of {str(folder)!r} says quant_method {settings.method!r}, and none of its tensors is a "
                "qweight; remove quantization_config from its config.json if its weights are not quantised, or "
                "download the checkpoint anew"
            )
        self._pages = FilePages()
        self._left = {*self._files}
        self.fill()
        self._check_left()
        if (folder / "generation_config.json").exists():
            self.model.generation_config = GenerationConfig.from_pretrained(folder)
        self.model.name_or_path = str(folder)
        vars(self.model.config).pop("quantization_config", None)  # a copy of the model, or of its config, has none

    def _opened(self, folder: Path) -> list[Any]:
        index = folder / "model.safetensors.index.json"
        names = {*map(str, read_object(index)["weight_map"].values())} if index.exists() else {"model.safetensors"}
        for name in sorted(names):
            if Path(name).name != name or not (folder / name).is_file():
                raise CheckpointError(f"{str(folder)!r} has no {name!r}; download the checkpoint anew")
        return [safe_open(folder / name, framework="pt") for name in sorted(names)]

    def _read(self, name: str, shape: Sequence[int], *dtypes: torch.dtype) -> torch.Tensor:
        if (file := self._files.get(name)) is None:
            raise self._unfit(f"1 missing, such as {name}")
        tensor: torch.Tensor = file.get_tensor(name)
        if tensor.shape != tuple(shape):
            told = f"quantization_config: {self._settings.method}, 4 bits, group_size {self._settings.group_size}"
            asked = f" by its {told}" if torch.int32 in dtypes or torch.float16 in dtypes else ""
            raise self._unfit(f"1 misshapen, such as {name}, {list(tensor.shape)} in place of {list(shape)}{asked}")
        if dtypes and tensor.dtype not in dtypes:
            raise self._unfit(f"1 of another dtype, such as {name}, {str(tensor.dtype)[6:]}")
        self._left.discard(name)
        return tensor

    def _tensor(self, name: str, shape: Sequence[int]) -> BlockTensor | None:
        if not self._in_blocks or (rows := self._packed(name, shape)) is None:
            return None
        return BlockTensor(self._format(rows), rows)

    @staticmethod
    def _format(rows: _PackedRows) -> WeightFormat:
        return formats()[-rows.values]

    def _dense(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        found = torch.empty(*shape, dtype=self._dtype)
        rows = self._packed(name, shape)
        if rows is None:
            return found.copy_(self._read(name, shape))
        some = max(1, _DEQUANTISED // shape[1])
        for first in range(0, shape[0], some):
            last = min(first + some, shape[0])
            found[first:last] = rows.dense(first, last)
        rows.release()
        return found

    def _packed(self, name: str, shape: Sequence[int]) -> _PackedRows | None:
        """A weight's blocks, or None where it is not quantised."""
        place = name.removesuffix(".weight")
        if name in self._files or f"{place}.qweight" not in self._files:
            return None
        outputs, inputs = shape
        size = inputs if self._settings.group_size == -1 else self._settings.group_size
        if outputs % 8 or inputs % 32:
            raise CheckpointError(
                f"{place!r} in {self._where} is {outputs} x {inputs}, and outputs are packed by 8, inputs by 32; give "
                "another checkpoint"
            )
        groups = math.ceil(inputs / size)
        packed = (inputs // 8, outputs) if self._settings.method == "gptq" else (inputs, outputs // 8)
        codes = self._read(f"{place}.qweight", packed, torch.int32)
        zeros = self._read(f"{place}.qzeros", (groups, outputs // 8), torch.int32)
        scales = self._read(f"{place}.scales", (groups, outputs), torch.float16, torch.bfloat16, torch.float32)
        halves = scales.to(torch.float16)
        if not torch.equal(halves.float(), scales.float()):
            raise CheckpointError(
                f"'{place}.scales' in {self._where} are {str(scales.dtype)[6:]}, and blocks' scales are float16, which "
                "does not have all of these values; give a checkpoint whose scales are float16"
            )
        self._check_order(f"{place}.g_idx", inputs, size)
        return _PackedRows(self._settings, (codes, zeros, halves), inputs, self._pages)

    def _check_order(self, name: str, inputs: int, size: int) -> None:
        """Raises CheckpointError where groups are not of inputs side by side."""
        if name not in self._files:
            if self._settings.ordered:
                raise self._unfit(f"1 missing, such as {name}, which desc_act=true asks for")
            return
        order = self._read(name, (inputs,))
        if not torch.equal(order.long(), torch.arange(inputs) // size):
            raise CheckpointError(
                f"{name!r} in {self._where} has inputs of a group that do not lie side by side (desc_act), and those "
                "of a block do; give a checkpoint that was made with desc_act=false, or a GGUF file"
            )

    def _check_left(self) -> None:
        """Raises CheckpointError for tensors that the model has no place for."""
        model: Any = self.model
        ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
        extra = [
            name
            for name in sorted(self._left)
            if not any(re.search(pattern, name) for pattern in ignored)
            and not self._is_no_bias(name)
            and not self._is_tied(name)
        ]
        if extra:
            raise self._unfit(f"{len(extra)} extra, such as {extra[0]}")

    def _is_no_bias(self, name: str) -> bool:
        """Whether it is a bias of zeros, which quantised linears are saved with also where their model has none."""
        return name.endswith("_proj.bias") and not bool(self._files[name].get_tensor(name).any())

    def _is_tied(self, name: str) -> bool:
        """Whether it is the head's weight once more, of a model whose head has the embedding's."""
        model: Any = self.model
        head, embedding = (
            f"{self._names[id(module)]}.weight"
            for module in (model.get_output_embeddings(), model.get_input_embeddings())
        )
        if name != head or not self._config.tie_word_embeddings:
            return False
        return torch.equal(self._files[name].get_tensor(name), self._files[embedding].get_tensor(embedding))
