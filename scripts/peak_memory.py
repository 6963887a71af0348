"""Peak memory of loading a model and decoding with it, ours beside transformers', each in a process of its own.

    python scripts/peak_memory.py                                 # the embedded model
    python scripts/peak_memory.py --shape 0.5b --dtype bfloat16   # random weights of a shape
    python scripts/peak_memory.py --model PATH

Both decode the same random prompt twice; the figure is the largest resident set. What a process shares with others is
in it, such as the pages of a checkpoint and of libraries. Linux and macOS, CPU only.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
SIDES = ("transformers", "specdec")


def decode(side: str, path: str, dtype: str, prompt_tokens: int, new: int) -> float:
    """Load and decode in this process; its peak resident set in MiB."""
    import transformers  # whichever side: neither pays for the other's imports

    transformers.utils.logging.disable_progress_bar()
    if side == "specdec":
        from specdec import Engine, TransformersTarget

        target = TransformersTarget.from_pretrained(path, dtype=dtype)
        engine = Engine(target)
        for _ in range(2):
            engine.generate(prompt_of(target.vocab_size, prompt_tokens), new)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        ids = torch.tensor([prompt_of(model.config.vocab_size, prompt_tokens)])
        for _ in range(2):
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def prompt_of(vocab_size: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


def measure(options: argparse.Namespace, path: str) -> dict[str, list[float]]:
    """Peaks of each side, the sides in turn."""
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(options.repeats):
        for side in SIDES:
            command = [sys.executable, __file__, *sys.argv[1:], "--model", path, "--side", side]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[side].append(json.loads(out.splitlines()[-1]))
    return found


def save_shape(shape: str, dtype: str, folder: str) -> None:
    """In a process of its own too: what made the model should not be in anybody's way."""
    code = (
        "import sys, torch; from specdec.bench.shapes import random_model; "
        "random_model(sys.argv[1], getattr(torch, sys.argv[2])).save_pretrained(sys.argv[3])"
    )
    subprocess.run([sys.executable, "-c", code, shape, dtype, folder], check=True, capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--shape", help="random weights of this shape instead of a checkpoint")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.side:
        print(decode(options.side, options.model, options.dtype, options.prompt_tokens, options.max_new_tokens))
        return
    with tempfile.TemporaryDirectory() as folder:
        if options.shape:
            save_shape(options.shape, "float32" if options.dtype == "auto" else options.dtype, folder)
            path = folder
        else:
            from specdec.pretrained import embedded_model

            path = str(embedded_model()) if options.model == "tiny" else options.model
        found = measure(options, path)
    middle = {side: statistics.median(peaks) for side, peaks in found.items()}
    for side, peaks in found.items():
        spread = ", ".join(f"{peak:.0f}" for peak in peaks)
        print(f"{side:13} {middle[side]:6.0f} MiB ({spread}), {middle[side] / middle['transformers']:.3f}")


if __name__ == "__main__":
    main()
