"""llama.cpp's server as a rival, with its own speculation: greedy decoding of a GGUF file by the package xllamacpp.

It needs ``pip install xllamacpp``. Tokens go in and come out as ids, so no tokenizer is involved. The file can have
another model than the target, such as a quantised one, so it counts as lossy.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import torch

from specdec.bench.plan import Plan
from specdec.bench.records import Output
from specdec.bench.rival import Rival
from specdec.engine.engine import Engine
from specdec.errors import ConfigError, check_choice

__all__ = ["XLlamaCpp"]

_PREFIX = "COMMON_SPECULATIVE_TYPE_"
_CONTEXT = 8192  # tokens


class XLlamaCpp(Rival):
    """Greedy decoding by llama.cpp's server on CPU.

    Options: ``file``, the GGUF file; ``spec_type``, as of its ``--spec-type``, such as ``ngram-simple`` (``none``);
    ``draft``, the GGUF file of a draft model, with ``spec_type`` ``draft-simple``.

    Raises:
        ConfigError: the package or a file is missing, the type is unknown, or T > 0, as its random numbers differ from
            ours.
    """

    Options: ClassVar[dict[str, Any]] = {"file": None, "spec_type": "none", "draft": None}

    def __init__(self, label: str, engine: Engine, plan: Plan, options: Mapping[str, Any]) -> None:
        super().__init__(label, engine, plan, options)
        if plan.temperature > 0:
            raise ConfigError(f"{label} is compared on greedy text; leave it out of --systems, or set --temperature 0")
        self.lossy, self.comparable = True, False
        for option in ("file", "draft"):
            path = self.options[option]
            if (path is None and option == "file") or (path is not None and not Path(path).is_file()):
                raise ConfigError(f"{option} of {label} is {path!r}; it must be a GGUF file")
        try:
            import xllamacpp
        except ImportError as error:
            raise ConfigError(f"{label} needs llama.cpp's server: pip install xllamacpp ({error})") from error
        types = {
            name.removeprefix(_PREFIX).lower().replace("_", "-"): getattr(xllamacpp.common_speculative_type, name)
            for name in dir(xllamacpp.common_speculative_type)
            if name.startswith(_PREFIX) and not name.endswith("_COUNT")
        }
        arguments = xllamacpp.CommonParams()
        arguments.model.path = str(self.options["file"])
        arguments.n_ctx, arguments.n_parallel = min(self.target.context_length, _CONTEXT), 1
        arguments.n_gpu_layers, arguments.warmup, arguments.verbosity = 0, False, -1
        threads = torch.get_num_threads()
        arguments.cpuparams.n_threads = arguments.cpuparams_batch.n_threads = threads
        speculative = arguments.speculative
        speculative.types = [types[check_choice(f"spec_type of {label}", self.options["spec_type"], [*types])]]
        if self.options["draft"] is not None:
            draft = speculative.draft
            draft.mparams.path = str(self.options["draft"])
            draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = threads
        self._server = xllamacpp.Server(arguments)

    def answer(self, prompt: list[int], budget: int) -> Output:
        began = perf_counter()
        asked = {"prompt": list(prompt), "max_tokens": budget, "temperature": 0, "cache_prompt": False, "logprobs": 1}
        found = self._server.handle_completions(asked)  # it returns token ids only with logprobs
        wall = perf_counter() - began
        if "choices" not in found:
            raise RuntimeError(f"llama.cpp's server answers {found}")
        (choice,), timings = found["choices"], found["timings"]
        ids = [token["id"] for token in choice["logprobs"]["content"]]
        ended = choice["finish_reason"] == "stop"
        if ended and (not ids or ids[-1] not in self.target.eos_ids):
            ids.append(min(self.target.eos_ids))  # the server omits the end token and does not say which it was
        return Output(
            ids,
            _spread(len(ids), len(ids) - timings.get("draft_n_accepted", 0)),
            seconds={"wall": wall, "prefill": timings["prompt_ms"] / 1e3},
            finish_reason="eos" if ended else "length",
        )


def _spread(tokens: int, steps: int) -> list[int]:
    """The tokens of each step; the server reports only the number of steps."""
    steps = max(steps, 1)
    return [tokens // steps + (step < tokens % steps) for step in range(steps)]
