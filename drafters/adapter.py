"""The adapter of Kangaroo: one small layer between an early exit and the target's head, and its file format.

It turns the residual stream after l layers into a guess at what the target's last norm would give (Liu et al. 2024,
arXiv 2404.18911, section 3.1). A checkpoint is a folder with ``model.safetensors`` and ``config.json``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from drafters.fingerprint import fingerprint
from drafters.weights import CONFIG, mismatches, save_weights
from specdec.config import parse
from specdec.errors import CheckpointError, ConfigError
from specdec.target import Target

__all__ = ["VARIANTS", "Adapter", "AdapterConfig", "fitting_heads", "random_adapter", "rotations"]

VARIANTS = ("attention", "head", "layer", "mlp")
"""The paper's Table 2: attention alone, attention with a head of its own, attention and MLP, MLP alone."""

_WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """What an adapter is and how it likes to be used.

    Attributes:
        hidden_size: D, the target's width.
        vocab_size: V, the target's.
        exit_layer: l, the layers of the target that feed it.
        heads: attention heads, each D / heads wide; there is no grouping.
        variant: one of ``VARIANTS``.
        intermediate_size: inner width of the MLP, for the variants that have one.
        rope_base: of the rotary positions.
        norm_eps: of the RMS norms.
        eta: confidence at or below which drafting stops.
        gamma: most drafts of a round.
        branch: alternatives for the token with which a round ends for want of confidence.
        target: fingerprint of the model that it was trained for; empty if not known.
    """

    hidden_size: int
    vocab_size: int
    exit_layer: int
    heads: int
    variant: str = "attention"
    intermediate_size: int = 0
    rope_base: float = 10000.0
    norm_eps: float = 1e-6
    eta: float = 0.6
    gamma: int = 6
    branch: int = 1
    target: str = ""

    def __post_init__(self) -> None:
        for name in ("hidden_size", "vocab_size", "exit_layer", "heads", "gamma", "branch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"adapter.{name} is {getattr(self, name)}; it must be at least 1")
        if self.variant not in VARIANTS:
            raise ConfigError(f"adapter.variant is {self.variant!r}; it must be one of {', '.join(VARIANTS)}")
        if self.hidden_size % self.heads or self.hidden_size // self.heads % 2:
            raise ConfigError(
                f"adapter.heads is {self.heads} at hidden_size {self.hidden_size}; it must divide it into even parts"
            )
        if self.variant in ("layer", "mlp") and self.intermediate_size < 1:
            raise ConfigError(f"adapter.variant {self.variant!r} has an MLP and needs intermediate_size >= 1")
        if not 0 <= self.eta <= 1:
            raise ConfigError(f"adapter.eta is {self.eta}; it is a probability, in [0, 1]")


class Adapter(nn.Module):
    """RMSNorm, causal attention, residual, (RMSNorm, MLP, residual,) RMSNorm.

    Example: D = 4096 without MLP has 4 D^2 + 2 D weights, 67 M, 1% of a 7 B model.
    """

    def __init__(self, config: AdapterConfig) -> None:
        super().__init__()
        self.config = config
        size, inner = config.hidden_size, config.intermediate_size
        if config.variant != "mlp":
            self.input_norm = nn.Parameter(torch.ones(size))
            self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(size, size, bias=False) for _ in range(4))
        if config.variant in ("layer", "mlp"):
            self.mlp_norm = nn.Parameter(torch.ones(size))
            self.gate_proj, self.up_proj = (nn.Linear(size, inner, bias=False) for _ in range(2))
            self.down_proj = nn.Linear(inner, size, bias=False)
        self.norm = nn.Parameter(torch.ones(size))
        self.head = nn.Linear(size, config.vocab_size, bias=False) if config.variant == "head" else None

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
            head: the target's head, used unless the adapter has its own.
            mask: [B, 1, L, L] bool, what each token sees; None is causal.
            rows: [N] int, rows of the flattened [B * L] that want logits; None for all.

        Returns:
            [N, V] logits.
        """
        if self.config.variant != "mlp":
            normed = self._normed(features, self.input_norm)
            rotary = rotations(positions, self.config, features.dtype)
            query, key = self._rotated(self.q_proj(normed), rotary), self._rotated(self.k_proj(normed), rotary)
            value = self._split(self.v_proj(normed))
            seen = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
            features = features + self.o_proj(seen.transpose(1, 2).flatten(2))
        flat = features.flatten(0, 1)
        return self.logits(self._top(flat if rows is None else flat[rows]), head)

    def logits(self, hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """[..., V] of states that passed the last norm."""
        own: torch.Tensor = (head if self.head is None else self.head)(hidden)
        return own

    def _top(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.config.variant in ("layer", "mlp"):
            normed = self._normed(hidden, self.mlp_norm)
            hidden = hidden + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))
        return self._normed(hidden, self.norm)

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self.config.norm_eps)

    def _split(self, states: torch.Tensor) -> torch.Tensor:
        """[B, T, D] to [B, heads, T, D / heads]."""
        batch, rows, size = states.shape
        return states.view(batch, rows, self.config.heads, size // self.config.heads).transpose(1, 2)

    def _rotated(self, states: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        states = self._split(states)
        cos, sin = rotary
        first, second = states.chunk(2, -1)
        return states * cos + torch.cat((-second, first), -1) * sin

    def start_from(self, target: Target, *, seed: int = 0) -> None:
        """Initial weights: the target's last norm (and head, if it has its own), attention and MLP that add nothing."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.ndim == 2:
                    drawn = torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5
                    parameter.copy_(drawn * 0 if name.startswith(("o_proj", "down_proj")) else drawn)
            lm_head, norm = getattr(target, "lm_head", None), getattr(target, "norm", None)
            if self.head is not None and lm_head is not None:
                self.head.weight.copy_(lm_head.weight)
            if isinstance(norm, nn.Module):
                # An RMS norm of ones is its weight, however the class writes it (Gemma adds 1).
                like = next(norm.parameters())
                scale = norm(torch.ones(1, len(self.norm), dtype=like.dtype, device=like.device))
                if bool(scale.any()):
                    self.norm.copy_(scale[0])

    def save_pretrained(self, folder: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Write weights and config; each file beside its name first, so that a full disk leaves the former ones whole.

        Args:
            folder: made if it is not there.
            dtype: of the weights in the file; None keeps theirs.

        Raises:
            CheckpointError: the files could not be written.
        """
        tensors = {name: tensor.to(dtype=dtype) for name, tensor in self.state_dict().items()}
        save_weights(Path(folder), _WEIGHTS, tensors, asdict(self.config), what="the adapter")

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Adapter:
        """Load strictly: every tensor there, none left over, all of the right shape.

        Raises:
            CheckpointError: no adapter there, or one that does not fit its own config.
        """
        folder = Path(folder)
        try:
            values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            tensors = load_file(folder / _WEIGHTS)
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(
                f"no Kangaroo adapter in {str(folder)!r}: {error}; give a folder that `specdec train kangaroo` or "
                "`specdec convert kangaroo` wrote"
            ) from error
        adapter = cls(config_of(values, folder))
        load_strictly(adapter, tensors, folder)
        return adapter


def config_of(values: Any, folder: Path) -> AdapterConfig:
    """The config in a ``config.json``.

    Raises:
        CheckpointError: it is that of something else.
    """
    try:
        if not isinstance(values, Mapping):
            raise ConfigError(f"it holds {type(values).__name__}, not a mapping")
        return parse(AdapterConfig, values, where="adapter")
    except ConfigError as error:
        raise CheckpointError(
            f"{str(folder / CONFIG)!r} is no adapter's config: {error}; official checkpoints go through "
            "`specdec convert kangaroo` first"
        ) from error


def load_strictly(adapter: Adapter, tensors: Mapping[str, torch.Tensor], source: object) -> None:
    """Fill an adapter.

    Raises:
        CheckpointError: a tensor is missing, left over, of another shape, or not finite.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in adapter.state_dict().items()}
    odd = mismatches(tensors, expected)
    if odd:
        raise CheckpointError(
            f"the weights in {str(source)!r} do not fit a {adapter.config.variant!r} adapter: {odd[0]} "
            f"({len(odd)} tensors differ); the file is broken or of another adapter"
        )
    broken = [name for name, tensor in sorted(tensors.items()) if not bool(tensor.isfinite().all())]
    if broken:
        raise CheckpointError(f"{broken[0]} in {str(source)!r} holds NaN or infinity; train it anew")
    adapter.load_state_dict(dict(tensors))


def rotations(positions: torch.Tensor, config: AdapterConfig, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of rotary positions: [T, d] for [T] positions, [B, 1, T, d] for [B, T]."""
    size = config.hidden_size // config.heads
    steps = torch.arange(0, size, 2, device=positions.device, dtype=torch.float64)
    angles = positions[..., None].double() * config.rope_base ** (-steps / size)
    angles = torch.cat((angles, angles), -1)
    if angles.ndim == 3:
        angles = angles[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def fitting_heads(hidden_size: int, wanted: int) -> int:
    """The most heads, up to ``wanted``, that divide the width into even parts."""
    return next(n for n in range(wanted, 0, -1) if hidden_size % n == 0 and hidden_size // n % 2 == 0)


def random_adapter(
    target: Target,
    folder: str | Path,
    *,
    exit_layer: int = 1,
    variant: str = "attention",
    seed: int = 0,
    **options: Any,
) -> Adapter:
    """Write an untrained adapter that fits ``target``: it drafts badly, and exactness must not mind."""
    size = target.hidden_size
    config = AdapterConfig(
        hidden_size=size,
        vocab_size=target.vocab_size,
        exit_layer=exit_layer,
        heads=fitting_heads(size, 4),
        variant=variant,
        intermediate_size=2 * size if variant in ("layer", "mlp") else 0,
        target=fingerprint(target),
        **options,
    )
    adapter = Adapter(config)
    adapter.start_from(target, seed=seed)
    adapter.save_pretrained(folder)
    return adapter
