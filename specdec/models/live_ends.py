"""The ends of a live model by themselves, its embedding and its head, which trained drafters read.

Some models multiply embeddings or logits (Granite, Cohere), or cap logits by a tanh (Gemma 2), in a module or around
it. The scales are measured on a few tokens, by what the model's own forward gives of them, and the cap is its config's.
If that does not explain all of what the forward gives, up to rounding, what needs the ends is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from specdec.errors import TargetError, first_line
from specdec.models.inspection import device_of, weight_of, why_special
from specdec.models.self_check import tokens_for
from specdec.runners.linear import DenseLinear, HeadOf, LinearKernel, linear_kernel
from specdec.step.step_io import FINAL, StepInput, Wanted
from specdec.target import Target

__all__ = ["LiveEnds"]

_STEPS = 8  # of rounding, relative to the largest number
_BY_TOKENS = "choose a drafter that reads tokens alone, such as prompt_lookup or lookahead"


@dataclass(frozen=True, slots=True, eq=False)
class LiveEnds:
    """Embedding and head of a live model.

    Attributes:
        model: the model.
        embedding_scale: of what the embedding gives.
        scale, cap: of what the head gives; the cap, 0 for none, comes after the scale.
    """

    model: Any
    embedding_scale: float = 1.0
    scale: float = 1.0
    cap: float = 0.0

    @classmethod
    def of(cls, model: Any, target: Target) -> LiveEnds:
        """Those of a target's model, held against its forward.

        Raises:
            TargetError: they do not give what the forward gives.
        """
        tokens = tokens_for(len(weight_of(model.get_input_embeddings())))
        cache = target.new_cache(capacity=len(tokens), rows=len(tokens))
        cap = float(getattr(target.config, "final_logit_softcapping", None) or 0.0)
        try:
            with target.active(), torch.inference_mode():
                output = target.forward(StepInput.of(cache, tokens, wanted=Wanted(hidden=(0, FINAL))))
                embedded, last, plain = output.hidden[0], output.hidden[FINAL], cls(model)
                scale = 1.0 if cap else _scale(plain.logits(last), output.logits)
                own = cls(model, _scale(plain.embed(tokens), embedded), scale, cap)
                alike = _alike(own.embed(tokens), embedded), _alike(own.logits(last), output.logits)
        except Exception as error:  # code of others: it may raise anything
            raise _not_alone(target, first_line(error)) from error
        if not all(alike):
            where = "head and logits" if alike[0] else "embedding and layers"
            raise _not_alone(target, f"it does something between {where} that is no multiple and no cap of its config")
        return own

    def embed(self, tokens: torch.Tensor | Sequence[int] | npt.NDArray[np.int64]) -> torch.Tensor:
        """[T, D] what the first layer reads of tokens [T]."""
        if not isinstance(tokens, torch.Tensor):
            tokens = torch.tensor(tokens)
        module = self.model.get_input_embeddings()
        found: torch.Tensor = module(tokens.to(device_of(module))[None])[0]
        return found if self.embedding_scale == 1.0 else found * self.embedding_scale

    @property
    def rows(self) -> torch.Tensor | None:
        """The table [V, D] whose rows are embeddings; None where more is done to them."""
        module = self.model.get_input_embeddings()
        plain = type(module) is nn.Embedding and module.max_norm is None and why_special(module) is None
        return module.weight.detach() if plain and self.embedding_scale == 1.0 else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., V] of states behind the last norm [..., D]."""
        found: torch.Tensor = self.model.get_output_embeddings()(hidden)
        return self._finished(found)

    def logits_of(
        self, tokens: torch.Tensor | None, dtype: torch.dtype | None, own_dtype: torch.dtype
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """As :meth:`specdec.target.Target.head_of`."""
        head = self.model.get_output_embeddings()
        if type(head) is not nn.Linear or head.bias is not None or why_special(head) is not None:
            every = slice(None) if tokens is None else tokens  # only the head's own module knows what it does
            return lambda hidden: self.logits(hidden.to(own_dtype))[..., every]
        weight = head.weight.detach()
        weight = weight if tokens is None else weight[tokens.to(weight.device)]
        kernel: LinearKernel = linear_kernel(weight) if dtype is None else DenseLinear(weight.to(dtype))
        return HeadOf(kernel, self._finished if self.scale != 1.0 or self.cap else None)

    def _finished(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits if self.scale == 1.0 else logits * self.scale
        return torch.tanh(logits / self.cap) * self.cap if self.cap else logits


def _scale(found: torch.Tensor, expected: torch.Tensor | None) -> float:
    """The factor by which ``found`` comes nearest to ``expected``; 1 if both are equal but for rounding."""
    if expected is None or found.shape != expected.shape or _alike(found, expected):
        return 1.0
    own, other = (part.to(found.device).double().flatten() for part in (found, expected))
    return float(own @ other / (own @ own))


def _alike(found: torch.Tensor, expected: torch.Tensor | None) -> bool:
    """Whether two tensors differ by no more than rounding."""
    if expected is None or found.shape != expected.shape:
        return False
    off = (found.to(expected.device).double() - expected.double()).abs().max()
    step = max(torch.finfo(expected.dtype).eps, torch.finfo(torch.float32).eps)  # some scales are float32's
    return bool(off <= _STEPS * step * expected.double().abs().max())


def _not_alone(target: Target, why: str) -> TargetError:
    return TargetError(
        f"{target.name} is run by its own forward as a whole, and its embedding and head cannot be called by "
        f"themselves: {why}; {_BY_TOKENS}"
    )
