"""The proposer for vLLM, called as vLLM calls it: a table of tokens whose rows move, and no name for a request."""

from __future__ import annotations

import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specdec.errors import ConfigError
from specdec.integrations import vllm
from specdec.integrations.vllm import Proposer

LONGEST, VOCAB = 64, 50
ONE = {"drafters": ["suffix_automaton"], "adapt": False}


def config(most: int = 4, longest: int = LONGEST, **options: Any) -> Any:
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=most),
        model_config=SimpleNamespace(max_model_len=longest, get_vocab_size=lambda: VOCAB),
        additional_config={"specdec": options},
    )


class Batch:
    """vLLM's table: requests are appended, leave by the last one taking their row, and are swapped."""

    def __init__(self, rows: int = 8) -> None:
        self.tokens = np.full((rows, LONGEST), -7, dtype=np.int32)  # what is behind a row's end is not cleared
        self.sizes = np.zeros(rows, dtype=np.int32)
        self.names: list[str] = []

    def add(self, name: str, tokens: list[int]) -> None:
        self.names.append(name)
        self.sizes[len(self.names) - 1] = 0
        self.extend(name, tokens)

    def extend(self, name: str, tokens: list[int]) -> None:
        row = self.names.index(name)
        size = self.sizes[row]
        self.tokens[row, size : size + len(tokens)] = tokens
        self.sizes[row] += len(tokens)

    def remove(self, name: str) -> None:
        row, last = self.names.index(name), len(self.names) - 1
        self.tokens[row], self.sizes[row], self.names[row] = self.tokens[last], self.sizes[last], self.names[last]
        self.names.pop()

    def swap(self, one: int, other: int) -> None:
        for table in (self.tokens, self.sizes):
            table[[one, other]] = table[[other, one]]
        self.names[one], self.names[other] = self.names[other], self.names[one]

    def drafts(self, proposer: Proposer, *, unread: tuple[str, ...] = ()) -> dict[str, list[int]]:
        sampled = [[] if name in unread else [int(self.tokens[row, self.sizes[row] - 1])]
                   for row, name in enumerate(self.names)]  # fmt: skip
        found = proposer.propose(sampled, self.sizes, self.tokens, slot_mappings=None)
        return dict(zip(self.names, found, strict=True))


def alone(tokens: list[int], **options: Any) -> list[int]:
    """What is drafted behind a text that nothing was known of."""
    batch = Batch()
    batch.add("a", tokens)
    return batch.drafts(Proposer(config(**options)))["a"]


def test_a_recorded_run() -> None:
    """Two requests, a third in the place of the first, as vLLM's table was step by step."""
    proposer, batch = Proposer(config(**ONE)), Batch()
    batch.add("a", [1, 2, 3, 4, 5, 6, 1, 2])
    batch.add("b", [9, 9, 9])
    assert batch.drafts(proposer) == {"a": [3, 4, 5, 6], "b": [9, 9, 9, 9]}
    batch.extend("a", [3, 4])
    batch.extend("b", [8])
    assert batch.drafts(proposer) == {"a": [5, 6, 1, 2], "b": []}
    batch.remove("a")  # the second one's row is the first now
    batch.add("c", [7, 1, 2, 7, 1])
    batch.extend("b", [9, 9])
    assert batch.drafts(proposer, unread=("c",)) == {"b": [8, 9, 9, 8], "c": []}
    batch.extend("c", [2])
    batch.extend("b", [9])
    assert batch.drafts(proposer) == {"b": [8, 9, 9, 9], "c": [7, 1, 2, 7]}
    assert all(type(token) is int for draft in batch.drafts(proposer).values() for token in draft)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(3))
def test_rows_that_move_are_drafted_for_as_those_that_stay(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever row a request is in, its draft follows from its own text; and no text is read twice."""
    draw, made = random.Random(seed), list[Any]()
    build = vllm._Text.__init__
    monkeypatch.setattr(vllm._Text, "__init__", lambda self, *given: (made.append(self), build(self, *given))[1])
    proposer, batch, texts, count = Proposer(config(**ONE)), Batch(), dict[str, list[int]](), 0
    for _ in range(60):
        if len(texts) < 8 and draw.random() < 0.4:
            count += 1
            prompt = [draw.randrange(3) for _ in range(draw.randrange(1, 20))]
            if texts and draw.random() < 0.5:  # as another one's text, to its end or not
                prompt = draw.choice([*texts.values()])[: draw.randrange(1, 20)]
            texts[str(count)] = [count % VOCAB, *prompt] if draw.random() < 0.7 else [*prompt]
            batch.add(str(count), texts[str(count)])
        if texts and draw.random() < 0.2:
            gone = draw.choice([*texts])
            del texts[gone]
            batch.remove(gone)
        if len(texts) > 1 and draw.random() < 0.5:
            batch.swap(*draw.sample(range(len(texts)), 2))
        for name, text in texts.items():
            fresh = [draw.randrange(3) for _ in range(draw.randrange(1, 4))][: LONGEST - len(text)]
            text += fresh
            batch.extend(name, fresh)
        unread = tuple(name for name in texts if draw.random() < 0.1)
        for name, draft in batch.drafts(proposer, unread=unread).items():
            left = LONGEST - len(texts[name])
            assert draft == ([] if name in unread or left < 2 else alone_with(texts[name]))


def alone_with(tokens: list[int]) -> list[int]:
    return alone(tokens, **ONE)


def test_a_row_that_moves_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[int]()
    of = vllm._Text.read
    monkeypatch.setattr(vllm._Text, "read", lambda self, row: (read.append(len(row) - len(self)), of(self, row))[1])
    proposer, batch = Proposer(config(**ONE)), Batch()
    for name in "abc":
        batch.add(name, [ord(name) - 97, *range(20)])
    batch.drafts(proposer)
    batch.swap(0, 2)
    batch.extend("a", [5])
    batch.extend("b", [5])
    batch.extend("c", [5])
    batch.drafts(proposer)
    batch.remove("c")
    batch.extend("a", [6, 7])
    batch.extend("b", [6])
    batch.drafts(proposer)
    assert read == [21, 21, 21, 1, 1, 1, 2, 1]
    # What left the batch, and comes back into another row, is known still.
    kept = [*map(int, batch.tokens[batch.names.index("a"), : batch.sizes[batch.names.index("a")]])]
    batch.remove("a")
    batch.drafts(proposer)
    batch.add("a", [*kept, 8])
    batch.drafts(proposer)
    assert read[8:] == [0, 0, 1]


def test_texts_that_are_gone_are_forgotten() -> None:
    proposer, batch = Proposer(config(**ONE, idle=2)), Batch()
    for number in range(20):
        batch.add("a", [number, 1, 2])
        batch.drafts(proposer)
        batch.remove("a")
    assert len(proposer._elsewhere) <= 3


def test_another_request_of_the_same_length_takes_a_row() -> None:
    """With the same last token, too."""
    proposer, batch = Proposer(config(**ONE)), Batch()
    batch.add("a", [1, 2, 3, 1])
    assert batch.drafts(proposer)["a"] == [2, 3]
    batch.remove("a")
    batch.add("b", [1, 7, 8, 1])
    assert batch.drafts(proposer)["b"] == [7, 8]


@pytest.mark.parametrize(("size", "drafted"), [(10, 4), (60, 3), (61, 2), (62, 1), (63, 0), (64, 0)])
def test_no_draft_runs_over_the_longest_text(size: int, drafted: int) -> None:
    assert len(alone([5] * size, **ONE)) == drafted


def test_a_draft_is_as_long_as_vllm_verifies() -> None:
    assert len(alone([5] * 30, most=12)) == 12
    assert len(alone([5] * 30, most=1)) == 1


def test_the_source_that_was_right_drafts() -> None:
    """Behind 1 2 the automaton proposes what came last, and prompt lookup here what came first; the text takes that."""
    first = {"name": "prompt_lookup", "match": "leftmost", "max_ngram": 2, "min_ngram": 2, "tokens": 4}
    options = {"drafters": ["suffix_automaton", first], "adapt": False}
    proposer, batch = Proposer(config(**options)), Batch()
    text = [1, 2, 3, 1, 2, 4]
    batch.add("a", text)
    batch.drafts(proposer)
    found = []
    for _ in range(4):
        for fresh in ([1], [2], [3], [4]):
            batch.extend("a", fresh)
            draft = batch.drafts(proposer)["a"]
            if fresh == [2]:
                found.append(draft[0])
    assert found[-1] == 3


def test_drafts_are_short_where_they_are_wrong() -> None:
    proposer, batch = Proposer(config()), Batch()
    batch.add("a", [1, 2, 3, 4, 5, 6, 7, 1])
    assert len(batch.drafts(proposer)["a"]) >= 2
    for token in (3, 1, 5, 1, 7, 1, 4, 1, 6, 1, 9, 1, 8, 1):
        batch.extend("a", [token])
        draft = batch.drafts(proposer)["a"]
    assert len(draft) == 1
    for token in draft * 9:  # and grow again where they are right
        batch.extend("a", [token])
        draft = batch.drafts(proposer)["a"]
    assert len(draft) > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": ["x"]}, "unknown option of specdec 'drafter'.*drafters"),
        ({"drafters": []}, "drafters is empty"),
        ({"drafters": ["suffix_automata"]}, "suffix_automaton"),
        ({"drafters": ["token_recycling"]}, "'token_recycling', which learns from what the model computes"),
        ({"idle": 0}, "idle is 0"),
        ({"most": 0}, "num_speculative_tokens is 0"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Proposer(config(**options))


def test_vllm_is_not_imported() -> None:
    assert "vllm" not in sys.modules
    Proposer(config()).load_model(None)
    made = config()
    made.additional_config = None
    assert Proposer(made).config.adapt


@pytest.mark.slow
def test_the_proposer_needs_no_transformers() -> None:
    """vLLM pins a version of its own, so the proposer imports neither it nor accelerate, also when it drafts."""
    code = (
        "import sys, types\n"
        "class Block:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name.split('.')[0] in ('transformers', 'accelerate'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "import numpy as np\n"
        "from specdec.integrations.vllm import Proposer\n"
        "spec = types.SimpleNamespace(num_speculative_tokens=3)\n"
        "model = types.SimpleNamespace(max_model_len=64, get_vocab_size=lambda: 50)\n"
        "config = types.SimpleNamespace(speculative_config=spec, model_config=model, additional_config={})\n"
        "tokens = np.array([[1, 2, 3, 4, 1, 2, 3, 4, 1, 2]], dtype=np.int32)\n"
        "print(Proposer(config).propose([[2]], np.array([10]), tokens))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("[[3, 4"), done.stderr[-500:]
