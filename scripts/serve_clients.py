"""Clients that people use, run against a server: the table of docs/clients.md.

    python scripts/serve_clients.py --model smollm2 --venvs runs/clients       # starts a server
    python scripts/serve_clients.py --url http://127.0.0.1:8000 --only openai --venvs runs/clients

Each client is installed into a virtual environment of its own under ``--venvs``, at the version that its file in
scripts/clients names, and does what its users do. Prints the table; ends with 1 where a use fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

USES = Path(__file__).parent / "clients"
CLIENTS = sorted(path.stem.removeprefix("uses_").replace("_", "-") for path in USES.glob("uses_*.py"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="what a server that is started serves")
    parser.add_argument("--url", help="of a server that runs already")
    parser.add_argument("--venvs", type=Path, required=True, help="the folder of the environments")
    parser.add_argument("--only", nargs="*", choices=CLIENTS, default=CLIENTS, help="clients")
    given = parser.parse_args()
    failed = 0
    with started(given.model) if given.url is None else nothing(given.url) as base:
        print("| client | works | fails |\n|---|---|---|", flush=True)
        for name in given.only:
            uses = f"uses_{name.replace('-', '_')}"
            packages = json.loads(re.search(r"dependencies = (.*)", (USES / f"{uses}.py").read_text())[1])
            results = run(installed(given.venvs / name, packages), uses, base, given.model)
            works = ", ".join(use for use, error in results if not error)
            fails = "; ".join(f"{use}: {error}" for use, error in results if error)
            failed += bool(fails)
            print(f"| {packages[0].replace('==', ' ')} | {works} | {fails} |", flush=True)
    sys.exit(failed > 0)


def installed(folder: Path, packages: list[str]) -> Path:
    """The interpreter of an environment that has the packages."""
    python, done = folder / "bin/python", folder / "packages.json"
    if not done.is_file() or json.loads(done.read_text()) != packages:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        done.write_text(json.dumps(packages))
    return python


def run(python: Path, uses: str, base: str, model: str) -> list[tuple[str, str]]:
    """Each use of a client, and its error, which is empty where it works."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"BASE": base, "MODEL": model}
    done = subprocess.run([python, USES / "run.py", uses], env=env, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    found = [(use, error) for use, error in map(json.loads, lines)]
    return found if done.returncode == 0 else [*found, ("start", (done.stderr.strip().splitlines() or ["nothing"])[-1])]


@contextmanager
def started(model: str, *options: str) -> Iterator[str]:
    """The address of a server that is started here."""
    command = [sys.executable, "-m", "specdec", "serve", "--model", model, "--port", "0", *options]
    with TemporaryFile("w+") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            end = time.monotonic() + 600
            while time.monotonic() < end and process.poll() is None:
                log.seek(0)
                if found := re.search(r"(http://\S+) serves", log.read()):
                    break
                time.sleep(0.2)
            else:
                sys.exit("the server did not start")
            yield found[1]
        finally:
            process.terminate()


@contextmanager
def nothing(base: str) -> Iterator[str]:
    """The address as it is."""
    yield base.rstrip("/")


if __name__ == "__main__":
    main()
