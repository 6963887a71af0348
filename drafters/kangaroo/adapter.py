"""The adapter of Kangaroo: one small layer between an early exit and the target's head, and its file format.

It maps the residual stream after l layers to an estimate of the target's last normed state (Liu et al. 2024, arXiv
2404.18911, section 3.1). A checkpoint is a folder with ``model.safetensors`` and ``config.json``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le, Lt
from torch import nn

from drafters.shared.layer_weights import LiveProduct, Make, layer_weights
from drafters.shared.target_weights import head_weight, norm_weight
from drafters.shared.vocabulary import check_draft_tokens
from drafters.shared.weights import WeightsConfig, load_strictly, load_tensors, read_config, reading, save_weights
from specdec.decoder.rope import Angles, RopeTables
from specdec.decoder.spec import Attention, Gated, Layer, Norm, Rope
from specdec.errors import ConfigError, shown
from specdec.execute.layer import LayerWeights, layer
from specdec.execute.norm import RmsNorm
from specdec.settings.parsing import parse
from specdec.settings.validation import AtLeast1, check_fields
from specdec.step.step_io import Part
from specdec.target import Target

__all__ = ["VARIANTS", "Adapter", "AdapterConfig", "AdapterTables", "adapter_weights", "fitting_heads"]

VARIANTS = ("attention", "head", "layer", "mlp")
"""The variants in the paper's Table 2: attention alone, attention with its own head, attention and MLP, MLP alone.
There is also ``none``, which needs no training: the target's own last norm and head (LayerSkip)."""

_WEIGHTS = "model.safetensors"
_WIDEST = 64  # bound of the MLP's width, in hidden sizes
_NAMES: Mapping[str, tuple[str, ...]] = {
    **{f"before.{part}": (name,) for part, name in (("attention", "input_norm"), ("mlp", "mlp_norm"))},
    **{f"attention.{part}": (f"{part}_proj",) for part in "qkvo"},
    **{f"mlp.{part}": (f"{part}_proj",) for part in ("gate", "up", "down")},
}
"""Part of the layer -> its name in the adapter."""
AtLeast0 = Annotated[int, Ge(0), "an integer >= 0"]
Drafts = Annotated[int, Ge(1), Le(1024), "an integer from 1 to 1024"]  # drafts of a round


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig(WeightsConfig):
    """The config of an adapter, with the defaults of its use.

    Attributes:
        hidden_size, vocab_size, target: see :class:`drafters.shared.weights.WeightsConfig`.
        exit_layer: l, the number of the target's layers before the exit.
        heads: number of attention heads, each D / heads wide.
        key_heads: number of key and value heads, each for a group of heads; 0 is one for each.
        draft_vocab: d, size of the draft vocabulary, see :mod:`drafters.shared.vocabulary`; 0 for all tokens.
        variant: one of ``VARIANTS``, or ``none``.
        intermediate_size: inner width of the MLP, for the variants that have one.
        rope_base: base of the rotary positions.
        norm_eps: epsilon of the RMS norms.
        eta: confidence at or below which drafting stops; None goes on while that pays, see
            :class:`drafters.kangaroo.drafter.KangarooConfig`.
        gamma: most drafts of a round.
        branch: number of alternatives for the last token of a round that stops for lack of confidence.
    """

    exit_layer: AtLeast1
    heads: AtLeast1
    key_heads: AtLeast0 = 0
    draft_vocab: AtLeast0 = 0
    variant: Literal["attention", "head", "layer", "mlp", "none"] = "attention"
    intermediate_size: AtLeast0 = 0
    rope_base: Annotated[float, Gt(0), Lt(1e15), "a number > 0 and < 1e15"] = 10000.0
    norm_eps: Annotated[float, Gt(0), Lt(1), "a number > 0 and < 1"] = 1e-6
    eta: Annotated[float, Ge(0), Le(1), "a probability, in [0, 1]"] | None = 0.6
    gamma: Drafts = 6
    branch: Drafts = 1

    def __post_init__(self) -> None:
        check_fields(self, "adapter.")
        size = self.hidden_size
        if size % self.heads or size // self.heads % 2:
            raise ConfigError(
                f"adapter.heads is {shown(self.heads)} at hidden_size {shown(size)}; it must divide it into even parts"
            )
        if self.key_heads and self.heads % self.key_heads:
            raise ConfigError(
                f"adapter.key_heads is {shown(self.key_heads)}; it must divide the {shown(self.heads)} heads, or be 0"
            )
        if self.draft_vocab > self.vocab_size:
            raise ConfigError(
                f"adapter.draft_vocab is {shown(self.draft_vocab)}; it must be in [0, {shown(self.vocab_size)}]"
            )
        if self.has_mlp and not self.intermediate_size:
            raise ConfigError(f"adapter.variant {self.variant!r} has an MLP and needs intermediate_size >= 1")
        if self.intermediate_size > _WIDEST * size:
            raise ConfigError(
                f"adapter.intermediate_size is {shown(self.intermediate_size)}; it must be at most {_WIDEST} times the "
                f"hidden_size of {shown(size)}"
            )

    @property
    def attends(self) -> bool:
        """Whether it has attention, and therefore a cache."""
        return self.variant not in ("mlp", "none")

    @property
    def has_mlp(self) -> bool:
        return self.variant in ("layer", "mlp")

    @property
    def parts(self) -> Part:
        """The parts of its layer that it has."""
        return (Part.ATTENTION if self.attends else Part(0)) | (Part.MLP if self.has_mlp else Part(0))

    @property
    def norm(self) -> Norm:
        """All of its norms."""
        return Norm(self.norm_eps)

    @property
    def layer(self) -> Layer:
        """A layer like Llama's, of which it has ``parts``."""
        norm, width = self.norm, self.hidden_size // self.heads
        rope = Rope(width, self.rope_base)
        attention = Attention(self.heads, self.key_heads or self.heads, width, width**-0.5, rope)
        return Layer(attention, Gated("silu", self.intermediate_size), (norm, norm))


class Adapter(nn.Module):
    """RMSNorm, causal attention, residual, (RMSNorm, MLP, residual,) RMSNorm.

    Example: D = 4096 without MLP and groups has 4 D^2 + 2 D weights, 67 M, 1% of a 7 B model.
    """

    draft_tokens: torch.Tensor | None  # [d] int64, ascending

    def __init__(self, config: AdapterConfig) -> None:
        super().__init__()
        self.config = config
        size, inner = config.hidden_size, config.intermediate_size
        if config.attends:
            inside = config.layer.attention.kv_heads * config.layer.attention.head_dim
            self.input_norm = nn.Parameter(torch.ones(size))
            self.q_proj, self.o_proj = (nn.Linear(size, size, bias=False) for _ in range(2))
            self.k_proj, self.v_proj = (nn.Linear(size, inside, bias=False) for _ in range(2))
        if config.has_mlp:
            self.mlp_norm = nn.Parameter(torch.ones(size))
            self.gate_proj, self.up_proj = (nn.Linear(size, inner, bias=False) for _ in range(2))
            self.down_proj = nn.Linear(inner, size, bias=False)
        self.norm = nn.Parameter(torch.ones(size))
        draft = config.draft_vocab
        self.head = nn.Linear(size, draft or config.vocab_size, bias=False) if config.variant == "head" else None
        self.register_buffer("draft_tokens", torch.arange(draft) if draft else None)

    def forward(
        self,
        features: torch.Tensor,
        positions: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
        *,
        mask: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits for whole texts at once, as in training.

        Args:
            features: [B, L, D] residual stream after ``exit_layer`` layers.
            positions: [B, L] int, each token's place in its text, below L.
            head: the target's head, over the draft vocabulary if there is one; unused if the adapter has its own.
            mask: [B, 1, L, L] bool, True where a token sees another; None is causal.
            rows: [N] int, rows of the flattened [B * L] to compute logits for; None for all.

        Returns:
            [N, V] logits, or [N, d] of the draft vocabulary.
        """
        spec, parts, texts = self.config.layer, self.config.parts, positions.shape
        weights = adapter_weights(self.config, dict(self.named_parameters()), LiveProduct)  # as they are in this step
        table = _tables(features.dtype, features.device).whole(spec.attention.rope, texts[1])
        angles = Angles(*(values.index_select(0, positions.flatten()) for values in table))
        mix = partial(_over_texts, texts, mask)
        hidden = layer(spec, weights, features.flatten(0, 1), angles, mix, parts & Part.ATTENTION)
        hidden = layer(spec, weights, hidden if rows is None else hidden[rows], angles, mix, parts & Part.MLP)
        return self.logits(RmsNorm(self.config.norm, self.norm)(hidden), head)

    def logits(self, hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """[..., V] logits of states behind the last norm."""
        own: torch.Tensor = (head if self.head is None else self.head)(hidden)
        return own

    def start_from(self, target: Target, *, seed: int = 0) -> None:
        """Set initial weights: the target's last norm (and head, if it has its own); attention and MLP add nothing."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.ndim == 2:
                    drawn = torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5
                    parameter.copy_(drawn * 0 if name.startswith(("o_proj", "down_proj")) else drawn)
            self.norm.copy_(norm_weight(target))
            if self.head is not None:
                self.head.weight.copy_(head_weight(target, self.draft_tokens))

    def save_pretrained(self, folder: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Write weights and config, each to a temporary file first, so that a full disk leaves the earlier files whole.

        Args:
            folder: the folder, created if missing.
            dtype: dtype of the weights in the file; None keeps each weight's own.

        Raises:
            CheckpointError: the files could not be written.
        """
        save_weights(Path(folder), _WEIGHTS, self.state_dict(), asdict(self.config), what="the adapter", dtype=dtype)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Adapter:
        """Load an adapter; every tensor must be present, none may be left over, and all must have the right shape.

        Raises:
            CheckpointError: the folder has no adapter, or one that does not fit its own config.
        """
        folder = Path(folder)
        remedy = "give a folder that `specdec train kangaroo` or `specdec convert kangaroo` wrote"
        with reading("Kangaroo adapter", folder, remedy):
            config, tensors = (
                parse(AdapterConfig, read_config(folder), where="adapter"),
                load_tensors(folder / _WEIGHTS),
            )
            with torch.device("meta"):  # the config can claim any size
                adapter = cls(config)
        load_strictly(adapter, tensors, folder, f"a {adapter.config.variant!r} adapter")
        check_draft_tokens(adapter.draft_tokens, adapter.config.vocab_size, folder)
        return adapter


def adapter_weights(config: AdapterConfig, tensors: Mapping[str, torch.Tensor], make: Make) -> LayerWeights:
    """What the layer of an adapter multiplies by, of its ``tensors`` by name; ``make`` makes products."""
    named = {name if name.endswith(".weight") else f"{name}.weight": tensor for name, tensor in tensors.items()}
    return layer_weights(config.layer, named, 0, make, parts=config.parts, names=_NAMES)


class AdapterTables(RopeTables):
    """Rotary positions by angles in float64, as adapters are trained and published."""

    def _made(self, rope: Rope, size: int) -> Angles:
        places, steps = (
            torch.arange(*of, device=self._device, dtype=torch.float64) for of in ((size,), (0, rope.dim, 2))
        )
        angles = places[:, None] * rope.base ** (-steps / rope.dim)
        cos, sin = angles.cos().to(self._dtype), angles.sin().to(self._dtype)
        return Angles(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))


_tables = cache(AdapterTables)


def _over_texts(
    texts: torch.Size, mask: torch.Tensor | None, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Attention of B texts of L tokens, whose heads are [1, H, B L, d]."""
    query, keys, values = (heads[0].view(heads.shape[1], *texts, -1).transpose(0, 1) for heads in (query, keys, values))
    seen = F.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=keys.shape[1] < query.shape[1]
    )
    return seen.transpose(0, 1).flatten(1, 2)[None]


def fitting_heads(hidden_size: int, wanted: int) -> int:
    """The largest number of heads, up to ``wanted``, that divides the hidden size."""
    return next(n for n in range(wanted, 0, -1) if hidden_size % n == 0 and hidden_size // n % 2 == 0)
