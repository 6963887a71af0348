"""A model's weights in quantised blocks, as a GGUF file that llama.cpp reads, too.

Blocks are the package gguf's. What it has no quantiser for is refused by name, as is a tokenizer that the file would
not say faithfully: what is written is read again, and has to make the same tokens. The file is written beside its place
and moved there last.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from specdec.errors import CheckpointError, ConfigError, first_line
from specdec.models.gguf import require_gguf
from specdec.models.gguf_splits import rules, splitter
from specdec.models.gguf_tokenizer import read_tokenizer
from specdec.models.gguf_writer import add_settings, add_weights
from specdec.models.loading import load_model
from specdec.models.tokenizer import load_tokenizer
from specdec.runners.rotary import rope_kinds
from specdec.settings.files import refuse_existing, replacing
from specdec.step import torch_switches

__all__ = ["quantise_model"]

_FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
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
    if any(rope.get("rope_type", "default") != "default" for rope in rope_kinds(config)):
        raise CheckpointError(
            f"{type(loaded).__name__} scales its rotary frequencies, which is not written to GGUF here; convert it "
            "with llama.cpp"
        )
    with replacing(out) as place:
        own = tokenizer.backend_tokenizer.pre_tokenizer

        def begun(rule: str) -> Any:
            """A file without weights, whose tokenizer splits texts by this rule."""
            writer = gguf.GGUFWriter(place, _FAMILIES[config.model_type])
            writer.add_name(Path(model).name)
            add_settings(writer, config)
            _add_tokenizer(writer, tokenizer, config.vocab_size, rule)
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
        writer = begun(rule)
        add_weights(writer, _FAMILIES[config.model_type], config, loaded.state_dict().items(), blocks)
        _write(writer)


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
        CheckpointError: it is of another kind.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    kind = state["model"]
    if kind["type"] != "BPE" or kind.get("byte_fallback") or "ByteLevel" not in json.dumps(state["decoder"]):
        raise CheckpointError("only tokenizers of byte pairs, as GPT-2's, are written to GGUF here; use llama.cpp")
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
    for name in ("bos", "eos", "pad"):
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
