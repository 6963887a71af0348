"""Drafters that read only text, as a proposer for vLLM (``method="custom_class"``).

    vllm serve MODEL --speculative-config '{"method": "custom_class", "num_speculative_tokens": 7,
        "model": "specdec.integrations.vllm.Proposer"}'

vLLM does not name requests when it asks for drafts: it passes a table of tokens, whose rows move when requests come and
go. So the state of a text is found by comparing its tokens. A request that takes another's row, or begins like another
one, never gets drafts from a foreign text.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specdec.drafter import Context, Drafter, DraftSession
from specdec.drafting.registry import parse_drafter
from specdec.errors import ConfigError, shown
from specdec.sampling.noise import Noise
from specdec.settings.parsing import check_positive, parse
from specdec.settings.sampling_params import SamplingParams
from specdec.step import torch_switches

__all__ = ["Proposer", "ProposerConfig"]

Tokens = npt.NDArray[np.integer[Any]]
_AUTO = {"suffix_automaton": "max_tokens", "prompt_lookup": "tokens"}  # default -> option of its longest draft
_MEMORY = 0.8  # weight of a draft in a drafter's record, relative to the next draft


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerConfig:
    """Options, from ``additional_config={"specdec": {...}}`` of vLLM's engine.

    Attributes:
        drafters: names of drafters, or ``{name: ..., **options}``, that learn from the text alone. Of several, each
            text uses the one that would recently have been right most often in it.
        adapt: whether a draft has at most twice as many tokens as were right recently, plus one; otherwise it always
            has up to ``num_speculative_tokens``.
        idle: number of calls after which a text that was in none of them is forgotten.
    """

    drafters: list[Any] = field(default_factory=lambda: [*_AUTO])
    adapt: bool = True
    idle: int = 256

    def __post_init__(self) -> None:
        check_positive("specdec.", idle=self.idle)
        if not self.drafters:
            raise ConfigError(f"specdec.drafters is empty; name some, such as {', '.join(_AUTO)}")


class Proposer:
    """Drafts for the rows of vLLM's batches.

    Args:
        vllm_config: vLLM's config; the proposer reads ``speculative_config.num_speculative_tokens``,
            ``model_config.max_model_len``, ``get_vocab_size()`` and ``additional_config``.

    Raises:
        ConfigError: an option is unknown, a drafter needs more than text, or there is no number of tokens.
    """

    @torch_switches.makes
    def __init__(self, vllm_config: Any) -> None:
        more = getattr(vllm_config, "additional_config", None)
        given = more.get("specdec", {}) if isinstance(more, Mapping) else {}
        self.config = parse(ProposerConfig, given, where="specdec")
        self._most: int = vllm_config.speculative_config.num_speculative_tokens
        self._longest: int = vllm_config.model_config.max_model_len
        check_positive("speculative_config.", num_speculative_tokens=self._most)
        target: Any = _Vocabulary(vllm_config.model_config.get_vocab_size())
        self._drafters = [self._drafter(spec, target) for spec in self.config.drafters]
        self._target = target
        self._texts: list[_Text | None] = []  # by row of the last call
        self._elsewhere: list[_Text] = []  # the texts that are in no row
        self._calls = 0

    def _drafter(self, spec: Any, target: Any) -> Drafter:
        """The drafter as the engine makes it; without options, its drafts are as long as vLLM verifies."""
        sized = {"name": spec, _AUTO[spec]: self._most} if isinstance(spec, str) and spec in _AUTO else spec
        kind, options = parse_drafter(sized)
        if kind.needs_observe or kind.taps:
            raise ConfigError(
                f"specdec.drafters has {shown(kind.name)}, which learns from what the model computes, and vLLM gives "
                f"its proposers tokens alone; choose of {', '.join(_AUTO)}"
            )
        made: Drafter = kind.build(options, target)
        return made

    def load_model(self, *_: Any, **__: Any) -> None:
        """Do nothing: vLLM calls this on every proposer, and this one has no model."""

    @torch_switches.makes
    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Tokens,
        token_ids_cpu: Tokens,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """A chain for each row of the batch, empty where there is nothing to propose.

        Args:
            sampled_token_ids: each row's tokens of this step; empty where a prompt has not been read to its end.
            num_tokens_no_spec: [rows or more] number of tokens in each row, this step's included.
            token_ids_cpu: [rows or more, longest text] the rows' tokens.
            slot_mappings: unused.
        """
        self._calls += 1
        rows = [token_ids_cpu[row, : int(num_tokens_no_spec[row])] for row in range(len(sampled_token_ids))]
        texts = self._found(rows)
        drafts = list[list[int]]()
        for row, (tokens, sampled) in enumerate(zip(rows, sampled_token_ids, strict=True)):
            left, text = self._longest - len(tokens), texts[row]
            if not len(sampled) or left < 2 or not len(tokens):
                drafts.append([])
                continue
            if text is None:
                text = texts[row] = _Text(self._drafters, self._target, self._most)
            text.read(tokens)
            drafts.append(text.draft(left, self.config.adapt))
        self._texts = texts
        return drafts

    def _found(self, rows: Sequence[Tokens]) -> list[_Text | None]:
        """The known text of each row, or None; the remaining texts are kept for later rows."""
        before = [*self._texts, *[None] * (len(rows) - len(self._texts))]
        found = [
            text if text is not None and text.begins(row) else None for text, row in zip(before, rows, strict=False)
        ]
        kept = {id(text) for text in found}
        loose = [text for text in (*before, *self._elsewhere) if text is not None and id(text) not in kept]
        for place, row in enumerate(rows):
            if found[place] is None and loose:
                fitting = [text for text in loose if text.begins(row)]
                if fitting:
                    longest = max(fitting, key=len)
                    loose.remove(longest)
                    found[place] = longest
        for text in found:
            if text is not None:
                text.seen = self._calls
        self._elsewhere = [text for text in loose if self._calls - text.seen <= self.config.idle]
        return found


class _Text:
    """One text: its tokens, a session of each drafter, and how often each was right recently."""

    def __init__(self, drafters: Sequence[Drafter], target: Any, most: int) -> None:
        self.seen = 0
        self._tokens = list[int]()
        self._array: Tokens = np.empty(0, dtype=np.int64)
        cache: Any = None  # no drafter that reads only text uses it
        params = SamplingParams()
        self._context = Context(
            target=target,
            cache=cache,
            tokens=self._tokens,
            prompt_length=0,
            remaining=1,
            max_rows=most + 1,
            sampling=params,
            noise=Noise(0, target.vocab_size, torch.device("cpu")),
            rng=random.Random(0),
        )
        self._drafters, self._most = drafters, most
        self._sessions = list[DraftSession]()
        self._drafts = list[list[int]]()  # the latest drafts
        self._right = [float(most)] * len(drafters)  # right tokens of drafts, with more weight on later ones
        self._weight = 1.0

    def __len__(self) -> int:
        return len(self._tokens)

    def begins(self, row: Tokens) -> bool:
        """Whether a row begins with this text."""
        size = len(self._tokens)
        if size > len(row) or (size and row[size - 1] != self._tokens[-1]):
            return False
        return bool(np.array_equal(self._array[:size], row[:size]))

    def read(self, row: Tokens) -> None:
        """Add a row's further tokens, and compare the latest drafts with them."""
        size = len(self._tokens)
        fresh: list[int] = row[size:].tolist()
        if fresh and self._drafts:
            self._weight = _MEMORY * self._weight + 1
            for place, draft in enumerate(self._drafts):
                right = next((n for n, pair in enumerate(zip(draft, fresh, strict=False)) if pair[0] != pair[1]), None)
                count = min(len(draft), len(fresh)) if right is None else right
                self._right[place] = _MEMORY * self._right[place] + count
            self._drafts = []
        self._tokens += fresh
        if len(self._array) < len(row):
            grown = np.empty(2 * len(row), dtype=row.dtype)
            grown[:size] = self._array[:size]
            self._array = grown
        self._array[size : len(row)] = row[size:]

    def draft(self, left: int, adapt: bool) -> list[int]:
        """A chain; ``left`` is the number of tokens that the text can still grow by."""
        context = self._context
        context.remaining = left
        if not self._sessions:
            context.prompt_length = len(self._tokens)
            self._sessions = [drafter.start(context) for drafter in self._drafters]
        most = min(self._most, left - 1)
        self._drafts = [_chain(session.propose(self._most + 1), most) for session in self._sessions]
        best = max(range(len(self._drafts)), key=lambda place: (bool(self._drafts[place]), self._right[place]))
        size = self._most if not adapt else 1 + round(2 * self._right[best] / self._weight)
        return self._drafts[best][:size]


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The interface of a target that drafters of text use."""

    vocab_size: int


def _chain(draft: Any, most: int) -> list[int]:
    """The path of first children, up to ``most`` tokens."""
    path, row = list[int](), 0
    below = draft.children()
    while below[row] and len(path) < most:
        row = below[row][0]
        path.append(int(draft.tokens[row]))
    return path
