"""Published formats of heads: a table of tensor names and config fields for each.

:mod:`drafters.heads.layout` reads a folder by these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["FORMATS", "SAVED", "SPECULATORS", "Format"]


@dataclass(frozen=True, kw_only=True)
class Format:
    """A published layout.

    Attributes:
        name: name of the format.
        kind: kind of head that it holds.
        renames: patterns of its names -> our names, tried in this order; a name that fits none is ours already.
        ignored: patterns of tensors that carry no further information.
        values: our field -> fields of its config, of which the first present one counts; a dot leads into a section.
        layer_shift: difference from its numbers of tapped layers to ours, which count the layers before the tap.
        unshifted: fields of its config whose numbers of tapped layers are ours.
        inner: sections of the config with the sizes of the layers, of which the first present one counts; otherwise it
            is the config itself.
        defaults: our field -> its value where the config has none.
    """

    name: str
    kind: str
    renames: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    layer_shift: int = 0
    unshifted: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def drafter(self) -> str:
        """Name of the drafter that uses this format."""
        return "dflash" if self.kind in ("dflash", "dflash2", "dspark") else "eagle"


SAVED = (r"(?:module\.|model\.|draft_model\.)+(.+)", r"\1")  # prefixes that training loops add
_CONSTANT = (r".*rotary_emb\.inv_freq", r"verifier_(lm_head|norm)\.weight")
_MIDLAYER = (r"midlayer\.(.+)", r"layers.0.\1")
_SPECULATORS_CHAIN = {
    "norm_before_residual": ("norm_before_residual",),
    "norm_output": ("norm_output",),
    "taps": ("eagle_aux_hidden_state_layer_ids",),
    "hidden_size": ("target_hidden_size",),
    "mask_token": ("mask_token_id",),
    "target_name": ("speculators_config.verifier.name_or_path",),
}
_SPECULATORS_BLOCK = {
    "taps": ("aux_hidden_state_layer_ids",),
    "block_size": ("block_size",),
    "mask_token": ("mask_token_id",),
    "from_anchor": ("sample_from_anchor",),
    "sees_later": ("sliding_window_non_causal",),
    "markov": ("markov_head_type",),
    "selector_top": ("selector_top_k",),
    "conv_group": ("conv_group_size",),
    "hidden_size": ("target_hidden_size",),
    "target_name": ("speculators_config.verifier.name_or_path",),
}
_PLAIN_BLOCK = {
    "taps": ("dflash_config.target_layer_ids", "dspark_config.target_layer_ids", "target_layer_ids"),
    "block_size": ("block_size", "dflash_config.block_size", "dspark_config.block_size"),
    "mask_token": ("dflash_config.mask_token_id", "dspark_config.mask_token_id", "mask_token_id"),
    "from_anchor": ("sample_from_anchor",),
    "sees_later": ("sliding_window_non_causal",),
    "markov": ("markov_head_type",),
    "selector_top": ("selector_top_k", "dflash_config.selector_top_k"),
    "conv_group": ("conv_group_size", "dflash_config.conv_group_size"),
    "target_layers": ("num_target_layers",),
}
_INNER = ("transformer_layer_config",)
_TOP_TAPS = ("eagle_aux_hidden_state_layer_ids",)  # vLLM reads them there first, and counts as we do

FORMATS: Mapping[str, Format] = {
    own.name: own
    for own in (
        Format(name="eagle", kind="eagle", renames=(SAVED,), ignored=_CONSTANT, inner=("model",)),
        Format(
            name="eagle3",
            kind="eagle3",
            renames=(SAVED, _MIDLAYER),
            ignored=_CONSTANT,
            values={
                "norm_before_residual": ("norm_before_residual", "eagle_config.norm_before_residual"),
                "norm_output": ("norm_output", "eagle_config.norm_output"),
                "taps": ("eagle_config.eagle_aux_hidden_state_layer_ids",),
                "hidden_size": ("target_hidden_size", "eagle_config.target_hidden_size"),
                "fused": ("eagle_config.use_aux_hidden_state",),
                "target_layers": ("num_target_layers",),
            },
            layer_shift=1,  # it counts layers from 0 and taps their outputs
            unshifted=_TOP_TAPS,
        ),
        Format(
            name="peagle",
            kind="peagle",
            renames=(SAVED, _MIDLAYER),
            ignored=_CONSTANT,
            values={
                "norm_before_residual": ("norm_before_residual", "eagle_config.norm_before_residual"),
                "taps": ("eagle_config.eagle_aux_hidden_state_layer_ids",),
                "hidden_size": ("target_hidden_size", "eagle_config.target_hidden_size"),
                "mask_token": ("mask_token_id", "ptd_token_id", "pard_token"),
                "depth": ("num_speculative_tokens", "k_train"),
            },
            layer_shift=1,
            unshifted=_TOP_TAPS,
        ),
        Format(
            name="dflash",
            kind="dflash",
            renames=(
                SAVED,
                (r"encoder\.fc\.(.+)", r"fc.\1"),  # the names that transformers uses
                (r"encoder\.output_norm_enc\.(.+)", r"hidden_norm.\1"),
            ),
            ignored=_CONSTANT,
            values=_PLAIN_BLOCK,
            layer_shift=1,
        ),
        Format(name="dflash2", kind="dflash2", renames=(SAVED,), ignored=_CONSTANT, values=_PLAIN_BLOCK, layer_shift=1),
        Format(
            name="dspark",
            kind="dspark",
            renames=(
                SAVED,
                (r"context_proj\.(.+)", r"fc.\1"),
                (r"context_norm\.(.+)", r"hidden_norm.\1"),
                (r"final_norm\.(.+)", r"norm.\1"),
            ),
            ignored=_CONSTANT,
            values=_PLAIN_BLOCK,
            layer_shift=1,
            defaults={"from_anchor": True},
        ),
    )
}
"""Layouts whose config names no format; tensors tell them apart, see :func:`find`."""

SPECULATORS: Mapping[str, Format] = {
    own.kind: own
    for own in (
        Format(
            name="speculators eagle",
            kind="eagle",
            renames=((r"transformer\.(.+)", r"layers.0.\1"),),
            values={"target_name": ("speculators_config.verifier.name_or_path",)},
            inner=_INNER,
            ignored=_CONSTANT,
        ),
        Format(name="speculators eagle3", kind="eagle3", values=_SPECULATORS_CHAIN, inner=_INNER, ignored=_CONSTANT),
        Format(name="speculators peagle", kind="peagle", values=_SPECULATORS_CHAIN, inner=_INNER, ignored=_CONSTANT),
        *(
            Format(
                name=f"speculators {kind}",
                kind=kind,
                values=_SPECULATORS_BLOCK,
                inner=_INNER,
                ignored=_CONSTANT,
                defaults={"from_anchor": kind == "dspark", "sees_later": kind == "dflash2"},
            )
            for kind in ("dflash", "dflash2", "dspark")
        ),
    )
}
"""``speculators_model_type`` -> its layout. Its layer numbers count the layers before the tap."""
