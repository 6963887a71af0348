"""Suffix automaton: copy what followed the longest suffix of the text that has occurred before.

The text's automaton grows by a token in amortised constant time (Blumer et al. 1985, "The smallest automaton
recognizing the subwords of a text"). The suffix link of its last state *is* the longest suffix that has occurred
before, so there is no search. Hu et al. 2024 ("SAM decoding", arXiv 2411.10666) draft from it and from a second
automaton, of a fixed corpus, in which every sequence moves a cursor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from drafters.rest.datastore import Datastore
from specdec.drafter import Context, DrafterBase, Observation
from specdec.errors import ConfigError
from specdec.settings.parsing import check_positive
from specdec.step.tree import Draft, Hints
from specdec.target import Target

__all__ = ["Cursor", "SuffixAutomaton", "SuffixAutomatonConfig", "SuffixAutomatonDrafter"]

# Number of suffix links along which occurrences are updated for each token. Chains in texts are short; a run of one
# repeated token has a chain as long as itself, which would make the automaton quadratic.
_FRESHENED = 32
_LARGEST = 2_000_000  # tokens of a corpus, about a kilobyte each


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixAutomatonConfig:
    """Options.

    Attributes:
        min_match: length of the shortest suffix to draft from.
        max_tokens: most tokens to propose.
        factor: tokens to propose for each matched token; a long match justifies a long draft.
        corpus: folder of a datastore (``specdec datastore build``) to copy from as well, where its match is longer than
            the text's. Its automaton takes about a kilobyte of memory per token, so it suits a few hundred thousand
            tokens; use ``rest`` for more.
    """

    min_match: int = 1
    max_tokens: int = 7
    factor: float = 2.0
    corpus: str | None = None

    def __post_init__(self) -> None:
        check_positive("suffix_automaton.", min_match=self.min_match, max_tokens=self.max_tokens)
        if not 0 < self.factor < math.inf:
            raise ConfigError(f"suffix_automaton.factor is {self.factor}; it must be more than 0, and finite")


class SuffixAutomaton:
    """The automaton of all substrings of a growing text.

    A state stands for all substrings that end at the same places: the longest one has ``length`` tokens, and ``link``
    is the state of its longest suffix that also ends elsewhere. ``end`` is the number of tokens up to the latest of
    these places; a clone inherits it, since the substrings that it takes over ended where its original did. ``match``
    describes the current text: the end of the latest earlier occurrence of its longest repeated suffix, and that
    suffix's length.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.end = [0]
        self.last = 0
        self.match = (0, 0)
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        text, after, link, length, end = self.tokens, self.next, self.link, self.length, self.end
        state, match = self.last, self.match
        for token in tokens:
            new = len(link)
            text.append(token)
            count = len(text)
            after.append({})
            length.append(count)
            end.append(count)
            link.append(0)
            while state >= 0 and token not in (following := after[state]):
                following[token] = new
                state = link[state]
            suffix = 0
            if state >= 0:
                suffix = following[token]
                if length[suffix] != length[state] + 1:
                    suffix = self._split(suffix, state, token)
            link[new] = suffix
            match = end[suffix], length[suffix]
            for _ in range(_FRESHENED):  # the latest end of every suffix is now here
                if suffix <= 0:
                    break
                end[suffix] = count
                suffix = link[suffix]
            state = new
        self.last, self.match = state, match

    def _split(self, old: int, state: int, token: int) -> int:
        """Split state ``old``: a new one gets ``state``'s longest string plus ``token``; ``old`` keeps longer ones."""
        after, link = self.next, self.link
        clone = len(link)
        after.append(dict(after[old]))
        link.append(link[old])
        self.length.append(self.length[state] + 1)
        self.end.append(self.end[old])
        link[old] = clone
        while state >= 0 and after[state].get(token) == old:
            after[state][token] = clone
            state = link[state]
        return clone


class Cursor:
    """Follows a text token by token: the longest suffix that occurs in *another* text."""

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self._automaton = automaton
        self._state = 0
        self._length = 0

    def add(self, token: int) -> None:
        """Add the text's next token."""
        automaton = self._automaton
        while self._state and token not in automaton.next[self._state]:
            self._state = automaton.link[self._state]
            self._length = automaton.length[self._state]
        following = automaton.next[self._state].get(token)
        if following is not None:
            self._state = following
            self._length += 1

    @property
    def match(self) -> tuple[int, int]:
        """The end of an occurrence in the other text, and the number of matching tokens."""
        return self._automaton.end[self._state], self._length


class SuffixAutomatonDrafter(DrafterBase):
    """The options and the corpus' automaton, which all sequences share."""

    name = "suffix_automaton"
    draws = False
    Config = SuffixAutomatonConfig
    needs_observe = False

    def __init__(self, config: SuffixAutomatonConfig | None = None, corpus: SuffixAutomaton | None = None) -> None:
        super().__init__(config)
        self.corpus = corpus

    @classmethod
    def build(cls, config: SuffixAutomatonConfig, target: Target) -> SuffixAutomatonDrafter:
        """Read the corpus and build its automaton.

        Raises:
            CheckpointError: there is no datastore, or a broken one, or one of another vocabulary.
            ConfigError: the corpus is too large.
        """
        if config.corpus is None:
            return cls(config)
        store = Datastore(config.corpus).check(target)
        if len(store) > _LARGEST:
            raise ConfigError(
                f"suffix_automaton.corpus {config.corpus!r} holds {len(store)} tokens, and an automaton of more than "
                f"{_LARGEST} does not fit into memory; take the drafter rest"
            )
        return cls(config, SuffixAutomaton(store.tokens.tolist()))

    def start(self, context: Context) -> SuffixAutomatonSession:
        return SuffixAutomatonSession(self.config, self.corpus, context)


class SuffixAutomatonSession:
    def __init__(self, config: SuffixAutomatonConfig, corpus: SuffixAutomaton | None, context: Context) -> None:
        self._config = config
        self._context = context
        self._text = SuffixAutomaton()
        self._corpus = corpus
        self._cursor = None if corpus is None else Cursor(corpus)
        self._read()

    def propose(self, row_budget: int) -> Draft:
        config, context = self._config, self._context
        if row_budget < 2:
            return Draft.chain([context.root])
        self._read()
        end, length = self._text.match
        source, match = self._text.tokens, (0, 0) if self._cursor is None else self._cursor.match
        if self._corpus is not None and match[1] > length:
            source, (end, length) = self._corpus.tokens, match
        if length < config.min_match:
            return Draft.chain([context.root])
        size = max(1, int(min(config.factor * length, config.max_tokens, context.remaining - 1, row_budget - 1)))
        path = source[end : end + size]
        if source is self._text.tokens:
            # A match that reaches the end of the text continues with the draft itself.
            period = len(source) - end
            while len(path) < size:
                path.append(path[len(path) - period])
        else:  # the separator is not a token, and a broken file can have others that are not
            size = self._context.target.vocab_size
            path = list(takewhile(lambda token: token < size, path))
        return Draft.chain([context.root, *path], hints=Hints(match_length=length))

    def observe(self, seen: Observation) -> None:
        pass  # the text is read from the context

    def _read(self) -> None:
        fresh = self._context.tokens[len(self._text.tokens) :]
        self._text.extend(fresh)
        if self._cursor is not None:
            for token in fresh:
                self._cursor.add(token)
