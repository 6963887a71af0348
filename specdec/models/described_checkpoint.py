"""A checkpoint as a decoder that a spec describes: whether it is one, and its tensors, checked before one is read.

It may be a folder, a hub id (safetensors only) or a GGUF file, its weights dense or quantised by one of ``METHODS``.
What no spec describes is loaded by transformers instead (:mod:`specdec.models.loading`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig

from specdec.decoder.families import FAMILIES, spec_of
from specdec.decoder.names import Names
from specdec.decoder.settings import Settings
from specdec.decoder.spec import DecoderSpec, UnknownDecoder
from specdec.decoder.weights.checkpoint import Checkpoint
from specdec.decoder.weights.quantised import METHODS, QuantisedSource, method_of, quantised_source
from specdec.decoder.weights.safetensors import SafetensorsSource
from specdec.decoder.weights.source import Source
from specdec.errors import CheckpointError, ConfigError, SpecdecError, shown, told
from specdec.models.folders import refuse_adapter, refuse_integers, refuse_others, remedy_for
from specdec.models.gguf import GgufFile, config_of, generation_of, is_gguf
from specdec.models.gguf_source import GGUF_NAMES, GgufSource, kept_as
from specdec.models.gguf_tensors import check_tensors, predicting
from specdec.models.inspection import end_ids, refuse_unfit
from specdec.models.loading import check_folder, check_sizes, mtp_layers
from specdec.models.long_context import take_long_factors
from specdec.models.names import model_source
from specdec.runners.linear import why_not_packed

__all__ = ["DescribedCheckpoint"]

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_AROUND_TEXT = ("gemma3", "got_ocr2", "internvl", "llava", "llava_next", "mistral3", "moss_transcribe_diarize")
"""Models of images, sounds and texts that do to texts alone what their text decoder does."""
_FOLDER = "no GGUF file of such a model is read: load the model's folder of safetensors"
_WEIGHTS = ("model.safetensors.index.json", "model.safetensors")


@dataclass(frozen=True, kw_only=True)
class DescribedCheckpoint:
    """A checkpoint.

    Attributes:
        checkpoint: its tensors, and the spec.
        dtype: of the computation.
        config: transformers' of its texts.
        generation_config: transformers' defaults for texts.
        eos_ids: the tokens that end a text.
        path: where it was loaded from.
        quantised: the kind of the quantised weights that were read, as text, empty where each has its own; None where a
            folder's are dense.
        why_dense: why quantised blocks are dequantised.
    """

    checkpoint: Checkpoint
    dtype: torch.dtype
    config: Any
    generation_config: Any
    eos_ids: frozenset[int]
    path: str
    quantised: Callable[[], str] | None = None
    why_dense: str | None = None

    @classmethod
    def opened(
        cls,
        path: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        device: Any = None,
        trust_remote_code: bool = False,
        in_blocks: bool = True,
        int8: bool = False,
        revision: str | None = None,
        subfolder: str | None = None,
        max_model_len: int | None = None,
    ) -> DescribedCheckpoint | str:
        """The checkpoint at a path, or why no spec describes it.

        Args:
            in_blocks: executors may run it, for which quantised weights stay in their blocks.
            int8: rows that blocks are multiplied with are to be rounded to bytes.
            revision, subfolder: as of :func:`model_source`.
            max_model_len: as of :func:`take_long_factors`.

        Raises:
            CheckpointError: no model there, a broken file, or tensors missing, misshapen or left over.
            ConfigError: a GGUF file, and no package to read it with; or no blocks, whose rows could be rounded.
            TargetError: a model that specdec cannot drive.
        """
        place = model_source(path, revision=revision, subfolder=subfolder, code=trust_remote_code)
        computed: Any = None if dtype == "auto" else getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
        if computed not in (None, *_DTYPES):
            return f"{dtype!r} is no dtype in which described decoders compute"
        wanted = _Wanted(str(path), computed, device, in_blocks, int8, max_model_len)
        try:
            if is_gguf(place):
                return _of_gguf(place, wanted)
            return _of_folder(place, wanted, trust_remote_code)
        except UnknownDecoder as unknown:
            if is_gguf(place):
                raise CheckpointError(f"{unknown}, and {_FOLDER}") from unknown
            return str(unknown)
        except SpecdecError:
            raise
        except Exception as error:  # files of others, read by code of others: they raise anything
            remedy = "get the GGUF file again" if is_gguf(place) else remedy_for(place, error)
            raise CheckpointError(
                f"cannot load a causal language model from {str(path)!r}: {told(error)}; {remedy}"
            ) from error


@dataclass(frozen=True)
class _Wanted:
    """What was asked for; ``dtype``: None for the checkpoint's."""

    path: str
    dtype: torch.dtype | None
    device: Any
    in_blocks: bool
    int8: bool
    max_model_len: int | None

    def why_dense(self, dtype: torch.dtype, why: str | None = None) -> str | None:
        """Why quantised blocks are dequantised, or None; ``why``: one that is known.

        Raises:
            ConfigError: they are, and rows that they are multiplied with were to be rounded.
        """
        found = "another way to run its layers was asked for"
        if self.in_blocks:
            found = why or self.why_not_packed(dtype) or ""
        if found and self.int8:
            raise ConfigError(f"activations='int8' needs quantised blocks as they lie, and {found}; leave it out")
        return found or None

    def why_not_packed(self, dtype: torch.dtype) -> str | None:
        """Why no weight is packed for a computation in this dtype here, or None."""
        return why_not_packed(dtype, torch.device("cpu" if self.device is None else self.device))


def _described(config: Any) -> tuple[DecoderSpec, Names, Any]:
    """What a config describes, what its tensors are called, and the config of its texts.

    Raises:
        UnknownDecoder: no description covers it.
    """
    text = config.get_text_config()
    if text is not config and config.model_type not in _AROUND_TEXT:
        raise UnknownDecoder(f"its model_type {shown(config.model_type)} is around a decoder of texts")
    if text.model_type not in FAMILIES:
        spec_of(text.model_type, Settings({}, where=type(text).__name__))
    spec, names = spec_of(text.model_type, Settings.of(text)), FAMILIES[text.model_type].names
    ignored = list(names.ignored)
    if text is not config:  # what is of images and sounds; the whole model's config says whether its head is tied
        tied = spec.head.tied or bool(getattr(config, "tie_word_embeddings", False))
        spec = replace(spec, head=replace(spec.head, tied=tied))
        ignored.append(r"^(?!(model\.)?language_model\.|lm_head\.)")
    if behind := mtp_layers(text):
        ignored.append(rf"^model\.layers\.({'|'.join(map(str, behind))})\.")
    return spec, replace(names, ignored=tuple(ignored)), text


def _of_folder(folder: Path, wanted: _Wanted, trust_remote_code: bool) -> DescribedCheckpoint | str:
    check_folder(folder)
    refuse_adapter(folder)
    config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    text: Any = config.get_text_config()
    refuse_unfit(type(config).__name__.removesuffix("Config"), text, described=True)
    check_sizes(config.to_dict(), wanted.path)
    take_long_factors(vars(config.get_text_config()), wanted.max_model_len)
    if trust_remote_code and getattr(config, "auto_map", None):
        return "its folder has code of its own, which was to be trusted"
    quantisation = getattr(config, "quantization_config", None)
    method = method_of(quantisation)
    if quantisation is not None and method is None:
        return "it is quantised by a method that transformers alone reads"
    if (named := getattr(config, "transformers_weights", None)) is not None:
        return f"its config names the file of its weights, {shown(named)}"
    spec, names, text = _described(config)
    source: Any
    if not any((folder / name).exists() for name in _WEIGHTS):
        return "it has no safetensors"
    if method is not None:
        found = _quantised(folder, spec, method, quantisation, config, wanted)
        if isinstance(found, str):
            return found
        dtype, source, why = found
        quantised: Callable[[], str] | None = source.described
    else:
        if wanted.int8:
            raise ConfigError(
                "activations='int8' rounds rows that quantised blocks are multiplied with, and "
                f"{shown(wanted.path, 400)} is no GGUF file, nor quantised by {', '.join(METHODS)}; leave it out, "
                "or make a GGUF file with `specdec quantize`"
            )
        source, quantised, why = SafetensorsSource(folder), None, None
        refuse_integers(folder)
        dtype = wanted.dtype or config.dtype or text.dtype or source.dtype
    refuse_others(folder, config, source.shapes)
    if dtype not in _DTYPES:
        return f"its dtype {shown(dtype)} is none in which described decoders compute"
    generation = GenerationConfig.from_model_config(config)
    if (folder / "generation_config.json").exists():
        generation = GenerationConfig.from_pretrained(folder)
    return DescribedCheckpoint(
        checkpoint=Checkpoint(spec, names, source),
        dtype=dtype,
        config=text,
        generation_config=generation,
        eos_ids=end_ids(generation, text, spec.architecture),
        path=str(folder),
        quantised=quantised,
        why_dense=why,
    )


def _quantised(
    folder: Path, spec: DecoderSpec, method: str, quantisation: Any, config: Any, wanted: _Wanted
) -> tuple[torch.dtype, QuantisedSource, str | None] | str:
    """The dtype, tensors, and why they are to be dense, of a checkpoint by one of ``METHODS``; or why transformers
    is to load it, whose packages are here.
    """
    dtype = wanted.dtype
    if dtype is None:
        dtype = torch.float32 if config.dtype in ("float32", torch.float32) else torch.bfloat16
    why, own = wanted.why_dense(dtype), METHODS[method]
    loads = own.leaves(wanted.device)
    try:
        source = quantised_source(folder, quantisation, spec.architecture, int8=wanted.int8)
    except CheckpointError as error:
        if loads:
            return str(error)
        raise
    if not source.quantised:
        marks = " or ".join(mark.strip(".") for mark in own.marks)
        raise CheckpointError(
            f"the config of {wanted.path!r} says quant_method {method!r}, and none of its tensors is a {marks}; remove "
            "quantization_config from its config.json if its weights are not quantised, or download the checkpoint anew"
        )
    if why is not None and loads and not own.here:
        return f"it is quantised by {method}, and {why}"
    return dtype, source, None if why is None else why + source.left_out()


def _of_gguf(path: Path, wanted: _Wanted) -> DescribedCheckpoint:
    file = GgufFile.read(path)
    fields = file.fields(wanted.max_model_len)
    check_sizes(fields, wanted.path)
    spec = spec_of(fields["model_type"], Settings(fields, where=file.table.where))
    names = FAMILIES[fields["model_type"]].names
    dtype = wanted.dtype or (torch.float32 if _runs_float16(file, wanted) else file.dtype)
    why = wanted.why_dense(dtype, _why_none_stays(file, dtype, int8=wanted.int8))
    check_tensors(file.table, spec, names)
    config = config_of(fields)
    config.dtype = dtype
    heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    source: Source = GgufSource(file.table, heads, fields["head_dim"], dtype)
    generation = generation_of(file, config)
    called = replace(GGUF_NAMES, ignored=predicting(file.table, len(spec.layers)))
    return DescribedCheckpoint(
        checkpoint=Checkpoint(spec, names, source, called),
        dtype=dtype,
        config=config,
        generation_config=generation,
        eos_ids=end_ids(generation, config, spec.architecture),
        path=str(file.path),
        quantised=str,  # each matrix in its own format
        why_dense=why,
    )


def _runs_float16(file: GgufFile, wanted: _Wanted) -> bool:
    """Whether a file's float16 is multiplied as it is, in float32."""
    packed = wanted.in_blocks and wanted.why_not_packed(torch.float32) is None
    return packed and file.dtype is torch.float16 and _why_none_stays(file, torch.float32) is None


def _why_none_stays(file: GgufFile, dtype: torch.dtype, *, int8: bool = False) -> str | None:
    """Why none of a file's matrices can be held as they are, or None; with ``int8``, multiplied with rounded rows."""
    kept = [form for entry in file.table.entries if (form := kept_as(entry, dtype)) is not None]
    if not kept:
        return "none of its weights are in blocks that native products read"
    return "none of its weights are in blocks of integers" if int8 and not any(k.has_integers for k in kept) else None
