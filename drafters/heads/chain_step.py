"""Running an EAGLE head: each row joins a token's embedding with the hidden state before it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product as product_of

import torch

from drafters.heads.head_step import Guess, HeadStep, Linear, last_rows
from drafters.heads.native_chain import NativeChain
from drafters.heads.recorded import MOST_RECORDED, RecordedChain
from drafters.heads.weights import Chain
from drafters.shared.own_cache import Nodes
from specdec.runners.attention import attend, attend_ends
from specdec.runners.rows import Rows
from specdec.runners.sent_rows import rows_on
from specdec.runners.visibility import bucket
from specdec.step.cache import KVCache
from specdec.step.joining import joined
from specdec.step.step_io import StepInput
from specdec.target import Target

__all__ = ["ChainStep"]

_WARM_ROWS = 64  # of several sequences, in passes that are recorded beforehand


class ChainStep(HeadStep):
    """An EAGLE head that drafts; see HeadStep.

    Attributes:
        native: the head in the native library; None where torch runs it.
        recorded: its passes as graphs on a CUDA device; None where they are launched one by one.
        mask_state: [1, W] the hidden state for all depths behind the first, in heads that draft all depths at once.
    """

    def __init__(self, head: Chain, target_head: Linear, target: Target) -> None:
        super().__init__(head, target_head, target)
        self.native = NativeChain.of(head, self._forward, self._head, self._ropes, target)
        mask = head.mask_hidden.detach()[None] if self.config.at_once else None
        self.mask_state = None if mask is None else self.fused(mask)
        recording = target.recording if self.native is None else None
        self.recorded: RecordedChain | None = None
        if recording is not None:
            self.recorded = RecordedChain(self._forward, self._head, recording, self._ropes, mask)

    @torch.no_grad()
    def guess(self, brought: Sequence[Nodes]) -> list[Guess]:
        """Run each sequence's rows; keys and values of all rows are stored."""
        rows = rows_on(self.device, joined([one.step for one in brought]))
        asked = [one.asked for one in brought]
        native, embedded = self.native, None
        if native is None or not native.embeds:  # tokens that a device drafted are not read
            embedded = self._embedded(rows.tokens[0])
        sources = [(one.features, one.states) for one in brought]
        if native is not None:
            logits, onward = native.guess(rows.step, sources, embedded, rows.step.last_rows(asked))
            logits, onward = self._ends(onward) if logits is None else (logits, onward)
        else:
            assert embedded is not None
            found = None if self.recorded is None else self.recorded.run(rows, sources, embedded)
            if found is None:
                logits, onward = self._ends(self._run(rows, embedded, self._states(brought), asked))
            else:
                logits, onward = (last_rows(every, rows, asked) for every in found)
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
        features = self.config.hidden_size * len(self.config.taps)
        hidden = torch.zeros(MOST_RECORDED, features, dtype=self.dtype, device=self.device)
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

        attends = self._forward.attending(self._angles(rows), mix)
        hidden, reads = self._forward.entering(embedded, states)
        return self._forward.through(hidden, attends, reads=reads, wanted=wanted if narrows else None)
