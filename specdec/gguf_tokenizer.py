"""What a GGUF file says of its tokenizer, read as llama.cpp reads it, and a tokenizer of transformers made to follow.

Transformers' reader takes flags that stand in the file. Where one is left out, llama.cpp goes by the kind of the
vocabulary and by the rule that splits texts, and the reader by neither.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import decoders, normalizers

from specdec.errors import CheckpointError, SpecdecWarning

__all__ = ["TokenizerSettings"]

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's space

# Rules under which a word that is a token as a whole is not put together from merges, and those with a begin token.
_LLAMA_3 = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano")
_BEGINNING = (*_LLAMA_3, "tekken", "chameleon")
_WHOLE_WORDS = (*_LLAMA_3, "tekken", "minicpm5", "youtu", "granite-embed-multi-97m")
_OWN_SPACES = ("gemma", "gemma2", "gemma3")  # whose first files lack the flag that says that no space is put first


@dataclass(frozen=True)
class TokenizerSettings:
    """The settings of a vocabulary of SentencePiece's pieces (``llama``) or of byte pairs (``gpt2``).

    Attributes:
        bos, eos: the tokens that begin and end a text; None where the file does not say.
        add_bos, add_eos: whether they are put around a text.
        space_prefix: whether a space is put before a text, and before what follows a special token.
        whole_words: whether a word that is a token as a whole is taken so, whatever the merges say.
    """

    kind: str
    bos: int | None
    eos: int | None
    add_bos: bool
    add_eos: bool
    space_prefix: bool
    whole_words: bool

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> TokenizerSettings | None:
        """Those of a file's metadata; None for other vocabularies."""
        kind, rule = (metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
        if kind not in ("llama", "gpt2"):
            return None
        pieces = kind == "llama"
        own_spaces = metadata.get("general.architecture") in _OWN_SPACES

        def said(name: str, default: Any) -> Any:
            return metadata.get(f"tokenizer.ggml.{name}", default)

        return cls(
            kind=kind,
            bos=said("bos_token_id", 1 if pieces else None),
            eos=said("eos_token_id", 2 if pieces else None),
            add_bos=bool(said("add_bos_token", pieces or rule in _BEGINNING)),
            add_eos=bool(said("add_eos_token", False)),
            space_prefix=bool(said("add_space_prefix", pieces and not own_spaces)),
            whole_words=not pieces and rule in _WHOLE_WORDS,
        )

    def apply(self, tokenizer: Any, name: str) -> None:
        """Have a tokenizer follow them, and see that it does.

        Args:
            tokenizer: transformers'.
            name: the file's, for messages.

        Raises:
            CheckpointError: it still reads a text otherwise.
        """
        backend = tokenizer.backend_tokenizer
        if self.whole_words:
            model = backend.model
            model.ignore_merges = True
            backend.model = model
        if self.kind == "llama":
            self._put_space(backend)
        for token, end, added in (("bos", self.bos, self.add_bos), ("eos", self.eos, self.add_eos)):
            if end is not None and added:
                setattr(tokenizer, f"{token}_token", tokenizer.convert_ids_to_tokens(end))
            elif added:
                warnings.warn(
                    f"{name} asks for a {token.upper()} token around each text and does not say which: none is put; "
                    f"set the file's tokenizer.ggml.{token}_token_id",
                    SpecdecWarning,
                    stacklevel=4,
                )
            setattr(tokenizer, f"add_{token}_token", added and end is not None)
        self._check(tokenizer, name)

    def _put_space(self, backend: Any) -> None:
        """Whether a space stands before a text that is encoded, and is left out of one that is decoded."""
        first = [normalizers.Prepend(_SPACE)] if self.space_prefix else []
        backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", _SPACE)])
        backend.pre_tokenizer = None
        strip = [decoders.Strip(" ", 1, 0)] if self.space_prefix else []
        pieces = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*pieces, *strip])

    def _check(self, tokenizer: Any, name: str) -> None:
        """Hold the tokens of a text against the settings."""
        plain = list(tokenizer("a b", add_special_tokens=False)["input_ids"])
        begin = [self.bos] if self.add_bos and self.bos is not None else []
        end = [self.eos] if self.add_eos and self.eos is not None else []
        found, expected = list(tokenizer("a b")["input_ids"]), [*begin, *plain, *end]
        if found != expected:
            raise CheckpointError(
                f"this version of transformers reads the tokenizer of {name} wrongly: a text became {found}, and the "
                f"file's settings make it {expected}; install the versions that constraints.txt names"
            )
