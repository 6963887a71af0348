"""A GGUF file's settings as the config of transformers that they make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig

from specdec.errors import CheckpointError
from specdec.models.gguf_families import FAMILIES
from specdec.models.gguf_settings import REMEDY, GgufSettings
from specdec.models.gguf_table import TensorTable

__all__ = ["config_of", "is_mixtral"]

_LAYERS = 8191
_EMBEDDINGS = ("bert", "embed", "t5encoder", "clip")
_DRAFTS = ("eagle", "dflash", "medusa", "assistant")


def config_of(table: TensorTable) -> Any:
    """The config of transformers that a file's settings make; a list of words may be given as its length.

    Raises:
        CheckpointError: a setting is missing, or it says what is not read from GGUF; or the architecture is not.
    """
    said = GgufSettings(table)
    if (family := FAMILIES.get(said.family)) is None:
        raise _unlike(said.family, table.where)
    values = {**_common(said), **family(said)}
    said.check_rest()
    size = said.said("tokenizer.ggml.tokens", said.get("vocab_size"))
    values["vocab_size"] = len(size) if isinstance(size, list) else size
    if values["vocab_size"] is None:
        raise said.refused("lists no tokens, and does not say how many there are", "get it again")
    values["tie_word_embeddings"] = "output.weight" not in said.names
    return AutoConfig.for_model(values.pop("model_type"), **values)


def _common(said: GgufSettings) -> dict[str, Any]:
    """Sizes, of heads of one width."""
    heads, dim = said.heads
    layers = said.number("block_count")
    if not 1 <= layers <= _LAYERS:
        raise said.refused(f"says {layers} layers", "get it again")
    said.only("attention.value_length", dim)
    return {
        "max_position_embeddings": said.number("context_length"),
        "hidden_size": said.number("embedding_length"),
        "num_hidden_layers": layers,
        "intermediate_size": said.number("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": said.number("attention.head_count_kv", heads),
        "head_dim": dim,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def is_mixtral(metadata: Mapping[str, Any]) -> bool:
    """Whether a file says that it is a Llama with experts."""
    return metadata["general.architecture"] == "llama" and bool(metadata.get("llama.expert_count"))


def _unlike(family: str, where: str) -> CheckpointError:
    if any(part in family for part in _EMBEDDINGS):
        why = "makes embeddings and no text; give a language model"
    elif any(part in family for part in _DRAFTS):
        why = "is a draft head and no model: give the model, and the head as the folder that it was published in"
    else:
        why = f"is not read from GGUF here, {', '.join(FAMILIES)} are; {REMEDY}"
    return CheckpointError(f"the architecture {family!r} of {where} {why}")
