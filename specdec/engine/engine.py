"""Engine: a target, its tokenizer and a drafter, and the ways to decode with them: one prompt, or many at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any, Unpack

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from specdec.costs.curve import CostCurve, roofline
from specdec.costs.fallback import Fallback
from specdec.costs.live_curve import LiveCosts
from specdec.costs.measuring import cost_curve, describe, kept_curve, source_of
from specdec.costs.policy import AcceptancePolicy, RowPolicy, check_policy
from specdec.drafter import warm_up
from specdec.drafting.registry import DrafterSpec, make_drafter, parse_drafter
from specdec.engine.conversations import answer_end
from specdec.engine.decoding import Decoding
from specdec.engine.prediction import prediction_ids
from specdec.engine.prompt import Prompt, is_chat, token_ids
from specdec.engine.requests import BatchOptions, Options, Request, make_requests
from specdec.engine.scheduler import Scheduler
from specdec.engine.text_stream import stop_strings
from specdec.errors import CheckpointError, ConfigError, PromptError, SpecdecWarning, check_choice, first_line, shown
from specdec.models.around_layers import GENERATION
from specdec.models.chat_templates import with_chat_template
from specdec.models.described_target import DescribedTarget
from specdec.models.inspection import unused_generation_options
from specdec.models.names import model_source
from specdec.models.tokenizer import load_tokenizer
from specdec.models.transformers_target import TransformersTarget
from specdec.parallel import PARALLEL
from specdec.parallel.load import load_parallel
from specdec.results import Chunk, Generation, Step
from specdec.runners.packed_step import MOST_REPLAYED
from specdec.sampling.processors import check_processors, settled
from specdec.settings.arguments import TOKENIZER_OR_PLACE, checked, checked_fields
from specdec.settings.copies import NotCopied
from specdec.settings.sampling_params import SamplingParams
from specdec.step import device_copies, torch_switches
from specdec.step.step_io import NOTHING, StepInput, Wanted
from specdec.target import Target

__all__ = ["Decoding", "Engine", "Prompt"]


class Engine(NotCopied):
    """A target, its tokenizer and a drafter.

    Args:
        target: the model.
        tokenizer: transformers' tokenizer, or None if prompts are token ids and no text is wanted.
        drafter: a registered name, ``{"name": ..., **options}``, or a drafter.
        max_rows: most rows of one step's tree; bounds the scratch slots of the cache.
        prefill_chunk: prompt tokens per forward; None takes 512, or the sliding window where that is smaller.
        policy: the row policy. With ``off`` the drafter's options decide; ``acceptance`` weighs accepted tokens
            against the cost of rows; a path names a cost file to do so with. See :mod:`specdec.costs.policy`. Under
            ``off``, a drafter that plans its rows still uses prices as under ``acceptance``.
        costs: the target's cost curve. A given curve is never adapted, so equal calls take equal steps. If left out, it
            is read from the user's cache folder or measured now, for about a second, if policy or drafter need it; and
            where the target is ``batch_invariant``, it is adapted to the latest forwards.
        progress: called with the share that is done while the curve is measured.

    Attributes:
        live: the live cost curve, or None.
        fallback: decides whether drafting pays at all; None without a live curve.
        step_kinds: the kinds of steps that were taken, see :class:`specdec.engine.decoding.Learning`.

    Raises:
        ConfigError: unknown drafter or option, or a size that is not positive.
    """

    instead = (
        "for another drafter call with_drafter, which shares the model, use one engine in several threads, and in "
        "another process (started by 'spawn') load a new engine: Engine.from_pretrained(...)"
    )

    @torch_switches.makes
    @checked
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
        self.target = target
        self.tokenizer = tokenizer
        self.drafter = make_drafter(drafter, target)
        self.max_rows = max_rows
        self.prefill_chunk = prefill_chunk
        self.policy = check_policy(policy)
        self._by_file = self.policy not in ("off", "acceptance")
        self._progress = progress
        self._weighs = self.drafter.proposes and (self.policy != "off" or self.drafter.plans_rows)
        live: LiveCosts | None = None
        if costs is None and self._weighs:
            costs = cost_curve(target, self.policy if self._by_file else None, progress=progress)
            if target.batch_invariant and not target.shared:
                live = LiveCosts(costs)  # no text depends on the steps that it took
        self._follow(live)
        self._known_costs = costs
        self.costs = costs or roofline(at_once=target.launches)
        self.step_kinds: set[Any] = set()
        self._warmed = "none yet; Engine.warm_up() records before the first answer what else its steps record"
        self._predicting: Engine | None = None
        self._answer_end: tuple[Any, int | None] | None = None  # the chat template, and the token that ends an answer

    @property
    def chunk_rows(self) -> int:
        """Most tokens of a prompt that go through one forward."""
        if self.prefill_chunk is not None:
            return self.prefill_chunk
        # A convolution remembers keys without values, and too few of them to bound a chunk.
        windows = [spec.window for spec in self.target.specs if spec.window is not None and spec.value_dim]
        return min(512, max(32, min(windows))) if windows else 512  # a window's size, but no sliver

    def warm_up(self, sequences: int = 1) -> None:
        """Compile kernels and record graphs on a GPU for steps of up to ``sequences`` sequences.

        A step that records is compared with no other, so this changes no decision, only how long first answers take.
        Recorded are the buckets of up to ``max_rows`` rows of one sequence, of several up to 64 rows together, and the
        passes of drafters that run a model; a chunk of a prompt is launched. On a CPU there is nothing to do.
        """
        if not self.target.launches:
            return
        began, rows = perf_counter(), min(self.max_rows if self.drafter.proposes else 1, MOST_REPLAYED)
        self.target.warm_up(rows, sequences=sequences, taps=self.drafter.taps)
        chunk = min(self.chunk_rows, self.target.context_length)
        with self.target.active():
            cache = self.target.new_cache(capacity=chunk, rows=chunk)
            wanted = Wanted(NOTHING.logits, 0, self.drafter.taps)
            self.target.forward(StepInput.of(cache, [0] * chunk, wanted=wanted, again=False))
        warm_up(self.drafter, self.target, rows, sequences)
        device_copies.wait(self.target.device)
        texts = "one sequence" if sequences == 1 else f"up to {sequences} sequences"
        self._warmed = f"in {perf_counter() - began:.1f} s, for up to {rows} rows and {texts}"

    def row_policy(self, *, steady: bool = False) -> RowPolicy | None:
        """The row policy of a new sequence, or None; ``steady``: by the measured curve, not the live one."""
        if not self._weighs:
            return None
        costs = self.costs if self.live is None or steady else self.live
        return AcceptancePolicy(costs, self.drafter.fixed_cost_rows)

    @classmethod
    @torch_switches.makes
    @partial(checked, tokenizer=TOKENIZER_OR_PLACE)
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
        activations: str = "default",
        trust_remote_code: bool = False,
        revision: str | None = None,
        subfolder: str | None = None,
        max_model_len: int | None = None,
        tokenizer: Any = None,
        chat_template: str | Path | None = None,
        parallel: str = "off",
        max_rows: int = 128,
        prefill_chunk: int | None = None,
        policy: str = "acceptance",
        progress: Callable[[float], None] | None = None,
    ) -> Engine:
        """Load target and tokenizer: a named model (``"tiny"``, ``"smollm2"``), a folder, a GGUF file, or a hub id.

        A repository with several GGUF files takes the name of a quantisation or a file, ``"me/repo:Q4_K_M"``;
        ``revision`` is its branch, tag or commit, ``subfolder`` the folder in it, or in a folder, that holds the model.

        ``execution``, ``attention``, ``activations`` and ``max_model_len`` are TransformersTarget's. ``tokenizer``,
        which may be named as a model is, takes the place of the one at the path, and ``chat_template``, a file or the
        name of one that ships (``"chatml"``, ``"llama3"``, ``"mistral"``), that of the tokenizer's own.
        ``parallel`` is for processes that torchrun started: ``rows`` splits each step's rows over them, ``tensor`` each
        weight (:mod:`specdec.parallel`). The policy is ``acceptance`` here, so that no drafter loses much; an engine
        that is put together by hand takes its drafter at its word.

        Raises:
            CheckpointError: no model or tokenizer there, or a broken one.
            TargetError: a model that specdec cannot drive exactly.
            ConfigError: unknown drafter or option.
        """
        policy = check_policy(policy)
        if isinstance(drafter, str | Mapping):
            parse_drafter(drafter)  # before a large model is loaded for nothing
        place = model_source(path, revision=revision, subfolder=subfolder, code=trust_remote_code)
        several = check_choice("parallel", parallel, PARALLEL) != "off"
        load: Callable[..., Target] = TransformersTarget.from_pretrained
        target: Target = (partial(load_parallel, parallel, max_rows=max_rows) if several else load)(
            place,
            dtype=dtype,
            device=device,
            device_map=device_map,
            execution=execution,
            attention=attention,
            activations=activations,
            trust_remote_code=trust_remote_code,
            max_model_len=max_model_len,
        )
        named: str | Path | None = tokenizer if isinstance(tokenizer, str | Path) else None
        if tokenizer is None or named is not None:
            tokenizer = load_tokenizer(named or place, trust_remote_code=trust_remote_code)
        if chat_template is not None:
            tokenizer = with_chat_template(tokenizer, chat_template)
        known = getattr(tokenizer, "vocab_size", 0)  # without added tokens, of which models may lack some
        if known > target.vocab_size:
            raise CheckpointError(
                f"the tokenizer at {str(named or path)!r} has {known} tokens, and {target.name} knows "
                f"{target.vocab_size}: it is another model's; copy the one that was saved with the weights"
            )
        return cls(
            target,
            tokenizer,
            drafter,
            max_rows=max_rows,
            prefill_chunk=prefill_chunk,
            policy=policy,
            progress=progress,
        )

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        tokenizer: Any = None,
        drafter: DrafterSpec = "none",
        *,
        execution: str = "auto",
        attention: str = "auto",
        **options: Any,
    ) -> Engine:
        """An engine of a copy of a live model's weights, laid out to be fast; it holds them beside the model's own.

        Later changes of the model are not followed; ``Engine(TransformersTarget(model))`` follows them, by the model's
        own forward. ``execution`` and ``attention`` are TransformersTarget's, ``options`` the engine's.

        Raises:
            TargetError: no description covers it, it is not as its class makes it, or its logits of a few tokens are
                others than the copy's; the message has the reason.
            ConfigError: the named executor cannot run it.
        """
        target = DescribedTarget.from_model(model, execution=execution, attention=attention)
        return cls(target, tokenizer, drafter, **options)

    def describe(self) -> dict[str, dict[str, Any]]:
        """How the model is run, and why: section -> name -> value; `specdec info` prints it."""
        machine = describe(self.target)
        curve = self._known_costs or kept_curve(machine) or self.costs
        steps = curve.steps(0, 8)
        return {
            **self.target.describe(),
            "decoding": {
                "drafter": self.drafter.name,
                "policy": self.policy,
                "a step of 2, 4, 8 rows": " / ".join(f"{steps[rows]:.2f}" for rows in (2, 4, 8)) + " plain steps",
                "known from": source_of(curve, self.policy if self._by_file else None),
                "warm-up": self._warmed if self.target.launches else None,
            },
        }

    @checked
    def with_drafter(self, drafter: DrafterSpec, *, policy: str | None = None) -> Engine:
        """The same target with another drafter, and another policy if one is given; nothing is loaded twice.

        The cost curve is measured once, now, if the new engine needs it and this one did not.
        """
        policy = self.policy if policy is None else check_policy(policy)
        other_file = policy != self.policy and policy not in ("off", "acceptance")
        other = Engine(
            self.target,
            self.tokenizer,
            drafter,
            max_rows=self.max_rows,
            prefill_chunk=self.prefill_chunk,
            policy=policy,
            costs=None if other_file else self._known_costs,
            progress=self._progress,
        )
        if self._known_costs is None and not other._by_file:
            self._known_costs = other._known_costs
            self._follow(other.live)
        elif not other_file:
            other._follow(self.live)
        return other

    def __copy__(self) -> Engine:
        """An engine of the same target, drafter and costs."""
        return self._sharing()

    def predicting(self) -> Engine:
        """The same engine with a drafter that also drafts from a text's ``prediction``; made once."""
        if self._predicting is None:
            self._predicting = self.with_drafter({"name": "prediction", "drafter": self.drafter})
        return self._predicting

    def _follow(self, live: LiveCosts | None) -> None:
        """Use a live cost curve, or None."""
        self.live = live
        self.fallback = Fallback(live) if live is not None and self._weighs else None

    @torch_switches.uncompiled
    @checked
    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = 128,
        sampling: SamplingParams | None = None,
        *,
        on_step: Callable[[Step], None] | None = None,
        **options: Unpack[Options],
    ) -> Generation:
        """Decode a prompt: text, token ids, or chat messages.

        Args:
            prompt: text, token ids, or ``[{"role": ..., "content": ...}]`` for the tokenizer's chat template.
            max_new_tokens: budget; the model's context length is one too.
            sampling: greedy if None; the checkpoint's generation config is not used (a SpecdecWarning names it).
            stop: strings that end the text, also those of special tokens; the result's text is cut before them.
            stop_token_ids: tokens that end the text, in addition to the model's end tokens.
            logits_processor: a list of functions ``(ids [1, n], scores [1, V]) -> scores``, as in transformers. They
                see each token's own prefix, so they act as in plain decoding. A
                :class:`specdec.sampling.grammar.Grammar` has a state instead.
            logprobs: the number of likeliest tokens whose log-probabilities are kept beside each emitted token's. They
                are the target's, before processors. None keeps nothing, 0 the emitted token's alone.
            prefix_cache: keeps this text and holds earlier ones; a common beginning is not run again.
            prediction: text or token ids that the answer is expected to be, such as the file that it changes. It is
                drafted from in addition to the engine's drafter, and changes no token of the answer.
            on_step: called after every step.

        Raises:
            PromptError: empty, too long, or tokens outside the vocabulary.
            NumericalError: the model's logits are no distribution.
        """
        decoding = self.start(prompt, max_new_tokens, sampling, **options)
        with self.target.active():
            decoding.prefill()
            while decoding.finish_reason is None:
                step = decoding.step()
                if on_step is not None:
                    on_step(step)
        return decoding.result()

    @torch_switches.uncompiled
    @checked
    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 128,
        sampling: SamplingParams | None = None,
        *,
        trace: bool = False,
        **options: Unpack[Options],
    ) -> Iterator[Chunk]:
        """As ``generate``, a chunk per step; the texts add up to ``generate``'s, the last chunk has the finish reason.

        With ``trace``, ``chunk.step.trace`` holds the step's tree and the sources of its tokens. The returned
        iterator's ``close`` ends the generation. A chunk may have no text, such as half a character.
        """
        return self.start(prompt, max_new_tokens, sampling, **options, trace=trace, stream=True).chunks()

    @torch_switches.uncompiled
    def generate_batch(
        self,
        prompts: Iterable[Prompt],
        max_new_tokens: int | Sequence[int] = 128,
        sampling: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        progress: bool = False,
        on_done: Callable[[int, Generation], None] | None = None,
        **options: Unpack[BatchOptions],
    ) -> list[Generation]:
        """Decode many prompts, ``batch`` at a time; when one ends, the next joins. Results are in the prompts' order.

        Each text equals the one of ``generate`` for its prompt. A parameter holds one value for all prompts, or a list
        with one value per prompt (a list of lists, if a value is a list).

        Args:
            options: as ``generate``'s; ``batch`` (8), ``step_rows`` and ``cache_bytes`` are those of
                :class:`specdec.engine.scheduler.Scheduler`, and ``seed`` is in place of ``sampling``'s.
            progress: show a bar.
            on_done: called with place and generation as each one ends, so that finished ones survive an interrupt.

        A prompt that fails (too long, a processor that raises) fails alone: its ``finish_reason`` is ``error``, its
        ``error`` is the reason, and a SpecdecWarning names it.

        Raises:
            ConfigError: a parameter with another number of values than there are prompts, or a size that cannot be.
        """
        scheduler, count = self._scheduler(prompts, max_new_tokens, sampling, **options)
        done: dict[int, Generation] = {}
        with tqdm(total=count, unit="prompt", disable=not progress) as bar, self.target.active():
            for event in chain.from_iterable(scheduler.run()):
                if event.last:
                    done[event.index] = generation = event.generation()
                    bar.update()
                    if on_done is not None:
                        on_done(event.index, generation)
        results = [done[index] for index in range(count)]
        failed = [f"{index} ({first_line(one.error)})" for index, one in enumerate(results) if one.error is not None]
        if failed:
            warnings.warn(
                f"{len(failed)} of {len(results)} prompts failed: {'; '.join(failed)}", SpecdecWarning, stacklevel=3
            )
        return results

    @torch_switches.uncompiled
    def stream_batch(
        self,
        prompts: Iterable[Prompt],
        max_new_tokens: int | Sequence[int] = 128,
        sampling: SamplingParams | Sequence[SamplingParams | None] | None = None,
        **options: Unpack[BatchOptions],
    ) -> Iterator[tuple[int, Chunk]]:
        """As ``generate_batch``, yielding a prompt's place and chunk per step; a failure is a chunk with an ``error``.

        Between steps, while the caller has a chunk, the model is unchanged.
        """
        if self.tokenizer is None:
            raise ConfigError("streams need a tokenizer; the engine has none")
        scheduler, _ = self._scheduler(prompts, max_new_tokens, sampling, **options, stream=True)
        return ((event.index, event.chunk()) for event in chain.from_iterable(scheduler.run()))

    def _scheduler(self, prompts: Iterable[Prompt], *parameters: Any, **options: Any) -> tuple[Scheduler, int]:
        """What decodes these prompts, and how many they are."""
        if self.target.shared:
            raise ConfigError("batches are decoded by one process; leave out parallel=, or take one prompt at a time")
        sizes = {name: options.pop(name) for name in ("batch", "step_rows", "cache_bytes") if name in options}
        requests = make_requests(prompts, *parameters, **options)
        return Scheduler(self, requests, **sizes), len(requests)

    @checked
    def start(
        self,
        prompt: Prompt,
        max_new_tokens: int = 128,
        sampling: SamplingParams | None = None,
        **options: Any,
    ) -> Decoding:
        """A generation to be driven step by step, inside ``target.active()``; ``generate`` and ``stream`` use it.

        ``options`` are those of a :class:`specdec.engine.requests.Request`.
        """
        began = perf_counter()
        with self.target.active():
            decoding = self.begin(self.prepare(Request(prompt, max_new_tokens, sampling, **options)))
        decoding.stats.seconds.prefill += perf_counter() - began
        return decoding

    def begin(self, request: Request) -> Decoding:
        """Start the generation of a prepared request: make its cache and its drafting session."""
        return Decoding(self.predicting() if request.prediction else self, request)

    def prepare(self, request: Request) -> Request:
        """Prepare a request for ``begin``: its prompt becomes token ids, and every option is checked and filled in.

        Raises:
            PromptError: see :meth:`encode`.
            ConfigError: an option that does not fit, or that this engine cannot follow.
        """
        request = checked_fields(request)
        if request.eos_ids is None:  # a caller with its own has read the generation config, and is called by generate
            self._warn_of_unused(request.sampling)
            self.target.check_methods(GENERATION)
        if request.prefix_cache is not None and self.target.shared:
            raise ConfigError("prefix caches are kept by one process; leave out parallel=, or prefix_cache")
        if request.drafter is not None:
            raise ConfigError(
                f"drafter is {shown(request.drafter)}, and this engine has {self.drafter.name!r}: give the request "
                "to a Scheduler, or call with_drafter"
            )
        if request.max_rows is not None and request.max_rows > self.max_rows:
            raise ConfigError(
                f"max_rows is {request.max_rows}, and the engine's is {self.max_rows}; give at most as many, or an "
                "engine with a larger max_rows"
            )
        stops, ends = stop_strings(request.stop), request.stop_token_ids
        if (stops or request.stream) and self.tokenizer is None:
            raise ConfigError("stop strings and streams need a tokenizer; the engine has none")
        stop_tokens = frozenset([ends] if isinstance(ends, int) else ends)
        if unknown := [token for token in stop_tokens if not 0 <= token < self.target.vocab_size]:
            raise ConfigError(
                f"stop_token_ids holds {shown(unknown[0])}, which is outside the vocabulary "
                f"[0, {self.target.vocab_size}) and so never comes; give tokens of this model"
            )
        check_processors(request.logits_processor)
        self._warn_of_chat_end(request.prompt, stops, stop_tokens)
        prompt = self.encode(request.prompt)
        if predicted := prediction_ids(request.prediction, self.tokenizer, self.target.vocab_size):
            self.predicting()  # is made by now
        return replace(
            request,
            prompt=prompt,
            prediction=predicted,
            sampling=settled(request.sampling or SamplingParams(), request.logits_processor),
            stop=stops,
            stop_token_ids=stop_tokens,
            eos_ids=self.target.eos_ids if request.eos_ids is None else request.eos_ids,
        )

    def _warn_of_unused(self, sampling: SamplingParams | None) -> None:
        """Warn of values of the checkpoint's generation config that transformers' ``generate`` would use."""
        config = self.target.generation_config
        unused = [] if config is None else unused_generation_options(config, sampling=sampling is not None)
        if unused:
            warnings.warn(
                f"the generation config of {self.target.name} sets {', '.join(unused)}, which an engine does not take: "
                "it decodes greedily, or by the SamplingParams and logits processors that it is given; give those, or "
                "use model.generate(custom_generate=specdec.custom_generate)",
                SpecdecWarning,
                stacklevel=8,  # two for each checked function, one that is not compiled
            )

    def _warn_of_chat_end(self, prompt: Prompt, stops: Sequence[str], stop_tokens: frozenset[int]) -> None:
        """Warn that an answer may not end where the chat template ends it.

        This is so for messages if the token that the template writes after an answer is neither one of the model's end
        tokens nor one of these stops. The model then goes on, as it does in transformers' ``generate``.
        """
        if not is_chat(prompt):
            return
        template = getattr(self.tokenizer, "chat_template", None)
        if self._answer_end is None or self._answer_end[0] != template:
            self._answer_end = template, answer_end(self.tokenizer)
        end = self._answer_end[1]
        if end is None or end in self.target.eos_ids | stop_tokens:
            return
        text = self.tokenizer.decode([end])
        if not any(one in text for one in stops):
            warnings.warn(
                f"the chat template ends an answer with {text!r} (token {end}), which does not end a text of "
                f"{self.target.name}, whose end tokens are {sorted(self.target.eos_ids)}: an answer goes on behind it. "
                f"Give stop_token_ids=[{end}] (--stop-token-ids {end}), or add it to the generation config's "
                "eos_token_id",
                SpecdecWarning,
                stacklevel=8,  # two for each checked function, one that is not compiled
            )

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.

        Raises:
            PromptError: no prompt, empty, longer than the context, or tokens outside the vocabulary.
        """
        ids = token_ids(prompt, self.tokenizer)
        if not ids:
            raise PromptError("the prompt is empty; give at least one token (a BOS token will do)")
        outside = [token for token in ids if not 0 <= token < self.target.vocab_size]
        if outside:
            raise PromptError(
                f"token {shown(outside[0])} is outside the vocabulary [0, {self.target.vocab_size}); "
                "the ids come from another tokenizer"
            )
        if len(ids) >= self.target.context_length:
            raise PromptError(
                f"the prompt has {len(ids)} tokens, and the model's context holds {self.target.context_length} with at "
                "least one new token; shorten the prompt"
            )
        return ids
