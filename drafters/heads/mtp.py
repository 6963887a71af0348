"""MTP (DeepSeek-V3 report, arXiv 2412.19437, section 2.2): a model's own layers that predict further tokens.

Row i of the first layer reads the target's last hidden state of position i and the embedding of token i + 1, and
predicts the token behind that one. Row i of layer k reads the output of the layer before it at row i and the embedding
of token i + 1 + k, so it predicts k tokens further on. Below the root these tokens are guesses: a node of the tree is a
row in every layer that runs for a node behind it. The last layer can run again on its own outputs, one token further on
each time, so a single layer can draft any number of tokens.

Most published checkpoints hold these layers behind the model's own, and transformers does not load them. They are read
from the model's own folder or GGUF file, so nothing needs a download or training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from drafters.heads.growing import WIDTH, Behind, Tokens
from drafters.heads.growth import Growth
from drafters.heads.head_step import Guess
from drafters.heads.later_layer import LaterLayer, above_in
from drafters.heads.mtp_finding import fit_of, layers_in, own_layers
from drafters.heads.mtp_layout import MtpTensors
from drafters.heads.mtp_step import MtpStep, check_described
from drafters.heads.options import HeadOptions
from drafters.heads.session import CHUNK, HeadDrafter
from drafters.heads.unread import UnreadSession
from drafters.heads.weights import FORMAT, WEIGHTS
from drafters.shared.fingerprint import fingerprint
from drafters.shared.own_cache import Nodes
from drafters.shared.weights import WeightsConfig, check_fit, save_weights
from specdec.drafter import Context
from specdec.errors import CheckpointError, ConfigError
from specdec.models.gguf import is_gguf
from specdec.step.cache import KVCache
from specdec.step.forward_passes import Pass, Passes
from specdec.step.step_io import StepInput
from specdec.target import Target

__all__ = ["Mtp", "MtpConfig", "convert_mtp"]

_DEPTH = 3  # tokens below the root by default, for one layer


@dataclass(frozen=True, kw_only=True)
class MtpConfig(HeadOptions):
    """Options.

    Attributes:
        head: folder with the layers: a model's, or one with these layers only, in any format that
            `specdec drafters --check` knows; or a GGUF file, likewise. None takes the layers in the checkpoint that the
            model was loaded from.
        tokens: most depth of a draft; each level costs a pass of a layer. None is the depth that the layers were
            published with, or else 3 or the number of layers, whichever is larger. Behind the last layer, that layer
            runs again.
        rows: most rows of a draft below the root; None for as many as pay.
        branch: most children of a row; 1 makes a chain.
        min_chance: extend and verify all rows that the layers expect to be reached with at least this chance, within
            ``rows`` and ``tokens``; None takes as many as pay by measured costs.
        check_target: whether to refuse layers that were converted for another model.
    """

    where: ClassVar[str] = "mtp."


class Mtp(HeadDrafter):
    """A model's own multi-token-prediction layers, which draft a chain or a tree."""

    name = "mtp"
    Config = MtpConfig

    def __init__(self, config: MtpConfig, found: MtpTensors, target: Target) -> None:
        super().__init__(config, None, target)
        self.depth = config.tokens or found.depth or max(_DEPTH, found.layers)
        self.step = MtpStep(found, target, self.depth)

    @classmethod
    def build(cls, config: MtpConfig, target: Target) -> Mtp:
        """Load the layers of a target.

        Raises:
            CheckpointError: there are no such layers, or they are broken or of another model.
            ConfigError: the target does not give the hidden states of all rows.
        """
        if target.splits:
            raise ConfigError(
                "parallel='rows' gives the hidden state of one row a step, and mtp reads the hidden states of all "
                "rows; choose lookahead, medusa or auto"
            )
        check_described(target)
        folder = Path(config.head) if config.head is not None else own_layers(target)
        if folder is None:
            raise CheckpointError(
                f"the checkpoint that this {target.name} was loaded from has no multi-token-prediction layers; give a "
                "folder or a GGUF file that has them as mtp.head, or use another drafter"
            )
        found = layers_in(folder, target.dtype)
        check_fit(fit_of(found, target.vocab_size), target, cls.name, check_target=config.check_target)
        return cls(config, found, target)

    @classmethod
    def describe_weights(cls, folder: Path) -> list[str]:
        """The lines of ``specdec drafters --check`` about a folder.

        Raises:
            CheckpointError: the folder has no such layers.
        """
        found = layers_in(folder)
        fit, plural = fit_of(found, 0), "s" * (found.layers > 1)
        return [
            f"multi-token-prediction layer{plural}, {found.layers}: {found.layout}, "
            f"{sum(map(math.prod, found.source.shapes.values())):,} weights",
            f"for {fit.target or found.values.get('model_type') or 'a model'}: width {found.width}, vocabulary "
            f"{fit.vocab_size or 'of the model'}",
            f"reads the last hidden state; drafts with layers of the model's own family, {_DEPTH} tokens or more",
            f"use it with --drafter {cls.name} --set {cls.name}.head={folder}, or alone for the model in this folder",
        ]

    def start(self, context: Context) -> MtpSession:
        return MtpSession(self, context)


def convert_mtp(folder: Path, out: Path, target: Target | None = None) -> MtpTensors:
    """Read the layers in any format and write a folder with these layers only.

    Args:
        folder: a model's folder, or one with these layers only.
        out: the folder to write.
        target: their model; if given, the layers are checked against it and stored with its fingerprint.

    Raises:
        CheckpointError: there are no such layers, they do not fit the target, or the folder could not be written.
    """
    if is_gguf(folder):
        raise CheckpointError(
            f"{str(folder)!r} is a GGUF file, of which the layers are read as they are: give it as mtp.head; only "
            "folders are converted"
        )
    found = layers_in(folder)
    fit = fit_of(found, 0 if target is None else target.vocab_size)
    if target is not None:
        Mtp.build(MtpConfig(head=str(folder)), target)
        fit = WeightsConfig(hidden_size=fit.hidden_size, vocab_size=target.vocab_size, target=fingerprint(target))
    values = {"format": FORMAT, "kind": "mtp", **asdict(fit), **_switches(found)}
    tensors = {name: found.source.read(name) for name in found.source.shapes}
    save_weights(out, WEIGHTS, tensors, values, what="the layers")
    return found


def _switches(found: MtpTensors) -> dict[str, Any]:
    """The layout's properties that a clean folder's names do not show, as config values."""
    return {"hidden_first": found.hidden_first, "repeated": found.repeated, "depth": found.depth}


class MtpSession(UnreadSession):
    def __init__(self, drafter: Mtp, context: Context) -> None:
        step, options = drafter.step, drafter.config
        rows = WIDTH * drafter.depth + 1
        super().__init__(context, drafter, step.specs[:1], step.weights, rows)
        self._step = step
        text = context.prompt_length + context.remaining
        more = max(rows + (options.rows or 0), min(CHUNK, text)) + rows
        self._later = [LaterLayer(KVCache([spec], capacity=text, rows=more)) for spec in step.specs[1:]]
        self._stays = self._stays and not self._later  # a later layer's rows have tokens of the text and of the draft
        self._anew = 0  # from this position on all hidden states are known
        self._logits: torch.Tensor | None = None  # behind the latest level's nodes
        self._states = dict[int, torch.Tensor]()  # node -> output of the latest layer
        self._stage = 0

    def missed(self) -> None:
        super().missed()
        self._anew = self._next
        for own in self._later:
            own.miss(self._anew)

    def _absorb(self, features: torch.Tensor) -> None:
        first = self._next
        step = self._own.text_rows(self._tokens_of(features))
        (guess,) = self._step.stages[0]([Nodes(step, features, asked=0)])
        self._own.read_text(step, root=False)
        self._hand_on(0, first, guess.states)
        self._absorb_later()

    def _absorb_later(self) -> None:
        """Run the later layers for the rows of text that they lack, except the last row, behind which they guess."""
        for stage, own in enumerate(self._later, 1):
            while own.last - 1 > own.next:
                first = own.next
                states, tokens = self._text_of(stage, min(own.last - 1, first + CHUNK))
                if not tokens:
                    break
                (guess,) = self._step.stages[stage]([Nodes(StepInput.of(own.cache, tokens), states, asked=0)])
                own.cache.commit(range(len(tokens)))
                self._hand_on(stage, first, guess.states)

    def _hand_on(self, stage: int, first: int, states: torch.Tensor) -> None:
        """Keep a layer's outputs for the text from position ``first`` on, as inputs of the next layer."""
        if stage < len(self._later):
            self._later[stage].put(first, states)

    def _text_of(self, stage: int, known: int) -> tuple[torch.Tensor, list[int]]:
        """States and tokens of the rows of text that a later layer lacks and whose states and tokens are known."""
        own, tokens = self._later[stage - 1], self._context.tokens
        first, last = own.next, min(known, len(tokens) - 1 - stage)
        if last <= first:
            return torch.empty(0), []
        return own.states(first, last), tokens[first + 1 + stage : last + 1 + stage]

    def _begin(self, deepest: int) -> Passes[None]:
        if any(own.last - own.next > CHUNK // 2 for own in self._later):  # no draft has reached them for long
            self._absorb_later()
        features, first = self._own.catch_up(), self._next
        step = self._own.text_rows(self._tokens_of(features))
        guess: Guess = yield Pass(self._step.stages[0], Nodes(step, features))
        self._own.read_text(step)
        if self._stays:
            assert guess.rows is not None
            self._root = guess.rows.tokens[0, -1:]
        self._hand_on(0, first, guess.states)
        self._logits, self._states, self._stage = guess.logits, {0: guess.states[-1:]}, 0

    def _behind(self, tree: Growth, level: Sequence[int], tokens: Tokens) -> Passes[Behind]:
        depth, most = tree.depths[level[0]], len(self._context.tokens) - 2 - self._anew
        if depth:
            # Each layer starts one token later than the one before, so a short text does not reach all layers, nor
            # does the one behind a rest.
            stage = min(depth, len(self._later), most)
            if stage > self._stage:
                yield from self._next_layer(tree, level, stage)
            else:
                yield from self._same_layer(tree, level, tokens)
        assert self._logits is not None
        return Behind(self._logits)

    def _same_layer(self, tree: Growth, level: Sequence[int], tokens: Tokens) -> Passes[None]:
        """Run the same layer for the level's nodes, behind their ancestors in that layer."""
        states = torch.cat([self._states[tree.parents[node]] for node in level])
        if self._stage:
            own = self._later[self._stage - 1]
            first = len(own.parents)
            own.grow(tree.parents, level)
            step = StepInput.of(own.cache, tokens, (own.parents, own.depths), first=first)
        else:
            step = self._own.draft_rows(level, tree.parents, tokens)
        yield from self._run(Nodes(step, states=states, asked=len(level)), level)

    def _next_layer(self, grown: Growth, level: Sequence[int], stage: int) -> Passes[None]:
        """Run the next layer for the rows of text that it lacks, and for the level's nodes and their ancestors."""
        self._stage, own = stage, self._later[stage - 1]
        limit = len(self._context.tokens) - 1 - stage
        text, tokens = self._text_of(stage, limit)
        above = {node for end in level for node in above_in(grown, end)}
        nodes = [*sorted(above - {*level}), *level]
        root = own.states(limit, limit + 1)  # input of nodes right below the root
        given = [root if not grown.parents[node] else self._states[grown.parents[node]] for node in nodes]
        first, rows = own.next, len(tokens)
        own.begin(rows)
        own.grow(grown.parents, nodes)
        all_tokens = [*tokens, *(grown.tokens[node] for node in nodes)]
        step = StepInput.of(own.cache, all_tokens, (own.parents, own.depths))
        brought = Nodes(step, states=torch.cat([text, *given]), asked=len(level))
        guess = yield from self._run(brought, nodes, rows)
        self._hand_on(stage, first, guess.states[:rows])
        # The last row of text is the root of the next rows, and runs again in the next step.
        own.cache.commit(range(rows - 1))
        own.rebase(rows - 1)

    def _run(self, nodes: Nodes, rows: Sequence[int], text: int = 0) -> Passes[Guess]:
        """Run a layer for rows of text and then for the tree's nodes ``rows``, and keep its outputs for these nodes."""
        guess: Guess = yield Pass(self._step.stages[self._stage], nodes)
        self._logits = guess.logits
        self._states = {node: guess.states[text + place, None] for place, node in enumerate(rows)}
        return guess
