"""Text stream: tokens become the text that ``decode`` would return, and stop strings end it at their last token.

``tokenizers.DecodeStream`` is not used: it fails on broken bytes, does not return broken bytes at the end, and returns
a run of bytes as text before the run is complete.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Any

__all__ = ["TextStream", "as_content", "continuation", "stop_strings"]

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")  # a byte's piece in vocabularies that fall back to bytes
_JOINED = " 'nvr"  # what clean-up may take a space from once it is seen what follows: " n't", " 've", " ' "
_LONG, _SHORT = 16, 8  # tokens that are decoded again: at most, but for runs, and once their text is known


def stop_strings(stop: str | Collection[str]) -> list[str]:
    """The stop strings as a list."""
    return [stop] if isinstance(stop, str) else list(stop)


def continuation(
    tokenizer: Any, prompt: Sequence[int], tokens: Sequence[int], *, skip_special_tokens: bool = True
) -> str:
    """The text of tokens behind a prompt: what ``decode`` adds to the prompt's text with them."""
    stream = TextStream(tokenizer, prompt=prompt, skip_special_tokens=skip_special_tokens)
    stream.extend(tokens)
    return stream.text


def as_content(text: str, tokenizer: Any, tokens: Sequence[int]) -> str:
    """An answer as the content of a message: without a space that only joins it to the prompt.

    SentencePiece's tokens of a word begin with such a space, and chat templates write it themselves.
    """
    joined = text.startswith(" ") and not continuation(tokenizer, (), tokens).startswith(" ")
    return text[1:] if joined else text


class TextStream:
    """The text of a growing list of new tokens, which is what ``decode`` adds to the prompt's text with them.

    Text is given out once no later token changes it. Not final are: broken bytes at the end, which may become a
    character; a run of byte tokens, which is text only as a whole (Llama 2, Mistral, Gemma); a space that the
    tokenizer's clean-up may take; and the beginning of a stop string. The cost of a token does not grow with the text.

    A stop string is looked for in the text with special tokens, too: it may be one, or hold one.

    Args:
        tokenizer: whose ``decode`` it is.
        stop: stop strings.
        prompt: the tokens before.
        skip_special_tokens: leave them out of the text.
        min_tokens: a stop string that ends within so many tokens does not count.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        prompt: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._stop, self._early = stop, min_tokens
        self._shown = _View(tokenizer, prompt, skip_special_tokens)
        self._marked = _View(tokenizer, prompt, False) if stop and skip_special_tokens else self._shown
        self._ahead: list[int] = []  # tokens that nothing had to be known of yet
        self._places = [(0, 0)]  # behind each token: lengths of the text with special tokens, and of the text
        self._floors = (0, 0)  # lengths of both texts where stop strings begin to count
        self._out = 0  # characters given out
        self._end: int | None = None  # of the text, where a stop string ended it

    @property
    def stopped(self) -> bool:
        """Whether a stop string was completed."""
        return self._end is not None

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens of which none can end the text."""
        self._ahead += tokens

    def push(self, token: int) -> bool:
        """Add a token; True where it completes a stop string."""
        self._ahead.append(token)
        if not self._stop or self.stopped:
            return False
        known = [len(view.final) for view in (self._marked, self._shown)]
        self._read()
        if self._early > 0:
            self._early -= 1
            self._floors = self._marked.length, self._shown.length
            return False
        hits = []
        for view, before, floor in zip((self._marked, self._shown), known, self._floors, strict=True):
            start = max(0, before - max(map(len, self._stop)))  # only a match that ends in new text is new
            recent = view.final[start:] + view.open
            # a match that ends at or before the floor was there within the first tokens
            ahead = ((text, max(0, floor + 1 - len(text) - start)) for text in self._stop)
            starts = [start + at for text, first in ahead if (at := recent.find(text, first)) >= 0]
            hits += [self._place(at) if view is self._marked else at for at in starts]
        self._end = min(hits, default=None)
        return self.stopped

    def take(self) -> str:
        """Final text not given out yet, holding back what may turn out to begin a stop string."""
        self._read()
        end = len(self._shown.final)
        if self._end is not None:
            end = self._end
        elif self._stop:
            end = min(end, self._held(self._shown.final), self._place(self._held(self._marked.final)))
        return self._give(end)

    def finish(self) -> str:
        """The rest: also characters that never became whole."""
        return self._give(len(self.text))

    @property
    def text(self) -> str:
        """All text, as ``decode`` shows it now."""
        self._read()
        return (self._shown.final + self._shown.open)[: self._end]

    def _give(self, end: int) -> str:
        text = (self._shown.final[self._out :] + self._shown.open)[: max(0, end - self._out)]
        self._out = max(self._out, end)
        return text

    def _read(self) -> None:
        tokens, self._ahead = self._ahead, []
        if not tokens or self.stopped:
            return
        self._shown.extend(tokens)
        if self._marked is not self._shown:
            self._marked.extend(tokens)
            place = self._marked.length, self._shown.length
            while self._places[-1][0] > place[0] or self._places[-1][1] > place[1]:
                self._places.pop()  # broken bytes have become fewer characters
            self._places.append(place)

    def _place(self, at: int) -> int:
        """Where in the text it stands that stands at ``at`` in the text with special tokens."""
        if self._marked is self._shown:
            return at
        later, place = self._marked.length, self._shown.length
        for before, start in reversed(self._places):
            if before <= at:
                return max(start, place - (later - at))
            later, place = before, start
        return 0

    def _held(self, text: str) -> int:
        """Where the longest end of the text begins that begins a stop string."""
        begun = (stop[:size] for stop in self._stop for size in range(1, len(stop)))
        return len(text) - max((len(start) for start in begun if text.endswith(start)), default=0)


class _View:
    """The text of new tokens by one way to decode: with special tokens, or without.

    Only a short tail of the tokens is decoded again as it grows. The text that new tokens add to the tail is the text
    that they add to the whole, since only the tail's first characters depend on the tokens before it.

    Attributes:
        final: text that no later token changes.
        open: the text after it, which later tokens may change.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], skip: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip
        self._pieces = getattr(tokenizer, "convert_ids_to_tokens", None)
        self._cleans = _cleans_up(tokenizer)
        self._run = False  # whether the last tokens are bytes, whose text is not certain
        self.final = self.open = ""
        self._tokens: list[int] = []
        self._begin(prompt)
        self._known = self._decode(self._tokens)  # text of the tail that is the prompt's, or final

    @property
    def length(self) -> int:
        """Characters of the text."""
        return len(self.final) + len(self.open)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens."""
        for token in tokens:
            self._add(token)
        text = self._decode(self._tokens)
        begin = len(self._known) if text.startswith(self._known) else _alike(text, self._known)
        end = begin if self._run else max(begin, self._certain(text))
        self.final += text[begin:end]
        self.open = text[end:]
        if end > begin:
            self._known = text[:end]
        if len(self._tokens) > _LONG and not self._run:
            self._shorten()

    def _add(self, token: int) -> None:
        if self._is_byte(token):
            self._run = True
        elif self._run and self._decode([token]):  # a special token that is left out ends no run
            self._run = False
        self._tokens.append(token)

    def _certain(self, text: str) -> int:
        """How many characters of the text no later token changes."""
        broken = len(text) - len(text.rstrip(_BROKEN))
        # A character has four bytes at most, and in a vocabulary whose bytes are known no run of them is open here.
        end = len(text) - (broken if self._pieces is None else min(broken, 3))
        return len(text[:end].rstrip(_JOINED)) if self._cleans else end

    def _shorten(self) -> None:
        """Go on with fewer tokens, where what they add to their text is still what all add to theirs."""
        tokens = self._tokens[-_SHORT:]
        text = self._decode(tokens)
        known = text.removesuffix(self.open)
        if text.endswith(self.open) and _is_anchor(known):
            self._tokens, self._known = tokens, known

    def _begin(self, prompt: Sequence[int]) -> None:
        """Take the end of a prompt, long enough for what follows it to be read as behind all of it."""
        size, anchored = _LONG, False
        while not anchored:
            self._tokens, self._run, whole = [], False, 0
            for token in prompt[-size:]:
                self._add(token)
                whole = whole if self._run else len(self._tokens)
            anchored = size >= len(prompt) or _is_anchor(self._decode(self._tokens[:whole]))
            size *= 4

    def _is_byte(self, token: int) -> bool:
        piece = None if self._pieces is None else self._pieces(token)
        return isinstance(piece, str) and _BYTE.fullmatch(piece) is not None

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=self._skip)
        return text


def _alike(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _is_anchor(text: str) -> bool:
    """Whether a text holds a character that says how all after it are read: where bytes begin, and spaces are kept."""
    solid = any(character not in _BROKEN + _JOINED and not character.isspace() for character in text)
    return solid or text.count(_BROKEN) > 3  # of broken bytes, three at most belong to what stood before


def _cleans_up(tokenizer: Any) -> bool:
    """Whether ``decode`` removes spaces in clean-up. For BPE, transformers needs a second option to do so."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    kind = type(getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)).__name__
    return kind != "BPE" or getattr(
        tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False
    )
