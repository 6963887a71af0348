"""The tokens that end an answer, and the types of tokens, as llama.cpp takes them from a GGUF file.

llama.cpp ends an answer at more than the tokens that a file names: at every token that has an end's name in the
vocabulary, and at the pad, repository and separator tokens of fill-in-the-middle. Tokens with such a name are control
tokens, whatever the file says of their type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CONTROL", "FILL_ENDS", "NORMAL", "USER_DEFINED", "TokenRoles"]

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # GGUF's numbers of tokens' types
_FIRST_END = {"llama": 2, "gpt2": 11}  # kind of tokenizer -> the end token of a file that names none

_TURN_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>"),
    *("[EOT]", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<end_of_utterance>"),
)
_ENDS = (
    *(*_TURN_ENDS, "<|eom_id|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "</s>", "[EOS]", "<eos>"),
    *("<turn|>", "<|tool_response>", "[e~["),
)
_FILL = {
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>", "<PRE>", "\u2581<PRE>"),
        *("<|code_prefix|>", "<|prefix|>"),
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>", "<SUF>", "\u2581<SUF>"),
        *("<|code_suffix|>", "<|suffix|>"),
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>", "<MID>", "\u2581<MID>"),
        *("<|code_middle|>", "<|middle|>"),
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Role of fill-in-the-middle -> the names by which a token has it, in a file that does not say which has it."""
_FORMER = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}  # keys of older files
FILL_ENDS = ("fim_pad", "fim_rep", "fim_sep")
_HARMONY = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # are shown in a text


@dataclass(frozen=True)
class TokenRoles:
    """What tokens are for.

    Attributes:
        ends: ids of the tokens that end an answer.
        types: id -> type, of the tokens whose type is another than the file says.
    """

    ends: frozenset[int]
    types: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, metadata: Mapping[str, Any], tokens: Sequence[str], kind: str) -> TokenRoles:
        """The roles of a file's tokens.

        Args:
            metadata: the file's settings.
            tokens: its vocabulary.
            kind: of its tokenizer.
        """
        words = {*_ENDS, *_HARMONY, *(word for words in _FILL.values() for word in words)}
        ids = {token: place for place, token in enumerate(tokens) if token in words}

        def said(name: str, default: int | None = None) -> int | None:
            found = metadata.get(f"tokenizer.ggml.{name}_token_id")
            known = type(found) is int and 0 <= found < len(tokens)
            return found if known else default if default is None or default < len(tokens) else None

        types: dict[int, int] = {}
        ends: set[int | None] = {said("eos", _FIRST_END.get(kind)), said("eot"), said("eom")}
        for role, names in _FILL.items():
            named = said(role, said(f"{_FORMER[role]}") if role in _FORMER else None)
            # Where several tokens have a role's names, llama.cpp takes whichever its hash table has first.
            places = [ids[name] for name in names if name in ids] if named is None else []
            types |= dict.fromkeys(places, CONTROL)
            ends |= {named, *places} if role in FILL_ENDS else set()
        named_ends = {ids[name] for name in _ENDS if name in ids}
        types |= dict.fromkeys(named_ends, CONTROL)
        types |= {ids[name]: USER_DEFINED for name in _HARMONY if name in ids}
        found = {end for end in ends | named_ends if end is not None}
        for place, kind_of in _taken_out({tokens[end]: end for end in found}):
            found.remove(place)
            types[place] = kind_of
        return cls(frozenset(found), types)


def _taken_out(ends: Mapping[str, int]) -> list[tuple[int, int]]:
    """Those that are no ends after all, and the type that each has: where others say that it ends something else."""
    out = []
    calls = {"<|call|>", "<|calls|>"} & {*ends}
    if calls and {"<|return|>", "<|flush|>"} & {*ends} and "<|end|>" in ends:  # OpenAI's Harmony, Solar
        out.append((ends["<|end|>"], USER_DEFINED))
    if "<|tool_response>" in ends and "</s>" in ends:  # Gemma 4
        out.append((ends["</s>"], NORMAL))
    return out
