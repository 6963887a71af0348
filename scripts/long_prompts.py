"""Prompts of many tokens, on real weights: whether texts are right, and time and memory by the prompt's length.

    python scripts/long_prompts.py FILE.gguf --lengths 2048,8192,16384,32000
    python scripts/long_prompts.py smollm2 --lengths 2048,8000 --no-reference

Each length has a process of its own, so that the peak of its memory is the largest resident set. The prompt is
Python's standard library, as text. ``none`` runs it and writes ``--new`` tokens; the drafter goes on from the kept
prompt and must write the same. The reference is the model's own modules with torch's attention
(``execution="modules"``), which share no layer with native ones: the last column is how far the log-probability of
the first new token is away from theirs. Prints a table; ends with 1 where a text differs.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer


def measure(setup: dict[str, Any]) -> dict[str, Any]:
    """What one process finds of one length."""
    import torch

    from specdec import Engine, PrefixCache

    torch.set_num_threads(setup["threads"])
    engine = Engine.from_pretrained(setup["model"], "none", execution=setup["execution"], policy="off")
    engine.generate("x = 1\n", 4)  # compiles and maps what is needed
    prompt, kept = prompt_of(engine.tokenizer, setup["length"]), PrefixCache()
    plain = engine.generate(prompt, setup["new"], prefix_cache=kept, logprobs=0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    assert plain.logprobs is not None
    found = {
        "prompt": plain.stats.seconds.prefill,
        "plain": plain.stats.tokens_per_second,
        "peak": peak,
        "first": [plain.token_ids[0], plain.logprobs[0].logprob],
    }
    if setup["drafter"]:
        drafted = engine.with_drafter(setup["drafter"]).generate(prompt, setup["new"], prefix_cache=kept)
        found |= {
            "drafted": drafted.stats.tokens_per_second,
            "steps": drafted.stats.tokens_per_step,
            "reused": drafted.stats.reused_tokens,
            "equal": drafted.token_ids == plain.token_ids,
        }
    return found


def prompt_of(tokenizer: Any, length: int) -> list[int]:
    """The first ``length`` tokens of the standard library's modules, in the order of their names."""
    ids, files = list[int](), sorted(Path(os.__file__).parent.glob("[a-z]*.py"))
    for file in files:
        if len(ids) >= length:
            return ids[:length]
        ids += tokenizer(file.read_text("utf-8"))["input_ids"]
    sys.exit(f"the standard library has {len(ids)} tokens; give a length up to that")


def apart(setup: dict[str, Any]) -> dict[str, Any]:
    """``measure`` in a process of its own."""
    environment = {**os.environ, "SPECDEC_LONG_PROMPTS": json.dumps(setup)}
    done = subprocess.run([sys.executable, __file__], env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"the process for {setup['length']} tokens ended with {done.returncode}; what it says is above")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(
    model: Annotated[str, typer.Argument(help="A model, as specdec generate takes it.")],
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts.")] = "2048,8192,16384,32000",
    new: Annotated[int, typer.Option(help="Tokens to write behind each.")] = 64,
    drafter: Annotated[str, typer.Option(help="A drafter beside none.")] = "auto",
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    reference: Annotated[bool, typer.Option(help="Whether the model's own modules run the prompts, too.")] = True,
) -> None:
    """Measure prompts of these lengths."""
    print(
        "| prompt, tokens | its seconds | tokens/s | plain, tokens/s | drafted | tokens per step | peak, MiB | away |"
    )
    print("| --: | --: | --: | --: | --: | --: | --: | --: |")
    right = True
    for length in map(int, lengths.split(",")):
        setup = {"model": model, "length": length, "threads": threads, "new": new, "drafter": drafter}
        own, away = apart({**setup, "execution": "auto"}), ""
        if reference:
            theirs = apart({**setup, "execution": "modules", "drafter": "", "new": 1})
            (token, logprob), (other, its) = own["first"], theirs["first"]
            away = f"{abs(logprob - its):.1e}" if token == other else f"{token}, not {other}"
        if not own["equal"] or own["reused"] != length - 1:
            right, away = False, f"{away} TEXTS DIFFER" if not own["equal"] else f"{away} {own['reused']} kept"
        figures = [f"{own['prompt']:.1f}", f"{length / own['prompt']:.0f}", f"{own['plain']:.1f}"]
        figures += [f"{own['drafted']:.1f}", f"{own['steps']:.2f}", f"{own['peak']:.0f}", away]
        print(f"| {length:,} | {' | '.join(figures)} |", flush=True)
    sys.exit(not right)


if __name__ == "__main__":
    if setup := os.environ.get("SPECDEC_LONG_PROMPTS"):
        print(json.dumps(measure(json.loads(setup))))
    else:
        typer.run(main)
