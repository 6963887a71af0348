"""llama.cpp on the same model, prompts and core, plain and with its n-gram lookup, beside ours and transformers'.

    pip install llama-cpp-python gguf
    OMP_NUM_THREADS=1 python scripts/compare_llama_cpp.py --threads 1

The model goes into a GGUF file with its own weights (``--type f32`` or ``bf16``); tokens go in and come out as numbers,
so no tokenizer is involved. Systems run in turn; medians are printed, and how many texts are those of transformers.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import llama_cpp
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from scripts.bench_engine import held_out_prompts
from specdec import Engine
from specdec.pretrained import embedded_model

_TYPES = {"f32": GGMLQuantizationType.F32, "bf16": GGMLQuantizationType.BF16, "f16": GGMLQuantizationType.F16}
_LOOKUP = 5  # tokens that its n-gram lookup proposes, from the last match of two tokens


def write_gguf(model: Any, path: Path, kind: str) -> None:
    """A Llama of transformers as llama.cpp reads it; queries and keys in the order of its rotary positions."""
    config, state = model.config, model.state_dict()
    writer = GGUFWriter(path, "llama")
    heads, key_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("no_vocab")

    def add(name: str, tensor: torch.Tensor, turned: int = 0) -> None:
        if turned:
            tensor = tensor.view(turned, 2, dim // 2, -1).transpose(1, 2).reshape(tensor.shape)
        values = tensor.float().contiguous().numpy()
        chosen = _TYPES[kind] if values.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(values, chosen), raw_dtype=chosen)

    add("token_embd.weight", state["model.embed_tokens.weight"])
    add("output_norm.weight", state["model.norm.weight"])
    if not config.tie_word_embeddings:
        add("output.weight", state["lm_head.weight"])
    for n in range(config.num_hidden_layers):
        ours, theirs = f"model.layers.{n}.", f"blk.{n}."
        add(theirs + "attn_norm.weight", state[ours + "input_layernorm.weight"])
        add(theirs + "ffn_norm.weight", state[ours + "post_attention_layernorm.weight"])
        add(theirs + "attn_q.weight", state[ours + "self_attn.q_proj.weight"], heads)
        add(theirs + "attn_k.weight", state[ours + "self_attn.k_proj.weight"], key_heads)
        for name, part in (("attn_v", "self_attn.v_proj"), ("attn_output", "self_attn.o_proj")):
            add(f"{theirs}{name}.weight", state[f"{ours}{part}.weight"])
        for name in ("gate", "up", "down"):
            add(f"{theirs}ffn_{name}.weight", state[f"{ours}mlp.{name}_proj.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaCpp:
    """Greedy decoding by llama.cpp's C interface."""

    def __init__(self, path: Path, threads: int, context: int) -> None:
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch = context, 512
        settings.n_threads = settings.n_threads_batch = threads
        settings.type_k = settings.type_v = 0  # float32
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._batch = llama_cpp.llama_batch_init(512, 0, 1)

    def plain(self, prompt: list[int], count: int) -> tuple[list[int], float]:
        """Tokens, and the seconds after the prompt."""
        return self._decode(prompt, count, lambda text: [])

    def lookup(self, prompt: list[int], count: int) -> tuple[list[int], float]:
        """The same with drafts that followed the last two tokens before."""
        return self._decode(prompt, count, _continuation)

    def _decode(
        self, prompt: list[int], count: int, guess: Callable[[list[int]], list[int]]
    ) -> tuple[list[int], float]:
        memory = llama_cpp.llama_get_memory(self._context)
        llama_cpp.llama_memory_clear(memory, True)
        text = list(prompt)
        text += self._forward(prompt, 0)[-1:]
        start = perf_counter()
        while len(text) - len(prompt) < count:
            drafts = guess(text)
            answers = self._forward([text[-1], *drafts], len(text) - 1)
            accepted = next((n for n, draft in enumerate(drafts) if answers[n] != draft), len(drafts))
            text += answers[: accepted + 1]
            if accepted < len(drafts):
                llama_cpp.llama_memory_seq_rm(memory, 0, len(text) - 1, -1)
        return text[len(prompt) :][:count], perf_counter() - start

    def _forward(self, tokens: list[int], first: int) -> list[int]:
        """The greedy answer after each token."""
        self._batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            self._batch.token[place], self._batch.pos[place] = token, first + place
            self._batch.n_seq_id[place], self._batch.seq_id[place][0], self._batch.logits[place] = 1, 0, True
        if llama_cpp.llama_decode(self._context, self._batch):
            raise RuntimeError("llama_decode failed")
        logits = np.ctypeslib.as_array(
            ctypes.cast(llama_cpp.llama_get_logits(self._context), ctypes.POINTER(ctypes.c_float)),
            (len(tokens), self._size),
        )
        answers: list[int] = logits.argmax(-1).tolist()
        return answers


def _continuation(text: list[int]) -> list[int]:
    last = text[-2:]
    for start in range(len(text) - 3, -1, -1):
        if text[start : start + 2] == last:
            return text[start + 2 : start + 2 + _LOOKUP]
    return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--type", choices=_TYPES, default="f32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    engine = Engine.from_pretrained(embedded_model())
    model = engine.target.plain_model()
    engine.target.eos_ids, model.generation_config.eos_token_id = frozenset(), None  # all texts to the full length
    prompts = held_out_prompts(lambda text: engine.tokenizer(text)["input_ids"], options.prompts, options.prompt_tokens)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_gguf(model, path, options.type)
        rival = LlamaCpp(path, options.threads, 1024)

    def theirs(prompt: list[int], count: int) -> tuple[list[int], float]:
        ids = torch.tensor([prompt])
        times = []
        for new in (1, count):
            start = perf_counter()
            out = model.generate(ids, max_new_tokens=new, do_sample=False)
            times.append(perf_counter() - start)
        return out[0, len(prompt) :].tolist(), times[1] - times[0]

    def ours(name: str) -> Callable[[list[int], int], tuple[list[int], float]]:
        drafting = engine.with_drafter(name)

        def run(prompt: list[int], count: int) -> tuple[list[int], float]:
            out = drafting.generate(prompt, count)
            return out.token_ids, out.stats.seconds.decode

        return run

    systems = {
        "transformers greedy": theirs,
        "specdec none": ours("none"),
        "llama.cpp": rival.plain,
        "specdec prompt_lookup": ours("prompt_lookup"),
        "specdec auto": ours("auto"),
        "llama.cpp lookup": rival.lookup,
    }
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    texts: dict[str, list[list[int]]] = {name: [] for name in systems}
    for repeat in range(-1, options.repeats):
        total = dict.fromkeys(systems, 0.0)
        for prompt in prompts:
            for name, run in systems.items():
                tokens, took = run(prompt, options.tokens)
                total[name] += took
                if repeat < 0:
                    texts[name].append(tokens)
        if repeat >= 0:
            for name, took in total.items():
                seconds[name].append(took)
    base = statistics.median(seconds["transformers greedy"])
    table = Table(
        "system", "tokens/s", "x transformers", "same texts", title=f"{options.type}, {options.threads} threads"
    )
    for name, found in seconds.items():
        median = statistics.median(found)
        same = sum(a == b for a, b in zip(texts[name], texts["transformers greedy"], strict=True))
        speed = len(prompts) * (options.tokens - 1) / median
        table.add_row(name, f"{speed:.0f}", f"{base / median:.2f}", f"{same}/{len(prompts)}")
    Console().print(table)


if __name__ == "__main__":
    main()
