"""Reading of training data: what is learnt of a sample, what is left out and why, and how samples are packed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from specdec.engine.config import override
from specdec.engine.conversations import vicuna
from specdec.errors import ConfigError
from specdec.models.loading import embedded_model
from tests.trained_texts import trained_texts
from training.data import Sample, TextConfig, load_samples, read_samples
from training.packing import pack
from training.run import TrainConfig
from training.skips import Skips
from training.split import is_drawn, prompt_of


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(embedded_model())


def talk(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in turns]}


def read(
    tmp_path: Path, tokenizer: Any, records: Any, *, name: str = "data.json", **options: Any
) -> tuple[list[Sample], Skips]:
    path = tmp_path / name
    path.write_text(records if isinstance(records, str) else json.dumps(records), encoding="utf-8")
    skips = Skips()
    return list(read_samples([str(path)], tokenizer, TextConfig(**options), skips)), skips


@pytest.mark.parametrize("template", ["tokenizer", "vicuna"])
def test_only_the_assistants_words_are_trained(tmp_path: Path, tokenizer: Any, template: str) -> None:
    # The same words in a question must not be taken for the answer.
    record = talk(("human", "Say: fine."), ("gpt", "fine."), ("user", "And?"), ("chatgpt", "Ünïcode – 你好 😀"))
    [sample], skips = read(tmp_path, tokenizer, [record], template=template)
    end = "<|end|>" if template == "vicuna" else ""
    assert [t.strip() for t in trained_texts(sample, tokenizer)] == [f"fine.{end}", f"Ünïcode – 你好 😀{end}"]
    assert not skips.skipped
    assert not skips.mended
    whole = tokenizer.decode(sample.tokens)
    assert whole.index("Say: fine.") < whole.rindex("fine.")


def test_the_begin_token_is_as_at_inference(tmp_path: Path, tokenizer: Any) -> None:
    record = [talk(("human", "a"), ("gpt", "b"))]
    [chat], _ = read(tmp_path, tokenizer, record, template="tokenizer")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert chat.tokens == tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    [plain], _ = read(tmp_path, tokenizer, record, template="vicuna")
    assert plain.tokens[0] == tokenizer.bos_token_id
    assert not plain.trained[0]


def test_vicunas_prompt() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "So long"},
    ]
    assert vicuna(messages, "</s>") == "Be brief. USER: Hi ASSISTANT: Hello</s>USER: Bye ASSISTANT: So long</s>"


@pytest.mark.parametrize(
    ("record", "kind", "reason", "answers"),
    [
        (talk(("gpt", "opening"), ("human", "q"), ("gpt", "a")), "mended", "opening turn", ["a"]),
        (talk(("human", "q"), ("human", "r"), ("gpt", "a")), "mended", "joined", ["a"]),
        (talk(("human", "q"), ("gpt", "a"), ("human", ""), ("gpt", "b")), "mended", "empty turn", ["a"]),
        (talk(("human", "q"), ("gpt", "a"), ("human", None), ("gpt", "b")), "mended", "empty turn", ["a"]),
        (talk(("human", "q"), ("gpt", "a"), ("human", "r"), ("gpt", 7)), "mended", "no text", ["a"]),
        (talk(("human", "q"), ("gpt", "a"), ("system", "s"), ("gpt", "b")), "mended", "system turn", ["a"]),
        (talk(("human", "q"), ("gpt", "  ")), "skipped", "no answer", []),
        (talk(("human", "q")), "skipped", "no answer", []),
        (talk(), "skipped", "no answer", []),
        (talk(("alien", "q"), ("gpt", "a")), "skipped", "unknown speaker 'alien'", []),
        ({"id": "y"}, "skipped", "no list", []),
        ("text", "skipped", "no list", []),
        ({"conversations": [3]}, "skipped", "unknown speaker None", []),
    ],
)
def test_odd_conversations_are_counted(
    tmp_path: Path, tokenizer: Any, record: Any, kind: str, reason: str, answers: list[str]
) -> None:
    samples, skips = read(tmp_path, tokenizer, [record])
    assert [text for sample in samples for text in trained_texts(sample, tokenizer)] == answers
    counted = {"mended": skips.mended, "skipped": skips.skipped}[kind]
    assert [reason in key for key in counted] == [True]
    assert any(line.startswith(f"1 {kind}: ") and reason in line for line in skips.lines())


def test_system_turns_and_both_key_styles(tmp_path: Path, tokenizer: Any) -> None:
    record = {"messages": [
        {"role": "system", "content": "s"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"},
    ]}  # fmt: skip
    [sample], _ = read(tmp_path, tokenizer, [record])
    assert trained_texts(sample, tokenizer) == ["a"]
    assert "# System: s" in tokenizer.decode(sample.tokens)
    asked = talk(("human", "q"), ("gpt", "a"))
    others = [read(tmp_path, tokenizer, [{**asked, "system": system}])[0] for system in ("s", "t", " ")]
    assert [[*map(str.strip, trained_texts(one, tokenizer))] for [one] in others] == [["a"]] * 3
    assert "# System: s" in tokenizer.decode(others[0][0].tokens)
    assert others[0][0].prompt == sample.prompt
    assert len({one.prompt for [one] in others}) == 3
    twice, skips = read(tmp_path, tokenizer, [{**record, "system": "t"}])  # a turn counts more than the field
    assert (twice[0].tokens, skips.lines()) == (sample.tokens, [])


_TOOLS = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% for c in m.get('tool_calls', []) %}"
    "[{{ c['function']['name'] }} {{ c['function']['arguments']['city'] }}]{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_tool_turns_are_used(tmp_path: Path) -> None:
    """As OpenAI and as ShareGPT files have them; calls are trained as the template writes them, results are not."""
    chat = AutoTokenizer.from_pretrained(embedded_model())
    chat.chat_template = _TOOLS
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    talks = {"messages": [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Weather?"}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4 C"}, {"role": "tool", "content": "wind"},
        {"role": "assistant", "content": "It is cold."},
    ]}  # fmt: skip
    [sample], skips = read(tmp_path, chat, [talks])
    assert trained_texts(sample, chat) == ["[weather Oslo]<|end|>", "It is cold.<|end|>"]
    assert skips.lines() == []
    assert "<|system|>Be brief.<|end|>" in chat.decode(sample.tokens)
    assert "<|tool|>4 C<|end|>\n<|tool|>wind<|end|>" in chat.decode(sample.tokens)
    shared = talk(("human", "q"), ("function_call", "call"), ("observation", "seen"), ("gpt", "a"))
    [sample], _ = read(tmp_path, chat, [shared])
    assert trained_texts(sample, chat) == ["call<|end|>", "a<|end|>"]
    samples, skips = read(tmp_path, chat, [shared], template="vicuna")
    assert (samples, [*skips.skipped]) == ([], ["Vicuna's format has no place for a tool's turn"])
    chat.chat_template = _TOOLS.replace("[{{ c['function']['name'] }}", "[")
    samples, skips = read(tmp_path, chat, [talks])
    assert (samples, [*skips.skipped]) == ([], ["the chat template leaves a tool call out"])


def test_parts_of_text_are_text(tmp_path: Path, tokenizer: Any) -> None:
    def said(*texts: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text} for text in texts]

    record = {"messages": [
        {"role": "user", "content": said("one", "two")}, {"role": "assistant", "content": said("three")},
        {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, {"role": "assistant", "content": "four"},
    ]}  # fmt: skip
    [sample], skips = read(tmp_path, tokenizer, [record], template="plain")
    assert trained_texts(sample, tokenizer) == ["three"]
    assert "one\ntwo" in tokenizer.decode(sample.tokens)
    assert skips.lines() == ["1 mended: cut at a turn with parts that are no text"]


def test_several_files_of_several_kinds(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.json").write_text(json.dumps([talk(("human", "q"), ("gpt", "one"))]))
    (tmp_path / "b.jsonl").write_text(json.dumps(talk(("human", "q"), ("bard", "two"))) + "\n")
    (tmp_path / "c.txt").write_text("three")
    skips = Skips()
    sources = [str(tmp_path / name) for name in ("a.json", "b.jsonl", "c.txt")]
    samples = list(read_samples(sources, tokenizer, TextConfig(), skips))
    assert [trained_texts(sample, tokenizer) for sample in samples] == [["one"], ["two"], ["three"]]
    assert skips.lines() == []


def test_json_lines_with_a_broken_line(tmp_path: Path, tokenizer: Any) -> None:
    line = json.dumps(talk(("human", "q"), ("bing", "a")))
    samples, skips = read(tmp_path, tokenizer, f"{line}\n{{broken\n\n{line}\n", name="data.jsonl")
    assert len(samples) == 2
    assert skips.lines() == [
        "1 skipped: a line that is no JSON: Expecting property name enclosed in double quotes (data.jsonl, line 2)"
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize("odd", ["{broken", '{"text": "x"}', "[]", json.dumps(talk(("human", "q")))])
def test_more_than_a_few_records_of_no_use_stop_it(tmp_path: Path, tokenizer: Any, odd: str) -> None:
    """Three or one in a hundred are few, whatever is wrong with them."""
    line = json.dumps(talk(("human", "q"), ("gpt", "a")))
    for good, bad, stops in ((1, 3, False), (9, 4, True), (396, 4, False), (395, 5, True)):
        text = "\n".join([*[odd] * (bad - 1), *[line] * good, "{broken"])
        if stops:
            with pytest.raises(ConfigError, match=rf"{bad} of {good + bad} records .*line 1.* set text\.skip=any"):
                read(tmp_path, tokenizer, text, name="data.jsonl")
        assert len(read(tmp_path, tokenizer, text, name="data.jsonl", skip="any" if stops else "few")[0]) == good


def test_what_is_left_out_is_named_by_its_place(tmp_path: Path, tokenizer: Any) -> None:
    good, mute = talk(("human", "q"), ("gpt", "a")), talk(("human", "q"))
    _, skips = read(tmp_path, tokenizer, [mute, good, *[mute] * 6, 7], skip="any")
    assert skips.lines() == [
        "7 skipped: no answer of an assistant (data.json, record 1, record 3, record 4, record 5, record 6; 2 more)",
        "1 skipped: no list of conversations, or of messages (data.json, record 9)",
    ]


def test_plain_turns_stand_end_to_end(tmp_path: Path, tokenizer: Any) -> None:
    record = {"conversations": [{"from": "human", "value": "def f(x):\n    "}, {"from": "gpt", "value": "return x\n"}]}
    [sample], _ = read(tmp_path, tokenizer, [record], template="plain")
    assert sample.tokens == tokenizer("def f(x):\n    return x\n")["input_ids"]
    # Its newline is the answer's own; a space shares a token with it.
    assert trained_texts(sample, tokenizer) == [" return x\n"]


def test_a_template_that_refuses(tmp_path: Path, tokenizer: Any) -> None:
    strict = AutoTokenizer.from_pretrained(embedded_model())
    strict.chat_template = "{{ raise_exception('no system turns here') }}"
    samples, skips = read(tmp_path, strict, [talk(("human", "q"), ("gpt", "a"))])
    assert not samples
    assert "no system turns here" in skips.lines()[0]


def test_a_template_that_changes_the_words(tmp_path: Path, tokenizer: Any) -> None:
    loud = AutoTokenizer.from_pretrained(embedded_model())
    loud.chat_template = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
    samples, skips = read(tmp_path, loud, [talk(("human", "q"), ("gpt", "a"))])
    assert not samples
    assert "changed the assistant's words" in skips.lines()[0]


@pytest.mark.parametrize("text", ["[{", "", "[1, 2"])
def test_a_file_that_is_no_json(tmp_path: Path, tokenizer: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=r"data.json.* is (no JSON|empty)"):
        read(tmp_path, tokenizer, text)


def test_a_file_that_is_not_there(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        list(read_samples(["nowhere.json"], tokenizer, TextConfig(), Skips()))


def test_a_tokenizer_without_offsets() -> None:
    with pytest.raises(ConfigError, match="fast tokenizer"):
        list(read_samples(["x.json"], object(), TextConfig(), Skips()))


def test_plain_text_is_trained_whole(tmp_path: Path, tokenizer: Any) -> None:
    [sample], _ = read(tmp_path, tokenizer, "def f():\n    return 1\n", name="code.py")
    assert trained_texts(sample, tokenizer) == ["def f():\n    return 1\n"]
    assert sample.tokens[0] == tokenizer.bos_token_id


def test_held_out_by_text(tmp_path: Path, tokenizer: Any) -> None:
    records = [talk(("human", f"question {i}"), ("gpt", "a")) for i in range(300)]
    first, _ = read(tmp_path, tokenizer, records, held_out_one_in=10)
    again, _ = read(tmp_path, tokenizer, records[::-1], held_out_one_in=10)
    assert 10 < sum(s.held_out for s in first) < 60
    assert [s.held_out for s in first] == [s.held_out for s in again][::-1]


class TestPacking:
    samples = (
        Sample([11, 12, 13], [False, True, True], False),
        Sample([21, 22, 23, 24], [False, True, False, True], False),
    )

    def test_windows_end_to_end(self) -> None:
        windows = pack(self.samples, 5, pad=7)
        batch = windows.at(np.array([0, 1]))
        assert batch.tokens.tolist() == [[11, 12, 13, 21, 22], [23, 24, 7, 7, 7]]
        assert batch.positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]]
        # Rows 0 and 1 predict 12 and 13, row 3 predicts 22, row 5 predicts 24; nothing predicts a sample's start.
        assert batch.targets.tolist() == [0, 1, 3, 5]
        assert batch.mask is not None
        assert batch.mask[0, 0].int().tolist() == [
            [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1],
        ]  # fmt: skip

    def test_windows_of_one_piece_need_no_mask(self) -> None:
        assert pack(self.samples[1:], 4).at(np.array([0])).mask is None

    def test_windows_without_a_trained_token_are_left_out(self) -> None:
        untrained = Sample([1] * 8, [False] * 8, False)
        assert len(pack([untrained, *self.samples], 4)) == 2

    def test_the_digest_knows_tokens_and_masks(self) -> None:
        other = Sample([21, 22, 23, 24], [False, True, True, True], False)
        digests = {pack(s, 5).digest for s in (self.samples, [self.samples[0], other], self.samples[::-1])}
        assert len(digests) == 3
        assert pack(self.samples, 5).digest in digests


def test_settings_are_read_as_their_options_mean_them() -> None:
    settings = ("loop.lr=3e-4", "loop.precision=no", "loop.wandb=off", "out=runs/x")
    values = override({"loop": {"steps": 3}}, settings, TrainConfig)
    assert values == {"loop": {"steps": 3, "lr": 3e-4, "precision": "no", "wandb": "off"}, "out": "runs/x"}


def asked(*questions: str, answers: int = 1, system: str = "") -> list[dict[str, Any]]:
    turns = [("system", system)] if system else []
    return [talk(*turns, ("human", question), ("gpt", f"answer {n}")) for question in questions for n in range(answers)]


def divided(
    tmp_path: Path, tokenizer: Any, records: Any, evaluated: Any = None, **options: Any
) -> tuple[list[Sample], list[Sample], list[str]]:
    paths = []
    for name, content in (("data.json", records), ("judged.json", evaluated)):
        (tmp_path / name).write_text(json.dumps(content))
        paths.append([str(tmp_path / name)] if content else [])
    said = list[str]()
    return *load_samples(paths[0], paths[1], TextConfig(**options), tokenizer, said.append), said


@pytest.mark.few(1)
@pytest.mark.parametrize("template", ["tokenizer", "vicuna", "plain"])
def test_no_prompt_is_on_both_sides(tmp_path: Path, tokenizer: Any, template: str) -> None:
    """With whatever answer, template, case and spaces; another system turn makes another prompt."""
    questions = [f"Question {i}?" for i in range(200)]
    records = asked(*questions, answers=2) + asked(*(f"  question  {i}? " for i in range(200)))
    records += asked(*questions, system="Be brief.")
    learnt, held, said = divided(tmp_path, tokenizer, records, held_out_one_in=10, template=template)
    assert not {s.prompt for s in learnt} & {s.prompt for s in held}
    assert len(learnt) + len(held) == 800
    assert 20 < len({s.prompt for s in held}) < 60
    assert len({s.prompt for s in (*learnt, *held)}) == 400
    assert not said


def test_pieces_of_a_text_stay_together(tmp_path: Path, tokenizer: Any) -> None:
    """As ``distill-data`` writes them; the name of a file of conversations, or of a data set, says nothing."""
    for source, prompts in (("stdlib/a/{}.py", 30), ("talks.jsonl", 90), ("a data set", 90)):
        records = [{**talk(("human", f"q{i}"), ("gpt", "a")), "source": source.format(i % 30)} for i in range(90)]
        learnt, held, _ = divided(tmp_path, tokenizer, records, held_out_one_in=10, template="plain")
        assert len({s.prompt for s in (*learnt, *held)}) == prompts
        assert not {s.prompt for s in learnt} & {s.prompt for s in held}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("records", "held"),
    [
        (asked("one"), 0),
        (asked("one", answers=50), 0),
        (asked("one", "two"), 1),
        (asked("one", "two", "three"), 2),
        (asked(*(f"q{i}" for i in range(9))), 2),
        (asked("most of it", answers=90) + asked(*(f"q{i}" for i in range(9))), 2),
    ],
)
def test_at_least_two_prompts_are_held_out(
    tmp_path: Path, tokenizer: Any, records: list[dict[str, Any]], held: int
) -> None:
    """Whatever the draw gives, one prompt at least is trained, and one of most samples is."""
    learnt, judged, said = divided(tmp_path, tokenizer, records, held_out_one_in=1 << 31)
    assert len({s.prompt for s in judged}) == held
    assert len(learnt) + len(judged) == len(records)
    assert learnt
    assert ["nothing is held out" in line for line in said] == [True] * (not held)
    learnt, judged, _ = divided(tmp_path, tokenizer, records, held_out_one_in=2)
    assert learnt
    assert len({s.prompt for s in judged}) >= held


def test_a_prompt_of_most_samples_is_trained(tmp_path: Path, tokenizer: Any) -> None:
    """Even where it is drawn."""
    name = next(f"q{i}" for i in range(99) if is_drawn(prompt_of("", f"q{i}"), 2))
    records = asked(name, answers=20) + asked(*(f"other {i}" for i in range(9)))
    learnt, held, _ = divided(tmp_path, tokenizer, records, held_out_one_in=2)
    assert sum(sample.prompt == prompt_of("", name) for sample in learnt) == 20
    assert len(held) >= 2


def test_prompts_of_the_evaluation_data_are_not_trained(tmp_path: Path, tokenizer: Any) -> None:
    records, judged = asked("a", "b", "c", answers=2), asked("B", "x")
    learnt, held, said = divided(tmp_path, tokenizer, records, judged)
    assert (len(learnt), len(held)) == (4, 2)
    assert said == ["2 samples are not trained, as eval_data has their prompts"]
    with pytest.raises(ConfigError, match="all prompts of data are in eval_data"):
        divided(tmp_path, tokenizer, records, records)
