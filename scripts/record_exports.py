"""Record what the package ``speculators`` guesses with heads that were exported: writes ``tests/head_exports.json``.

    python scripts/record_exports.py

It needs that package, see ``tests/head_references.py``. The heads are those of the tests of training; of each text and
path that the quick ones come to, the likeliest tokens are kept.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tests.head_references import exported
from tests.integration.test_heads_reference import key
from tests.integration.test_training_heads import CASES, EXPORTED, FAMILY, drafts, exports
from tests.models import target_of

_KEPT = 12  # tokens of a guess


def main() -> None:
    """Write the file."""
    found: dict[str, dict[str, list[int]]] = {}
    for kind, name in CASES:
        kept = found.setdefault(f"{kind}, {name}", {})
        with tempfile.TemporaryDirectory() as folder:
            target = target_of(FAMILY, torch.float64)
            out = exports(kind, name, target, Path(folder))
            guess = exported(out)
            for tokens, path, _ in drafts(kind, out, target):
                kept[key(tokens, path)] = guess(tokens, path)[-1].topk(_KEPT).indices.tolist()
        print(f"{kind}, {name}: {len(kept)} guesses")
    lines = [json.dumps(case) + ": " + json.dumps(kept, separators=(",", ":")) for case, kept in found.items()]
    EXPORTED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
