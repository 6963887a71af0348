"""Models of images and sounds, asked with text alone: ``custom_generate`` runs whichever the engine does."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.generation.stopping_criteria import MaxLengthCriteria

from specdec import Engine, TransformersTarget, custom_generate
from specdec.errors import ConfigError
from tests.models import PAD, VOCAB, prompt_of, reference

NEW = 12
PROMPT = prompt_of(9)
_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": PAD,
}
_IMAGE = VOCAB - 1
_CLIP = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_CLIP |= {"image_size": 16, "patch_size": 8, "projection_dim": 32}
_QWEN = {"embed_dim": 32, "hidden_size": 32, "depth": 1, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2}
_TURNS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}


def _llava() -> Any:
    vision, text = transformers.CLIPVisionConfig(**_CLIP), transformers.LlamaConfig(**_TEXT)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=_IMAGE)
    return transformers.LlavaForConditionalGeneration(config)


def _qwen2_vl() -> Any:
    text = {**_TEXT, "rope_parameters": _TURNS}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=_QWEN, **_qwen_tokens())
    return transformers.Qwen2VLForConditionalGeneration(config)


def _qwen3_vl() -> Any:
    """Its text's config knows no token that ends a text."""
    vision = {**_QWEN, "intermediate_size": 48, "out_hidden_size": 32, "deepstack_visual_indexes": [0]}
    text = {**_TEXT, "rope_parameters": _TURNS}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **_qwen_tokens())
    return transformers.Qwen3VLForConditionalGeneration(config)


def _gemma3() -> Any:
    vision = transformers.SiglipVisionConfig(**{name: _CLIP[name] for name in _CLIP if name != "projection_dim"})
    text = transformers.Gemma3TextConfig(**_TEXT, sliding_window=8, query_pre_attn_scalar=8, tie_word_embeddings=False)
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=_IMAGE,
        tie_word_embeddings=False,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def _qwen2_audio() -> Any:
    audio = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}
    config = transformers.Qwen2AudioConfig(
        text_config={**_TEXT, "model_type": "qwen2"}, audio_config=audio, audio_token_index=_IMAGE
    )
    return transformers.Qwen2AudioForConditionalGeneration(config)


def _qwen_tokens() -> dict[str, int]:
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return {name: _IMAGE - place for place, name in enumerate(names)}


FAMILIES = {
    "llava": (_llava, {}),
    "qwen2_vl": (_qwen2_vl, {"mm_token_type_ids": torch.zeros(1, 9, dtype=torch.long)}),
    "qwen3_vl": (_qwen3_vl, {"mm_token_type_ids": torch.zeros(1, 9, dtype=torch.long)}),
    "gemma3": (_gemma3, {"token_type_ids": torch.zeros(1, 9, dtype=torch.long)}),
    "qwen2_audio": (_qwen2_audio, {"input_features": None}),
}


@functools.cache
def model_of(family: str) -> Any:
    torch.manual_seed(0)
    model = FAMILIES[family][0]().double().eval()
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for parameter in model.get_decoder().parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.3)
        model.get_output_embeddings().weight.normal_(std=0.3)
    return model


def generate(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, **options: Any) -> Any:
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **options)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_text_alone(family: str) -> None:
    """Two texts behind unlike padding, and with what processors give beside a text."""
    model, beside = model_of(family), FAMILIES[family][1]
    loop: Callable[..., Any] = functools.partial(custom_generate, drafter="lookahead")
    ids, mask = torch.tensor([PROMPT, PROMPT]), torch.ones(2, 9, dtype=torch.long)
    ids[0, :3], mask[0, :3] = PAD, 0
    expected = generate(model, ids, mask)
    assert len(set(expected[1, 9:].tolist())) > 3
    assert torch.equal(generate(model, ids, mask, custom_generate=loop), expected)
    assert torch.equal(generate(model, ids[1:], **beside, custom_generate=loop), expected[1:])
    assert Engine(TransformersTarget(model)).generate(PROMPT, NEW).token_ids == expected[1, 9:].tolist()


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llava", "qwen3_vl", "gemma3"])
def test_a_folder_is_given_texts_alone(family: str, tmp_path: Path) -> None:
    model = model_of(family)
    model.save_pretrained(tmp_path)
    engine = Engine(TransformersTarget.from_pretrained(tmp_path, dtype="float64"), drafter="lookahead")
    assert engine.generate(PROMPT, NEW).token_ids == reference(model, PROMPT, NEW)


@pytest.mark.parametrize("pixels", [torch.zeros, torch.ones])
def test_an_image_is_refused(pixels: Callable[..., torch.Tensor]) -> None:
    """Also a black one."""
    model, ids = model_of("llava"), torch.tensor([[*PROMPT, *[_IMAGE] * 4]])
    image = {"pixel_values": pixels(1, 3, 16, 16, dtype=torch.float64)}
    assert generate(model, ids, **image).shape == (1, ids.shape[1] + NEW)
    with pytest.raises(ConfigError, match="mm_encoder_outputs holds image; specdec feeds the model token ids alone"):
        generate(model, ids, **image, custom_generate=custom_generate)


def test_a_decoder_that_was_replaced_is_followed() -> None:
    """It hangs in a module that hangs in the model."""
    model = copy.deepcopy(model_of("llava"))
    whole = Engine(TransformersTarget(model))
    model.model.language_model = copy.deepcopy(model.model.language_model)
    assert whole.generate(PROMPT, NEW).token_ids == reference(model, PROMPT, NEW)


GIVEN: dict[str, tuple[str, Any]] = {
    "a silence": ("input_features", torch.zeros(1, 80, 8)),
    "an image among texts": ("mm_encoder_outputs", {"image": [None, torch.zeros(1)]}),
    "what an image is": ("token_type_ids", torch.tensor([[0, 1, 1]])),
    "keys from both sides": ("is_causal", False),
    "a flag that is raised": ("use_audio_in_video", True),
    "embeddings": ("inputs_embeds", torch.zeros(1, 3, 4)),
}
NOTHING: dict[str, tuple[str, Any]] = {
    "no images": ("mm_encoder_outputs", {}),
    "none of either": ("mm_encoder_outputs", {"image": None, "video": []}),
    "an empty tensor": ("pixel_values", torch.zeros(0, 3, 16, 16)),
    "a text's types": ("mm_token_type_ids", torch.zeros(1, 3)),
    "keys from one side": ("is_causal", True),
    "a flag that is not raised": ("use_audio_in_video", False),
    "an output that is dropped": ("output_router_logits", True),
}


LOOP: dict[str, Any] = {"logits_processor": [], "stopping_criteria": [MaxLengthCriteria(3 + 4)]}


def call(name: str, value: Any) -> list[int]:
    """``custom_generate`` called as ``generate`` does, with one more input."""
    model = model_of("llava")
    config = transformers.GenerationConfig(max_length=3 + 4, do_sample=False, pad_token_id=PAD)
    ids = torch.tensor([PROMPT[:3]])
    tokens: list[int] = custom_generate(model, ids, generation_config=config, **LOOP, **{name: value})[0, 3:].tolist()
    return tokens


@pytest.mark.parametrize("given", GIVEN)
def test_an_input_that_would_be_ignored_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=f"{GIVEN[given][0]} .*; specdec feeds the model token ids alone"):
        call(*GIVEN[given])


@pytest.mark.few(4)
@pytest.mark.parametrize("given", NOTHING)
def test_an_input_that_says_nothing_is_none(given: str) -> None:
    assert call(*NOTHING[given]) == reference(model_of("llava"), PROMPT[:3], 4)
