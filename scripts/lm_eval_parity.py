"""lm-eval by the server's ``/v1/completions`` beside its own ``hf`` model: the same log-probabilities and accuracy.

    python scripts/lm_eval_parity.py --model smollm2 --venv runs/lm-eval

Both have the model in float32 and a task of multiple choice that is made here, so nothing is downloaded but packages.
lm-eval is installed into an environment of its own. Prints the largest difference of a token's log-probability (a
choice's sum over its tokens) and both accuracies; ends with 1 where it is above 1e-4 or the accuracies differ.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from serve_clients import installed, started

PACKAGES = [
    "lm_eval==0.4.13",
    "torch==2.13.0",
    "transformers==5.23.0",
    "accelerate==1.15.0",
    "aiohttp",
    "tenacity",
    "tiktoken",
]
MOST = 1e-4  # of a token

TASK = """
task: parity
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
"""

EVALUATE = """
import json, sys
import lm_eval
from lm_eval.tasks import TaskManager
model, arguments, folder = json.loads(sys.argv[1])
found = lm_eval.simple_evaluate(
    model=model, model_args=arguments, tasks=["parity"], batch_size=1, log_samples=True, bootstrap_iters=0,
    task_manager=TaskManager(include_path=folder, include_defaults=False),
)
samples = sorted(found["samples"]["parity"], key=lambda sample: sample["doc_id"])
choices = [[float(choice[0][0]) for choice in sample["resps"]] for sample in samples]
print(json.dumps([found["results"]["parity"]["acc,none"], choices]))
"""


def questions() -> list[dict[str, Any]]:
    """Sums, days and sequences, with four choices each, of which ``answer`` is the right one."""
    rng, asked = random.Random(1), list[tuple[str, str, list[str]]]()  # question, right choice, and all that may be
    numbers = [str(number) for number in range(4, 60)]
    for _ in range(20):
        one, other = rng.randrange(2, 30), rng.randrange(2, 30)
        asked.append((f"Question: what is {one} + {other}?\nAnswer:", str(one + other), numbers))
    days = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
    asked += [(f"The day after {day} is", days[(place + 1) % 7], days) for place, day in enumerate(days)]
    for _ in range(13):
        first, step = rng.randrange(1, 9), rng.randrange(1, 9)
        told = ", ".join(str(first + step * turn) for turn in range(5))
        asked.append((f"The sequence {told} goes on with", str(first + step * 5), numbers))
    made = list[dict[str, Any]]()
    for question, right, all_choices in asked:
        choices = rng.sample([choice for choice in all_choices if choice != right], 3)
        choices.insert(place := rng.randrange(4), right)
        made.append({"question": question, "choices": [f" {choice}" for choice in choices], "answer": place})
    return made


def evaluate(python: Path, model: str, arguments: str, folder: str) -> tuple[float, list[list[float]]]:
    """Accuracy, and the log-probability of each choice of each question."""
    told = json.dumps([model, arguments, folder])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [python, "-c", EVALUATE, told], stdout=subprocess.PIPE, text=True, check=True, env=environment
    )
    accuracy, choices = json.loads(done.stdout.splitlines()[-1])
    return accuracy, choices


def main() -> None:
    from specdec.models.names import model_source
    from specdec.models.tokenizer import load_tokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--venv", type=Path, required=True, help="the folder of lm-eval's environment")
    parser.add_argument("--questions", type=int, default=40, help="at most 40")
    given = parser.parse_args()
    place, asked = model_source(given.model), questions()[: given.questions]
    python = installed(given.venv, PACKAGES)
    with TemporaryDirectory() as folder, started(given.model, "--dtype", "float32") as base:
        file = Path(folder, "questions.jsonl")
        file.write_text("\n".join(map(json.dumps, asked)) + "\n")
        Path(folder, "parity.yaml").write_text(TASK.format(file=file))
        theirs = evaluate(python, "hf", f"pretrained={place},dtype=float32,device=cpu", folder)
        server = f"model={given.model},base_url={base}/v1/completions,tokenizer={place},num_concurrent=1"
        ours = evaluate(python, "local-completions", server, folder)
    tokenizer = load_tokenizer(place)
    away = max(
        abs(one - other) / len(tokenizer(choice, add_special_tokens=False)["input_ids"])
        for question, *both in zip(asked, ours[1], theirs[1], strict=True)
        for choice, one, other in zip(question["choices"], *both, strict=True)
    )
    print(f"{len(asked)} questions; a token's log-probability is at most {away:.1e} away", end="; ")
    print(f"accuracy {ours[0]:.3f} by the server, {theirs[0]:.3f} by hf")
    sys.exit(away > MOST or ours[0] != theirs[0])


if __name__ == "__main__":
    main()
