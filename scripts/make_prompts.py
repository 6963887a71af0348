"""Prompts of Spec-Bench's kinds, to distil training data for a chat model from: scripts/prompts.yaml, put together.

No question was taken from a benchmark, and nobody's text: what is to be summarised, or to be answered from, the model
writes itself, in a first round.

    python scripts/make_prompts.py --out runs/asked_articles.jsonl
    specdec distill-data runs/asked_articles.jsonl --model smollm2 --max-new-tokens 260 --out runs/articles.jsonl
    python scripts/make_prompts.py --articles runs/articles.jsonl --out runs/asked_kinds.jsonl
    specdec distill-data runs/asked_kinds.jsonl --model smollm2 --max-new-tokens 160 --out runs/kinds.jsonl
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from specdec.engine.conversations import turns_of
from specdec.errors import ConfigError, SpecdecError
from specdec.settings.files import write_text
from specdec.settings.formats import read_records
from specdec.settings.parsing import load_yaml

Asked = Iterator[tuple[str, list[str]]]  # kind, turns


def articles(lists: dict[str, Any]) -> Asked:
    """An article about every subject in every form."""
    for subject in lists["subjects"]:
        for form in lists["forms"]:
            yield "articles", [form.format(subject)]


def told_in(file: Path, subjects: list[str]) -> Iterator[tuple[str, str]]:
    """What was written, up to its last whole sentence, and its subject.

    Raises:
        ConfigError: an article that was asked for by nothing in the lists.
    """
    for record in read_records(file):
        said = [text if isinstance(text, str) else "" for _, text in turns_of(record.value) or ()]
        subject = next((one for one in subjects if said and one in said[0]), None)
        if subject is None or len(said) < 2:
            raise ConfigError(
                f"{file}, conversation {record.number}: nothing that prompts.yaml asks for is answered there; give one "
                "that specdec distill-data made of what this script wrote without --articles"
            )
        whole = said[1][: said[1].rfind(".") + 1].strip()
        if len(whole.split()) >= 30:
            yield whole, subject


def of_all_kinds(lists: dict[str, Any], told: list[tuple[str, str]], translations: int, draw: random.Random) -> Asked:
    """Summaries, answers from several texts, translations and facts; ``told`` are texts and their subjects."""
    for number, (text, subject) in enumerate(told):
        yield "summarization", [draw.choice(lists["summarise"]).format(text)]
        rest = told[:number] + told[number + 1 :]
        others = draw.sample(rest, min(draw.choice((0, 1, 2)), len(rest)))
        sources = [" ".join(source.split()) for source in (text, *(other for other, _ in others))]
        draw.shuffle(sources)
        mark = draw.choice(("[{}] {}", "Document {}: {}", "{}. {}"))
        joined = "\n".join(mark.format(place, source) for place, source in enumerate(sources, 1))
        question = draw.choice(lists["questions"]).format(subject)
        yield "rag", [draw.choice(lists["from_sources"]).format(sources=joined, question=question)]
    for _ in range(translations):
        who, when, what, because = (draw.choice(lists[part]) for part in ("who", "when", "what", "because"))
        yield "translation", [draw.choice(lists["translate"]).format(f"{who} hat {when} {what}{because}.")]
    for form, things in lists["asked"].items():
        for thing in things:
            yield "qa", [form.format(thing) + draw.choice(("", "?"))]


def main(
    out: Annotated[Path, typer.Option()],
    articles_file: Annotated[Path | None, typer.Option("--articles", help="What the model wrote.")] = None,
    translations: int = 1200,
    seed: int = 0,
) -> None:
    """Write a question file: without --articles, the one that asks for them."""
    lists, draw = load_yaml(Path(__file__).with_name("prompts.yaml")), random.Random(seed)
    if articles_file is None:
        made = list(articles(lists))
    else:
        told = list(told_in(articles_file, lists["subjects"]))
        made = list(of_all_kinds(lists, told, translations, draw))
    draw.shuffle(made)
    lines = [{"question_id": number, "category": kind, "turns": turns} for number, (kind, turns) in enumerate(made)]
    write_text(out, "".join(json.dumps(line) + "\n" for line in lines))
    print(f"{out}: {len(made):,} prompts")


if __name__ == "__main__":
    try:
        typer.run(main)
    except SpecdecError as error:
        raise SystemExit(f"error: {error}") from error
