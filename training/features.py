"""Features: a frozen target's hidden states for windows of text, computed by the decoding code, as drafters see them.

They depend on the window alone, not on its batch, so they can be kept, in memory or on disk: a second epoch, or a
second run, then needs no forward of the target, which with little data is most of the training time.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from drafters.shared.fingerprint import fingerprint
from specdec.errors import SpecdecWarning
from specdec.settings.files import replacing
from specdec.step.step_io import NOTHING, StepInput, Wanted
from specdec.target import FINAL, Target
from training.loop_config import half_is_fast
from training.packing import Batch

__all__ = ["FrozenTarget"]

_SLAB = 64  # windows stored in one tensor, as many small ones would fragment memory


class FrozenTarget:
    """A target's early features and last hidden states for whole batches, and its head.

    Args:
        target: the model, which is never changed.
        layers: for each number l >= 1, features are the residual stream after l layers.
        draft_tokens: [d] the draft vocabulary of the head; None for all tokens.
        keep: bytes of features to keep in memory; further windows are computed each time.
        folder: folder that keeps the features of all windows instead, a file for each; several runs can share it.
    """

    def __init__(
        self,
        target: Target,
        layers: Collection[int],
        *,
        draft_tokens: torch.Tensor | None = None,
        keep: int = 0,
        folder: Path | None = None,
    ) -> None:
        self.target = target
        self.draft_tokens = draft_tokens
        self._taps = [*sorted(set(layers)), FINAL]
        self._keep = keep
        self._folder = folder
        by = "" if folder is None else f"{fingerprint(target)} {target.dtype} {target.options['runner']}"
        self._identity = f"{by} {self._taps}"
        self._full = False  # whether the folder takes no more
        self._slabs: list[torch.Tensor] = []  # [windows, taps, L, D]
        self._places: dict[int, int] = {}  # number of a window -> its index in the slabs
        self._texts: dict[bytes, torch.Tensor] = {}  # tokens of a text that is no window -> its features
        # A product with gradients, in its input's dtype.
        self._heads: dict[torch.dtype, Callable[[torch.Tensor], torch.Tensor]] = {}

    def bytes_of(self, windows: int, length: int) -> int:
        """The bytes of the features of windows of some length."""
        return windows * length * len(self._taps) * self.target.hidden_size * self.target.dtype.itemsize

    @torch.no_grad()
    def read(self, batch: Batch) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
        """Features [B, L, D] by layer, and the last normed states [N, D] at ``batch.targets``, without gradients."""
        numbers = [-1] * len(batch.tokens) if batch.numbers is None else batch.numbers.tolist()
        stacked = torch.stack(
            [self._window(*row) for row in zip(numbers, batch.tokens, batch.documents, strict=True)], 1
        )  # [taps, B, L, D]
        *features, states = stacked
        return dict(zip(self._taps, features, strict=False)), states.flatten(0, 1)[batch.targets]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's logits [..., V], or [..., d] of the draft vocabulary, for states behind a last norm.

        They are in float32 where the device is slow in half precision.
        """
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        if dtype.itemsize < 4 and not torch.is_autocast_enabled(kind) and not half_is_fast(hidden.device):
            dtype = torch.float32
        if dtype not in self._heads:
            self._heads[dtype] = self.target.head_of(self.draft_tokens, dtype=dtype)
        return self._heads[dtype](hidden.to(dtype))

    def _window(self, number: int, tokens: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        """[taps, L, D] the features of one window."""
        if self._folder is not None:
            path = self._folder / self._name(tokens, documents)
            with suppress(OSError, SafetensorError):
                return load_file(path)["features"].to(tokens.device)
            if not self._full:
                features = self._computed(tokens, documents)
                self._store(features, path)
                return features
        if number < 0:
            return self._text(tokens, documents)
        place = self._places.get(number)
        if place is not None:
            return self._slabs[place // _SLAB][place % _SLAB]
        features, place = self._computed(tokens, documents), len(self._places)
        left = self._keep // features.nbytes - place
        if left > 0:
            if place % _SLAB == 0:
                self._slabs.append(features.new_empty(min(_SLAB, left), *features.shape))
            self._slabs[-1][place % _SLAB] = features
            self._places[number] = place
        return features

    def _text(self, tokens: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        """The features of a text that is no window, which each evaluation reads."""
        key = tokens.cpu().numpy().tobytes()
        if key in self._texts:
            return self._texts[key]
        features = self._computed(tokens, documents)
        if self._keep - sum(slab.nbytes for slab in self._slabs) >= features.nbytes:
            self._texts[key] = features
            self._keep -= features.nbytes
        return features

    def _name(self, tokens: torch.Tensor, documents: torch.Tensor) -> str:
        """The name of a window's file."""
        text = torch.stack((tokens, documents)).cpu().numpy().tobytes()
        return f"{hashlib.sha256(self._identity.encode() + text).hexdigest()[:32]}.safetensors"

    def _store(self, features: torch.Tensor, path: Path) -> None:
        """Write the features of a window; where that fails, further ones stay in memory, and the run goes on."""
        try:
            with replacing(path) as new:
                save_file({"features": features.cpu().contiguous()}, new)
        except (OSError, SafetensorError) as error:
            self._full = True
            warnings.warn(
                f"cannot write the features of a window, {features.nbytes:,} bytes, to {str(path.parent)!r}: {error}; "
                f"the run goes on, reads those that are there, and keeps up to {self._keep / 2**30:.2f} GiB of others "
                "in memory (keep_features)",
                SpecdecWarning,
                stacklevel=2,
            )

    def _computed(self, tokens: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        """[taps, L, D] the features of one window; its pieces of text do not see each other, so each is a forward."""
        target, pieces, start = self.target, [], 0
        with torch.autocast(tokens.device.type, enabled=False), target.active():
            cache = target.new_cache(capacity=len(tokens), rows=len(tokens))  # nothing is ever committed to it
            for size in torch.unique_consecutive(documents, return_counts=True)[1].tolist():
                ids = tokens[start : start + size].tolist()
                wanted = Wanted(NOTHING.logits, 0, self._taps)
                taps = target.forward(StepInput.of(cache, ids, wanted=wanted)).hidden
                pieces.append(torch.stack([taps[tap].to(tokens.device) for tap in self._taps]))
                start += size
        return torch.cat(pieces, 1)  # outside of inference mode, so that autograd can use it
