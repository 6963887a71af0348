"""Running a case of the exactness harness: what its texts are to be, and what they are."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, NoBadWordsLogitsProcessor, NoRepeatNGramLogitsProcessor

from specdec import Context, Draft, DrafterBase, Engine, Generation, PrefixCache, SamplingParams, custom_generate
from specdec.drafting.registry import make_drafter
from specdec.engine.requests import Request
from specdec.engine.scheduler import Scheduler
from specdec.native import library as native
from tests import launching, models
from tests.exactness.cases import Case
from tests.exactness.targets import Letters, Targets, engine_of
from tests.fakes import Alternating, Drawing, Oracle, Spy

__all__ = ["check"]

Found = tuple[list[int], str, Any]
"""A text's tokens, why it ended, and its log-probabilities, where they are asked for."""
Prompt = tuple[int, ...]


class Rhyme(LogitsProcessor):
    """A user's own processor, which depends on the whole prefix: it forbids one token and favours another."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        total, size = int(input_ids.sum()), scores.shape[-1]
        scores[:, total % size] = -torch.inf  # in place, as transformers' own do now and then
        scores[:, (total * 7 + input_ids.shape[1]) % size] += 3.0
        return scores


PROCESSORS: dict[str, Callable[[], list[Any]]] = {
    "own": lambda: [Rhyme()],
    "greedy own": lambda: [Rhyme()],
    "no_repeat": lambda: [NoRepeatNGramLogitsProcessor(2)],
    "bad_words": lambda: [NoBadWordsLogitsProcessor([[26], [18], [20, 27]], eos_token_id=[1])],
    "grammar": lambda: [Alternating()],
}


class Knowing(DrafterBase):
    """Draws its trees around the text that is known of each prompt."""

    name = "knowing"

    def __init__(self, texts: dict[Prompt, list[int]], vocab_size: int, steady: bool) -> None:
        self._texts, self._size, self._steady = texts, vocab_size, steady

    def start(self, context: Context) -> Any:
        prompt = tuple(context.tokens[: context.prompt_length])
        text = [*prompt, *self._texts.get(prompt, ())]
        return Oracle(text, self._size, steady=self._steady).start(context)


class Run:
    """A case on its target. ``stops`` is what ends its texts before their budget does."""

    def __init__(self, case: Case, targets: Targets) -> None:
        self.case, self.targets, self.rng = case, targets, random.Random(case.seed)
        self.target = self.endless = targets.of(case)
        self.prompts = [models.prompt_of(size, seed=case.seed % 7) for size in case.prompts]
        if case.load not in ("batch", "mixed"):
            self.prompts = self.prompts[:1]
        self.new = [max(1, case.new - 3 * place) for place in range(len(self.prompts))]
        self.plain: dict[Prompt, list[int]] = {}
        self.wanted: list[Found] = []  # of each prompt
        self.stops: dict[str, Any] = {}

    def options(self) -> dict[str, Any]:
        """Of every generation, ends left out."""
        made = PROCESSORS.get(self.case.sampling)
        options: dict[str, Any] = {"logits_processor": made()} if made else {}
        return options | ({} if self.case.logprobs is None else {"logprobs": self.case.logprobs})

    def drafter(self) -> Any:
        """The case's drafter, with options for this target."""
        case = self.case
        if case.drafter == "oracle":
            return Knowing(self.plain, self.target.vocab_size, steady=case.setting % 2 == 0)
        if case.drafter == "drawing":
            random = torch.Generator().manual_seed(case.seed)
            q = torch.randn(self.target.vocab_size, self.target.vocab_size, generator=random).double().softmax(-1)
            return Drawing(q)
        return self.targets.settings(case, self.target, case.drafter)

    def expected(self, place: int, prompt: Prompt, new: int) -> Found:
        """Plain decoding's text, or, where it may be the drafter's own, the drafter's in one piece and alone."""
        case, params = self.case, self.case.params(place)
        out = engine_of(self.endless, "none").generate(prompt, new, params, **self.options())
        self.plain[prompt] = out.token_ids
        if (options := _GENERATED.get(case.sampling)) is not None and case.format == "float64":
            assert out.token_ids == models.reference(models.model_of(case.family), prompt, new, **options)
        if case.rejects:
            sizes: dict[str, Any] = {"max_rows": case.max_rows, "prefill_chunk": case.chunk, "policy": case.policy}
            drafts: list[Draft] = []
            drafter = Spy(make_drafter(self.drafter(), self.endless), drafts.append)
            plain, out = out, engine_of(self.endless, drafter, **sizes).generate(prompt, new, params, **self.options())
            if case.sampling == "auto" and not any(draft.q for draft in drafts):
                assert out.token_ids == plain.token_ids, "what was not drawn from a q is followed by ``match``"
        return out.token_ids, out.finish_reason, out.logprobs

    def end(self, text: list[int]) -> None:
        """Choose what ends the texts, from the first one."""
        case, at = self.case, self.rng.randrange(len(text))
        if case.end in ("eos", "context"):
            self.target = copy.copy(self.target)
        if case.end == "eos":
            self.target.eos_ids |= {text[at]}
        elif case.end == "context":
            self.target.context_length = len(self.prompts[0]) + at + 1
        elif case.end == "stop token":
            self.stops["stop_token_ids"] = text[at : at + 1]
        elif case.end == "stop string":
            self.stops["stop"] = Letters().decode(text[at : at + 2])
        elif case.end == "budget":
            self.new = [min(new, at + 1) for new in self.new]

    def cut(self, found: Found, prompt: Prompt, new: int) -> Found:
        """The text up to its end."""
        tokens, reason, logprobs = found
        stop, ids = self.stops.get("stop"), self.stops.get("stop_token_ids", ())
        for count, token in enumerate(tokens, 1):
            ended = None
            if count == new:
                ended = reason if count == len(tokens) else "length"
            elif self.case.end == "context" and len(prompt) + count == self.target.context_length:
                ended = "context"
            if stop is not None and stop in Letters().decode(tokens[:count]):
                ended = "stop"
            if token in ids:
                ended = "stop"
            if self.case.end == "eos" and token in self.target.eos_ids:
                ended = "eos"
            if ended is not None:
                return tokens[:count], ended, None if logprobs is None else logprobs[:count]
        return found

    def predictions(self) -> list[Any]:
        """What is said of each prompt's answer."""
        known = [self.plain[prompt] for prompt in self.prompts]
        edited = [[*text[: len(text) // 2], 7, 8, *text[len(text) // 2 + 1 :]] for text in known]
        return {"right": known, "edited": edited, "wrong": [[9] * 50] * len(known)}.get(self.case.predicted, [])

    def ask(self, engine: Engine) -> list[Any]:
        """Texts as the case's load has them; a prompt that came of them is among ``prompts`` then."""
        case, params = self.case, [self.case.params(place) for place in range(len(self.prompts))]
        options: dict[str, Any] = {**self.options(), **self.stops}
        said = self.predictions()
        first: dict[str, Any] = options | ({"prediction": said[0]} if said else {})
        if case.load == "batch":
            together = options | ({"prediction": said} if said else {})
            found = engine.generate_batch(
                self.prompts, self.new, params, batch=3, step_rows=max(26, case.max_rows), **together
            )
            assert [one.error for one in found] == [None] * len(found)
            return found
        if case.load == "mixed":
            return self.mixed(engine, params, options)
        if case.load == "custom":
            return [self.custom()]
        if case.load == "stream":
            chunks = list(engine.stream(self.prompts[0], self.new[0], params[0], **first))
            tokens = [token for chunk in chunks for token in chunk.token_ids]
            return [(tokens, chunks[-1].finish_reason, None)]
        if case.load == "prefix":
            kept = PrefixCache()
            begun = engine.generate(self.prompts[0], self.new[0], params[0], prefix_cache=kept, **first)
            prompt = (*self.prompts[0], *begun.token_ids, 5, 6)[: -3 if case.seed % 2 else None]
            self.prompts.append(prompt)
            self.wanted.append(self.expected(0, prompt, self.new[0]))
            again = engine.generate(prompt, self.new[0], params[0], prefix_cache=kept, **options)
            assert again.stats.reused_tokens or len(prompt) < 4
            return [begun, again]
        return [engine.generate(self.prompts[0], self.new[0], params[0], **first)]

    def mixed(self, engine: Engine, params: Sequence[SamplingParams], options: dict[str, Any]) -> list[Generation]:
        """Each prompt has a drafter of its own."""
        names = ("none", "prompt_lookup", "medusa" if self.case.seed % 2 else "kangaroo")
        drafters = [None, *(self.targets.settings(self.case, self.target, name) for name in names)]
        asked = zip(self.prompts, self.new, params, drafters, strict=True)
        requests = [Request(prompt, new, one, drafter=own, **options) for prompt, new, one, own in asked]
        done: dict[int, Generation] = {}
        with self.target.active():
            for events in Scheduler(engine, requests, batch=3, step_rows=44).run():
                done |= {event.index: event.generation() for event in events if event.last}
        return [done[place] for place in range(len(requests))]

    def custom(self) -> Found:
        """Inside transformers' ``generate``."""
        params, ids = self.case.params(), torch.tensor([self.prompts[0]])
        told = {"seed": params.seed, "acceptance": "match", "policy": self.case.policy}
        own: Any = partial(custom_generate, drafter=self.drafter(), target=self.target, **told)
        names = ("temperature", "top_k", "top_p", "min_p") if params.temperature else ()
        options = {name: getattr(params, name) for name in (*names, "repetition_penalty")}
        whole = models.model_of(self.case.family).generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=params.temperature > 0, max_new_tokens=self.new[0],
            custom_generate=own, **options,
        )  # fmt: skip
        return whole[0, ids.shape[1] :].tolist(), "length", None


_GENERATED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy once more": {},
    "greedy penalty": {"repetition_penalty": 1.2},
}


def check(case: Case, targets: Targets, patch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Run a case, and see that its texts are what they are to be; returns tokens and steps of its texts."""
    if (case.executor == "native" or case.in_torch) and native.library() is None:
        pytest.skip("no C compiler")
    if case.recorded:
        launching.launch(patch)
    if case.executor == "split":
        patch.setattr("specdec.runners.attention.SPLIT_FROM", 0)
    if case.small:
        patch.setattr("specdec.step.slots._START", 8)
    run = Run(case, targets)
    asked = zip(run.prompts, run.new, strict=True)
    run.wanted = [run.expected(place, prompt, new) for place, (prompt, new) in enumerate(asked)]
    run.end(run.wanted[0][0])
    tokens = steps = 0
    for texts in targets.run(case, run.target, run.drafter(), run.ask):
        for place, out in enumerate(texts):
            prompt, new = run.prompts[place], run.new[place if case.load != "prefix" else 0]
            found = out
            if isinstance(out, Generation):
                found = (out.token_ids, out.finish_reason, out.logprobs)
                tokens, steps = tokens + out.stats.new_tokens, steps + out.stats.steps
                assert out.stats.new_tokens == len(out.token_ids)
            wanted = run.cut(run.wanted[place], prompt, new)
            assert found[:2] == wanted[:2], f"the text of the prompt {prompt}"
            if (case.executor == "native" or case.in_torch) and case.load != "stream":
                assert found[2] == wanted[2], f"log-probabilities behind the prompt {prompt}"
    return tokens, steps
