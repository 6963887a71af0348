"""Chats: whether a tokenizer writes them, where its template ends an answer, and what is said where nothing ends it."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest

from specdec import Engine
from specdec.engine.conversations import answer_end, writes_chats
from specdec.engine.questions import Question, build_prompt
from specdec.errors import PromptError, SpecdecWarning
from tests.fakes import Reciter
from tests.small_tokenizers import SPECIAL, ids_of, tokenizer_of
from training.distill import _users_place

KIND = "byte-level BPE"
TALK = [{"role": "user", "content": "ab"}]
TEMPLATE = (
    "{% for m in messages %}<|x|>{{ m.role }} {{ m.content }}{% if m.role == 'assistant' %}<|end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|x|>assistant{% endif %}"
)
X, END = (ids_of(KIND, token)[0] for token in SPECIAL)


class OwnChats:
    """A tokenizer that writes chats with no template to go by, and has no such attribute, as Mistral's own have not."""

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> dict[str, list[int]]:
        assert options == {"add_generation_prompt": True, "return_dict": True}  # tokens are asked for, and no text
        return {"input_ids": [X, *ids_of(KIND, "".join(one["content"] for one in messages)), END]}

    def decode(self, tokens: list[int], **options: Any) -> str:
        return str(tokenizer_of(KIND).decode(tokens, **options))


def with_template(template: str | None) -> Any:
    tokenizer = copy.deepcopy(tokenizer_of(KIND))
    tokenizer.chat_template = template
    return tokenizer


def engine_of(tokenizer: Any, *eos: int) -> Engine:
    """It says <|end|>, and goes on behind it."""
    last = ids_of(KIND, "c")[0]
    return Engine(Reciter(lambda text: last if text[-1] == END else END, vocab_size=300, eos_ids=eos), tokenizer)


@pytest.mark.parametrize(
    ("tokenizer", "writes"),
    [(OwnChats(), True), (with_template(TEMPLATE), True), (with_template(None), False), (None, False)],
)
def test_whoever_writes_chats_is_asked_for_one(tokenizer: Any, writes: bool) -> None:
    assert writes_chats(tokenizer) == writes
    question = Question(id=1, category="qa", turns=("ab",))
    asked = build_prompt(question, [], "auto", tokenizer)
    if writes:
        assert asked == build_prompt(question, [], "chat", tokenizer) == TALK
    else:
        assert str(asked).endswith("USER: ab ASSISTANT:")
        with pytest.raises(PromptError, match="no chat template"):
            build_prompt(question, [], "chat", tokenizer)


def test_a_tokenizer_with_a_way_of_its_own_is_taken_at_it() -> None:
    engine = engine_of(OwnChats())
    assert engine.encode(TALK) == [X, *ids_of(KIND, "ab"), END]
    assert engine.generate(TALK, 2).text == "c"
    assert _users_place(engine.tokenizer) == [X]


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (TEMPLATE, END),
        (TEMPLATE.replace("<|end|>", " \n<|end|>"), END),  # with white space before it
        (TEMPLATE.replace("<|end|>", "end"), None),  # words, which an answer may hold
        (TEMPLATE.replace("<|end|>", "."), None),
        ("{{ messages[0].content }}", None),
        ("{{ raise_exception('no') }}", None),
        (None, None),
    ],
)
def test_what_a_template_writes_behind_an_answer(template: str | None, end: int | None) -> None:
    assert answer_end(with_template(template)) == end


@pytest.mark.parametrize("way", ["generate", "stream", "generate_batch", "stream_batch"])
def test_an_answer_that_nothing_ends_is_named(way: str) -> None:
    engine = engine_of(with_template(TEMPLATE), X)

    def run(prompt: Any, **stops: Any) -> None:
        found = getattr(engine, way)([prompt] if "batch" in way else prompt, 3, **stops)
        if "stream" in way:
            list(found)

    named = rf"ends an answer with '<\|end\|>' \(token {END}\).*\[{X}\].*stop_token_ids=\[{END}\]"
    with pytest.warns(SpecdecWarning, match=named):
        run(TALK)
    with pytest.warns(SpecdecWarning, match=named):
        run(TALK, stop="c", stop_token_ids=[X])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(TALK, stop="<|end|>")
        run(TALK, stop_token_ids=END)
        run(engine.encode(TALK))
        engine.target.eos_ids = frozenset([X, END])
        run(TALK)


def test_the_text_stays_the_model_s() -> None:
    """A warning, and the same tokens as without a template."""
    engine = engine_of(with_template(TEMPLATE), X)
    with pytest.warns(SpecdecWarning, match="an answer goes on behind it"):
        chat = engine.generate(TALK, 3)
    assert chat.token_ids == engine.generate(engine.encode(TALK), 3).token_ids
    assert len(chat.token_ids) == 3
