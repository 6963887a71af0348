"""Peak memory of loading a model and decoding with it, ours beside transformers', each in a process of its own.

    python scripts/peak_memory.py                                 # the embedded model
    python scripts/peak_memory.py --shape 0.5b --dtype bfloat16   # random weights of a shape
    python scripts/peak_memory.py --model PATH

Both decode the same random prompt twice; the figure is the largest resident set. What a process shares with others is
in it, such as the pages of a checkpoint and of libraries. Linux and macOS, CPU only.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
SIDES = ("transformers", "specdec")


def decode(side: str, path: str, options: argparse.Namespace) -> float:
    """Load and decode in this process; its peak resident set in MiB."""
    import transformers  # whichever side: neither pays for the other's imports

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    if side == "specdec":
        from specdec import Engine, TransformersTarget

        target = TransformersTarget.from_pretrained(path, dtype=options.dtype)
        engine = Engine(target)
        for _ in range(2):
            engine.generate(prompt_of(target.vocab_size, options.prompt_tokens), options.max_new_tokens)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=options.dtype)
        ids = torch.tensor([prompt_of(model.config.vocab_size, options.prompt_tokens)])
        new = {"max_new_tokens": options.max_new_tokens, "do_sample": False}
        for _ in range(2):
            model.generate(ids, attention_mask=torch.ones_like(ids), **new)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def prompt_of(vocab_size: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


def place_of(options: argparse.Namespace, folder: str) -> str:
    """The folder of the model, which is made where it is a shape's."""
    if options.shape:
        from specdec.bench.shapes import random_model

        dtype = torch.float32 if options.dtype == "auto" else getattr(torch, options.dtype)
        random_model(options.shape, dtype).save_pretrained(folder)
        return folder
    from specdec.models.names import model_source

    return str(model_source(options.model))


def alone(function: Any, *arguments: Any) -> Any:
    """What a function returns, called in a new process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--shape", help="random weights of this shape instead of a checkpoint")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = alone(place_of, options, folder)
        rounds = [{side: alone(decode, side, path, options) for side in SIDES} for _ in range(options.repeats)]
    found = {side: [peaks[side] for peaks in rounds] for side in SIDES}
    middle = {side: statistics.median(peaks) for side, peaks in found.items()}
    for side, peaks in found.items():
        spread = ", ".join(f"{peak:.0f}" for peak in peaks)
        print(f"{side:13} {middle[side]:6.0f} MiB ({spread}), {middle[side] / middle['transformers']:.3f}")


if __name__ == "__main__":
    main()
