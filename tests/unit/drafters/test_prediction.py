"""Predicted outputs: the caller says what the answer will mostly be, and that is drafted from."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drafters.prediction import PredictedText, Prediction, PredictionFirst
from drafters.union.merge import Merged
from specdec import Context, Draft, Engine, Observation, PrefixCache, SamplingParams
from specdec.cli.main import main
from specdec.costs.curve import roofline
from specdec.drafting.registry import drafter_names
from specdec.engine.prediction import appeared
from specdec.engine.requests import make_requests
from specdec.errors import PromptError
from tests import seam
from tests.fakes import Reciter, Spy
from tests.models import OF_LAYERS, VOCAB, prompt_of, settings_of, target_of
from tests.tiers import FEW, turns

CODE = "def add(a, b):\n    return a + b\n\n\ndef "
ROWS = 33  # of a step with the default options


def reciting(answer: Sequence[int], drafter: Any = "none", **options: Any) -> Engine:
    """An engine that answers the prompt [1] with these tokens, whatever is drafted."""
    text = [1, *answer]
    return Engine(Reciter(lambda seen: text[len(seen)], context_length=5000), None, drafter, **options)


@pytest.fixture(scope="module")
def file() -> list[int]:
    """Tokens as of a program: a few are everywhere, most are rare."""
    rng = random.Random(0)
    return [rng.choice([rng.randrange(2, 5), rng.randrange(5, 100)]) for _ in range(400)]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("drafter", "sampling"),
    turns(
        drafter_names(),
        (SamplingParams(), SamplingParams(temperature=1.0, seed=3, acceptance="match")),
        first=(*FEW, "prediction"),
    ),
)
def test_the_text_is_plain_decodings(drafter: str, sampling: SamplingParams, tmp_path: Path) -> None:
    target, prompt = target_of("llama" if drafter in OF_LAYERS else "gemma3"), prompt_of(9)
    plain = Engine(target).generate(prompt, 30, sampling).token_ids
    edited = [*plain[:8], 7, 8, *plain[13:]]
    for number, options in enumerate(settings_of(drafter, target, tmp_path)):
        engine = Engine(target, None, options, policy=("off", "acceptance")[number % 2], costs=roofline())
        for prediction in (plain, edited, [9] * 200, [0]):
            assert engine.generate(prompt, 30, sampling, prediction=prediction).token_ids == plain


@pytest.mark.slow
def test_texts_and_streams(tiny_engine: Engine) -> None:
    plain = tiny_engine.generate(CODE, 30)
    for prediction in (plain.text, "Ein ganz anderer Satz. Und noch einer."):
        assert tiny_engine.generate(CODE, 30, prediction=prediction).token_ids == plain.token_ids
        assert "".join(chunk.text for chunk in tiny_engine.stream(CODE, 30, prediction=prediction)) == plain.text


@pytest.mark.few(1)
@pytest.mark.parametrize("drafter", ["none", "union", "prompt_lookup"])
def test_a_prediction_that_is_the_answer_takes_few_steps(file: list[int], drafter: str) -> None:
    found = reciting(file, drafter, policy="off").generate([1], len(file), prediction=file)
    assert found.token_ids == file
    assert found.stats.steps <= ceil(len(file) / ROWS)
    assert (found.stats.accepted_prediction_tokens, found.stats.rejected_prediction_tokens) == (len(file), 0)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("edit", "steps"),
    [
        (lambda file: [*file[:200], 101, 102, 103, *file[203:]], 8),  # replaced
        (lambda file: [*file[:200], 101, *file[200:]], 5),  # put in
        (lambda file: [*file[:200], *file[240:]], 5),  # left out
        (lambda file: [*file[:100], *file[300:], *file[100:300]], 12),  # moved
        (lambda file: [101, *file[1:]], 5),  # the first token, as where its space is another one
    ],
)
def test_after_an_edit_the_answer_is_found_in_the_prediction_again(
    file: list[int], edit: Callable[[list[int]], list[int]], steps: int
) -> None:
    answer = edit(file)
    engine = Engine(Reciter(lambda seen: [1, *answer][len(seen)], vocab_size=110, context_length=5000), None, "none")
    found = engine.generate([1], len(answer), prediction=file)
    assert found.token_ids == answer
    assert found.stats.steps <= ceil(len(answer) / ROWS) + steps


def test_a_phrase_that_occurs_often_does_not_lead_astray() -> None:
    """Behind an edit the place to go on is the next one, and not the last of all that look alike."""
    block = [[2, 3, 10 + number, 4, 5, 40 + number, 6, 7] for number in range(30)]
    predicted = [token for part in block for token in part]
    answer = [*predicted[:83], 99, *predicted[84:]]
    found = reciting(answer).generate([1], len(answer), prediction=predicted)
    assert found.token_ids == answer
    assert found.stats.steps <= ceil(len(answer) / ROWS) + 5


@pytest.mark.slow
def test_a_prediction_of_another_text_lets_the_drafter_work() -> None:
    """What does not come true is tried more and more rarely, and the engine's own drafter drafts."""
    answer = [10, 11, 12, 13, 14, 15, 16, 17] * 40
    alone = reciting(answer, "prompt_lookup").generate([1], len(answer)).stats
    for misleading in ([10, 11, 99], [12, 13, 98], [14, 15, 97], [16, 17, 96]):
        led = reciting(answer, "prompt_lookup").generate([1], len(answer), prediction=misleading * 50).stats
        assert led.steps <= alone.steps + 25
    stray = reciting(answer, "prompt_lookup").generate([1], len(answer), prediction=[*range(50, 90)] * 5).stats
    assert stray.steps <= alone.steps + 25
    assert (stray.accepted_prediction_tokens, stray.rejected_prediction_tokens) == (0, 200)


@pytest.mark.few(1)
@pytest.mark.parametrize("drafter", ["medusa", "kangaroo"])
def test_a_drafter_is_shown_the_hidden_states_of_all_tokens(drafter: str, tmp_path: Path) -> None:
    """Once and in order, whoever drafted them."""
    target, prompt = target_of("llama"), prompt_of(20)
    plain = Engine(target).generate(prompt, 40).token_ids
    engine = Engine(target, None, settings_of(drafter, target, tmp_path)[0])
    shown = dict[int, list[torch.Tensor]]()
    drafts = list[Draft]()

    def on_seen(context: Context, step: Observation) -> None:
        for layer, rows in step.taps.items():
            shown.setdefault(layer, []).append(rows[list(step.path)])

    engine.drafter = spy = Spy(engine.drafter, drafts.append, on_seen)
    found = engine.generate(prompt, 40, prediction=[*plain[:10], *plain[11:20], 9, 9, 9, *plain[24:30]])
    assert found.token_ids == plain
    assert 0 < len(drafts) < found.stats.steps  # both drafted
    for layer in spy.taps:
        rows = torch.cat(shown[layer])
        text = [*prompt, *plain][: len(rows)]
        assert len(text) >= len(prompt) + 30
        with target.active():
            fresh = seam.text(target, capacity=100, rows=100).run(text, taps=(layer,), rows=())
        torch.testing.assert_close(rows, fresh.hidden[layer])


@pytest.mark.slow
def test_a_drafter_that_takes_steps_as_they_were_learns_from_all(tiny_engine: Engine) -> None:
    plain = tiny_engine.generate(CODE, 40).token_ids
    engine = tiny_engine.with_drafter("token_recycling", policy="off")
    told = list[int]()
    engine.drafter = Spy(engine.drafter, on_seen=lambda context, step: told.append(len(step.tokens)))
    found = engine.generate(CODE, 40, prediction=plain[:30])
    assert len(told) == found.stats.steps - 1  # the last one is told to no session


@pytest.mark.slow
def test_batches_take_one_for_all_or_one_for_each(tiny_engine: Engine) -> None:
    engine = tiny_engine.with_drafter("prompt_lookup")
    prompts = [CODE, "class A:\n"]
    plain = [engine.generate(prompt, 8) for prompt in prompts]
    texts, ids = [one.text for one in plain], [one.token_ids for one in plain]
    for prediction in ([texts[0], None], ids, texts[1], np.array(ids[0])):
        found = engine.generate_batch(prompts, 8, prediction=prediction)
        assert [one.token_ids for one in found] == ids
    streamed = ["", ""]
    for place, chunk in engine.stream_batch(prompts, 8, prediction=ids):
        streamed[place] += chunk.text
    assert streamed == texts
    assert [one.stats.accepted_prediction_tokens for one in engine.generate_batch(prompts, 8, prediction=ids)] == [8, 8]


def test_one_for_each_is_one_for_each() -> None:
    def given(prediction: Any) -> list[Any]:
        requests = make_requests(
            ["a", "b"], 1, None, seed=None, stop=(), stop_token_ids=(), logits_processor=(), prediction=prediction
        )
        return [request.prediction for request in requests]

    assert given("ab") == ["ab", "ab"]
    assert given([1, 2]) == [[1, 2], [1, 2]]
    assert given(["a", [1]]) == ["a", [1]]
    assert given([None, "b"]) == [None, "b"]


@pytest.mark.slow
def test_beside_a_prefix_cache(tiny_engine: Engine) -> None:
    kept, plain = PrefixCache(), tiny_engine.generate(CODE, 40)
    for turn in range(2):
        found = tiny_engine.generate(CODE, 40, prefix_cache=kept, prediction=plain.text)
        assert found.token_ids == plain.token_ids
        assert bool(found.stats.reused_tokens) == bool(turn)


@pytest.mark.parametrize("empty", [None, "", [], np.array([], dtype=np.int64)])
def test_an_empty_prediction_is_none(tiny_engine: Engine, empty: Any) -> None:
    decoding = tiny_engine.start(CODE, 4, prediction=empty)
    assert decoding.sequence.drafter.inner is tiny_engine.drafter
    assert decoding.result().stats.rejected_prediction_tokens == 0


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        ([3, VOCAB], f"the prediction holds token {VOCAB} at place 1, which is outside the vocabulary [0, {VOCAB})"),
        ([-1], "the prediction holds token -1"),
        ([3, "b"], "the prediction's item 1 is 'b', of type str"),
        ([True], "the prediction's item 0 is True, of type bool"),
        (5, "the prediction is 5, of type int"),
        (b"text", "the prediction is b'text', of type bytes"),
        ({"content": "text"}, "the prediction is {'content': 'text'}, of type dict"),
        ("text", "the prediction is text, and this engine has no tokenizer"),
    ],
)
def test_what_is_no_prediction_is_refused(prediction: Any, message: str) -> None:
    engine = Engine(target_of("llama"), None)
    with pytest.raises(PromptError) as refused:
        engine.generate([1, 2], 3, prediction=prediction)
    assert str(refused.value).startswith(message)


def test_half_a_character_is_refused(tiny_engine: Engine) -> None:
    with pytest.raises(PromptError, match=r"the prediction holds '\\ud83d' at character 1"):
        tiny_engine.generate(CODE, 3, prediction="a\ud83d")


@pytest.mark.slow
def test_a_policy_bounds_its_rows(file: list[int]) -> None:
    """A prediction that never comes true is verified rarely; one row at a time, mostly none."""
    answer = [token + 1 for token in file]
    off, bounded = (
        Engine(
            Reciter(lambda seen: [1, *answer][len(seen)], vocab_size=110, context_length=5000), None, policy=policy
        ).generate([1], 300, prediction=[7, 8, 9] * 100)
        for policy in ("off", "acceptance")
    )
    assert bounded.stats.rows_per_step <= 1.5
    assert off.stats.rows_per_step > bounded.stats.rows_per_step


def test_it_becomes_a_part_of_what_merges_and_goes_before_all_else(tiny_engine: Engine) -> None:
    merged = tiny_engine.with_drafter("auto").predicting().drafter
    assert isinstance(merged, Merged)
    assert merged.name == "auto"
    assert [part.name for part in merged.parts][:2] == ["prediction", "suffix_automaton"]
    engine = tiny_engine.with_drafter("union")
    predicting = engine.predicting()
    assert predicting.drafter.record.bandits[1:] == engine.drafter.record.bandits  # what is known of them is shared
    assert engine.predicting() is predicting
    assert isinstance(tiny_engine.with_drafter("jacobi").predicting().drafter, PredictionFirst)
    assert isinstance(tiny_engine.with_drafter("none").predicting().drafter, Prediction)


@pytest.mark.parametrize(
    ("prediction", "text", "common"),
    [([], [1, 2], 0), ([1, 2, 3], [], 0), ([1, 2, 3], [1, 3], 2), ([1, 1, 1], [1], 1), ([1, 2, 3], [3, 2, 1], 1)],
)
def test_how_much_of_a_prediction_appeared(prediction: list[int], text: list[int], common: int) -> None:
    assert appeared(prediction, text) == common


def test_how_much_appeared_as_the_table_has_it() -> None:
    """Against the textbook's table, on texts of few tokens, and longer than a machine word."""
    rng = random.Random(1)
    for _ in range(40):
        one, two = ([rng.randrange(4) for _ in range(rng.randrange(90))] for _ in range(2))
        row = [0] * (len(two) + 1)
        for token in one:
            above = row.copy()
            for place, other in enumerate(two):
                row[place + 1] = above[place] + 1 if token == other else max(row[place], above[place + 1])
        assert appeared(one, two) == row[-1]


def test_the_places_where_an_answer_may_go_on() -> None:
    text = PredictedText([10, 11, 12, 13, 14, 15, 16, 17, 18, 19])
    for token in (10, 11, 12):
        text.add(token)
    assert (text.place, text.away) == (3, 0)
    text.add(50)
    assert (text.place, text.away, text.branches()) == (3, 1, [4, 3])
    text.add(15)
    assert text.branches() == [6, 5, 3]  # behind the 15, replaced, put in
    text.add(16)
    assert (text.place, text.agreed, text.away) == (7, 2, 0)


def test_of_places_that_look_alike_the_next_one_counts() -> None:
    text = PredictedText([1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 5])
    for token in (1, 2, 3, 9, 50, 2):
        text.add(token)
    assert (text.left, text.found()) == (4, (6, 1))


@pytest.mark.slow
def test_the_command_takes_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("before.py")
    command = ["generate", CODE, "--max-new-tokens", "20", "--policy", "off", "--prediction", str(file)]
    assert main(command) == 2
    assert "error: cannot read the prediction file 'before.py': No such file or directory" in capsys.readouterr().err
    plain_command = command[:-2]
    assert main(plain_command) == 0
    plain = capsys.readouterr()
    file.write_bytes(b"\xef\xbb\xbf" + plain.out.encode())
    assert main(command) == 0
    found = capsys.readouterr()
    assert found.out == plain.out
    assert "20 tokens in 20 target steps" in plain.err
    assert "20 tokens in 1 target step," in found.err
    assert "20 of 20 predicted tokens" in found.err
