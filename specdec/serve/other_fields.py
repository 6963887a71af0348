"""Fields of other servers and their clients: those that have one of ours, and values that ask for nothing.

The table is published in docs/serving.md.
"""

from __future__ import annotations

import json
from typing import Any

from specdec.errors import shown
from specdec.serve.errors import ApiError

__all__ = ["ANY", "NEUTRAL", "RENAMED", "refused", "short", "translated"]

ANY: tuple[Any, ...] = ("any",)
"""In place of values: the field changes no answer of this server, whatever its value is."""

RENAMED = {
    "repeat_penalty": "repetition_penalty",  # llama.cpp, Ollama, LM Studio
    "rep_pen": "repetition_penalty",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "stopping_strings": "stop",
    "stop_sequence": "stop",
    "ban_eos_token": "ignore_eos",
    "sampler_seed": "seed",  # KoboldAI
}
"""Names of other servers -> ours, which is taken where a request has both."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("typical_p", "typical", "tfs_z", "tfs", "guidance_scale", "encoder_repetition_penalty"), (1,)),
    **dict.fromkeys(("num_beams",), (1,)),
    **dict.fromkeys(("mirostat", "mirostat_mode", "top_a", "dynatemp_range", "smoothing_factor"), (0,)),
    **dict.fromkeys(("xtc_probability", "dry_multiplier", "epsilon_cutoff", "eta_cutoff", "penalty_alpha"), (0,)),
    **dict.fromkeys(("no_repeat_ngram_size", "min_keep", "n_probs", "n_indent", "t_max_predict_ms"), (0,)),
    **dict.fromkeys(("top_n_sigma", "nsigma"), (-1, 0)),
    **dict.fromkeys(("mirostat_tau", "mirostat_eta", "dynatemp_exponent", "smoothing_curve", "xtc_threshold"), ANY),
    **dict.fromkeys(("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"), ANY),
    **dict.fromkeys(("penalize_nl", "dynamic_temperature", "temperature_last", "early_stopping"), (False,)),
    **dict.fromkeys(("post_sampling_probs", "return_tokens", "return_progress"), (False,)),
    **dict.fromkeys(("skew", "max_tokens_second", "min_length", "rep_pen_size"), (0,)),
    "rep_pen_slope": (0, 1),
    **dict.fromkeys(("add_bos_token",), (True,)),
    # Slots, a context that is shifted, memory, routes: of the server, not of the answer.
    **dict.fromkeys(("cache_prompt", "id_slot", "slot_id", "n_keep", "num_keep", "n_discard", "n_cache_reuse"), ANY),
    **dict.fromkeys(("num_ctx", "num_batch", "num_gpu", "num_thread", "keep_alive", "truncation_length"), ANY),
    **dict.fromkeys(("provider", "route", "transforms", "timings_per_token", "auto_max_new_tokens", "preset"), ANY),
    **dict.fromkeys(("allow_fallbacks", "api_type", "api_server", "bypass_status_check"), ANY),
}
"""Fields of other servers that have none of ours -> their values that ask for nothing, or :data:`ANY`."""

_WINDOWS = ("repetition_penalty_range", "rep_pen_range")  # 0 or -1: the whole text, as ours


def translated(values: dict[str, Any], *, chat: bool, ignored: list[str] | None = None) -> dict[str, Any]:
    """A request's values with those of other servers under our names, and without those that ask for nothing.

    Args:
        values: the request's JSON object.
        chat: whether it is a chat, which has a template.
        ignored: takes the names of fields that cannot be followed, where they are to be ignored.

    Raises:
        ApiError: a field asks for what this server does not do.
    """
    values = dict(values)
    for name, ours in RENAMED.items():
        if (value := values.pop(name, None)) is not None and values.get(ours) is None:
            values[ours] = value
    if values.get("max_tokens") is not None:
        values.pop("max_length", None)  # of a prompt and its answer; without the former it may be the answer's
    if values.pop("do_sample", None) is False:
        values["temperature"] = 0
    usage = values.get("usage")
    if isinstance(usage, dict) and usage.keys() <= {"include"}:  # OpenRouter's name of stream_options.include_usage
        del values["usage"]
        if usage.get("include") is True and values.get("stream_options") is None and values.get("stream") is True:
            values["stream_options"] = {"include_usage": True}
    if chat:
        _think(values)
    penalty = values.get("repetition_penalty")
    whole = (0, -1) if any(values.get(name) in (0, -1) for name in _WINDOWS) else (-1,)  # llama.cpp's 0 alone: no token
    windows = {**dict.fromkeys(_WINDOWS, (0, -1)), "repeat_last_n": whole}
    neutral = {**NEUTRAL, **(dict.fromkeys(windows, ANY) if penalty in (None, 1) else windows)}
    for name in neutral.keys() & values.keys():
        value, nothing = values.pop(name), neutral[name]
        if value is None or value in ("", [], {}) or nothing is ANY or value in nothing:
            continue
        if ignored is None:
            raise refused(name, value, nothing)
        ignored.append(name)
    return values


def refused(name: str, value: Any, nothing: tuple[Any, ...], why: str = "which this server does not do") -> ApiError:
    """The error of a field that asks for more than the values ``nothing`` do."""
    remedy = "".join(f", or send {json.dumps(one)}" for one in nothing)
    return ApiError(
        f"{name} is {short(value)}, {why}; leave the field out{remedy}", param=name, code="unsupported_parameter"
    )


def short(value: Any) -> str:
    """The value as a message shows it. It is cut before it is written, as it may be as large as the body."""
    if isinstance(value, str | list):
        value = value[:100]
    elif isinstance(value, dict):
        value = dict(list(value.items())[:20])
    return shown(value)


def _think(values: dict[str, Any]) -> None:
    """Give what asks for thinking, or for none, to the chat template, under the names that templates read."""
    variables: dict[str, Any] = {}
    effort = values.pop("reasoning_effort", None)
    asked = values.get("reasoning")
    if isinstance(asked, dict) and asked.keys() <= {"effort", "enabled", "exclude", "summary"}:  # OpenRouter's
        del values["reasoning"]
        effort = asked.get("effort") if effort is None else effort
        if asked.get("enabled") is not None:
            variables["enable_thinking"] = asked["enabled"]
    asked = values.get("thinking")
    if isinstance(asked, dict) and asked.get("type") in ("enabled", "disabled", "adaptive"):  # Anthropic's, DeepSeek's
        del values["thinking"]
        variables["enable_thinking"] = asked["type"] != "disabled"
    if isinstance(think := values.get("think"), bool):  # Ollama's
        del values["think"]
        variables["enable_thinking"] = think
    if effort is not None:
        if effort not in _EFFORTS:
            raise ApiError(
                f"reasoning_effort is {shown(effort)}; it must be one of {', '.join(_EFFORTS)}",
                param="reasoning_effort",
            )
        variables["reasoning_effort"] = effort
        if effort == "none":
            variables["enable_thinking"] = False
    if (enabled := values.pop("enable_thinking", None)) is not None:
        variables["enable_thinking"] = enabled
    own = values.get("chat_template_kwargs")
    if variables and (own is None or isinstance(own, dict)):
        values["chat_template_kwargs"] = {**variables, **(own or {})}


_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
