"""The tokenizer that a GGUF file describes, built from the file's lists and settings as llama.cpp reads them.

Transformers reads such files into the architecture's tokenizer class. That class adds tokens which the file does not
have, splits control tokens that are not written in GPT-2's bytes, and ignores settings that the file leaves to
llama.cpp's defaults.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers.tokenization_utils_base import generate_merges
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from specdec.errors import CheckpointError, SpecdecWarning, first_line
from specdec.models.gguf_ends import CONTROL, USER_DEFINED, TokenRoles
from specdec.models.gguf_splits import splitter
from specdec.models.gguf_table import read_settings
from specdec.runners.memory_pages import trim_heap

__all__ = ["ends_of", "read_tokenizer"]

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's character for a space
_UNKNOWN = 2
_WHOLE = _UNKNOWN, CONTROL, USER_DEFINED  # types of tokens that are matched whole in a text
_REMEDY = (
    "give the model's own tokenizer, --tokenizer FOLDER or Engine.from_pretrained(file, tokenizer=FOLDER), or load the "
    "model's folder of safetensors"
)
_KINDS = ("llama", "gpt2", "gemma4")

# Rules under which a word that is a token is taken whole, without merges, and those that add a begin token.
_LLAMA_3 = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano")
_BEGINNING = (*_LLAMA_3, "tekken")
_WHOLE_WORDS = (*_LLAMA_3, "tekken", "glm4", "glm5")
_OWN_SPACES = ("gemma", "gemma2", "gemma3")  # their first files lack the flag "no space before the text"

# Ordinary words, runs of spaces and newlines, digits, a contraction, and characters that are encoded as bytes.
_PROBES = ("Hello world", " a  b\n\n\tc", "It's 2026, isn't it?", "na\u00efve \u6f22\u5b57 \U0001f642")


@dataclass(frozen=True)
class TokenizerSettings:
    """The tokenizer settings of a file, with llama.cpp's default for each one that is missing.

    Attributes:
        kind: ``llama`` for SentencePiece's pieces, merged by score; ``gemma4`` for such pieces with a list of merges;
            ``gpt2`` for byte pairs.
        rule: name of the rule that splits texts before byte pairs are merged.
        bos, eos, unk, pad: ids of the begin, end, unknown and padding tokens; None where the file has none.
        add_bos, add_eos: whether the begin and end tokens are added to a text.
        space_prefix: whether a space is added before a text, and before the text after a special token.
        whole_words: whether a word that is a token is taken whole, without merges.
        trims: whether special tokens absorb the spaces behind them.
    """

    kind: str
    rule: str
    bos: int | None
    eos: int | None
    unk: int | None
    pad: int | None
    add_bos: bool
    add_eos: bool
    space_prefix: bool
    whole_words: bool
    trims: bool

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> TokenizerSettings:
        """The settings in a file's metadata."""
        kind, rule = (str(metadata.get(f"tokenizer.ggml.{name}") or "default") for name in ("model", "pre"))
        pieces = kind == "llama"
        own_spaces = metadata.get("general.architecture") in _OWN_SPACES

        def said(name: str, default: Any) -> Any:
            return metadata.get(f"tokenizer.ggml.{name}", default)

        return cls(
            kind=kind,
            rule=rule,
            bos=said("bos_token_id", 1 if pieces else None),
            eos=said("eos_token_id", 2 if pieces else None),
            unk=said("unknown_token_id", 0 if pieces else None),
            pad=said("padding_token_id", None),
            add_bos=bool(said("add_bos_token", kind != "gpt2" or rule in _BEGINNING)),
            add_eos=bool(said("add_eos_token", False)),
            space_prefix=pieces and bool(said("add_space_prefix", not own_spaces)),
            whole_words=not pieces and rule in _WHOLE_WORDS,
            trims=pieces and any(name in str(metadata.get("general.name")).lower() for name in ("phi-3", "phi3")),
        )


def read_tokenizer(path: Path) -> Any:
    """The tokenizer of a GGUF file, with its chat template.

    Raises:
        CheckpointError: the file has no tokenizer, or one that cannot be reproduced exactly.
    """
    trim_heap()  # what a model's load has freed; the lists take pages of their own
    try:
        _, metadata, _, _ = read_settings(path, ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"))
        vocabulary = _Vocabulary(path.name, metadata)
        template = metadata.get("tokenizer.chat_template")
        del metadata  # whose lists take ten megabytes or more
        tokenizer = vocabulary.tokenizer(template)
        vocabulary.check(tokenizer)
    except CheckpointError:
        raise
    except Exception as error:  # a file's lists can have any length and type
        raise CheckpointError(f"no tokenizer in {str(path)!r}: {first_line(error)}; {_REMEDY}") from error
    tokenizer.name_or_path = str(path)
    trim_heap()  # of lists that are as large as the tokenizer
    return tokenizer


def ends_of(path: Path) -> list[int]:
    """The tokens of a GGUF file that end an answer, sorted; those that it names where it lists no tokens."""
    _, metadata, _, _ = read_settings(path, ("tokenizer.ggml.tokens",))
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    found = TokenRoles.of(metadata, tokens, str(metadata.get("tokenizer.ggml.model"))).ends
    trim_heap()  # of the list of tokens
    return sorted(found)


class _Handed:
    """A backend that transformers takes without a copy; copying takes as long as everything else together."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._backend


class _Vocabulary:
    """A file's tokens, and two encoders for them: the tokenizers library's, and a simple one that checks it."""

    def __init__(self, name: str, metadata: Mapping[str, Any]) -> None:
        self.name, self.settings = name, TokenizerSettings.of(metadata)
        if "tokenizer.ggml.tokens" not in metadata:
            raise CheckpointError(f"no tokenizer in {name!r}: it lists no tokens; {_REMEDY}")
        listed = metadata["tokenizer.ggml.tokens"]
        self.tokens: Sequence[str] = [token or f"[EMPTY_{place}]" for place, token in enumerate(listed)]
        self.ids = {token: place for place, token in enumerate(self.tokens)}
        settings = self.settings
        if settings.kind not in _KINDS:
            raise self._refusal(f"it is of the kind {settings.kind!r}, and {', '.join(_KINDS)} are read here")
        if settings.kind == "gpt2" and splitter(settings.rule) is None:
            raise self._refusal(f"it splits texts by the rule {settings.rule!r}, which is not known here")
        needed = "scores" if settings.kind == "llama" else "merges"
        if f"tokenizer.ggml.{needed}" not in metadata:
            raise self._refusal(f"its tokens have no {needed}")
        if len(self.ids) < len(self.tokens):
            raise self._refusal("it lists a token twice")
        self.roles = TokenRoles.of(metadata, self.tokens, settings.kind)
        named = (settings.bos, settings.eos, settings.unk, settings.pad)
        for place in named:
            if place is not None and not 0 <= place < len(self.tokens):
                raise self._refusal(f"it names token {place} and has {len(self.tokens)}")
        self.scores = metadata.get("tokenizer.ggml.scores") if settings.kind == "llama" else None
        merges = () if self.scores else metadata.get("tokenizer.ggml.merges", ())
        self.merges = [self._pair(merge) for merge in merges]
        types = {**dict(enumerate(metadata.get("tokenizer.ggml.token_type", ()))), **self.roles.types}
        of_type = {kind: {at for at, is_of in types.items() if is_of == kind} for kind in _WHOLE}
        self.special = of_type[_UNKNOWN] | of_type[CONTROL] | {place for place in named if place is not None}
        self.whole = sorted(self.special | of_type[USER_DEFINED])

    def tokenizer(self, template: str | None) -> Any:
        """The transformers tokenizer for these tokens."""
        settings, tokens = self.settings, self.tokens
        backend = Tokenizer(self._model())
        if settings.kind != "gpt2":
            first = [normalizers.Prepend(_SPACE)] if settings.space_prefix else []
            backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", _SPACE)])
            strip = [decoders.Strip(" ", 1, 0)] if settings.space_prefix else []
            pieces = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
            backend.decoder = decoders.Sequence([*pieces, *strip])
        else:
            backend.pre_tokenizer = splitter(settings.rule)
            backend.decoder = decoders.ByteLevel()
        self._add_whole(backend)
        named = {"bos": settings.bos, "eos": settings.eos, "unk": settings.unk, "pad": settings.pad}
        for token, added in (("bos", settings.add_bos), ("eos", settings.add_eos)):
            if added and named[token] is None:
                warnings.warn(
                    f"{self.name} asks for a {token.upper()} token around each text and does not say which: none is "
                    f"put; set the file's tokenizer.ggml.{token}_token_id",
                    SpecdecWarning,
                    stacklevel=4,
                )
        new: Any = TokenizersBackend
        return new(
            tokenizer_object=_Handed(backend),
            **{f"{token}_token": None if place is None else tokens[place] for token, place in named.items()},
            add_bos_token=settings.add_bos and settings.bos is not None,
            add_eos_token=settings.add_eos and settings.eos is not None,
            chat_template=template,
        )

    def _model(self) -> Any:
        if self.settings.kind == "gpt2":
            return models.BPE(self.ids, self.merges, ignore_merges=self.settings.whole_words)
        scores = None if self.scores is None else dict(zip(self.tokens, self.scores, strict=True))
        merges = self.merges if scores is None else generate_merges(self.ids, scores)
        unknown = None if self.settings.unk is None else self.tokens[self.settings.unk]
        return models.BPE(self.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)

    def _add_whole(self, backend: Any) -> None:
        """Add the tokens that are matched whole in a text."""
        untrimmed = ("<unk>", "<s>", "<|endoftext|>")

        def added(place: int) -> AddedToken:
            trims = self.settings.trims and self.tokens[place] not in untrimmed
            return AddedToken(self.tokens[place], normalized=False, special=place in self.special, rstrip=trims)

        backend.add_tokens([added(place) for place in self.whole])

    def check(self, tokenizer: Any) -> None:
        """Compare the library's tokens of some texts with the simple encoder's."""
        ends = [self.tokens[end] for end in sorted(self.roles.ends)]
        for text in (*_PROBES, *(f"ab{end}cd" for end in ends)):
            tokens, expected = list(tokenizer(text)["input_ids"]), self.encode(text, tokenizer.backend_tokenizer)
            if tokens != expected:
                raise self._refusal(f"{text!r} becomes the tokens {tokens}, and its own settings make it {expected}")

    def encode(self, text: str, backend: Any) -> list[int]:
        """The tokens of a text, merged pair by pair as the file's lists say."""
        settings = self.settings
        whole = sorted((token for place in self.whole if (token := self.tokens[place]) in text), key=len, reverse=True)
        ids = [settings.bos] if settings.add_bos and settings.bos is not None else []
        for place, part in enumerate(re.split(f"({'|'.join(map(re.escape, whole))})", text) if whole else [text]):
            if place % 2:
                ids.append(self.ids[part])
            elif part and settings.kind != "gpt2":
                ids += self._merged((" " * settings.space_prefix + part).replace(" ", _SPACE))
            elif part:
                ids += [
                    token for word, _ in backend.pre_tokenizer.pre_tokenize_str(part) for token in self._merged(word)
                ]
        return [*ids, settings.eos] if settings.add_eos and settings.eos is not None else ids

    def _merged(self, word: str) -> list[int]:
        if self.settings.whole_words and word in self.ids:
            return [self.ids[word]]
        parts = list(word)
        while len(parts) > 1:
            ranks = [self._rank(*pair) for pair in pairwise(parts)]
            if (best := min(ranks)) == math.inf:
                break
            at = ranks.index(best)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids = [token for part in parts for token in self._spelled(part)]
        return [
            token for place, token in enumerate(ids) if ids[max(0, place - 1) : place + 1] != [self.settings.unk] * 2
        ]

    def _pair(self, merge: str) -> tuple[str, str]:
        """The two tokens of a merge, which a space separates; the first may itself begin with a space. They are the
        vocabulary's own strings, as merges are many.
        """
        space = merge.index(" ", 1)
        left, right = (
            self.tokens[self.ids[part]] if part in self.ids else part for part in (merge[:space], merge[space + 1 :])
        )
        return left, right

    @cached_property
    def _ranks(self) -> Mapping[tuple[str, str], int]:
        return {pair: rank for rank, pair in enumerate(self.merges)}

    def _rank(self, left: str, right: str) -> float:
        """The rank of a pair; pairs of lower rank are merged first."""
        if self.scores is None:
            return self._ranks.get((left, right), math.inf)
        return -self.scores[self.ids[left + right]] if left + right in self.ids else math.inf

    def _spelled(self, part: str) -> list[int]:
        """The token of a part of the text, or the tokens of its bytes."""
        if part in self.ids:
            return [self.ids[part]]
        names = [f"<0x{byte:02X}>" for byte in part.encode()]
        if self.settings.kind == "gpt2":
            return []
        if all(name in self.ids for name in names):
            return [self.ids[name] for name in names]
        return [] if self.settings.unk is None else [self.settings.unk]

    def _refusal(self, why: str) -> CheckpointError:
        return CheckpointError(f"the tokenizer of {self.name} cannot be read faithfully: {why}; {_REMEDY}")
