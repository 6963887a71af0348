"""Requests as clients that were not installed write them, after their sources; docs/clients.md lists these.

Each is what the file named beside it makes of a chat or a text with its default settings, or with those named.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serving import Running

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TOOL = {"name": "read_file", "description": "Reads.", "parameters": {"type": "object", "properties": {"path": {}}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a"}'}}

CLINE = {  # src/core/api/providers/openai.ts at 0162b82
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "You are Cline."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "<task>\nHi\n</task>"}, {"type": "text", "text": "Files"}],
        },
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "text"},
    ],
    "temperature": 0,
    "max_tokens": 8,
    "stream": True,
    "stream_options": {"include_usage": True},
    "tools": [{"type": "function", "function": {**TOOL, "strict": False}}],
}
ZED = {  # crates/open_ai/src/open_ai.rs at 014676e
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "You are helpful."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Hm."},
        {"role": "tool", "content": "text", "tool_call_id": "call_1"},
    ],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_completion_tokens": 8,
    "temperature": 1.0,
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "tools": [{"type": "function", "function": TOOL}],
    "prompt_cache_key": "8d3c",
    "reasoning_effort": "low",
}
OPEN_WEBUI = {  # backend/open_webui/utils/payload.py at 05746a9, with all of its parameters
    "model": "tiny",
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    "stream": True,
    "temperature": 0.8,
    "top_p": 0.9,
    "max_tokens": 8,
    "frequency_penalty": 1.1,
    "seed": 42,
    "stop": ["\n\n\n"],
}
CONTINUE_CHAT = {  # core/llm/openaiTypeConverters.ts at 0228b89
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": " ", "tool_calls": [CALL]},
        {"role": "tool", "content": "text", "tool_call_id": "call_1"},
    ],
    "model": "tiny",
    "max_tokens": 8,
    "stream": True,
    "prediction": {"type": "content", "content": "Hi"},
    "tools": [{"type": "function", "function": TOOL}],
}
CONTINUE_COMPLETE = {
    "prompt": "def f(",
    "model": "tiny",
    "max_tokens": 8,
    "temperature": 0.01,
    "stream": True,
    "stop": ["\n\n", "```"],
}
CODEX = {  # codex-rs/codex-api/src/common.rs at 001cb8e, with its function tools alone
    "model": "tiny",
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"},
        {"type": "function_call", "name": "read_file", "arguments": "{}", "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "text"},
    ],
    "tools": [{"type": "function", **TOOL, "strict": False}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0198",
    "text": {"verbosity": "medium"},
    "max_output_tokens": 8,
}
SILLYTAVERN: dict[str, Any] = {  # public/scripts/custom-request.js, for every kind of server
    "prompt": "User: Hi\nBot:",
    "model": "tiny",
    **dict.fromkeys(("max_new_tokens", "max_tokens"), 8),
    **{"temperature": 0.7, "top_p": 0.5, "min_p": 0, "repetition_penalty": 1.2, "top_k": 40, "top_a": 0, "tfs": 1},
    **dict.fromkeys(("typical_p", "typical", "dry_allowed_length"), 1),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "skew", "min_tokens", "smoothing_factor"), 0),
    **{"max_length": 2048, "add_bos_token": True, "smoothing_curve": 1, "dry_multiplier": 0, "dry_base": 1.75},
    **{"dry_sequence_breakers": '["\\n", ":"]', "dry_penalty_last_n": 0, "max_tokens_second": 0},
    **{"ban_eos_token": False, "skip_special_tokens": True, "include_reasoning": True, "mirostat_mode": 0},
    **{"mirostat_tau": 5, "mirostat_eta": 0.1, "custom_token_bans": "", "banned_strings": [], "xtc_threshold": 0.1},
    **{"xtc_probability": 0, "nsigma": 0, "stream": True, "bypass_status_check": False, "rep_pen_size": 0},
    "sampler_seed": 7,
    "api_server": "http://127.0.0.1:8000/",
}
OTHERS = {  # what it adds for servers other than vLLM
    **{"rep_pen": 1.2, "rep_pen_range": 0, "repetition_penalty_range": 0, "seed": 7, "guidance_scale": 1},
    **{"grammar_string": "", "repeat_penalty": 1.2, "tfs_z": 1, "repeat_last_n": 0, "n_predict": 8, "num_predict": 8},
    **{"mirostat": 0, "ignore_eos": False, "rep_pen_slope": 1},
}
RECORDED: dict[str, tuple[str, dict[str, Any]]] = {
    "Cline": (CHAT, CLINE),
    "Zed": (CHAT, ZED),
    "Open WebUI": (CHAT, OPEN_WEBUI),
    "Continue, chat": (CHAT, CONTINUE_CHAT),
    "Continue, completion": (COMPLETIONS, CONTINUE_COMPLETE),
    "Codex": (RESPONSES, CODEX),
    "SillyTavern, vLLM": (COMPLETIONS, {**SILLYTAVERN, "api_type": "vllm", "n": 1, "ignore_eos": False, "seed": 7}),
    "SillyTavern, generic": (COMPLETIONS, {**SILLYTAVERN, "api_type": "generic", **OTHERS}),
    "SillyTavern, llama.cpp": (
        COMPLETIONS,
        {
            **SILLYTAVERN,
            "api_type": "llamacpp",
            **OTHERS,
            "grammar": "",
            "cache_prompt": True,
            "dry_sequence_breakers": [":"],
        },
    ),
}


@pytest.mark.parametrize("client", RECORDED)
def test_a_recorded_request_is_answered(running: Running, client: str) -> None:
    path, body = RECORDED[client]
    with running.http() as http:
        answer = http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        whole = http.post(path, json={**body, "stream": False, "stream_options": None})
    assert whole.status_code == 200, whole.text
    assert "error" not in whole.json()
    assert not events[-1].get("error")
    if path == RESPONSES:
        assert events[-1]["type"] in ("response.completed", "response.incomplete")
    else:
        assert any(choice["finish_reason"] for event in events for choice in event["choices"])
