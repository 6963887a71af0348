"""Running an EAGLE head: each row joins a token's embedding with the hidden state before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product as product_of

import torch

from drafters.heads.forward import HeadForward
from drafters.heads.layers import Linear, embedding_of, specs_of
from drafters.heads.native_chain import NativeChain
from drafters.heads.recorded_chain import MOST_RECORDED, RecordedChain
from drafters.heads.spec import head_spec
from drafters.heads.weights import Chain
from specdec.decoder.rope import RopeTables
from specdec.runners.attention import attend, attend_ends
from specdec.runners.linear import linear_kernel
from specdec.runners.rows import Rows, TextRows
from specdec.runners.sent_rows import rows_on
from specdec.runners.visibility import bucket
from specdec.step import device_copies
from specdec.step.cache import KVCache
from specdec.step.joining import joined
from specdec.step.step_io import StepInput
from specdec.target import Target

__all__ = ["ChainStep", "Guess", "Nodes"]

_WARM_ROWS = 64  # of several sequences, in passes that are recorded beforehand


@dataclass(frozen=True, slots=True, eq=False)
class Nodes:
    """A sequence's input to a pass of the head: the next rows of its text, or of the tree behind it.

    Attributes:
        step: T tokens in the head's own cache; each is paired with the hidden state of the position before it.
        features: [T', taps x D] hidden states of the target for the first T' rows.
        states: [T - T', W] hidden states of the head itself for the other rows.
        asked: number of last rows whose logits are computed.
    """

    step: StepInput
    features: torch.Tensor | None = None
    states: torch.Tensor | None = None
    asked: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Guess:
    """A pass's result.

    Attributes:
        logits: [N, d] behind the asked rows.
        states: [N, W] theirs, for the next level.
        rows: all rows, where they are on a device of its own; else None.
    """

    logits: torch.Tensor
    states: torch.Tensor
    rows: TextRows | None = None


class ChainStep:
    """A head's weights in the layout that drafting uses.

    Args:
        head: the head's modules; not needed afterwards.
        target_head: the target's head, over the draft vocabulary if there is one; unused if the head has its own.
        target: the target, whose embedding is used unless the head has its own.

    Attributes:
        config: the head's config.
        features: width of the target's hidden states that a row reads.
        native: the head in the native library; None where torch runs it.
        recorded: its passes as graphs on a CUDA device; None where they are launched one by one.
        mask_state: [1, W] the hidden state for all depths behind the first, in heads that draft all depths at once.
        weights: number of weights that a pass reads.
    """

    def __init__(self, head: Chain, target_head: Linear, target: Target) -> None:
        self.config = config = head.config
        self.features = config.hidden_size * len(config.taps)
        like = next(head.layers.parameters())
        self.device, self.dtype = like.device, like.dtype
        self._embed = embedding_of(head, target)
        self._head = linear_kernel(head.lm_head.weight.detach()) if config.own_head else target_head
        self._ropes = RopeTables(self.dtype, self.device)
        self._forward = forward = HeadForward.of(head_spec(config), head.state_dict(), linear_kernel)
        self.native = NativeChain.of(head, forward, self._head, self._ropes, target)
        self.specs = specs_of(forward.spec, self.device, self.dtype)
        mask = head.mask_hidden.detach()[None] if config.at_once else None
        self.mask_state = None if mask is None else self.fused(mask)
        recording = target.recording if self.native is None else None
        self.recorded: RecordedChain | None = None
        if recording is not None:
            self.recorded = RecordedChain(forward, self._head, recording, self._ropes, mask)
        size = (config.draft_vocab or config.vocab_size) * config.width
        self.weights = size + sum(weight.numel() for weight in head.layers.parameters())

    @torch.no_grad()
    def fused(self, features: torch.Tensor) -> torch.Tensor:
        """[T, W] the combination of the target's hidden states [T, taps x D]."""
        return self._forward.fused(features.to(self.device, self.dtype))

    def embedded(self, rows: Rows) -> torch.Tensor:
        """[T, W] the embeddings of the rows' tokens; those that a device drafted are not read."""
        there = device_copies.is_apart(self.device)
        return self._embed(rows.tokens[0] if there else rows.step.ids).to(self.device, self.dtype)

    @torch.no_grad()
    def guess(self, brought: Sequence[Nodes]) -> list[Guess]:
        """Run each sequence's rows; keys and values of all rows are stored."""
        rows = rows_on(self.device, joined([one.step for one in brought]))
        asked = [one.asked for one in brought]
        native, logits = self.native, None
        embedded = torch.empty(0) if native is not None and native.embeds else self.embedded(rows)
        sources = [(one.features, one.states) for one in brought]
        if native is not None:
            given = None if native.embeds else embedded
            logits, onward = native.guess(rows.step, sources, given, rows.step.last_rows(asked))
        elif self.recorded is not None and (found := self.recorded.run(rows, sources, embedded)) is not None:
            logits, onward = (_picked(every, rows, asked) for every in found)
        else:
            onward = self._run(rows, embedded, self._states(brought), asked)
        if logits is None:
            last, onward = self._forward.ends(onward)
            logits = self._head(last)
        if len(brought) == 1:
            return [Guess(logits, onward, *rows.there)]
        each = torch.split(logits, asked), torch.split(onward, asked), rows.there
        return [Guess(*part) for part in zip(*each, strict=True)]

    def warm_up(self, sequences: int, width: int, nodes: int) -> None:
        """Record the passes of up to ``sequences`` sequences beforehand.

        Args:
            width: most rows of a level.
            nodes: most rows of a draft that run, the root included.
        """
        if self.recorded is None:
            return
        sizes = [1 << power for power in range(bucket(max(nodes, MOST_RECORDED)).bit_length())]
        most = bucket(width) if width else 0
        caches = [KVCache(self.specs, capacity=1, rows=sizes[-1]) for _ in range(bucket(sequences))]
        hidden = torch.zeros(MOST_RECORDED, self.features, dtype=self.dtype, device=self.device)
        states = torch.zeros(MOST_RECORDED, self.config.width, dtype=self.dtype, device=self.device)
        for count, each in product_of((1 << power for power in range(len(caches).bit_length())), sizes):
            if each > MOST_RECORDED or (count > 1 and each > 1 and count * each > _WARM_ROWS):
                continue
            self.guess([Nodes(StepInput.of(own, [0] * each), hidden[:each]) for own in caches[:count]])
            for whole in (size for size in sizes if each <= most and each <= size <= bucket(nodes)):
                tree = (range(-1, whole - 1), range(whole)) if each < whole else None
                steps = [StepInput.of(own, [0] * each, tree, first=whole - each) for own in caches[:count]]
                self.guess([Nodes(step, states=states[:each], asked=each) for step in steps])

    def _states(self, brought: Sequence[Nodes]) -> torch.Tensor:
        """[T, W] the states of all rows."""
        features = [one.features for one in brought if one.features is not None]
        fused = iter(torch.split(self.fused(torch.cat(features)), [*map(len, features)]) if features else ())
        parts = list[torch.Tensor]()
        for one in brought:
            if one.features is not None:
                parts.append(next(fused))
            if one.states is not None:
                parts.append(one.states)
        return torch.cat(parts)

    def _run(self, rows: Rows, embedded: torch.Tensor, states: torch.Tensor, asked: Sequence[int]) -> torch.Tensor:
        """[N, W] states of the asked rows, the last ones of each part, before the last norm."""
        wanted, layers = rows.step.last_rows(asked), self._forward.spec.layers
        narrows = len(wanted) < rows.rows

        def mix(place: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            rows.store(keys, values, place)
            if narrows and place == len(layers) - 1:
                return attend_ends(query, rows, place, layers[place].attention.scale, asked)
            return attend(query, rows, place, layers[place].attention.scale)

        attends = self._forward.attending(self._ropes.of(layers[0].attention.rope, rows), mix)
        hidden, reads = self._forward.entering(embedded, states)
        return self._forward.through(hidden, attends, reads=reads, wanted=wanted if narrows else None)


def _picked(every: torch.Tensor, rows: Rows, asked: Sequence[int]) -> torch.Tensor:
    """The asked rows, the last ones of each part, of all rows [T, ...]; sliced, as an index would cost a copy."""
    parts = [every[part.ends - count : part.ends] for part, count in zip(rows.parts, asked, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
