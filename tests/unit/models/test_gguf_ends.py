"""The tokens at which an answer ends: those of llama.cpp, whatever a file names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

from specdec.models.gguf_ends import CONTROL, NORMAL, USER_DEFINED, TokenRoles
from specdec.models.gguf_tokenizer import ends_of
from specdec.models.tokenizer import load_tokenizer
from tests.gguf_families import write_family
from tests.llama_cpp import LlamaCpp

LETTERS = sorted(bytes_to_unicode().values())
CASES: list[tuple[list[str], dict[str, int]]] = [  # more tokens, and what the file names, by their places among these
    (["<|im_start|>", "<|im_end|>", "<|endoftext|>"], {"eos": 1}),
    (["<|im_end|>", "<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_middle|>"], {"eos": 0}),
    (["<|im_end|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"], {"eos": 0, "fim_pad": 0, "fim_rep": 0}),
    (["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"], {"eos": 0}),
    (["<eos>", "<end_of_turn>", "<start_of_turn>"], {"eos": 0}),
    (["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|endoftext|>"], {"eos": 4}),
    (["<|end|>", "<|calls|>", "<|flush|>", "xx"], {"eos": 3}),
    (["<|end|>", "<|return|>", "xx"], {"eos": 2}),
    (["</s>", "<turn|>", "<|tool_response>"], {"eos": 1}),
    (["xx", "yy", "zz"], {"eos": 0, "eot": 1, "eom": 2}),
    (["<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[", "[EOT]", "[EOS]", "<end_of_utterance>", "_<EOT>"], {"eos": 1}),
    (["[PAD]", "<reponame>", "<fim_prefix>"], {}),
]


def file_of(path: Path, words: list[str], named: dict[str, int], types: list[int] | None = None) -> Path:
    """A model of a vocabulary of letters and some words, all of which are said to be normal tokens."""
    tokens = [*LETTERS, "ab", *words]
    keys = {f"tokenizer.ggml.{role}_token_id": len(LETTERS) + 1 + place for role, place in named.items()}
    general: dict[str, Any] = {"tokens": tokens, "types": types or [NORMAL] * len(tokens)}
    return write_family(path, "llama", general=keys, vocabulary=general)


@pytest.mark.few(1)
@pytest.mark.parametrize(("words", "named"), CASES, ids=str)
def test_answers_end_where_llama_cpp_s_do(
    words: list[str], named: dict[str, int], llama_cpp: LlamaCpp, tmp_path: Path
) -> None:
    file = file_of(tmp_path / "a.gguf", words, named)
    assert {*ends_of(file)} == llama_cpp.ends(file, [5, 6, 7], len(LETTERS) + 1 + len(words))


def test_tokens_with_an_end_s_name_are_control_tokens(tmp_path: Path) -> None:
    """So that a chat's prompt has them whole, whatever the file says of their type."""
    words = ["<|im_end|>", "<|endoftext|>"]
    tokenizer = load_tokenizer(file_of(tmp_path / "a.gguf", words, {"eos": 1}))
    place = len(LETTERS) + 1
    assert tokenizer("ab<|im_end|>")["input_ids"][-1] == place
    assert tokenizer.decode([place, LETTERS.index("a")], skip_special_tokens=True) == "a"


def test_harmony_s_words_are_shown() -> None:
    words = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"]
    found = TokenRoles.of({"tokenizer.ggml.eos_token_id": 4}, words, "gpt2")
    assert found.ends == {4, 5}
    assert found.types == {0: USER_DEFINED, 1: USER_DEFINED, 2: USER_DEFINED, 3: USER_DEFINED, 4: CONTROL, 5: CONTROL}
