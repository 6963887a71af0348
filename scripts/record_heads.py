"""Record what others' implementations guess with heads of each format: writes ``tests/head_guesses.json``.

    python scripts/record_heads.py

It needs the package ``speculators``, see ``tests/head_references.py``. The heads' weights are random, of fixed seeds;
of each text and path that the quick tests come to, the likeliest tokens are kept.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.head_references import REFERENCES
from tests.integration.test_heads_reference import RECORDED, SHAPES, guesses, key

_KEPT = 12  # tokens of a guess


def main() -> None:
    """Write the file."""
    found: dict[str, dict[str, list[int]]] = {}
    for case, own in REFERENCES.items():
        guess, kept = own.guess(), found.setdefault(case, {})
        for shape in SHAPES:
            with tempfile.TemporaryDirectory() as folder:
                for tokens, path, _ in guesses(case, Path(folder), shape, 16):
                    if key(tokens, path) not in kept:
                        kept[key(tokens, path)] = guess(tokens, path)[-1].topk(_KEPT).indices.tolist()
        print(f"{case}: {len(kept)} guesses")
    lines = [json.dumps(case) + ": " + json.dumps(kept, separators=(",", ":")) for case, kept in found.items()]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
