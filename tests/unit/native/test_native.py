"""Native layers: the model's own numbers, and a row's the same, bit for bit, whatever rows are beside it."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from drafters.kangaroo.adapter import VARIANTS, Adapter, AdapterConfig
from drafters.kangaroo.adapter_step import AdapterStep
from drafters.shared.own_cache import Nodes
from specdec import Engine, SamplingParams, TransformersTarget
from specdec.native import library as native
from specdec.native import types
from specdec.native.scores import Stored, draw, weighed
from specdec.runners.linear import HeadOf, PackedWeight, linear_kernel
from specdec.sampling.noise import Noise
from specdec.sampling.sampler import Sampler
from specdec.step import step_output
from specdec.step.step_io import Draws, Entering
from specdec.step.step_output import StepOutput
from specdec.step.tree import Draft
from specdec.target import FINAL, run_steps
from tests import models, seam
from tests.models import target_for
from tests.sums import InOrder, rounding_of
from tests.tiers import once
from tests.unit.drafters.test_kangaroo import guess_on

needs_compiler = pytest.mark.skipif(native.library() is None, reason="no C compiler")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "mixtral", "qwen3_moe", "olmoe")
SMALL = {"max_rows": 24, "prefill_chunk": 16}
SIZES = {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}


HEADS = [(16, 4, 2), (48, 3, 1), (64, 6, 2), (96, 8, 1), (128, 4, 1), (160, 2, 2), (256, 2, 1)]


@pytest.fixture(params=["tiles", "vectors"])
def multiplied(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native layers by tiles, where the processor has them, and by vectors, which all have."""
    by_tiles = request.param == "tiles"
    if by_tiles and not native.library().specdec_tiles():
        pytest.skip("this processor has no tiles")
    monkeypatch.setattr(native.library(), "specdec_tiles", lambda: int(by_tiles))


def native_target(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> TransformersTarget:
    return target_for(models.new_model(family, dtype, **SIZES | changes), execution="native")


def sizes_of(heads: tuple[int, int, int]) -> dict[str, int]:
    """Of heads of so many values, so many queries' and so many keys'."""
    counts = {"num_attention_heads": heads[1], "num_key_value_heads": heads[2]}
    return {"hidden_size": 96, "head_dim": heads[0], **counts}


def weight_of(dtype: torch.dtype, values: str, inputs: int = 530) -> torch.Tensor:
    """[200, inputs] random weights: float32's own; float16's; bfloat16's; with a few, or many, that have no code."""
    weight = torch.randn(200, inputs)
    if values == "float16":
        return weight.half().to(dtype)
    if values != "float32":
        weight = weight.bfloat16().float()
    every = {"few": 5_000, "many": 50}.get(values)
    if every is not None:
        weight.view(-1)[::every] *= 2.0 ** torch.randint(-100, 10, weight.view(-1)[::every].shape)
        weight.view(-1)[1::every] = 0.0
    return weight.to(dtype)


@pytest.mark.few(4)
@needs_compiler
@pytest.mark.usefixtures("multiplied")
@pytest.mark.parametrize("values", ["float32", "float16", "bfloat16", "few", "many"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [64, 530, 544])
def test_a_row_s_product_does_not_depend_on_the_others(inputs: int, dtype: torch.dtype, values: str) -> None:
    torch.manual_seed(0)
    weight, bias = weight_of(dtype, values, inputs), torch.randn(200).to(dtype)
    rows, residual = torch.randn(300, inputs).to(dtype), torch.randn(300, 200).to(dtype)
    product = PackedWeight(weight, bias)
    expected = torch.nn.functional.linear(rows.double(), weight.double(), bias.double())
    together, onto = product(rows), product.add(rows, residual)
    bound = rounding_of(rows, weight, bias, expected)
    torch.testing.assert_close(together.double(), expected, atol=bound, rtol=0)
    torch.testing.assert_close(onto.double(), expected + residual.double(), atol=bound, rtol=0)
    for count in (*range(1, 32), 33, 64, 100, 256, 257):
        assert torch.equal(product(rows[:count]), together[:count]), count
        assert torch.equal(product.add(rows[-count:], residual[-count:]), onto[-count:]), count


@pytest.mark.few(9)
@needs_compiler
@pytest.mark.usefixtures("multiplied")
@pytest.mark.parametrize("inputs", [530, 531, 544])
@pytest.mark.parametrize("values", ["float32", "float16", "bfloat16", "few", "many"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_of_a_weight_is_lost(dtype: torch.dtype, values: str, inputs: int) -> None:
    """Unpacked, looked up, and multiplied with rows of the unit matrix, few and many of them."""
    torch.manual_seed(0)
    weight = weight_of(dtype, values, inputs)
    product, unit = PackedWeight(weight), torch.eye(inputs).to(dtype)
    assert torch.equal(product.unpack(), weight)
    assert torch.equal(product.look_up([199, 0, 31, 32]), weight[[199, 0, 31, 32]])
    assert torch.equal(product(unit), weight.t())
    assert torch.equal(product(unit[-3:]), weight.t()[-3:])
    assert torch.equal(torch.cat([product(row[None]) for row in unit]), weight.t())
    half, kind = dtype is torch.bfloat16 or values != "float32", types.Kind(product.described.kind)
    in_float16 = values == "float16" and dtype is torch.float32
    assert (kind is types.Kind.FLOAT16) == in_float16
    coded = half and values != "many" and not in_float16 and inputs % 2 == 0 and native.library().specdec_codes()
    assert (kind in (types.Kind.CODED, types.Kind.CODED_PAIRS)) == coded
    padded = 256 * inputs
    assert product.nbytes <= (padded * 1.5 + 1_000 if coded else padded * (2 if half else 4))


@needs_compiler
@pytest.mark.parametrize("special", [float("inf"), float("-inf"), float("nan"), -0.0, 1e-40])
def test_a_weight_that_is_no_usual_number_is_kept(special: float) -> None:
    weight = torch.randn(64, 256).bfloat16()
    weight[5, 7] = special
    found = PackedWeight(weight).unpack()
    assert torch.equal(found.view(torch.int16), weight.view(torch.int16))


@needs_compiler
def test_a_residual_stays_as_it_is() -> None:
    product, residual = PackedWeight(torch.randn(64, 32), None), torch.randn(3, 64)
    before = residual.clone()
    product.add(torch.randn(3, 32), residual)
    assert torch.equal(residual, before)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_weight_s_rows_are_looked_up(dtype: torch.dtype) -> None:
    weight = torch.randn(100, 32).to(dtype)
    packed, tokens = PackedWeight(weight, None), [0, 99, 31, 32, 5, 5]
    assert torch.equal(packed.look_up(tokens), weight[tokens])
    for wrong in (100, -1):
        with pytest.raises(IndexError, match="the weight has 100"):
            packed.look_up([wrong])


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3"])
def test_an_embedding_that_multiplies_and_shares_the_head_s_weight(family: str) -> None:
    """With heads of 256, and norms that are not all the same."""
    model = models.new_model(family, torch.float32, head_dim=256, num_attention_heads=2, tie_word_embeddings=True)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.uniform_(parameter, -0.5, 0.5)
    tokens = [3, 5, models.VOCAB - 1]
    target = target_for(model, execution="native")
    assert torch.equal(target.embed(tokens), model.get_input_embeddings()(torch.tensor(tokens)))
    prompt = models.prompt_of(11)
    assert Engine(target, drafter="lookahead").generate(prompt, 40).token_ids == models.reference(model, prompt, 40)


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_that_of_generate(family: str) -> None:
    target = native_target(family, attention_bias=True) if family == "llama" else native_target(family)
    prompt = models.prompt_of(11)
    expected = models.reference(target.model, prompt, 60)
    for drafter in ("none", "prompt_lookup", "jacobi", "lookahead", "token_recycling"):
        assert Engine(target, drafter=drafter).generate(prompt, 60).token_ids == expected, drafter


@needs_compiler
@pytest.mark.parametrize("number", [3.0e38, 1.0000001, -1e-30, 0.0, float("inf"), float("-inf"), float("nan")])
def test_a_float32_row_of_any_numbers_is_multiplied_as_it_is(number: float) -> None:
    """In three parts of eight bits, where that is how it is done."""
    weight = torch.eye(32) if abs(number) < float("inf") else torch.ones(32, 32)
    found = PackedWeight(weight)(torch.full((7, 32), number))
    torch.testing.assert_close(found, torch.full((7, 32), number), rtol=0, atol=0, equal_nan=True)


@pytest.mark.few(2)
@needs_compiler
@pytest.mark.usefixtures("multiplied")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "heads"),
    [
        *((family, (16, 6, 2) if family == "olmoe" else HEADS[0]) for family in FAMILIES),  # whose heads are as wide
        *(("llama", heads) for heads in HEADS[1:]),
    ],
)
def test_a_tree_s_rows_are_plain_decoding_s_bit_for_bit(
    family: str, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Every path of a tree, over texts that have left the windows (8 tokens) and wrapped their rings."""
    target = native_target(family, dtype, **sizes_of(heads))
    tree = Draft((3, 4, 5, 6, 7, 8, 9), (-1, 0, 0, 1, 2, 3, 5))
    for length in (1, 5, 8, 21):
        with target.active():
            own = seam.text(target, rows=8)
            for token in models.prompt_of(length):
                plain(own, token)
            logits = own.run(tree, taps=(2,))
            for path in ((0, 1, 3, 5, 6), (0, 2, 4)):
                alone = seam.text(target, rows=8)
                for token in models.prompt_of(length):
                    plain(alone, token)
                for row in path:
                    output = plain(alone, tree.tokens[row])
                    assert torch.equal(output.logits[0], logits.logits[row]), (length, row)
                    assert torch.equal(output.hidden[2][0], logits.hidden[2][row]), (length, row)


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.usefixtures("multiplied")
@pytest.mark.parametrize(
    ("family", "heads", "dtype"),
    [("llama", heads, torch.bfloat16) for heads in HEADS]
    + [("gemma2", HEADS[2], torch.bfloat16), ("llama", HEADS[2], torch.float32)],
)
def test_a_tree_after_a_long_text(family: str, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Rows of many branches see blocks that all share, whole ones of their own, and what is left."""
    more = {"sliding_window": 512} if family == "gemma2" else {}
    target = native_target(family, dtype, **more, **sizes_of(heads))
    parents = [-1, *range(40), 3, 41, 42, 20, 44, 0, 46, 47, 35]  # a trunk that is longer than a block, and branches
    tree = Draft(models.prompt_of(len(parents)), parents)
    for length in (30, 64, 290):
        text, found = models.prompt_of(length), []
        for steps in ([range(len(parents))], [[0, *range(1, 41)]], [[0, 1, 2, 3, 41, 42, 43]], [[0, 46, 47, 48]]):
            with target.active():
                own = seam.text(target, capacity=400, rows=300)
                own.run(text)
                own.commit(range(length))
                if len(steps[0]) == len(parents):
                    found.append(own.run(tree).logits)
                else:
                    logits = []
                    for row in steps[0]:
                        logits.append(plain(own, tree.tokens[row]).logits[0])
                    assert torch.equal(torch.stack(logits), found[0][list(steps[0])]), length


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_walk_in_two_parts_is_the_whole_walk_bit_for_bit(dtype: torch.dtype) -> None:
    target, tokens = native_target("qwen3", dtype), models.prompt_of(9)
    with target.active():
        expected, parted = seam.text(target).run(tokens).logits, seam.text(target)
        shallow = parted.run(tokens, exit_layer=2).out
        found = parted.run(tokens, entry=Entering(2, shallow)).logits
    assert torch.equal(found, expected)


@pytest.mark.few(3)
@needs_compiler
@pytest.mark.parametrize("top_k", [0, 20])
@pytest.mark.parametrize("vocab", [64, 101])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_head_s_rows_and_their_peaks(dtype: torch.dtype, vocab: int, top_k: int) -> None:
    """Chosen rows are those of all; a tie's first token is taken, as by torch; a row that is NaN has none."""
    target, tokens = native_target("llama", dtype, vocab_size=vocab, tie_word_embeddings=True), [3, 4, 5, 6]
    with target.active():
        own = seam.text(target)
        whole = own.run(tokens, taps=(FINAL,), top_k=top_k)
        part = own.run(tokens, rows=(1, 3), top_k=top_k)
        assert own.run(tokens, taps=(FINAL,), rows=()).logits is None
        assert torch.equal(target.head(whole.hidden[FINAL]), whole.logits)
        assert torch.equal(part.logits, whole.logits[[1, 3]])
        assert whole.best == whole.logits.argmax(-1).tolist()
        assert part.select([3], None).best == whole.logits[3:].argmax(-1).tolist()
        for value, found in ((0.0, 0), (float("nan"), -1), (float("inf"), -1)):
            hidden = torch.full((4, target.hidden_size), value, dtype=dtype)
            with torch.no_grad():
                entry = Entering(target.num_layers, hidden)
                entered = own.run(tokens, entry=entry, rows=(2,), top_k=top_k)
            assert entered.best == [found], value


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_embedded_in_the_same_call(dtype: torch.dtype) -> None:
    """They go in as their rows of the embedding do; what is no token is refused."""
    target, tokens = native_target("llama", dtype, vocab_size=101, tie_word_embeddings=True), [3, 100, 0, 64]
    with target.active():
        own = seam.text(target)
        found = own.run(tokens, taps=(0,))
        embedded = target.embed(tokens)
        assert torch.equal(embedded, target.model.get_input_embeddings().weight[tokens])
        assert torch.equal(found.hidden[0], embedded)
        assert torch.equal(own.run(tokens, entry=Entering(0, embedded)).logits, found.logits)
        for none in (101, -1):
            with pytest.raises(IndexError, match="no embedding for one of its tokens"):
                own.run([3, none])


@pytest.mark.few(2)
@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_likeliest_tokens_are_found_with_the_logits(
    dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a look at the logits finds, and no look is taken, of a sequence by itself and of two together."""
    target = native_target("llama", dtype, vocab_size=200)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with target.active():
            each = zip(([3, 4, 5], [6, 7]), (None, (1,)), strict=True)
            parts = [seam.text(target).rows(ids, **seam.asked(rows=rows, top_k=32)) for ids, rows in each]
            outputs = [*run_steps(target, parts), target.forward(parts[0])]
    finally:
        torch.set_num_threads(before)
    monkeypatch.setattr(step_output, "weighed", None)
    for own, rows in zip(outputs, (None, [1], None), strict=True):
        order = own.logits.sort(descending=True, stable=True)
        assert own.rows == rows
        assert own.top_k(8) == order.indices[:, :8].tolist()
        tokens, logits = own.weighed(32)
        assert [row.tolist() for row in tokens] == order.indices[:, :32].tolist()
        assert torch.equal(torch.tensor([row.tolist() for row in logits], dtype=dtype), order.values[:, :32])
        if rows is None:
            assert own.select([2, 0], None).top_k(3) == order.indices[[2, 0], :3].tolist()
        with pytest.raises(TypeError):  # of more than were asked for
            own.top_k(33)
    monkeypatch.undo()
    assert outputs[0].top_k(40) == outputs[0].logits.sort(descending=True, stable=True).indices[:, :40].tolist()


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_s_largest_are_those_of_a_stable_sort(dtype: torch.dtype) -> None:
    """Of any width, with ties, infinities and NaN, which torch sorts before all numbers too; as of a part of others."""
    torch.manual_seed(0)
    for size in (1, 5, 16, 63, 64, 65, 200, 1003, 4096, 70_001):
        scores = torch.randn(6, size).to(dtype)
        scores[1].round_()  # ties
        scores[2, ::2] = -torch.inf
        scores[3] = -torch.inf
        scores[4, ::3], scores[4, ::5] = torch.nan, torch.inf
        scores[5] = torch.linspace(-1, 1, size)  # each one larger than all before it
        expected = scores.sort(descending=True, stable=True).indices
        for count in (1, 8, 20):
            stored = Stored(scores.data_ptr(), 6, size, dtype is torch.bfloat16).part(2, 4)
            for rows, (places, values) in (
                (range(6), weighed(scores, None, count) or ([], [])),
                ((5, 1, 1), weighed(scores, (5, 1, 1), count) or ([], [])),
                (range(2, 6), weighed(stored, None, count) or ([], [])),
            ):
                best = expected[[*rows], :count]
                assert [row.tolist() for row in places] == best.tolist(), (size, count)
                found = torch.tensor([row.tolist() for row in values], dtype=dtype)
                assert torch.equal(found.nan_to_num(), scores[[*rows]].gather(1, best).nan_to_num())
    assert weighed(scores.double(), None, 1) is None
    assert weighed(scores[:, ::2], None, 1) is None


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draw_is_that_of_torch_s_numbers(dtype: torch.dtype) -> None:
    """Of any width, steep or flat; where scores are no distribution, or two sums are even, nobody is drawn."""
    for size, seed in itertools.product((1, 7, 16, 63, 65, 200, 20_011), range(8)):
        noise = Noise(seed, size, torch.device("cpu"))
        scores = (0.0, 0.5, 4.0, 30.0)[seed % 4] * torch.randn(size, generator=torch.Generator().manual_seed(seed))
        scores[1::7] = -torch.inf
        scores = scores.to(dtype)
        for temperature in (1.0, 0.8, 0.01, 3.0):
            expected = int((noise.gumbel(3) + scores.float() / temperature).argmax())
            assert noise.drawn(scores, 3, temperature) == expected, (size, seed, temperature)
        for odd in (torch.nan, torch.inf):
            assert draw(scores.index_fill(0, torch.tensor([size // 2]), odd), 5) is None
    assert draw(torch.full((100,), -torch.inf), 5) is None
    assert draw(torch.zeros(100).double(), 5) is None
    noise = Noise(0, 2, torch.device("cpu"))
    found = ((position, *noise.gumbel(position).tolist()) for position in itertools.count())
    position, first, second = next(near for near in found if 0 < near[1] - near[2] < 0.005)
    even = torch.tensor([0.0, first - second])  # float32 is exact enough to make their sums even
    assert noise.drawn(even, position) is None
    assert noise.drawn(even + torch.tensor([0.0, 1e-6]), position) == 1


@needs_compiler
def test_a_draw_is_uneven_wherever_its_best_tokens_lie() -> None:
    """Two tokens whose sums are as good as even, in places that are looked at one after the other, and far apart."""
    for size, other in itertools.product((200, 3001), (1, 63, 64, 130, 199)):
        noise = Noise(size, size, torch.device("cpu"))
        for position in range(3):
            numbers, scores = noise.gumbel(position), torch.full((size,), -60.0, dtype=torch.float64)
            scores[0], scores[other] = 20.0, 20.0 + numbers[0] - numbers[other]
            rounded = scores.float()
            apart = float((rounded.double() + numbers)[other] - (rounded.double() + numbers)[0])
            assert abs(apart) < 1e-5
            winner = None if abs(apart) < 1e-9 else other if apart > 0 else 0
            assert noise.drawn(rounded, position) == winner


@pytest.mark.few(2)
@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_comes_next_is_drawn_with_the_logits(dtype: torch.dtype, threads: int) -> None:
    """Of a sequence by itself and of three together, one of which asks for none, and another for logits of few rows."""
    target = native_target("llama", dtype, vocab_size=200)
    noise, before = Noise(3, 200, torch.device("cpu")), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with target.active():
            texts = [seam.text(target).blank(length) for length in (0, 2, 1)]
            for position in range(1, 21):
                for own, behind in zip(texts, (-1, 2, 0), strict=True):
                    own.blank(position + behind)
                start, wanted = (noise.start,), (None, None, (0, 2))
                hot = [Draws(start, (0.8,)), None, Draws(start, (1.5,))]
                each = zip(texts, ([3, 4, 5], [6, 7], [8, 9, 10]), wanted, hot, strict=True)
                top_k = 1 + position % 2
                parts = []
                for own, ids, rows, draws in each:
                    asked = seam.asked(rows=rows, top_k=top_k)
                    asked["wanted"] = replace(asked["wanted"], draws=draws)
                    parts.append(own.rows(ids, **asked))
                first, none, last = run_steps(target, parts)
                alone = target.forward(parts[0])
                for scores in (first, alone):
                    assert scores.decided(0) == noise.drawn(scores.logits[0], position, 0.8)
                    assert scores.decided(1) is scores.decided(2) is None
                assert none.decided(0) is none.decided(1) is None
                assert last.decided(0) == noise.drawn(last.logits[0], position + 1, 1.5)
                assert last.decided(2) is None
    finally:
        torch.set_num_threads(before)


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.parametrize("drafter", ["none", "prompt_lookup", "token_recycling"])
def test_no_second_look_is_taken_for_the_first_draw(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the text is the one that such looks give; where processors change logits, none are drawn with them."""
    target, looks = native_target("llama", torch.bfloat16, vocab_size=200), list[int]()
    engine = Engine(target, None, drafter, policy="off")
    draw = StepOutput.draw

    def counted(self: StepOutput, row: int, key: int, temperature: float) -> int | None:
        looks.append(row)
        return draw(self, row, key, temperature)

    monkeypatch.setattr(StepOutput, "draw", counted)
    hot, prompt = SamplingParams(temperature=0.7, seed=5), [3, 4, 5, 3, 4, 5, 3]
    found = engine.generate(prompt, 40, hot)
    assert len(looks) == len(found.token_ids) - len(found.steps), "one of each step's tokens needs none"
    monkeypatch.setattr(Sampler, "draws", None)
    looks.clear()
    assert engine.generate(prompt, 40, hot).token_ids == found.token_ids
    assert len(looks) == len(found.token_ids)
    monkeypatch.undo()
    for params in (replace(hot, top_p=0.6), replace(hot, top_k=5), replace(hot, repetition_penalty=1.3)):
        other = engine.with_drafter("none").generate(prompt, 40, params).token_ids
        assert engine.generate(prompt, 40, params).token_ids == other


def plain(own: seam.Text, token: int) -> Any:
    """One token by itself."""
    output = own.run([token], taps=(2,))
    own.commit((0,))
    return output


@needs_compiler
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_adapter_s_step_equals_the_whole_text(variant: str) -> None:
    torch.manual_seed(0)
    inner = 48 if variant in ("layer", "mlp") else 0
    config = AdapterConfig(
        hidden_size=64, vocab_size=32, exit_layer=1, heads=4, variant=variant, intermediate_size=inner
    )
    adapter = Adapter(config).requires_grad_(False)
    features, head = torch.randn(1, 11, 64), torch.nn.Linear(64, 32).requires_grad_(False)
    whole = adapter(features, torch.arange(11)[None], head)
    step = AdapterStep(adapter, head)
    assert (step._layer is not None) == (variant == "layer")
    cache = step.new_cache(11)
    if variant != "mlp":
        step.absorb(features[0, :4], cache)
    found = torch.cat(
        [guess_on(step, features[0, first:last], cache) for first, last in itertools.pairwise((4, 5, 8, 9, 11))]
    )
    torch.testing.assert_close(found, whole[[4, 7, 8, 10]], atol=1e-5, rtol=1e-5)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_s_layer_and_head_are_one_call(dtype: torch.dtype) -> None:
    """A guess, of one sequence and of three, is what layer and head give one after the other."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "vocab_size": 96, "heads": 4, "key_heads": 2, "intermediate_size": 48}
    adapter = Adapter(AdapterConfig(exit_layer=1, variant="layer", **sizes)).to(dtype).requires_grad_(False)
    weight = torch.randn(70, 64).to(dtype)
    step = AdapterStep(adapter, HeadOf(linear_kernel(weight)))
    apart = AdapterStep(adapter, lambda hidden: hidden @ weight.T)
    assert (step._native_head is None, apart._native_head is None) == (False, True)
    texts = [torch.randn(size, 64).to(dtype) for size in (5, 9, 3)]

    def guesses(of: AdapterStep, together: bool) -> list[torch.Tensor]:
        caches, found = [of.new_cache(12) for _ in texts], list[torch.Tensor]()
        for first, last in ((0, 2), (2, 3)):
            parts = [text[first:last] for text in texts]
            if together:
                each, rows = [*map(seam.Text, caches)], range(last - first)
                found += of.guess([Nodes(own.rows(rows), part) for part, own in zip(parts, each, strict=True)])
                for own in each:
                    own.commit(rows)
            else:
                found += [guess_on(of, part, cache) for part, cache in zip(parts, caches, strict=True)]
        return found

    one, other = guesses(step, together=False), guesses(step, together=True)
    assert all(map(torch.equal, one, other))
    for found, expected in zip(one, guesses(apart, together=True), strict=True):
        torch.testing.assert_close(found, expected, **({} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.2}))


@pytest.mark.few(3)
@needs_compiler
@pytest.mark.usefixtures("multiplied")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_no_number_spreads_as_in_the_model(dtype: torch.dtype) -> None:
    """A broken row of the embedding: it and all that see it are NaN, and the rows before it are what they were."""
    target, found = native_target("llama", dtype, **sizes_of(HEADS[2])), []
    for broken in (False, True):
        if broken:
            with torch.no_grad():
                target.executor._weights.embedding[5] = float("nan")
        with target.active():
            logits = seam.text(target).run([3, 4, 5, 6]).logits
        assert logits is not None
        found.append(logits)
    assert [bool(row.isnan().all()) for row in found[1]] == [False, False, True, True]
    assert torch.equal(found[1][:2], found[0][:2])


@pytest.mark.few(2)
@needs_compiler
@pytest.mark.usefixtures("multiplied")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 11, 40])
def test_threads_change_nothing(rows: int, dtype: torch.dtype) -> None:
    """Nor do the rows beside a row, when threads part the rows of one strip of a weight."""
    target, prompt = native_target("qwen2", dtype, vocab_size=3001), models.prompt_of(40)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            with target.active():
                found.append(seam.text(target, rows=40).run(prompt[:rows]).logits)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.usefixtures("multiplied")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_a_prefill_s_rows_are_those_of_one_by_one(family: str, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Over many blocks of rows, and a window that they leave; whole, by 13 and by one."""
    target, tokens, found = native_target(family, dtype, **sizes_of(heads)), models.prompt_of(70), []
    for step in (70, 13, 1):
        with target.active():
            own, logits = seam.text(target, capacity=80, rows=70), []
            for begin in range(0, 70, step):
                part = tokens[begin : begin + step]
                logits.append(own.run(part).logits)
                own.commit(range(len(part)))
        found.append(torch.cat(logits))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.few(2)
@needs_compiler
@pytest.mark.usefixtures("multiplied")
@pytest.mark.parametrize(("family", "heads"), once(["llama", "mistral", "gemma2"], HEADS))
def test_attention_is_the_model_s(family: str, heads: tuple[int, int, int]) -> None:
    """As near to what float64 says as transformers' own layers are whose sums run in order; in bfloat16 nearer."""
    tokens = models.prompt_of(70)
    for dtype in (torch.float32, torch.bfloat16):
        off = most = 0.0
        for seed in (1, 2):  # one model may be an exception
            model = models.new_model(family, dtype, seed=seed, **sizes_of(heads))
            model.set_attn_implementation("eager")
            with torch.inference_mode():
                exact = copy.deepcopy(model).double()(torch.tensor([tokens])).logits[0]
                with InOrder():
                    theirs = model(torch.tensor([tokens])).logits[0]
            target = target_for(model, execution="native")
            with target.active():
                ours = seam.text(target, capacity=80, rows=70).run(tokens).logits
            assert ours is not None
            off += float((ours.double() - exact).abs().mean())
            most += float((theirs.double() - exact).abs().mean())
        assert off < (1.05 if dtype is torch.float32 else 0.9) * most


@needs_compiler
def test_a_tied_weight_is_held_once() -> None:
    model = models.new_model("llama", torch.float32, tie_word_embeddings=True, **SIZES)
    target = target_for(model, execution="native")
    held = [names for names, _ in target.executor.kernels() if "layers" not in names[0]]
    assert held == [["model.embed_tokens.weight"]]
    own, theirs = dict(target.named_weights()), dict(model.named_parameters())
    assert own.keys() == theirs.keys()
    assert all(torch.equal(own[name], weight) for name, weight in theirs.items())
    prompt = models.prompt_of(7)
    assert Engine(target).generate(prompt, 30).token_ids == models.reference(model, prompt, 30)
