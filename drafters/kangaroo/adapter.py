"""The adapter of Kangaroo: one small layer between an early exit and the target's head, and its file format.

It maps the residual stream after l layers to an estimate of the target's last normed state (Liu et al. 2024, arXiv
2404.18911, section 3.1). A checkpoint is a folder with ``model.safetensors`` and ``config.json``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le, Lt
from torch import nn

from drafters.shared.target_weights import head_weight, norm_weight
from drafters.shared.vocabulary import check_draft_tokens
from drafters.shared.weights import WeightsConfig, load_strictly, load_tensors, read_config, reading, save_weights
from specdec.errors import ConfigError, shown
from specdec.runners.rotary import rotate, signed
from specdec.settings.parsing import parse
from specdec.settings.validation import AtLeast1, check_fields
from specdec.target import Target

__all__ = ["VARIANTS", "Adapter", "AdapterConfig", "fitting_heads", "rotations"]

VARIANTS = ("attention", "head", "layer", "mlp")
"""The variants in the paper's Table 2: attention alone, attention with its own head, attention and MLP, MLP alone.
There is also ``none``, which needs no training: the target's own last norm and head (LayerSkip)."""

_WEIGHTS = "model.safetensors"
_WIDEST = 64  # bound of the MLP's width, in hidden sizes
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
    def head_dim(self) -> int:
        """The width of a head."""
        return self.hidden_size // self.heads

    @property
    def groups(self) -> tuple[int, int]:
        """The numbers of query heads, and of key and value heads."""
        return self.heads, self.key_heads or self.heads


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
            inside = config.groups[1] * config.head_dim
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
            positions: [B, L] int, each token's place in its text.
            head: the target's head, over the draft vocabulary if there is one; unused if the adapter has its own.
            mask: [B, 1, L, L] bool, True where a token sees another; None is causal.
            rows: [N] int, rows of the flattened [B * L] to compute logits for; None for all.

        Returns:
            [N, V] logits, or [N, d] of the draft vocabulary.
        """
        if self.config.attends:
            normed = self._normed(features, self.input_norm)
            rotary = rotations(positions, self.config, features.dtype)
            query, key = self._rotated(self.q_proj(normed), rotary), self._rotated(self.k_proj(normed), rotary)
            value = self._split(self.v_proj(normed))
            seen = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=key.shape[1] < query.shape[1]
            )
            features = features + self.o_proj(seen.transpose(1, 2).flatten(2))
        flat = features.flatten(0, 1)
        return self.logits(self._top(flat if rows is None else flat[rows]), head)

    def logits(self, hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """[..., V] logits of states behind the last norm."""
        own: torch.Tensor = (head if self.head is None else self.head)(hidden)
        return own

    def _top(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.config.has_mlp:
            normed = self._normed(hidden, self.mlp_norm)
            hidden = hidden + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))
        return self._normed(hidden, self.norm)

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self.config.norm_eps)

    def _split(self, states: torch.Tensor) -> torch.Tensor:
        """[B, T, heads x d] to [B, heads, T, d]."""
        return states.view(*states.shape[:2], -1, self.config.head_dim).transpose(1, 2)

    def _rotated(self, states: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        cos, sin = rotary
        return rotate(self._split(states), cos, signed(sin))

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


def rotations(positions: torch.Tensor, config: AdapterConfig, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of rotary positions: [T, d] for positions [T], [B, 1, T, d] for [B, T]."""
    size = config.head_dim
    steps = torch.arange(0, size, 2, device=positions.device, dtype=torch.float64)
    angles = positions[..., None].double() * config.rope_base ** (-steps / size)
    angles = torch.cat((angles, angles), -1)
    if angles.ndim == 3:
        angles = angles[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def fitting_heads(hidden_size: int, wanted: int) -> int:
    """The largest number of heads, up to ``wanted``, that divides the hidden size."""
    return next(n for n in range(wanted, 0, -1) if hidden_size % n == 0 and hidden_size // n % 2 == 0)
