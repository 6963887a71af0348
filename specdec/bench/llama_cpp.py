"""llama.cpp as a rival: greedy decoding through its C interface, from a GGUF file with the target's own weights.

It needs ``pip install llama-cpp-python gguf``. Tokens go in and come out as ids, so no tokenizer is involved. With
``file``, it decodes that file instead, for example a quantised one; that is another model, so it counts as lossy.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import numpy as np
import torch

from specdec.bench.plan import Plan
from specdec.bench.records import Output
from specdec.bench.rival import Rival
from specdec.engine.engine import Engine
from specdec.errors import ConfigError
from specdec.models.gguf_writer import add_settings, add_weights
from specdec.models.transformers_target import TransformersTarget

__all__ = ["LlamaCpp"]

_TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_BATCH = 512  # tokens in a forward of the prompt, equal to ours


class LlamaCpp(Rival):
    """Greedy decoding by llama.cpp on CPU.

    Options: ``file``, a GGUF file to decode instead of the target's weights; ``lookup``, the number of tokens that its
    n-gram lookup proposes behind the last match of two tokens (0: none).

    Raises:
        ConfigError: a package is missing, the target is not a Llama, or T > 0, as its random numbers differ from ours.
    """

    Options: ClassVar[dict[str, Any]] = {"file": None, "lookup": 0}

    def __init__(self, label: str, engine: Engine, plan: Plan, options: Mapping[str, Any]) -> None:
        super().__init__(label, engine, plan, options)
        if plan.temperature > 0:
            raise ConfigError(f"{label} is compared on greedy text; leave it out of --systems, or set --temperature 0")
        self.lossy = self.options["file"] is not None
        self.comparable = False  # the same weights in other kernels can break ties otherwise
        try:
            import llama_cpp
        except ImportError as error:
            raise ConfigError(f"{label} needs llama.cpp: pip install llama-cpp-python gguf ({error})") from error
        self._lib: Any = llama_cpp
        llama_cpp.llama_backend_init()
        llama_cpp.llama_log_set(_quiet(), None)
        arguments = llama_cpp.llama_model_default_params()
        arguments.n_gpu_layers = 0
        with tempfile.TemporaryDirectory() as folder:
            path = self.options["file"]
            if path is None:
                path = Path(folder) / "model.gguf"
                write_gguf(engine, path)
            elif not Path(path).is_file():
                raise ConfigError(f"there is no GGUF file {str(path)!r} for {label}")
            self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), arguments)
        if not self._model:
            raise ConfigError(f"llama.cpp cannot read {str(self.options['file'] or 'the weights it was given')!r}")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = min(self.target.context_length, 8192), _BATCH, _BATCH
        settings.n_threads = settings.n_threads_batch = torch.get_num_threads()
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        self._size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)

    def answer(self, prompt: list[int], budget: int) -> Output:
        began = perf_counter()
        memory = self._lib.llama_get_memory(self._context)
        self._lib.llama_memory_clear(memory, True)
        for start in range(0, len(prompt) - 1, _BATCH):
            self._forward(prompt[start : min(start + _BATCH, len(prompt) - 1)], start, wanted=False)
        filled = perf_counter()
        text, end = list(prompt), len(prompt) + budget
        steps: list[int] = []
        times: list[float] = []
        while not steps or (len(text) < end and text[-1] not in self.target.eos_ids):
            drafts = _continuation(text, self.options["lookup"])
            answers = self._forward([text[-1], *drafts], len(text) - 1)
            accepted = next((n for n, draft in enumerate(drafts) if answers[n] != draft), len(drafts))
            new = answers[: min(accepted + 1, end - len(text))]
            ends = next((n + 1 for n, token in enumerate(new) if token in self.target.eos_ids), len(new))
            text += new[:ends]
            steps.append(ends)
            times.append(perf_counter() - began)
            if accepted < len(drafts):
                self._lib.llama_memory_seq_rm(memory, 0, len(text) - 1, -1)
        ended = perf_counter()
        return Output(
            text[len(prompt) :],
            steps,
            seconds={"wall": ended - began, "prefill": filled - began},
            finish_reason="eos" if text[-1] in self.target.eos_ids else "length",
            times=times,
        )

    def _forward(self, tokens: list[int], first: int, *, wanted: bool = True) -> list[int]:
        """The greedy token behind each token; empty where they are not wanted."""
        self._batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            self._batch.token[place], self._batch.pos[place] = token, first + place
            self._batch.n_seq_id[place], self._batch.seq_id[place][0], self._batch.logits[place] = 1, 0, wanted
        if self._lib.llama_decode(self._context, self._batch):
            raise RuntimeError(f"llama.cpp could not decode {len(tokens)} tokens at position {first}")
        if not wanted:
            return []
        logits = np.ctypeslib.as_array(
            ctypes.cast(self._lib.llama_get_logits(self._context), ctypes.POINTER(ctypes.c_float)),
            (len(tokens), self._size),
        )
        answers: list[int] = logits.argmax(-1).tolist()
        return answers


def write_gguf(engine: Engine, path: Path) -> None:
    """Write the target's weights as llama.cpp reads them; queries and keys are in the order of its rotary positions.

    Raises:
        ConfigError: the model is not a Llama, or has a precision that the format lacks.
    """
    target = engine.target
    config = target.config if isinstance(target, TransformersTarget) else None
    if config is None or config.model_type != "llama" or (kind := str(target.dtype)[6:]) not in _TYPES:
        raise ConfigError(f"llama.cpp is given Llamas in {', '.join(_TYPES)}; the target is {target.name}")
    from gguf import GGMLQuantizationType, GGUFWriter

    assert isinstance(target, TransformersTarget)
    writer = GGUFWriter(path, "llama")
    add_settings(writer, config)
    writer.add_tokenizer_model("no_vocab")
    add_weights(writer, "llama", config, target.named_weights(), GGMLQuantizationType[_TYPES[kind]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _continuation(text: list[int], count: int) -> list[int]:
    """The tokens that followed the previous occurrence of the last two tokens."""
    if count:
        last = text[-2:]
        for start in range(len(text) - 3, -1, -1):
            if text[start : start + 2] == last:
                return text[start + 2 : start + 2 + count]
    return []


@cache
def _quiet() -> Any:
    """A log function that drops llama.cpp's messages; the library calls it until the process ends."""
    import llama_cpp

    return llama_cpp.llama_log_callback(lambda level, text, data: None)
