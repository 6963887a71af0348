"""llama.cpp, in a process of its own: what it says of GGUF files. A file that it refuses can end its process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["LlamaCpp", "apart", "log_probabilities"]

_MARK = "answer: "
_ANSWERS = """
import json, sys
import xllamacpp

for line in sys.stdin:
    asked = json.loads(line)
    given = xllamacpp.CommonParams()
    given.model.path, given.n_ctx, given.n_parallel = asked["file"], 256, 1
    given.n_gpu_layers, given.warmup, given.verbosity, given.fit_params = 0, False, -1, False
    given.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    given.cache_type_k = given.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    given.cpuparams.n_threads = given.cpuparams_batch.n_threads = 1
    try:
        server = xllamacpp.Server(given)
        found = [server.handle_completions({"temperature": 0, "cache_prompt": False, **one}) for one in asked["asked"]]
        del server
    except RuntimeError as error:
        found = str(error)
    print("answer: " + json.dumps(found), flush=True)
"""


class LlamaCpp:
    """llama.cpp's answers; a process is begun where none runs, and ended by ``close``."""

    def __init__(self) -> None:
        self._process: Any = None

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate(timeout=60)
            self._process = None

    def logits(self, file: Path, prompts: Sequence[Sequence[int]], vocabulary: int) -> torch.Tensor | None:
        """[prompts, vocabulary] float64 log-probabilities of the tokens after each prompt; None: it is refused."""
        asked = [{"prompt": list(prompt), "n_predict": 1, "logprobs": vocabulary} for prompt in prompts]
        if (found := self._ask(file, asked)) is None:
            return None
        out = torch.full((len(prompts), vocabulary), float("-inf"), dtype=torch.float64)
        for row, answer in enumerate(found):
            for token in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
                out[row, token["id"]] = token["logprob"]
        return out.log_softmax(-1)  # they are printed in seven digits

    def ends(self, file: Path, prompt: Sequence[int], vocabulary: int) -> set[int]:
        """The tokens at which an answer ends, as each is made the likeliest in turn."""
        asked = [
            {"prompt": list(prompt), "n_predict": 2, "logit_bias": [[token, 1000.0]]} for token in range(vocabulary)
        ]
        found = self._ask(file, asked)
        assert found is not None
        return {token for token, answer in enumerate(found) if answer["choices"][0]["finish_reason"] == "stop"}

    def _ask(self, file: Path, asked: Sequence[dict[str, Any]]) -> list[Any] | None:
        if self._process is None:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            self._process = subprocess.Popen([sys.executable, "-c", _ANSWERS], text=True, **pipes)
        self._process.stdin.write(json.dumps({"file": str(file), "asked": list(asked)}) + "\n")
        self._process.stdin.flush()
        while (line := self._process.stdout.readline()) and not line.startswith(_MARK):
            pass  # what llama.cpp itself prints
        if not line:  # an assertion has ended it
            self.close()
            return None
        found = json.loads(line.removeprefix(_MARK))
        if isinstance(found, str) or any("choices" not in answer for answer in found):
            return None
        return list(found)


def log_probabilities(model: Any, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """[prompts, vocabulary] of the tokens after each prompt, by a model of transformers."""
    with torch.inference_mode():
        return torch.stack([model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1) for prompt in prompts])


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The larger divergence of two rows of log-probabilities, in nats."""
    return float((found.exp() * (found - expected)).sum(-1).abs().max())
