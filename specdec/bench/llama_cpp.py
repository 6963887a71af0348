"""llama.cpp's server as a rival: greedy decoding of the target's own weights, or of a GGUF file, by xllamacpp.

It needs ``pip install xllamacpp gguf``. Tokens go in and come out as ids, so no tokenizer is involved.
"""

from __future__ import annotations

import tempfile
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
from specdec.models.gguf_writer import add_settings, add_weights

__all__ = ["LlamaCpp", "write_gguf"]

_TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_PREFIX = "COMMON_SPECULATIVE_TYPE_"
_CONTEXT = 8192  # tokens


class LlamaCpp(Rival):
    """Greedy decoding by llama.cpp's server on CPU.

    Options: ``file``, a GGUF file to decode instead of the target's weights, for example a quantised one, which is
    another model and counts as lossy; ``spec_type``, as of its ``--spec-type``, such as ``ngram-simple`` (``none``);
    ``draft``, the GGUF file of a draft model, with ``spec_type`` ``draft-simple``.

    Raises:
        ConfigError: a package or a file is missing, the type is unknown, the target is not a Llama and no file is
            given, or T > 0, as its random numbers differ from ours.
    """

    Options: ClassVar[dict[str, Any]] = {"file": None, "spec_type": "none", "draft": None}

    def __init__(self, label: str, engine: Engine, plan: Plan, options: Mapping[str, Any]) -> None:
        super().__init__(label, engine, plan, options)
        if plan.temperature > 0:
            raise ConfigError(f"{label} is compared on greedy text; leave it out of --systems, or set --temperature 0")
        self.lossy = self.options["file"] is not None
        self.comparable = False  # the same weights in other kernels can break ties otherwise
        for option in ("file", "draft"):
            path = self.options[option]
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"{option} of {label} is {str(path)!r}; it must be a GGUF file")
        try:
            import xllamacpp
        except ImportError as error:
            raise ConfigError(f"{label} needs llama.cpp's server: pip install xllamacpp gguf ({error})") from error
        with tempfile.TemporaryDirectory() as folder:
            path = self.options["file"] or write_gguf(engine, Path(folder) / "model.gguf")
            self._server = xllamacpp.Server(self._parameters(xllamacpp, path))

    def _parameters(self, xllamacpp: Any, path: Path | str) -> Any:
        types = {
            name.removeprefix(_PREFIX).lower().replace("_", "-"): getattr(xllamacpp.common_speculative_type, name)
            for name in dir(xllamacpp.common_speculative_type)
            if name.startswith(_PREFIX) and not name.endswith("_COUNT")
        }
        arguments = xllamacpp.CommonParams()
        arguments.model.path = str(path)
        arguments.n_ctx, arguments.n_parallel = min(self.target.context_length, _CONTEXT), 1
        arguments.n_gpu_layers, arguments.warmup, arguments.verbosity = 0, False, -1
        threads = torch.get_num_threads()
        arguments.cpuparams.n_threads = arguments.cpuparams_batch.n_threads = threads
        speculative = arguments.speculative
        speculative.types = [types[check_choice(f"spec_type of {self.label}", self.options["spec_type"], [*types])]]
        if self.options["draft"] is not None:
            draft = speculative.draft
            draft.mparams.path = str(self.options["draft"])
            draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = threads
        return arguments

    def answer(self, prompt: list[int], budget: int) -> Output:
        began = perf_counter()
        asked = {"prompt": list(prompt), "max_tokens": budget, "temperature": 0, "cache_prompt": False}
        asked |= {"ignore_eos": not self.target.eos_ids, "logprobs": 1}  # it returns token ids only with logprobs
        found = self._server.handle_completions(asked)
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


def write_gguf(engine: Engine, path: Path) -> Path:
    """Write the target's weights as llama.cpp reads them, with names for its tokens that say only their numbers.

    Returns the path.

    Raises:
        ConfigError: the model is not a Llama, or has a precision that the format lacks.
    """
    target = engine.target
    config = target.config
    if config is None or config.model_type != "llama" or (kind := str(target.dtype)[6:]) not in _TYPES:
        raise ConfigError(f"llama.cpp is given Llamas in {', '.join(_TYPES)}; the target is {target.name}")
    from gguf import GGMLQuantizationType, GGUFWriter, TokenType

    writer = GGUFWriter(path, "llama")
    add_settings(writer, config)
    count = config.vocab_size
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<0x{n:02X}>" if n < 256 else f"t{n}" for n in range(count)])
    writer.add_token_scores([0.0] * count)
    writer.add_token_types([TokenType.BYTE if n < 256 else TokenType.NORMAL for n in range(count)])
    ends = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)  # as many as a file can name
    for add, token in zip(ends, sorted(target.eos_ids), strict=False):
        add(token)
    add_weights(writer, "llama", config, target.named_weights(), GGMLQuantizationType[_TYPES[kind]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
