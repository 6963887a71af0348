"""A quantised GGUF file, decoded by specdec and by llama.cpp in one interleaved run: speed, texts, loading, memory.

    python scripts/bench_quantised.py FILE.gguf --llama FOLDER              # where xllamacpp is installed
    python scripts/bench_quantised.py FILE.gguf --draft SMALL.gguf --threads 1 --threads 2 --seconds 100

Questions go round by round to every system, and each text is held against the same system's own plain one. Speeds are
of decoding alone, after the prompt. Loading is from the start of a process to the first token, and peak memory the
largest resident set of that process; both in processes of their own. llama.cpp is the package xllamacpp.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BEGAN = time.perf_counter()
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
QUESTIONS = Path(__file__).with_name("code_questions.txt").read_text(encoding="utf-8").splitlines()
LOADED = ("import", "model", "first token")
ACTIVATIONS = {"specdec": "default", "specdec int8": "int8"}

Answer = Callable[[list[int], int], tuple[Any, float]]
"""Tokens of a prompt, and how many are wanted, to the text, or its tokens, and tokens a second."""


def ours(target: Any, tokenizer: Any, drafter: Any) -> Answer:
    from specdec import Engine

    engine = Engine(target, tokenizer, drafter, policy="acceptance")  # as from_pretrained makes it

    def answer(prompt: list[int], count: int) -> tuple[Any, float]:
        found = engine.generate(prompt, count)
        return found.token_ids, found.stats.tokens_per_second

    return answer


def llama(folder: str, file: str, threads: int, kind: str = "NONE", draft: str | None = None) -> Answer:
    sys.path.insert(0, folder)
    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path = file
    options.n_ctx, options.n_parallel, options.n_gpu_layers, options.warmup = 2048, 1, 0, False
    options.verbosity = -1
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
    options.speculative.types = [getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{kind}")]
    if draft is not None:
        options.speculative.draft.mparams.path = draft
        options.speculative.draft.cpuparams.n_threads = options.speculative.draft.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(options)

    def answer(prompt: list[int], count: int) -> tuple[Any, float]:
        asked = {"prompt": prompt, "max_tokens": count, "temperature": 0, "cache_prompt": False}
        found = server.handle_completions(asked)
        return found["choices"][0]["text"], found["timings"]["predicted_per_second"]

    return answer


def load_and_tell(options: argparse.Namespace) -> None:
    """In a process of its own: seconds to the first token, and the largest resident set."""
    prompt, system, threads = [*range(100, 116)], options.alone, options.threads[0]
    if system != "llama.cpp":
        import torch

        torch.set_num_threads(threads)
        from specdec import Engine

        imported = time.perf_counter()
        engine = Engine.from_pretrained(options.file, activations=ACTIVATIONS[system])
        loaded = time.perf_counter()
        engine.generate(prompt, 1)
    else:
        imported = time.perf_counter()
        answer = llama(options.llama, options.file, threads)
        loaded = time.perf_counter()
        answer(prompt, 1)
    # Not getrusage's, which begins with what the process held that started this one.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) / 1024
    seconds = [imported - BEGAN, loaded - imported, time.perf_counter() - loaded]
    print(json.dumps({"seconds": dict(zip(LOADED, seconds, strict=True)), "peak MiB": peak}))


def alone(system: str, options: argparse.Namespace, threads: int) -> dict[str, Any]:
    command = [sys.executable, __file__, options.file, "--alone", system, "--threads", str(threads)]
    command += ["--llama", options.llama] if options.llama else []
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(options: argparse.Namespace, threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    from specdec import Engine

    tokenizer: Any = None
    systems: dict[str, Answer] = {}
    drafters: dict[str, Any] = {"plain": "none", "auto": "auto"}
    if options.draft:
        drafters["draft_model"] = {"name": "draft_model", "model": options.draft}
    for own, activations in ACTIVATIONS.items():
        engine = Engine.from_pretrained(options.file, tokenizer=tokenizer, activations=activations)
        tokenizer = engine.tokenizer
        for name, drafter in drafters.items():
            systems[f"{own}, {name}"] = ours(engine.target, tokenizer, drafter)
    if options.llama:
        systems["llama.cpp, plain"] = llama(options.llama, options.file, threads)
        for kind in options.types:
            systems[f"llama.cpp, {kind.lower()}"] = llama(options.llama, options.file, threads, kind)
        if options.draft:
            name = "llama.cpp, draft model"
            systems[name] = llama(options.llama, options.file, threads, "DRAFT_SIMPLE", options.draft)
    speeds: dict[str, list[float]] = {name: [] for name in systems}
    differs = dict.fromkeys(systems, 0)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for question in QUESTIONS[: options.questions]
    ]
    began, done = time.perf_counter(), 0
    for prompt in prompts:
        if options.seconds and done and time.perf_counter() - began > options.seconds:
            break
        done += 1
        texts = {}
        for name, answer in systems.items():
            texts[name], speed = answer(list(prompt), options.tokens)
            speeds[name].append(speed)
            differs[name] += texts[name] != texts[f"{name.split(',')[0]}, plain"]
    print(f"\n{Path(options.file).name}, {threads} thread(s), {done} questions, {options.tokens} tokens each")
    base = statistics.median(speeds["specdec, plain"])
    for name, found in speeds.items():
        middle = statistics.median(found)
        print(f"  {name:26} {middle:7.1f} tokens/s  {middle / base:5.2f} x our plain  {differs[name]} texts differ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--draft", help="a smaller file of the same tokens")
    parser.add_argument("--llama", default="", help="the folder in which xllamacpp is installed")
    parser.add_argument("--types", nargs="*", default=["NGRAM_SIMPLE", "NGRAM_MOD"], help="llama.cpp's speculation")
    parser.add_argument("--threads", type=int, action="append")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=0, help="after which no question begins, a number of threads")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.threads = options.threads or [1, 2]
    if options.alone:
        load_and_tell(options)
        return
    size = Path(options.file).stat().st_size / 2**20
    for threads in options.threads:
        for system in (*ACTIVATIONS, "llama.cpp") if options.llama else ACTIVATIONS:
            found = alone(system, options, threads)
            parts = ", ".join(f"{name} {value:.1f} s" for name, value in found["seconds"].items())
            print(
                f"{system:12} {threads} thread(s): {parts}; peak {found['peak MiB']:.0f} MiB for a file of {size:.0f}"
            )
        compare(options, threads)


if __name__ == "__main__":
    main()
