"""Which tokens of a conversation are trained: the answers and what ends them, whatever their words are and whoever else
says them, by templates of the kinds that models come with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from specdec.models.loading import embedded_model
from tests.trained_texts import trained_texts
from training.data import TextConfig, _conversation
from training.skips import Skips
from training.spans import Message, answer_spans, chat_spans, plain, trained_tokens, vicuna_writer

ENDS = ("<|end|>", "<|eot|>", "<|return|>", "<|user|>", "<|assistant|>")

CHATML = (
    "{% if messages[0].role != 'system' %}<|user|>system\nYou are an assistant, S.<|eot|>\n{% endif %}"
    "{% for m in messages %}<|user|>{{ m.role }}\n{{ m.content }}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "trimmed": CHATML.replace("{{ m.content }}", "{{ m.content | trim }}"),
    # Llama 2: no generation prompt, spaces around the answer.
    "brackets": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content | trim }} [/INST]"
        "{% elif m.role == 'assistant' %} {{ m.content | trim }} <|eot|>{% else %}<<{{ m.content }}>>{% endif %}"
        "{% endfor %}"
    ),
    # The first Llama 3: a header for an answer behind every text, asked for or not.
    "always a header": (
        "{% for m in messages %}<|user|>{{ m.role }}\n\n{{ m.content | trim }}<|eot|>{% endfor %}<|user|>assistant\n\n"
    ),
    # Qwen 3: the last answer has a block for reasoning, earlier ones lose theirs.
    "reasoning": (
        "{% for m in messages %}{% set said = m.content %}{% if m.role == 'assistant' %}"
        "{% set thought = '' %}{% if '</think>' in said %}"
        "{% set thought = said.split('</think>')[0].split('<think>')[-1] %}"
        "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "<|assistant|>\n{% if loop.last %}<think>\n{{ thought.strip('\n') }}\n</think>\n\n{% endif %}"
        "{{ said }}<|eot|>\n"
        "{% else %}<|user|>\n{{ said }}<|eot|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
    # DeepSeek R1: the generation prompt opens the reasoning, and a text has none of it.
    "opened reasoning": (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{{ m.content.split('</think>')[-1] }}<|eot|>"
        "{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
    ),
    # gpt-oss: another end for the last answer.
    "another end": (
        "{% for m in messages %}<|user|>{{ m.role }}\n{{ m.content }}"
        "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|eot|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
    ),
    "no end": (
        "{% for m in messages %}{{ '<|assistant|>' if m.role == 'assistant' else '<|user|>' }}"
        "{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    "marked": (
        "{% for m in messages %}<|user|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|eot|>"
        "{% endgeneration %}{% else %}{{ m.content }}<|eot|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
    ),
    "marked without the end": (
        "{% for m in messages %}<|user|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|eot|>\n{% endfor %}"
    ),
    # Whose answers' places cannot be seen from outside.
    "marked and doubled": (
        "{% for m in messages %}{% if m.role == 'assistant' %}({{ m.content | length }}) <|assistant|>"
        "{% generation %}{{ m.content }}<|eot|>{% endgeneration %}({{ m.content | length }})"
        "{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}"
    ),
}
MARKED = [name for name in TEMPLATES if name.startswith("marked")]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = AutoTokenizer.from_pretrained(embedded_model())
    made.add_special_tokens({"additional_special_tokens": list(ENDS[1:])})
    return made


def talk(*said: str, system: str | None = None) -> list[Message]:
    turns = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(said)]
    return [*([] if system is None else [{"role": "system", "content": system}]), *turns]


def learnt(messages: list[Message], tokenizer: Any, template: str) -> list[str]:
    """The texts of the runs of trained tokens."""
    tokenizer.chat_template = TEMPLATES.get(template)
    kind = {"vicuna": "vicuna", "plain": "plain"}.get(template, "tokenizer")
    skips = Skips()
    sample = _conversation(messages, tokenizer, TextConfig(template=kind), skips)
    assert sample is not None, skips.lines()
    return trained_texts(sample, tokenizer)


ENDINGS = {"vicuna": ["<|end|>"] * 9, "plain": [""] * 9, "no end": [""] * 9}
HARD = {
    "words of a header": talk("The letter after R?", "S", "And the word?", "assistant", "Who?", "user"),
    "words of the system's": talk("You", "are", "an", "an", system="You are an assistant: S, A."),
    "the question": talk("yes", "yes", "yes", "yes"),
    "one letter": talk("Which of A, B, C?", "A", "s or es?", "s"),
    "what is no letter": talk("a", ":", "b", "[", "c", "]", "d", "<|", "e", "/", "f", "4"),
    "an end token in the words": talk("a", "x<|eot|>y", "b", "<|end|>"),
    "others' letters": talk("Grüße?", "你好 😀👩‍👩‍👧", "?", "ﷺ\u0301"),
}
SPACED = {
    "a newline behind": talk("a", "b\n", "c", "d \n\n"),
    "spaces before": talk("a", "  b", "c", "\n\td"),
    "spaces around and within": talk("a ", " b  c \n", " d\n", "\n e\n\nf "),
}


@pytest.mark.few(62)
@pytest.mark.parametrize("template", [*TEMPLATES, "vicuna"])
@pytest.mark.parametrize("case", HARD)
def test_an_answer_and_its_end_whatever_its_words_are(tokenizer: Any, template: str, case: str) -> None:
    messages = HARD[case]
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    ends = ENDINGS.get(template, ["<|eot|>"] * 9)[: len(answers)]
    if template == "another end":
        ends[-1] = "<|return|>"
    wanted = [answer + end for answer, end in zip(answers, ends, strict=True)]
    found = learnt(messages, tokenizer, template)
    if template == "reasoning":  # which is the model's to write, too
        assert found[-1].startswith("<think>\n\n</think>\n\n")
        found[-1] = found[-1].removeprefix("<think>\n\n</think>\n\n")
    if template in ("brackets", "vicuna"):  # a space that stands between header, answer and end
        found, wanted = ["".join(text.split()) for text in found], ["".join(text.split()) for text in wanted]
    assert found == wanted


@pytest.mark.parametrize("template", [*TEMPLATES, "vicuna", "plain"])
@pytest.mark.parametrize("case", SPACED)
def test_spaces_of_an_answer_are_trained_where_they_are_written(tokenizer: Any, template: str, case: str) -> None:
    messages = SPACED[case]
    if template == "plain":  # where turns share tokens
        tokenizer.chat_template = None
        text, spans = answer_spans(messages, plain, ENDS)
        assert [text[start:end] for start, end in spans] == [messages[1]["content"], messages[3]["content"]]
        return
    found = learnt(messages, tokenizer, template)
    strips = template in ("trimmed", "brackets", "always a header", "vicuna")
    for text, message in zip(found, messages[1::2], strict=True):
        text = text.removeprefix("<think>\n\n</think>\n\n")
        body = text.removesuffix("<|return|>").removesuffix("<|eot|>").removesuffix("<|end|>")
        assert body != text or template == "no end"
        content = message["content"].strip() if strips else message["content"]
        header = (body.rstrip(" ") if strips else body).removesuffix(content)
        assert header in ("", " " * strips, "\n")  # a token may hold the header's last character and the answer's first


def test_reasoning_is_trained_where_it_is_written(tokenizer: Any) -> None:
    messages = talk("a", "<think>\nhm\n</think>\n\nb", "c", "<think>\nwell\n</think>\n\nd")
    assert learnt(messages, tokenizer, "reasoning") == ["b<|eot|>", "<think>\nwell\n</think>\n\nd<|eot|>"]
    assert learnt(messages, tokenizer, "opened reasoning") == ["\n\nb<|eot|>", "\n\nd<|eot|>"]
    assert learnt(messages, tokenizer, "chatml") == [f"{messages[n]['content']}<|eot|>" for n in (1, 3)]


def test_turns_that_repeat(tokenizer: Any) -> None:
    assert learnt(talk(*["again"] * 8), tokenizer, "chatml") == ["again<|eot|>"] * 4
    assert learnt(talk(*["again"] * 8), tokenizer, "vicuna") == [" again<|end|>"] * 4


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no system turns here') }}", "the chat template refused it: no system turns here"),
        ("{{ messages[7].content }}", "the chat template refused it: "),
        ("{{ messages[0].content + 1 }}", "the chat template refused it: "),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "changed the assistant's words"),
        ("{% for m in messages %}{{ m.content[:2] }}{% endfor %}", "changed the assistant's words"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "twice or not at all"),
        ("{% for m in messages %}{{ m.content }} {{ m.content }}{% endfor %}", "twice or not at all"),
        ("{% for m in messages %}{{ m.content }} ({{ m.content | length }}){% endfor %}", "what follows it depends"),
        ("{% for m in messages %}({{ m.content | length }}) {{ m.content }}{% endfor %}", "otherwise than the prompts"),
        ("{% for m in messages | reverse %}{{ m.role }} {{ m.content }}{% endfor %}", "in another order"),
    ],
)
def test_a_place_that_is_not_certain_is_none(tokenizer: Any, template: str, reason: str) -> None:
    tokenizer.chat_template = template
    skips = Skips()
    assert _conversation(talk("q", "letter", "r", "another"), tokenizer, TextConfig(), skips) is None
    assert reason in skips.lines()[0]


def chatml(messages: list[Message]) -> tuple[str, list[tuple[int, int]]]:
    """What ``CHATML`` writes, and where its answers are."""
    text, spans = "" if messages[0]["role"] == "system" else "<|user|>system\nYou are an assistant, S.<|eot|>\n", []
    for message in messages:
        text += f"<|user|>{message['role']}\n"
        begin = len(text)
        text += message["content"] + "<|eot|>"
        if message["role"] == "assistant":
            spans.append((begin, len(text)))
        text += "\n"
    return text, spans


def vicunas(messages: list[Message]) -> tuple[str, list[tuple[int, int]]]:
    text, spans = vicuna_writer("</s>")([], False), []
    for message in messages:
        if message["role"] == "user":
            text += f"USER: {message['content'].strip()} "
        else:
            text += "ASSISTANT:"
            spans.append((len(text), len(text) + len(f" {message['content'].strip()}</s>")))
            text += f" {message['content'].strip()}</s>"
    return text, spans


def plains(messages: list[Message]) -> tuple[str, list[tuple[int, int]]]:
    ends = [sum(len(message["content"]) for message in messages[: place + 1]) for place in range(len(messages))]
    return plain(messages, False), list(zip(ends[::2], ends[1::2], strict=True))


PIECES = ["<|user|>", "assistant", "\n", " ", "S", "<|eot|>", "ASSISTANT:", "USER:", "</s>", "😀", "\ue000", "\ue001"]
WORDS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("".join).filter(str.strip)


@given(st.lists(WORDS, min_size=2, max_size=6).map(lambda said: talk(*said[: len(said) // 2 * 2])))
@settings(max_examples=40, deadline=None)
def test_spans_are_those_of_the_writer(tokenizer: Any, messages: list[Message]) -> None:
    """Of words that are the templates' own; with the marks' characters among them."""
    tokenizer.chat_template = CHATML
    ways: list[tuple[Callable[[list[Message]], Any], Any]] = [
        (chatml, chat_spans(messages, tokenizer, ENDS)),
        (vicunas, answer_spans(messages, vicuna_writer("</s>"), ["</s>"])),
        (plains, answer_spans(messages, plain, ENDS)),
    ]
    for written, found in ways:
        assert found == written(messages)


def test_tokens_of_spans() -> None:
    """As the offsets of byte-level tokenizers are (a character of four bytes), and GPT-2's, who trims spaces."""
    offsets = [(0, 0), (0, 2), (2, 3), (3, 4), (3, 4), (3, 4), (4, 8), (8, 9), (0, 0)]
    assert trained_tokens(offsets, [(3, 4), (8, 9)]) == [False, False, False, True, True, True, False, True, False]
    assert trained_tokens(offsets, [(3, 5)]) == [False, False, False, True, True, True, True, False, False]
    # "a:" and "  ", "b", "  ", "</s>": spaces before the span are not its own, those within it are.
    trimmed = [(0, 1), (1, 2), (4, 4), (4, 5), (7, 7), (7, 11)]
    assert trained_tokens(trimmed, [(4, 7)]) == [False, False, False, True, True, False]
    assert trained_tokens(trimmed, [(2, 5)]) == [False, False, True, True, False, False]
    assert trained_tokens(trimmed, []) == [False] * 6
