"""Pre-tokenizers: how a text is split before byte pairs are merged, by GGUF's names (``tokenizer.ggml.pre``)."""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

__all__ = ["rules", "splitter"]

_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA_3, _QWEN_2 = (GGUF_PRE_TOKENIZER_SPLITS[rule] for rule in ("llama3", "qwen2"))
_WORDS = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"  # first part of several rules
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASCII_MARKS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_MARKED = rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*"

# The names of a rule, and its expressions; each expression splits the pieces that the ones before it made.
_RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat mellum a.x-4.0", (_GPT_2,)),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", (r"\p{N}", _GPT_2)),
    ("stablelm2 hunyuan solar-open grok-2", (_QWEN_2,)),
    ("chatglm-bpe glm4 glm5", (_LLAMA_3,)),
    ("default", (r"[\p{P}$+<=>^~|]+", _GPT_2, r"\p{N}+", "[0-9]{3}")),
    ("falcon", (r"[\p{P}$+<=>^~|`]+", _GPT_2, "[0-9]{3}")),
    ("deepseek-coder", (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")),
    (
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        (r"\p{N}{1,3}", _CJK, rf"{_MARKED}|\s*[\r\n]+|\s+(?!\S)|\s+"),
    ),
    ("bloom poro-chat gpt3-finnish", (" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+",)),
    ("seed-coder", (rf"{_WORDS}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",)),
    ("bailingmoe bailingmoe2 llada-moe", (rf"{_WORDS}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",)),
)
_SPLITS: dict[str, tuple[str, ...]] = {rule: (split,) for rule, split in GGUF_PRE_TOKENIZER_SPLITS.items()}
_SPLITS |= {rule: splits for rules, splits in _RULES for rule in rules.split()}


def rules() -> tuple[str, ...]:
    """The names of all rules that are implemented."""
    return tuple(_SPLITS)


def splitter(rule: str) -> Any:
    """The pre-tokenizer of a rule, with GPT-2's characters for bytes; None for an unknown rule."""
    if (splits := _SPLITS.get(rule)) is None:
        return None
    pieces: list[Any] = [pre_tokenizers.Split(Regex(split), "isolated") for split in splits]
    return pre_tokenizers.Sequence([*pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
