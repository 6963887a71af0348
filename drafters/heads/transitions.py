"""Corrections of a block's rows for the token before them: DSpark's bias and confidence, DFlash2's selector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import addressof
from dataclasses import dataclass
from typing import Any

import torch

from drafters.heads.head_step import product
from drafters.heads.weights import Block
from specdec.execute.native_layers import address_of
from specdec.native.library import library
from specdec.native.types import CTransitions
from specdec.runners.linear import PackedWeight

__all__ = ["Said", "Transitions"]


@dataclass(frozen=True, slots=True, eq=False)
class Said:
    """Results for N nodes: ``logits`` [N, d]; the ``chances`` of acceptance [N], where the head estimates them; and the
    ``states`` [N, r] of a recurrent bias.
    """

    logits: torch.Tensor
    chances: list[float] | None
    states: torch.Tensor | None


class Transitions:
    """The small heads behind a block's rows.

    Args:
        head: the head's modules.

    Attributes:
        known: whether the result depends on the token before; otherwise it is the same behind all tokens.
        recurrent: whether it depends on all tokens before.
    """

    def __init__(self, head: Block) -> None:
        self.config = config = head.config
        self.known = config.markov != "none" or config.selector_rank > 0 or config.confidence == "markov"
        self.recurrent = config.markov == "rnn"
        markov: Any = head.markov_head if config.markov_rank else None
        self._w1 = None if markov is None else markov.markov_w1.weight.detach()
        self._w2 = None if markov is None else product(markov.markov_w2)
        gate: Any = {"gated": "gate_proj", "rnn": "joint_proj"}.get(config.markov)
        self._gate = None if gate is None else product(getattr(markov, gate))
        self._confidence = product(head.confidence_head.proj) if config.confidence != "none" else None
        selector: Any = head.candidate_selector if config.selector_rank else None
        self._before = None if selector is None else selector.predecessor_codebook.detach()
        self._after = None if selector is None else selector.successor_codebook.detach()
        self._projection = None if selector is None else product(selector.hidden_projection)
        self._drafted: torch.Tensor | None = head.draft_tokens

    def described(self, outputs: int, dtype: torch.dtype) -> CTransitions | None:
        """These heads behind ``outputs`` logits, for the native library, valid while this object is.

        None where only torch computes them.
        """
        config, heads = self.config, [one for one in (self._w2, self._confidence) if one is not None]
        packed = [one for one in heads if isinstance(one, PackedWeight) and one.dtype is dtype]
        if len(packed) < len(heads) or config.markov not in ("none", "vanilla") or config.selector_rank:
            return None
        before = None if self._w1 is None else self._w1.contiguous()
        drafted = None if self._drafted is None else self._drafted.long().contiguous()
        self._held = before, drafted  # the library reads them by address
        after, chance = (
            addressof(one.described) if isinstance(one, PackedWeight) else None for one in (self._w2, self._confidence)
        )
        return CTransitions(
            size=outputs, half=dtype is torch.bfloat16, drafted=address_of(drafted), before=address_of(before),
            after=after, chance=chance, width=config.width, rank=config.markov_rank, vocabulary=config.vocab_size,
        )  # fmt: skip

    @torch.no_grad()
    def said(
        self,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        before: Sequence[int] | torch.Tensor,
        states: torch.Tensor | None,
        *,
        confident: bool = True,
    ) -> Said:
        """Correct rows ``hidden`` [N, W] with ``logits`` [N, d] for the tokens ``before`` them.

        ``states`` [N, r] are those of a recurrent bias behind the rows before; None for the first rows. ``confident``:
        whether to estimate chances, for which a device is waited for.
        """
        tokens = before if isinstance(before, torch.Tensor) else torch.tensor([*before], device=hidden.device)
        known = None if self._w1 is None else self._w1[tokens]  # [N, r]
        if known is not None and self._w2 is not None:
            bias, states = self._bias(known, hidden, states)
            logits = logits + self._w2(bias)
        if self._before is not None:
            logits = self._selected(hidden, logits, tokens)
        chances = None
        if self._confidence is not None and confident:
            read = hidden if self.config.confidence == "hidden" or known is None else torch.cat((hidden, known), -1)
            chances = [_sigmoid(logit) for logit in self._confidence(read)[:, 0].tolist()]
        return Said(logits, chances, states)

    def _bias(
        self, known: torch.Tensor, hidden: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[N, r] the bias before its last product, and the states behind these rows."""
        if self._gate is None:
            return known, None
        if not self.recurrent:
            return self._gate(torch.cat((hidden, known), -1)).sigmoid() * known, None
        states = torch.zeros_like(known) if states is None else states
        gate, candidate, output = self._gate(torch.cat((states, known, hidden), -1)).chunk(3, -1)
        gate = gate.sigmoid()
        return output.tanh(), gate * states + (1 - gate) * candidate.tanh()

    def _selected(self, hidden: torch.Tensor, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The top candidates' logits plus their score behind the token before; -inf for all other tokens."""
        assert self._before is not None
        assert self._after is not None
        assert self._projection is not None
        best = logits.topk(self.config.selector_top, -1)
        context = self._before[tokens] * self._projection(hidden)
        scores = best.values + (context[:, None] * self._after[best.indices]).sum(-1)
        return torch.full_like(logits, -torch.inf).scatter(-1, best.indices, scores)


def _sigmoid(logit: float) -> float:
    """As the native library computes it, bit for bit; 0 for NaN."""
    if (own := library()) is not None:
        found: float = own.specdec_sigmoid(logit)
        return found
    return 1 / (1 + math.exp(-logit)) if logit > -700 else 0.0
