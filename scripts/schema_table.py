"""What structured output follows of JSON Schema: the table of docs/structured_output.md, by the JSON Schema Test Suite.

    pip download --no-deps --no-binary :all: jsonschema==4.26.0 && tar xzf jsonschema-4.26.0.tar.gz
    python scripts/schema_table.py jsonschema-4.26.0/json

Each schema of the suite is *followed* if its grammar allows the valid instances and no other, *narrower* if it allows
none but valid ones and not all, *refused* if the server answers 400, and *wrong* if it allows an invalid one. Keys are
tried in every order, as a grammar has one. Exits with 1 where a schema is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

import specdec
from specdec.serve.errors import ApiError
from specdec.serve.formats import FORMATS
from specdec.serve.json_grammar import Grammars, JsonGrammar
from specdec.serve.structured import Structured

KINDS = ("followed", "narrower", "refused", "wrong")
DRAFTS = ("draft2020-12", "draft7")
PAGE = Path(__file__).parents[1] / "docs/structured_output.md"
MARKS = "<!-- schema_table -->", "<!-- end -->"
_ORDERS = 24  # orders of an object's keys that are tried


def texts(value: Any) -> Iterator[str]:
    """The value as JSON, with its keys in several orders and its whole numbers without a point."""
    yield from (json.dumps(one, separators=(",", ":"), ensure_ascii=False) for one in _orders(value))


def _orders(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for order in itertools.islice(itertools.permutations(value), _ORDERS):
            below = [list(itertools.islice(_orders(value[name]), _ORDERS)) for name in order]
            for values in itertools.islice(itertools.product(*below), _ORDERS):
                yield dict(zip(order, values, strict=True))
    elif isinstance(value, list):
        below = [list(itertools.islice(_orders(one), _ORDERS)) for one in value]
        yield from (list(values) for values in itertools.islice(itertools.product(*below), _ORDERS))
    elif isinstance(value, float) and value.is_integer():
        yield from (int(value), value)
    else:
        yield value


def allows(grammars: Grammars, grammar: JsonGrammar, text: str) -> bool:
    """Whether the text is one of the grammar's."""
    state: Any = grammar.start([])
    for token in grammars.tokenizer.tokenize_str(text):
        state = state.advance(token)
        if state is None:
            return False
    return state.advance(min(grammars.ends)) is not None


def kind_of(grammars: Grammars, case: dict[str, Any]) -> tuple[str, list[str]]:
    """The kind of a schema of the suite, and the invalid instances that its grammar allows."""
    try:
        grammar = Structured(lambda: grammars).of_schema(case["schema"])
    except ApiError:
        return "refused", []
    allowed = [any(allows(grammars, grammar, text) for text in texts(test["data"])) for test in case["tests"]]
    pairs = list(zip(case["tests"], allowed, strict=True))
    wrong = [json.dumps(test["data"]) for test, found in pairs if found and not test["valid"]]
    if wrong:
        return "wrong", wrong
    return "followed" if all(found for test, found in pairs if test["valid"]) else "narrower", []


def is_annotation(place: str) -> bool:
    """Whether a file of the suite is about what JSON Schema takes for an annotation, and so does the server."""
    if place.startswith("optional/content"):
        return True
    form = place.removeprefix("optional/format/")
    return form != place and form not in FORMATS


def counted(grammars: Grammars, suite: Path) -> dict[str, Counter[str]]:
    """Keyword -> number of schemas of each kind, of all drafts."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for draft in DRAFTS:
        root = suite / "tests" / draft
        for file in sorted(root.rglob("*.json")):
            place = file.relative_to(root).with_suffix("").as_posix()
            if is_annotation(place):
                continue
            for case in json.loads(file.read_text("utf-8")):
                kind, wrong = kind_of(grammars, case)
                found[place.removeprefix("optional/")][kind] += 1
                for instance in wrong:
                    print(f"wrong: {draft}/{place}: {case['description']}: {instance}", file=sys.stderr)
    return found


def table(found: dict[str, Counter[str]]) -> str:
    """The table in Markdown; keywords whose schemas are all of one kind share a line."""
    lines = ["| keyword | " + " | ".join(KINDS) + " |", "|---|" + "--:|" * len(KINDS)]
    for kind in ("followed", "refused"):
        names = [name for name, counts in found.items() if set(counts) == {kind}]
        counts = [str(sum(found[name][kind] for name in names)) if one == kind else "0" for one in KINDS]
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {' | '.join(counts)} |")
    for name, kinds in found.items():
        if len(kinds) > 1 or set(kinds) & {"narrower", "wrong"}:
            lines.append(f"| `{name}` | {' | '.join(str(kinds[one]) for one in KINDS)} |")
    total = sum(found.values(), Counter())
    return "\n".join([*lines, f"| all | {' | '.join(f'**{total[one]}**' for one in KINDS)} |"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", type=Path, help="the folder json/ of jsonschema's source archive")
    suite = parser.parse_args().suite
    if not (suite / "tests").is_dir():
        parser.error(f"{suite} holds no folder tests; give the folder json/ of jsonschema's source archive")
    tokenizer = AutoTokenizer.from_pretrained(Path(specdec.__file__).parent / "assets/tiny")
    found = counted(Grammars(tokenizer, len(tokenizer), {tokenizer.eos_token_id}), suite)
    page = PAGE.read_text("utf-8")
    begin, end = (page.index(mark) for mark in MARKS)
    PAGE.write_text(f"{page[: begin + len(MARKS[0])]}\n{table(found)}\n{page[end:]}", "utf-8")
    return int(any(counts["wrong"] for counts in found.values()))


if __name__ == "__main__":
    sys.exit(main())
