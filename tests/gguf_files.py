"""GGUF files of tiny random models, written with the package gguf, and a wheel around one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from specdec.models.catalog import NamedModel
from specdec.settings.files import digest_of

TOKENS = [*sorted(bytes_to_unicode().values()), "ĊĊ", "12", "<s>", "</s>"]
BOS, EOS = len(TOKENS) - 2, len(TOKENS) - 1
TEMPLATE = "{% for m in messages %}{{ '<s>' + m['content'] + '</s>' }}{% endfor %}"
SPACE = "\u2581"
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
PIECES += [SPACE, "a", "b", SPACE + "a", "ab", SPACE + "ab"]
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def new_llama() -> LlamaForCausalLM:
    """Two layers, four query and two key heads; every weight is a bfloat16 number."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=len(TOKENS), max_position_embeddings=64, bos_token_id=BOS, eos_token_id=EOS, **sizes, **heads
    )
    return LlamaForCausalLM(config).bfloat16().float()


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    *,
    split: str = "smollm",
    architecture: str = "llama",
    merges: Sequence[str] = ("Ċ Ċ", "1 2"),
    change: Callable[[Any], None] = lambda writer: None,
) -> Path:
    """A model as llama.cpp keeps it: rows of queries and keys stand in another order."""
    config: Any = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * (len(TOKENS) - 2) + [3, 3])
    writer.add_token_merges(list(merges))
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_chat_template(TEMPLATE)
    change(writer)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        place, _, kind = name.rpartition(".")
        layer = place.removeprefix("model.layers.").partition(".") if "layers" in place else ("", "", place)
        values = tensor.numpy()
        if (count := heads.get(place.rpartition(".")[2])) is not None:
            values = values.reshape(count, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        prefix = f"blk.{layer[0]}." if layer[0] else ""
        writer.add_tensor(f"{prefix}{_NAMES[layer[2]]}.{kind}", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_pieces(
    path: Path,
    *,
    architecture: str = "llama",
    name: str = "small",
    settings: Mapping[str, Any] | None = None,
    ends: bool = True,
    tied: Sequence[str] = (),
) -> Path:
    """A file with SentencePiece's vocabulary and hardly a weight.

    Args:
        settings: by their keys behind tokenizer.ggml.
        ends: whether it names the tokens that begin and end a text.
        tied: more pieces, all of one score.
    """
    pieces, plain = [*PIECES, *tied], len(PIECES) - 259
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(name)
    writer.add_context_length(64)
    writer.add_block_count(1)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(pieces))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores([0.0] * 259 + [-float(place) for place in range(plain)] + [-1e3] * len(tied))
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (plain + len(tied)))
    if ends:
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
    for key, value in (settings or {}).items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((len(pieces), 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def widened(file: Path, to: Path) -> Path:
    """The same file with its tensors in float32."""
    return rewritten(file, to, lambda tensor: (gguf.quants.dequantize(tensor.data, tensor.tensor_type), None))


def rewritten(file: Path, to: Path, change: Callable[[Any], tuple[Any, Any]]) -> Path:
    """The same file with other tensors; ``change`` gives one's data, and the type of its blocks or None."""
    read = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(to, read.fields["general.architecture"].contents())
    for name, field in read.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, field.contents(), *field.types[:2])
    for tensor in read.tensors:
        data, kind = change(tensor)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def split_gguf(
    whole: Path, count: int, stem: str = "parts", changes: Mapping[int, Mapping[str, int | None]] | None = None
) -> list[Path]:
    """The parts of a file, beside it, as llama.cpp's gguf-split makes them; the first has the settings.

    Args:
        whole: the file.
        count: of parts.
        stem: of their names.
        changes: part -> other values of the keys that only parts have; None: the key is left out.
    """
    read = gguf.GGUFReader(whole)
    paths = [whole.with_name(f"{stem}-{part + 1:05d}-of-{count:05d}.gguf") for part in range(count)]
    for part, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, read.fields["general.architecture"].contents())
        for name, field in read.fields.items() if part == 0 else ():
            if not name.startswith("GGUF.") and name != "general.architecture":
                writer.add_key_value(name, field.contents(), *field.types[:2])
        said: dict[str, int | None] = {"split.no": part, "split.count": count, "split.tensors.count": len(read.tensors)}
        for key, value in (said | dict((changes or {}).get(part, {}))).items():
            if value is not None:
                (writer.add_int32 if "tensors" in key else writer.add_uint16)(key, value)
        for tensor in read.tensors[part * len(read.tensors) // count : (part + 1) * len(read.tensors) // count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def wheel_of(file: Path, folder: Path) -> NamedModel:
    """A wheel with the file in it, in ``folder``, and the model that is pulled from it."""
    folder.mkdir(exist_ok=True)
    wheel = folder / "small_llama-1.0-py3-none-any.whl"
    about = "Metadata-Version: 2.1\nName: small-llama\nVersion: 1.0\n"
    kind = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with ZipFile(wheel, "w") as archive:
        archive.write(file, "small_llama/small.gguf")
        archive.writestr("small_llama-1.0.dist-info/METADATA", about)
        archive.writestr("small_llama-1.0.dist-info/WHEEL", kind)
        archive.writestr("small_llama-1.0.dist-info/RECORD", "")
    return NamedModel(
        name="small",
        about="a model of a test",
        licence="none",
        package="small-llama",
        version="1.0",
        wheel=wheel.name,
        bytes=wheel.stat().st_size,
        sha256=digest_of(wheel),
        gguf="small_llama/small.gguf",
        gguf_sha256=digest_of(file),
        dtype="bfloat16",
        hello=[BOS, TOKENS.index("1"), TOKENS.index("ĊĊ"), TOKENS.index("2"), EOS],
    )
