"""MTP (DeepSeek-V3 report, arXiv 2412.19437, section 2.2): a model's own layers that predict more than one token.

Row i of the first layer reads the target's last hidden state of position i and the embedding of token i + 1, and says
what comes behind that token. Row i of layer k reads what the layer before it gave at row i, and the embedding of token
i + 1 + k, so that it says what comes k tokens further on. Below the root these tokens are guesses: a node of the tree
is a row of each layer that is run for a node behind it. After the last layer its own states are read, one token further
on each time: one layer drafts as many tokens as are asked for.

The layers are in most published checkpoints, behind the model's own, and transformers does not load them. They are read
from where the model was loaded from, so there is nothing to download and nothing to train.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download

from drafters.heads.chain_step import Guess, Nodes
from drafters.heads.growing import WIDTH, Behind, check_chance
from drafters.heads.growth import Growth
from drafters.heads.mtp_layout import MtpTensors, find_mtp, has_mtp
from drafters.heads.mtp_step import MtpStep
from drafters.heads.session import CHUNK, HeadDrafter, HeadSession
from drafters.heads.weights import FORMAT, WEIGHTS
from drafters.shared.fingerprint import fingerprint
from drafters.shared.weights import WeightsConfig, check_fit, reading, save_weights
from specdec.drafter import Context
from specdec.errors import CheckpointError, ConfigError
from specdec.models.loading import model_source
from specdec.models.transformers_target import TransformersTarget
from specdec.settings.parsing import check_positive
from specdec.step.block import Block
from specdec.step.cache import KVCache
from specdec.step.forward_passes import Pass, Passes
from specdec.target import Target

__all__ = ["Mtp", "MtpConfig", "convert_mtp", "own_layers"]

_DEPTH = 3  # tokens below the root of one layer, where nothing is said
_BRANCH = 8  # children of a row that are looked at
_REMEDY = (
    "it takes a model's folder whose checkpoint has such layers (DeepSeek-V3, GLM-4 MoE, Mellum, MiMo), or a head of "
    "speculators' kind mtp"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig:
    """Options.

    Attributes:
        head: folder with the layers: a model's, or one that holds them alone, in any format that
            `specdec drafters --check` knows; None takes those in the checkpoint that the model was loaded from.
        tokens: depth of a draft, at most; each level costs a pass of a layer. None is what the layers were
            published to draft, or 3, or their number where that is larger. Behind the last layer it is run again.
        rows: rows of a draft below the root, at most; None leaves it to what pays.
        branch: children of a row, at most; 1 makes a chain. Under ``reject`` it is 1.
        min_chance: verify and extend whatever is reached with this chance, by the layers, as far as ``rows`` and
            ``tokens`` go; None takes what pays by measured costs.
        check_target: refuse a model that is not the one the layers were converted for.
    """

    head: str | None = None
    tokens: int | None = None
    rows: int | None = None
    branch: int = _BRANCH
    min_chance: float | None = None
    check_target: bool = True

    def __post_init__(self) -> None:
        check_positive("mtp.", tokens=self.tokens, rows=self.rows, branch=self.branch)
        check_chance("mtp.", self.min_chance)


def own_layers(target: Target) -> Path | None:
    """The folder that a target was loaded from, if multi-token-prediction layers are in it; nothing is downloaded."""
    name = str(getattr(getattr(target, "model", None), "name_or_path", "") or "")
    if not name:
        return None
    try:
        place = model_source(name)
        folder = place if isinstance(place, Path) else Path(snapshot_download(place, local_files_only=True))
        with reading("multi-token-prediction layers", folder, _REMEDY):
            return folder if has_mtp(folder) else None
    except (CheckpointError, OSError, ValueError):
        return None


class Mtp(HeadDrafter):
    """A model's own layers, a chain or a tree."""

    name = "mtp"
    Config = MtpConfig

    def __init__(self, config: MtpConfig, found: MtpTensors, target: TransformersTarget) -> None:
        super().__init__(config, None, target)
        self.depth = config.tokens or found.depth or max(_DEPTH, found.layers)
        self.step = MtpStep(found, found.folder, target, self.depth)

    @classmethod
    def build(cls, config: MtpConfig, target: Target) -> Mtp:
        """Load the layers for a target.

        Raises:
            CheckpointError: there are none, or they are broken, or another model's.
            ConfigError: the target gives no hidden states of all rows.
        """
        if getattr(target, "splits", False):
            raise ConfigError(
                "parallel='rows' gives the hidden state of one row a step, and mtp reads the hidden states of all "
                "rows; choose lookahead, medusa or auto"
            )
        if not isinstance(target, TransformersTarget):
            raise CheckpointError(
                f"mtp makes layers of the class that the target's are of, and this {type(target).__name__} is no "
                "transformers decoder; use another drafter"
            )
        folder = Path(config.head) if config.head is not None else own_layers(target)
        if folder is None:
            raise CheckpointError(
                f"the checkpoint that this {target.name} was loaded from has no multi-token-prediction layers; give a "
                "folder that has them as mtp.head, or use another drafter"
            )
        found = _found(folder)
        check_fit(_fit(found, target.vocab_size), target, cls.name, check_target=config.check_target)
        return cls(config, found, target)

    @classmethod
    def describe_weights(cls, folder: Path) -> list[str]:
        """What a folder holds, for ``specdec drafters --check``.

        Raises:
            CheckpointError: no such layers.
        """
        found = _found(folder)
        fit, plural = _fit(found, 0), "s" * (found.layers > 1)
        return [
            f"multi-token-prediction layer{plural}, {found.layers}: {found.layout}, "
            f"{sum(tensor.numel() for tensor in found.tensors.values()):,} weights",
            f"for {fit.target or found.values.get('model_type') or 'a model'}: width {found.width}, vocabulary "
            f"{fit.vocab_size or 'of the model'}",
            f"reads the last hidden state; drafts with the model's own layer class, {_DEPTH} tokens or more",
            f"use it with --drafter {cls.name} --set {cls.name}.head={folder}, or alone for the model in this folder",
        ]

    def start(self, context: Context) -> MtpSession:
        return MtpSession(self, context)


def _found(folder: Path) -> MtpTensors:
    with reading("multi-token-prediction layers", folder, _REMEDY):
        return find_mtp(folder)


def _fit(found: MtpTensors, vocab_size: int) -> WeightsConfig:
    """What the layers are for; a folder of the layers alone may not say the vocabulary, which is the target's then."""
    with reading("multi-token-prediction layers", found.folder, _REMEDY):
        told = found.values.get("text_config") or found.values.get("transformer_layer_config") or found.values
        vocabulary = told.get("vocab_size") or vocab_size
        target = str(found.values.get("target", "")) if found.values.get("format") == FORMAT else ""
        return WeightsConfig(hidden_size=found.width, vocab_size=int(vocabulary), target=target)


def convert_mtp(folder: Path, out: Path, target: Target | None = None) -> MtpTensors:
    """Read the layers of whatever format and write one clean folder, of these layers alone.

    Args:
        folder: a model's, or one of the layers alone.
        out: folder to write.
        target: its model; if given, the layers are checked against it and carry its fingerprint.

    Raises:
        CheckpointError: no such layers, they do not fit the target, or the folder could not be written.
    """
    found = _found(folder)
    fit = _fit(found, 0 if target is None else target.vocab_size)
    if target is not None:
        Mtp.build(MtpConfig(head=str(folder)), target)
        fit = WeightsConfig(hidden_size=fit.hidden_size, vocab_size=target.vocab_size, target=fingerprint(target))
    values = {"format": FORMAT, "kind": "mtp", **asdict(fit), **_switches(found)}
    save_weights(out, WEIGHTS, found.tensors, values, what="the layers")
    return found


def _switches(found: MtpTensors) -> dict[str, Any]:
    """What the names of a clean folder do not say."""
    return {"hidden_first": found.hidden_first, "repeated": found.repeated, "depth": found.depth}


class MtpSession(HeadSession):
    def __init__(self, drafter: Mtp, context: Context) -> None:
        step, options = drafter.step, drafter.config
        rows = WIDTH * drafter.depth + 1
        super().__init__(context, drafter, step.specs[:1], step.weights, rows)
        self._step = step
        text = context.prompt_length + context.remaining
        more = max(rows + (options.rows or 0), min(CHUNK, text)) + rows
        self._later = [_Later(KVCache([spec], capacity=text, rows=more)) for spec in step.specs[1:]]
        self._logits: torch.Tensor | None = None  # behind the nodes of the latest level
        self._states = dict[int, torch.Tensor]()  # of nodes that the latest layer was run for
        self._stage = 0

    def _absorb(self, features: torch.Tensor) -> None:
        first = self._own.cache.length
        block = self._own.text_block(self._tokens_of(features))
        (guess,) = self._step.stages[0]([Nodes(block, features, asked=0)])
        self._own.read_text(block, root=False)
        self._hand_on(0, first, guess.states)
        self._absorb_later()

    def _absorb_later(self) -> None:
        """Have the later layers see what they lack, but for the row behind which they will be asked."""
        for stage, own in enumerate(self._later, 1):
            while own.last - 1 > own.cache.length:
                first = own.cache.length
                states, tokens = self._text_of(stage, min(own.last - 1, first + CHUNK))
                if not tokens:
                    break
                (guess,) = self._step.stages[stage]([Nodes(self._block(own.cache, tokens), states, asked=0)])
                own.cache.commit(range(len(tokens)))
                self._hand_on(stage, first, guess.states)

    def _block(self, cache: KVCache, tokens: Sequence[int], **tree: Any) -> Block:
        return Block(cache, tokens, device=self._device, **tree)

    def _tokens_of(self, features: torch.Tensor) -> list[int]:
        """The tokens that go with the next hidden states: each one stands a place behind its own."""
        first = self._own.cache.length + 1
        return self._context.tokens[first : first + len(features)]

    def _hand_on(self, stage: int, first: int, states: torch.Tensor) -> None:
        """Keep what a layer gave for rows of text from ``first`` on, for the layer behind it."""
        if stage < len(self._later):
            self._later[stage].put(first, states)

    def _text_of(self, stage: int, known: int) -> tuple[torch.Tensor, list[int]]:
        """States and tokens of the rows of text that a later layer lacks, as far as states and tokens are known."""
        own, tokens = self._later[stage - 1], self._context.tokens
        first, last = own.cache.length, min(known, len(tokens) - 1 - stage)
        if last <= first:
            return torch.empty(0), []
        return own.states(first, last), tokens[first + 1 + stage : last + 1 + stage]

    def _begin(self, deepest: int) -> Passes[None]:
        if any(own.last - own.cache.length > CHUNK // 2 for own in self._later):  # drafts did not reach them for long
            self._absorb_later()
        features, first = self._own.catch_up(), self._own.cache.length
        block = self._own.text_block(self._tokens_of(features))
        guess: Guess = yield Pass(self._step.stages[0], Nodes(block, features))
        self._own.read_text(block)
        self._hand_on(0, first, guess.states)
        self._logits, self._states, self._stage = guess.logits, {0: guess.states[-1:]}, 0

    def _behind(self, grown: Growth, level: Sequence[int]) -> Passes[Behind]:
        depth, most = grown.depths[level[0]], len(self._context.tokens) - 2
        if depth:
            # Each layer lacks a row more of the text, so the first ones of a text do not reach them all.
            stage = min(depth, len(self._later), most)
            if stage > self._stage:
                yield from self._next_layer(grown, level, stage)
            else:
                yield from self._same_layer(grown, level)
        assert self._logits is not None
        return Behind(self._logits)

    def _same_layer(self, grown: Growth, level: Sequence[int]) -> Passes[None]:
        """The level's nodes, behind those above them in the layer that was run for these."""
        states = torch.cat([self._states[grown.parents[node]] for node in level])
        tokens = [grown.tokens[node] for node in level]
        if self._stage:
            own = self._later[self._stage - 1]
            first = len(own.parents)
            own.grow(grown, level)
            block = self._block(own.cache, tokens, parents=own.parents, depths=own.depths, first=first)
        else:
            block = self._own.draft_block(level, grown.parents, tokens)
        yield from self._run(Nodes(block, states=states, asked=len(level)), level)

    def _next_layer(self, grown: Growth, level: Sequence[int], stage: int) -> Passes[None]:
        """The next layer: the rows of text that it lacks, and the level's nodes with those above them."""
        self._stage, own = stage, self._later[stage - 1]
        limit = len(self._context.tokens) - 1 - stage
        text, tokens = self._text_of(stage, limit)
        above = {node for end in level for node in _above(grown, end)}
        nodes = [*sorted(above - {*level}), *level]
        root = own.states(limit, limit + 1)  # what nodes right below the root read
        given = [root if not grown.parents[node] else self._states[grown.parents[node]] for node in nodes]
        first, rows = own.cache.length, len(tokens)
        own.begin(rows)
        own.grow(grown, nodes)
        all_tokens = [*tokens, *(grown.tokens[node] for node in nodes)]
        block = self._block(own.cache, all_tokens, parents=own.parents, depths=own.depths)
        brought = Nodes(block, states=torch.cat([text, *given]), asked=len(level))
        guess = yield from self._run(brought, nodes, rows)
        self._hand_on(stage, first, guess.states[:rows])
        # The last row of text stays the root of the rows behind it, and is run again in the next step.
        own.cache.commit(range(rows - 1))
        own.rebase(rows - 1)

    def _run(self, nodes: Nodes, rows: Sequence[int], text: int = 0) -> Passes[Guess]:
        """Run a layer for rows of text and then for nodes of the tree, ``rows``, and keep what it gives for these."""
        guess: Guess = yield Pass(self._step.stages[self._stage], nodes)
        self._logits = guess.logits
        self._states = {node: guess.states[text + place, None] for place, node in enumerate(rows)}
        return guess


def _above(grown: Growth, node: int) -> list[int]:
    """A node, and those above it but for the root."""
    found = list[int]()
    while node:
        found.append(node)
        node = grown.parents[node]
    return found


class _Later:
    """A layer behind the first one: its cache, what the layer before it gave, and the rows of this step's tree."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self._first, self._given = 0, list[torch.Tensor]()
        self.begin(0)

    @property
    def last(self) -> int:
        """The row after the last one of text that the layer before it gave."""
        return self._first + sum(map(len, self._given))

    def put(self, first: int, states: torch.Tensor) -> None:
        """Keep states [T, D] of rows from ``first`` on, in the place of those that are known from there on."""
        if self._given and first < self.last:
            self._given = [torch.cat(self._given)[: first - self._first]]
        if first == self.last or not self._given:
            self._first = self._first if self._given else first
            self._given.append(states)

    def states(self, first: int, last: int) -> torch.Tensor:
        """[last - first, D] those of rows [first, last); what is before these is not kept any longer."""
        whole = self._given[0] if len(self._given) == 1 else torch.cat(self._given)
        keep = max(0, min(first, self.cache.length) - self._first)
        self._given, self._first = [whole[keep:]], self._first + keep
        return self._given[0][first - self._first : last - self._first]

    def begin(self, text: int) -> None:
        """Begin a tree behind so many rows of text."""
        self.parents, self.depths = [*range(-1, text - 1)], [*range(text)]
        self._places = {0: text - 1}

    def grow(self, grown: Growth, nodes: Sequence[int]) -> None:
        """Put nodes behind those above them."""
        for node in nodes:
            above = self._places[grown.parents[node]]
            self._places[node] = len(self.parents)
            self.parents.append(above)
            self.depths.append(self.depths[above] + 1)

    def rebase(self, text: int) -> None:
        """So many of the first rows are committed, which are no rows of the tree any more."""
        self.parents = [max(above - text, -1) for above in self.parents[text:]]
        self.depths = [depth - text for depth in self.depths[text:]]
        self._places = {node: place - text for node, place in self._places.items()}
