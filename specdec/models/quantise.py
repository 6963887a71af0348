"""A model's weights in quantised blocks, as a GGUF file that llama.cpp reads, too.

Blocks are the package gguf's. What it has no quantiser for is refused by name, as is a tokenizer that the file would
not say faithfully: what is written is read again, and has to make the same tokens. The file is written beside its place
and moved there last.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from warnings import warn

import numpy as np

from specdec.decoder.rope_settings import rope_kinds
from specdec.errors import CheckpointError, ConfigError, SpecdecWarning, first_line
from specdec.models.described_checkpoint import DescribedCheckpoint
from specdec.models.gguf import require_gguf
from specdec.models.gguf_ends import FILL_ENDS, TokenRoles
from specdec.models.gguf_splits import rules, splitter
from specdec.models.gguf_tokenizer import ends_of, read_tokenizer
from specdec.models.gguf_writer import add_settings, add_weights
from specdec.models.inspection import eos_ids_of
from specdec.models.live_model import load_model
from specdec.models.tokenizer import load_tokenizer
from specdec.settings.files import refuse_existing, replacing
from specdec.step import torch_switches

__all__ = ["quantise_model"]

_FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings"),
)
_PROBES = (
    "Hello world, it's 2026! \n\n  def f(x):\n\treturn x**2  # na\u00efve \u6f22\u5b57\u3002 \U0001f642",
    "1234567 12 a1b2 I'LL we've \u00c9t\u00e9 \r\n\r\n ...!? <tag/> x_y-z   end ",
)


@torch_switches.makes
def quantise_model(model: str | Path, kind: str, out: Path) -> None:
    """Write a model's matrices in blocks of a kind, and its few other weights in float32.

    Raises:
        ConfigError: no such kind, no quantiser for it, or no place for the file.
        CheckpointError: a model or a tokenizer that such a file cannot say.
    """
    require_gguf()
    import gguf

    blocks = _blocks(kind)
    if out.suffix.lower() != ".gguf":
        raise ConfigError(f"--out is {str(out)!r}; a GGUF file's name ends with .gguf")
    refuse_existing(out)
    loaded: Any = load_model(model, dtype="auto", device=None, device_map=None, trust_remote_code=False)
    config, tokenizer = loaded.config, load_tokenizer(model)
    if config.model_type not in _FAMILIES:
        raise CheckpointError(
            f"{type(loaded).__name__} is not written to GGUF here, only {', '.join(_FAMILIES)}; convert it with "
            "llama.cpp"
        )
    if (unsaid := _unsaid(config)) is not None:
        raise CheckpointError(f"{type(loaded).__name__} {unsaid}; load it as it is, from its own folder")
    ends = eos_ids_of(loaded)
    with replacing(out) as place:
        own = tokenizer.backend_tokenizer.pre_tokenizer

        def begun(rule: str) -> Any:
            """A file without weights, whose tokenizer splits texts by this rule."""
            writer = gguf.GGUFWriter(place, _FAMILIES[config.model_type])
            writer.add_name(Path(model).name)
            writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{blocks.name}"])  # some readers refuse a file without it
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            add_settings(writer, config)
            _add_tokenizer(writer, tokenizer, config.vocab_size, rule)
            _add_ends(writer, tokenizer, ends)
            return writer

        # A tokenizer has the expression that splits a text, and a file the name of a rule.
        for rule in (rule for rule in rules() if _splits_alike(rule, own)):
            if _reads_alike(begun(rule), place, tokenizer):
                break
        else:
            raise CheckpointError(
                f"the tokenizer of {model} splits texts by a rule that GGUF has no name for here; convert it with "
                "llama.cpp"
            )
        _check_ends(ends, place, tokenizer)
        writer = begun(rule)
        add_weights(writer, _FAMILIES[config.model_type], config, loaded.state_dict().items(), blocks)
        _write(writer)
        _check_model(place, loaded)


def _unsaid(config: Any) -> str | None:
    """What a config says and llama.cpp's architecture has no key for, or None."""
    if any(rope.get("rope_type", "default") != "default" for rope in rope_kinds(config)):
        return "scales its rotary frequencies, which is not written to GGUF here"
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if types is not None and "sliding_attention" not in types:
        window = None
    if window is not None and window < config.max_position_embeddings:
        return f"has attention within a window of {window} tokens, for which GGUF has no key in its architecture"
    if config.hidden_act not in ("silu", "swish"):
        return f"has the activation {config.hidden_act!r}, and llama.cpp computes silu in its architecture"
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if config.model_type == "qwen2" and dim * config.num_attention_heads != config.hidden_size:
        return f"has heads of {dim}, and llama.cpp's architecture has them share the width {config.hidden_size}"
    return None


def _add_ends(writer: Any, tokenizer: Any, ends: frozenset[int]) -> None:
    """Keys for the tokens that end an answer, as far as there are any: three, beside those that ends have by name."""
    first = tokenizer.eos_token_id if tokenizer.eos_token_id in ends else min(ends, default=None)
    others = sorted(ends - {first})
    if first is None:
        return
    own = dict(zip(("eos", "eot", "eom"), (first, *_unnamed(tokenizer, others)), strict=False))
    for role in FILL_ENDS:  # what a key does not say, llama.cpp looks for by name
        own[role] = first
    for role, place in own.items():
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", place)


def _unnamed(tokenizer: Any, places: Sequence[int]) -> list[int]:
    """Those of some end tokens that are not ends by their names."""
    words = tokenizer.convert_ids_to_tokens(places)
    by_name = TokenRoles.of({}, words, "").ends
    return [place for at, place in enumerate(places) if at not in by_name]


def _check_ends(ends: frozenset[int], place: Path, tokenizer: Any) -> None:
    """Raises CheckpointError where a file's answers do not end where the model's do; warns of ends by name."""
    found = {*ends_of(place)}
    if lost := sorted(ends - found):
        raise CheckpointError(
            f"the model ends an answer at {len(ends)} tokens, and GGUF has keys for three: {lost} would be lost; leave "
            "some out of eos_token_id in its generation_config.json"
        )
    extra = sorted(found - ends)
    if arbitrary := _unnamed(tokenizer, extra):
        words = tokenizer.convert_ids_to_tokens(arbitrary)
        raise CheckpointError(
            f"answers of the file would end at {words} as well, for want of an end: put those of the model into "
            "eos_token_id in its generation_config.json"
        )
    if extra:
        more, own = (tokenizer.convert_ids_to_tokens(sorted(places)) for places in (extra, ends))
        warn(
            f"answers of the file end at {more} as well, as llama.cpp takes these for ends by their names; the model "
            f"ends at {own} alone",
            SpecdecWarning,
            stacklevel=2,
        )


def _check_model(place: Path, loaded: Any) -> None:
    """Raises CheckpointError where the file is read as another model than the one that was written."""
    found, config = DescribedCheckpoint.opened(place, in_blocks=False), loaded.config
    if isinstance(found, str):
        raise CheckpointError(f"the file cannot be read again: {found}; convert the model with llama.cpp")
    for name in _SAME:
        own, read = (getattr(one, name, None) for one in (config, found.config))
        if name == "head_dim":
            own = own or config.hidden_size // config.num_attention_heads
        if own != read and not (isinstance(own, float) and math.isclose(own, float(read or 0), rel_tol=1e-6)):
            raise CheckpointError(f"the file says {name} {read} and the model {own}; convert it with llama.cpp")


def _blocks(kind: str) -> Any:
    """The package gguf's number of a kind that it has a quantiser for.

    Raises:
        ConfigError: there is none.
    """
    import gguf

    known = [one for one in gguf.GGMLQuantizationType if one.name.startswith("Q") and _quantises(one)]
    names = ", ".join(one.name.lower() for one in known)
    if (found := next((one for one in gguf.GGMLQuantizationType if one.name == kind.upper()), None)) is None:
        raise ConfigError(f"--type is {kind!r}, which GGUF does not know; give one of {names}")
    if found not in known:
        raise ConfigError(f"the package gguf has no quantiser for {found.name}; give one of {names}")
    return found


def _quantises(kind: Any) -> bool:
    import gguf

    try:
        gguf.quants.quantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][0]), np.float32), kind)
    except (NotImplementedError, ValueError):
        return False
    return True


def _add_tokenizer(writer: Any, tokenizer: Any, size: int, rule: str) -> None:
    """The lists of a tokenizer of byte pairs.

    Raises:
        CheckpointError: it is of another kind, or has tokens that the model has no rows for.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    kind = state["model"]
    if kind["type"] != "BPE" or kind.get("byte_fallback") or "ByteLevel" not in json.dumps(state["decoder"]):
        raise CheckpointError("only tokenizers of byte pairs, as GPT-2's, are written to GGUF here; use llama.cpp")
    places = {**kind["vocab"], **{added["content"]: added["id"] for added in state["added_tokens"]}}
    if beyond := {token: place for token, place in places.items() if place >= size}:
        token, place = next(iter(beyond.items()))
        raise CheckpointError(
            f"the tokenizer has {token!r} at {place}, and the model has rows for {size} tokens; take it out of the "
            "tokenizer, or give the model's embedding more rows (resize_token_embeddings)"
        )
    tokens = [f"[PAD{place}]" for place in range(size)]
    types = [5] * size  # unused
    for token, place in kind["vocab"].items():
        tokens[place], types[place] = token, 1
    for added in state["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], 3 if added["special"] else 4
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in kind["merges"]])
    begins = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    for name in ("bos", "pad"):
        if (place := getattr(tokenizer, f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(place)
    writer.add_add_bos_token(begins)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _splits_alike(rule: str, own: Any) -> bool:
    """Whether a rule parts some texts as a tokenizer does."""
    made = splitter(rule)
    return all(made.pre_tokenize_str(text) == own.pre_tokenize_str(text) for text in _PROBES)


def _reads_alike(writer: Any, place: Path, tokenizer: Any) -> bool:
    """Whether the file's own tokenizer makes the same tokens of some texts."""
    writer.add_tensor("token_embd.weight", np.zeros((1, 32), np.float32))
    _write(writer)
    try:
        found = read_tokenizer(place)
    except CheckpointError:
        return False
    some = range(0, len(tokenizer), max(1, len(tokenizer) // 200))
    texts = [*_PROBES, *(tokenizer.decode([token]) for token in some)]
    return all(list(found(text)["input_ids"]) == list(tokenizer(text)["input_ids"]) for text in texts)


def _write(writer: Any) -> None:
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    except OSError as error:
        raise ConfigError(f"cannot write the file: {first_line(error)}; make room, or give another --out") from error
    finally:
        writer.close()
