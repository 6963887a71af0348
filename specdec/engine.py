"""Engine: propose, verify, commit, until the text ends.

Between steps ``cache.length == len(tokens) - 1``: the last token is the root of the next draft, and its keys and values
are computed with it. Prefill is a step whose rows are all known, so the first step is an ordinary one.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoTokenizer

from specdec import copies
from specdec.block import Block
from specdec.cost import CostCurve, cost_curve, describe, roofline, stored_at
from specdec.draft import Draft
from specdec.drafter import AskingSession, Context, Drafter, Observation, Question
from specdec.errors import CheckpointError, ConfigError, DraftError, PromptError, SpecdecWarning
from specdec.model import TransformersTarget
from specdec.policy import AcceptancePolicy, CostPolicy, RowPolicy, check_policy
from specdec.pretrained import model_source, unused_generation_options
from specdec.registry import make_drafter
from specdec.results import Chunk, Generation, Statistics, Step
from specdec.sampling import Sampler, SamplingParams, Scores
from specdec.target import Target
from specdec.text import TextStream, check_stops
from specdec.verify import last_row, match, verifier_for, walk_arrays

__all__ = ["Decoding", "Engine", "Prompt"]

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]] | torch.Tensor
DrafterSpec = str | Mapping[str, Any] | Drafter


class Engine:
    """A target, its tokenizer and a drafter.

    Args:
        target: the model.
        tokenizer: transformers' tokenizer, or None if prompts are token ids and no text is wanted.
        drafter: a registered name, ``{"name": ..., **options}``, or a drafter.
        max_rows: most rows of one step's tree; bounds the scratch slots of the cache.
        prefill_chunk: prompt tokens per forward; None takes 512, or the sliding window where that is smaller.
        policy: ``off`` lets the drafter propose what its options say; ``acceptance`` weighs accepted tokens against
            what rows cost by the target's curve; ``cost`` goes by the clock as well, and a path is that of a cost file
            to do so by. See :mod:`specdec.policy`. A drafter that plans its rows goes by acceptance where it is off.
        costs: the target's curve. Left out, it is read from the user's cache folder where it was kept, or measured here
            and now, for about a second, if policy or drafter want it; never later.
        progress: called with the share that is done while the curve is measured.

    Raises:
        ConfigError: unknown drafter or option, or a size that is not positive.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: Any = None,
        drafter: DrafterSpec = "none",
        *,
        max_rows: int = 128,
        prefill_chunk: int | None = None,
        policy: str = "off",
        costs: CostCurve | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        for name, value in (("max_rows", max_rows), ("prefill_chunk", prefill_chunk)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        self.target = target
        self.tokenizer = tokenizer
        self.drafter = make_drafter(drafter, target)
        self.max_rows = max_rows
        self.prefill_chunk = prefill_chunk
        self.policy = check_policy(policy)
        self._progress = progress
        self._weighs = self.drafter.proposes and (policy != "off" or self.drafter.plans_rows)
        if costs is None and self._weighs:
            file = None if policy in ("off", "acceptance", "cost") else policy
            costs = cost_curve(target, file, progress=progress)
        self._known_costs = costs
        self.costs = costs or roofline(target.device)
        by_clock = self._weighs and policy not in ("off", "acceptance")
        self._cost_policy = CostPolicy(self.costs) if by_clock else None

    def row_policy(self) -> RowPolicy | None:
        """What decides on the rows of a new sequence, if anything does."""
        if self._weighs and self._cost_policy is None:
            return AcceptancePolicy(self.costs, self.drafter.fixed_cost_rows)
        return self._cost_policy

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        drafter: DrafterSpec = "none",
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        device_map: str | dict[str, Any] | None = None,
        execution: str = "auto",
        attention: str = "auto",
        trust_remote_code: bool = False,
        max_rows: int = 128,
        prefill_chunk: int | None = None,
        policy: str = "acceptance",
        progress: Callable[[float], None] | None = None,
    ) -> Engine:
        """Load target and tokenizer: ``"tiny"`` (the model in this package), a folder, or a hub id.

        ``execution`` and ``attention`` are TransformersTarget's. The policy is ``acceptance`` here, so that no drafter
        loses much; an engine that is put together by hand takes its drafter at its word.

        Raises:
            CheckpointError: no model or tokenizer there, or a broken one.
            TargetError: a model that specdec cannot drive exactly.
            ConfigError: unknown drafter or option.
        """
        target = TransformersTarget.from_pretrained(
            path,
            dtype=dtype,
            device=device,
            device_map=device_map,
            execution=execution,
            attention=attention,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
        place = model_source(path)
        try:
            tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"no tokenizer at {str(path)!r}: {error}; save one beside the weights") from error
        return cls(
            target,
            tokenizer,
            drafter,
            max_rows=max_rows,
            prefill_chunk=prefill_chunk,
            policy=policy,
            progress=progress,
        )

    def describe(self) -> dict[str, dict[str, Any]]:
        """What runs here, and why: section -> name -> value; `specdec info` prints it."""
        curve, file = self.costs, stored_at(describe(self.target))
        steps = curve.steps(0, 8)
        return {
            **self.target.describe(),
            "decoding": {
                "drafter": self.drafter.name,
                "policy": self.policy,
                "a step of 2, 4, 8 rows": " / ".join(f"{steps[rows]:.2f}" for rows in (2, 4, 8)) + " plain steps",
                "known from": str(file) if file.exists() else "a roofline, as nothing was timed here",
            },
        }

    def with_drafter(self, drafter: DrafterSpec, *, policy: str | None = None) -> Engine:
        """The same target with another drafter, and another policy if one is given; nothing is loaded twice.

        What rows cost is measured here, once, if this engine had no use for it and the new one has.
        """
        policy = self.policy if policy is None else policy
        other_file = policy != self.policy and policy not in ("off", "acceptance", "cost")
        return Engine(
            self.target,
            self.tokenizer,
            drafter,
            max_rows=self.max_rows,
            prefill_chunk=self.prefill_chunk,
            policy=policy,
            costs=None if other_file else self._known_costs,
            progress=self._progress,
        )

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = 128,
        sampling: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        logits_processor: Sequence[Any] = (),
        on_step: Callable[[Step], None] | None = None,
    ) -> Generation:
        """Decode a prompt: text, token ids, or chat messages.

        Args:
            prompt: text, token ids, or ``[{"role": ..., "content": ...}]`` for the tokenizer's chat template.
            max_new_tokens: budget; the model's context length is one too.
            sampling: greedy if None, whatever the checkpoint's generation config says (a SpecdecWarning names it).
            stop: strings that end the text; the result's text is cut before them.
            logits_processor: transformers' or any ``(ids [1, n], scores [1, V]) -> scores``; they see each token's own
                prefix, so they act as in plain decoding.
            on_step: called after every step.

        Raises:
            PromptError: empty, too long, or tokens outside the vocabulary.
            NumericalError: the model's logits are no distribution.
        """
        decoding = self.start(prompt, max_new_tokens, sampling, stop=stop, logits_processor=logits_processor)
        with self.target.active():
            decoding.prefill()
            while decoding.finish_reason is None:
                step = decoding.step()
                if on_step is not None:
                    on_step(step)
        return decoding.result()

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 128,
        sampling: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        logits_processor: Sequence[Any] = (),
    ) -> Iterator[Chunk]:
        """As ``generate``, a chunk per step; the texts add up to ``generate``'s, the last chunk has the finish reason.

        The returned iterator's ``close`` ends the generation; a chunk may have no text (half a character, say).
        """
        decoding = self.start(
            prompt, max_new_tokens, sampling, stop=stop, logits_processor=logits_processor, stream=True
        )
        return decoding.chunks()

    def start(
        self,
        prompt: Prompt,
        max_new_tokens: int = 128,
        sampling: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        logits_processor: Sequence[Any] = (),
        stop_when: Callable[[Sequence[int]], bool] | None = None,
        sample: bool | None = None,
        eos_ids: frozenset[int] | None = None,
        stream: bool = False,
    ) -> Decoding:
        """A generation to be driven step by step, inside ``target.active()``; ``generate`` and ``stream`` use it.

        ``stop_when`` is asked after every token, with prompt and text; ``sample`` overrides what the temperature says.
        """
        if max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
        if eos_ids is None:  # a caller with its own has read the generation config
            self._warn_of_unused(sampling)
        stops = check_stops(stop)
        if (stops or stream) and self.tokenizer is None:
            raise ConfigError("stop strings and streams need a tokenizer; the engine has none")
        return Decoding(
            self,
            self.encode(prompt),
            max_new_tokens,
            sampling or SamplingParams(),
            processors=logits_processor,
            stop_when=stop_when,
            sample=sample,
            eos_ids=self.target.eos_ids if eos_ids is None else eos_ids,
            text=TextStream(self.tokenizer, stops) if stops or stream else None,
        )

    def _warn_of_unused(self, sampling: SamplingParams | None) -> None:
        """Say what transformers' ``generate`` would take from the checkpoint, and an engine does not."""
        model = getattr(self.target, "model", None)
        unused = [] if model is None else unused_generation_options(model, sampling=sampling is not None)
        if unused:
            warnings.warn(
                f"the generation config of {self.target.name} sets {', '.join(unused)}, which an engine does not take: "
                "it decodes greedily, or by the SamplingParams and logits processors that it is given; give those, or "
                "use model.generate(custom_generate=specdec.custom_generate)",
                SpecdecWarning,
                stacklevel=4,
            )

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.

        Raises:
            PromptError: empty, longer than the context, or tokens outside the vocabulary.
        """
        ids = self._ids(prompt)
        if not ids:
            raise PromptError("the prompt is empty; give at least one token (a BOS token will do)")
        outside = [token for token in ids if not 0 <= token < self.target.vocab_size]
        if outside:
            raise PromptError(
                f"token {outside[0]} is outside the vocabulary [0, {self.target.vocab_size}); "
                "the ids come from another tokenizer"
            )
        if len(ids) >= self.target.context_length:
            raise PromptError(
                f"the prompt has {len(ids)} tokens, and the model's context holds {self.target.context_length} with at "
                "least one new token; shorten the prompt"
            )
        return ids

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, torch.Tensor):
            if prompt.ndim == 2 and prompt.shape[0] == 1:
                prompt = prompt[0]
            if prompt.ndim != 1:
                raise PromptError(f"the prompt has shape {list(prompt.shape)}; give one sequence, [n] or [1, n]")
            if prompt.dtype.is_floating_point or prompt.dtype is torch.bool:
                raise PromptError(f"the prompt is of {prompt.dtype}; token ids are integers")
            return [int(token) for token in prompt.tolist()]
        tokens = [] if isinstance(prompt, str) else [int(token) for token in prompt if isinstance(token, Integral)]
        if not isinstance(prompt, str) and len(tokens) == len(prompt):
            return tokens
        if self.tokenizer is None:
            raise PromptError("this engine has no tokenizer; give token ids")
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        if not getattr(self.tokenizer, "chat_template", None):
            raise PromptError("the tokenizer has no chat template; give text, or set tokenizer.chat_template")
        encoded = self.tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])


class Decoding:
    """One generation under way. Made by ``Engine.start``; the caller holds ``target.active()`` around its methods."""

    def __init__(
        self,
        engine: Engine,
        prompt: list[int],
        max_new_tokens: int,
        sampling: SamplingParams,
        *,
        processors: Sequence[Any],
        stop_when: Callable[[Sequence[int]], bool] | None,
        sample: bool | None,
        eos_ids: frozenset[int],
        text: TextStream | None,
    ) -> None:
        target = engine.target
        target.check_unchanged()
        self._target, self._tokenizer, self._drafter = target, engine.tokenizer, engine.drafter
        self._policy = engine.row_policy()
        self._tells = bool(engine.drafter.taps) or engine.drafter.needs_observe
        self._stop_when, self._eos_ids, self._text = stop_when, eos_ids, text
        self.tokens = list(prompt)
        self._end = min(len(prompt) + max_new_tokens, target.context_length)
        self._end_reason = "length" if self._end == len(prompt) + max_new_tokens else "context"
        self._chunk = engine.prefill_chunk or _prefill_chunk(target)
        self._cache = target.new_cache(capacity=self._end, rows=max(engine.max_rows, min(self._chunk, len(prompt))))
        self._cache.reserve(len(prompt))
        self.sampler = Sampler(sampling, self.tokens, target.vocab_size, target.head_device, processors, sample)
        self._context = Context(
            target=target,
            cache=self._cache,
            tokens=self.tokens,
            prompt_length=len(prompt),
            remaining=self._end - len(prompt),
            max_rows=engine.max_rows,
            sampling=sampling,
            noise=self.sampler.noise,
            rng=random.Random(sampling.seed),
            costs=engine.costs,
            policy=self._policy,
        )
        self._session = self._drafter.start(self._context)
        self._apart = copies.is_apart(target.head_device)
        self._asks = self._apart and isinstance(self._session, AskingSession)
        self.finish_reason: str | None = None
        self.stats = Statistics(prompt_tokens=len(prompt), lossy=sampling.lossy)
        self.steps: list[Step] = []

    @property
    def cache_bytes(self) -> int:
        """Bytes of the target's cache."""
        return self._cache.nbytes

    def prefill(self) -> None:
        """Run the prompt but its last token, in chunks, with no logits."""
        began = perf_counter()
        known = self.tokens[:-1]
        for start in range(0, len(known), self._chunk):
            chunk = known[start : start + self._chunk]
            block = Block(self._cache, chunk, device=self._target.device, backend=self._target.backend)
            output = self._target.forward(block, taps=self._drafter.taps, rows=())
            self._cache.commit(range(len(chunk)))
            if self._drafter.taps:
                self._session.observe(Observation(None, range(len(chunk)), chunk, taps=output.taps))
        copies.wait(self._target.head_device)
        self.stats.seconds.prefill += perf_counter() - began

    def step(self) -> Step:
        """One draft, one target forward, at least one token."""
        began = perf_counter()
        room = min(self._context.max_rows, self._cache.free)
        length = self._cache.length
        self._context.remaining = remaining = self._end - len(self.tokens)
        if self._policy is not None and not self._drafter.plans_rows:
            room = self._policy.room(room, length)
        draft = self._session.propose(room) if remaining > 1 else Draft.chain(self.tokens[-1:])
        self._check(draft, room)
        drafted = perf_counter()

        rows = draft.scored_rows()
        sent = self._arrays(draft, rows) if self._apart else None
        block = Block.of(draft, self._cache, self._target.device, self._target.backend, sent)
        output = self._target.forward(block, entry=draft.entry, taps=self._drafter.taps, rows=rows)
        assert output.logits is not None
        scores = Scores(output.logits, rows)
        forwarded = perf_counter()

        verifier = verifier_for(self.sampler.params, draft, sampling=self.sampler.sample)
        answer = self._copy_out(draft, block, scores, output.taps) if self._apart and verifier is match else None
        verdict = verifier(draft, scores, self.sampler)
        verdict = verdict.cut(self._cut(verdict.tokens))
        verified = perf_counter()

        self._cache.commit(verdict.path)
        self.tokens.extend(verdict.tokens)
        committed = perf_counter()
        if self._tells and self.finish_reason is None:
            self._session.observe(Observation(draft, verdict.path, verdict.tokens, scores, output.taps, answer))
        step = Step(len(self.steps), verdict.tokens, len(draft), self._drafter.name)
        self.steps.append(step)
        self.stats.acceptance_lengths.append(len(verdict.tokens))
        self.stats.rows.append(len(draft))
        observed = perf_counter()
        seconds = self.stats.seconds
        seconds.draft += drafted - began + observed - committed
        seconds.target += forwarded - drafted
        seconds.verify += verified - forwarded
        seconds.other += committed - verified
        if self._policy is not None:
            drafting = drafted - began + observed - committed
            self._policy.learn(draft, verdict.path, length, drafting, observed - began)
        return step

    def _arrays(self, draft: Draft, rows: Sequence[int] | None) -> dict[str, npt.NDArray[Any]]:
        """What a step on a device needs there beside its rows; it goes in the same copy."""
        scores = Scores(torch.empty(0), rows)
        arrays = walk_arrays(draft, scores.place) if self._asks else {}
        return arrays if rows is None else {**arrays, "rows": np.array(rows, dtype=np.int64)}

    def _copy_out(
        self, draft: Draft, block: Block, scores: Scores, taps: Mapping[int, torch.Tensor]
    ) -> list[int] | None:
        """Decide all rows on the device, and copy from it, at once, what verification and the drafter will read."""
        depths = [draft.depths[row] for row in (range(len(draft)) if scores.rows is None else scores.rows)]
        decided = self.sampler.decide(scores, depths)
        if decided is None:
            return None
        wanted = None
        if self._asks:
            device, sent = scores.logits.device, block.sent
            own, tokens, places, eligible, closure = (
                tensor.to(device)
                for tensor in (
                    decided[1], block.tokens[0], sent["parent_places"], sent["eligible"], block.seen(len(draft), device)
                )
            )  # fmt: skip
            assert isinstance(self._session, AskingSession)
            wanted = self._session.ask(Question(scores, taps, last_row(own, tokens, places, eligible, closure)))
        greedy = decided[0] is decided[1]
        found = copies.copy_out([*decided[greedy:], *([] if wanted is None else [wanted.to(scores.logits.device)])])
        scores.decided(found[0], found[0 if greedy else 1])
        return None if wanted is None else found[-1]

    def result(self) -> Generation:
        """The generation as it stands."""
        new = self.tokens[self.stats.prompt_tokens :]
        if self._text is not None:
            self._text.finish()
            text = self._text.text
        else:
            text = "" if self._tokenizer is None else self._tokenizer.decode(new, skip_special_tokens=True)
        return Generation(text, new, self.finish_reason or "unfinished", self.stats, self.steps)

    def chunks(self) -> Iterator[Chunk]:
        """Drive to the end, yielding each step; the model is as it was while the caller has the chunk."""
        assert self._text is not None
        with self._target.active():
            self.prefill()
        while self.finish_reason is None:
            with self._target.active():
                step = self.step()
            last = self.finish_reason is not None
            text = self._text.finish() if last else self._text.take()
            yield Chunk(text, step.tokens, step, self.finish_reason)

    def _check(self, draft: Draft, room: int) -> None:
        """Raises DraftError where a session broke the rules that exactness stands on."""
        if draft.tokens[0] != self.tokens[-1]:
            raise DraftError(
                f"the draft's root is token {draft.tokens[0]}, the last emitted token is {self.tokens[-1]}; "
                f"row 0 must be context.root (drafter {self._drafter.name!r})"
            )
        if len(draft) > room:
            raise DraftError(
                f"draft has {len(draft)} rows but {room} slots are free; propose at most `room` rows "
                f"(drafter {self._drafter.name!r}), lower its sizes, or raise the engine's max_rows"
            )
        if not 0 <= min(draft.tokens) <= max(draft.tokens) < self._target.vocab_size:
            raise DraftError(
                f"drafter {self._drafter.name!r} proposed a token outside the vocabulary [0, {self._target.vocab_size})"
            )
        entry = draft.entry
        if entry is not None and entry.hidden.shape != (len(draft), self._target.hidden_size):
            raise DraftError(
                f"entry.hidden has shape {list(entry.hidden.shape)}, the draft needs "
                f"{[len(draft), self._target.hidden_size]}: one row per draft row, in the same order"
            )

    def _cut(self, tokens: Sequence[int]) -> int:
        """How many of the accepted tokens plain decoding would have emitted; sets the finish reason."""
        for count, token in enumerate(tokens, 1):
            stopped = self._text is not None and self._text.push(token)
            if token in self._eos_ids:
                self.finish_reason = "eos"
            elif stopped or (self._stop_when is not None and self._stop_when([*self.tokens, *tokens[:count]])):
                self.finish_reason = "stop"
            elif len(self.tokens) + count == self._end:
                self.finish_reason = self._end_reason
            if self.finish_reason is not None:
                return count
        return len(tokens)


def _prefill_chunk(target: Target) -> int:
    """512 tokens, or the smallest sliding window where that is smaller, but no sliver."""
    windows = [spec.window for spec in getattr(target, "specs", ()) if spec.window is not None]
    return min(512, max(32, min(windows))) if windows else 512
