"""Joint distributions of the next tokens: by enumeration of a model, as observed, and a chi-square between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
import transformers
from scipy.stats import chi2
from transformers import LogitsProcessor, PreTrainedModel

from specdec.models.transformers_target import TransformersTarget
from tests.models import target_for

Joint = dict[tuple[int, ...], float]


@cache
def five_token_target(family: str = "Llama", kinds: tuple[str, ...] = ()) -> tuple[TransformersTarget, PreTrainedModel]:
    """A model of three layers over five tokens, and its target; the next token depends on the text, but not sharply."""
    config = getattr(transformers, f"{family}Config")(
        vocab_size=5,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        **({"layer_types": [*kinds]} if kinds else {}),
    )
    torch.manual_seed(5)
    model = getattr(transformers, f"{family}ForCausalLM")(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.35)
    return target_for(model, execution="fused"), model


def joint_of(
    model: PreTrainedModel,
    prompt: Sequence[int],
    count: int,
    temperature: float = 1.0,
    processors: Sequence[LogitsProcessor] = (),
) -> Joint:
    """The probability of every continuation of ``count`` tokens, by running the model on all of them."""
    joint: Joint = {(): 1.0}
    for _ in range(count):
        ids = torch.tensor([[*prompt, *text] for text in joint])
        with torch.inference_mode():
            logits = model(ids, attention_mask=torch.ones_like(ids)).logits[:, -1].double()
        for processor in processors:
            logits = processor(ids, logits)
        shares = torch.softmax(logits / temperature, -1).tolist()
        joint = {
            (*text, token): weight * share
            for (text, weight), row in zip(joint.items(), shares, strict=True)
            for token, share in enumerate(row)
        }
    return joint


def assert_joint(texts: Sequence[Sequence[int]], joint: Joint, *, alarm: float = 1e-3) -> None:
    """Chi-square of the texts against the joint distribution; cells that expect under 5 are pooled.

    Seeds are fixed, so the outcome is too, if drafts are chosen by no clock: ``alarm`` is the p-value below which a
    rule counts as wrong.
    """
    assert abs(sum(joint.values()) - 1) < 1e-9
    seen = Counter(tuple(text) for text in texts)
    assert set(seen) <= set(joint)
    expected = np.array([joint[key] for key in joint]) * len(texts)
    observed = np.array([seen[key] for key in joint], dtype=float)
    small = expected < 5
    if small.any():
        expected = np.append(expected[~small], expected[small].sum())
        observed = np.append(observed[~small], observed[small].sum())
    assert len(expected) > 5, "too few texts for a test"
    statistic = float(((observed - expected) ** 2 / expected).sum())
    value = float(chi2.sf(statistic, len(expected) - 1))
    assert value > alarm, f"chi-square {statistic:.1f} over {len(expected)} cells, p = {value:.2g}"
