"""transformers' own ways to generate, as rivals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, ClassVar

import torch
from transformers.generation.streamers import BaseStreamer

from specdec.bench.own_model import own_model
from specdec.bench.plan import Plan
from specdec.bench.records import Output
from specdec.bench.rival import Rival
from specdec.engine.engine import Engine
from specdec.errors import CheckpointError, ConfigError
from specdec.models.live_model import load_model
from specdec.step.device_copies import wait

__all__ = ["TransformersSystem"]


class TransformersSystem(Rival):
    """Transformers' ``generate`` on the same model object, with its own attention; subclasses add their arguments."""

    def __init__(self, label: str, engine: Engine, plan: Plan, options: Mapping[str, Any]) -> None:
        super().__init__(label, engine, plan, options)
        self._model: Any = own_model(engine.target)

    def arguments(self) -> dict[str, Any]:
        """Further arguments of ``generate``."""
        return dict(self.options)

    def answer(self, prompt: list[int], budget: int) -> Output:
        return self._generate([prompt], budget)[0]

    def _generate(self, prompts: Sequence[list[int]], budget: int) -> list[Output]:
        """Answer all prompts at once, padded on the left."""
        plan, device, eos = self.plan, self.target.device, self.target.eos_ids
        width = max(map(len, prompts))
        padding, clock = min(eos, default=0), _Clock(len(prompts))
        padded = [[padding] * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        ids, attention_mask = torch.tensor(padded, device=device), torch.tensor(mask, device=device)
        arguments: dict[str, Any] = {
            "max_new_tokens": min(budget, self.target.context_length - width),
            "do_sample": plan.temperature > 0,
            "num_beams": 1,
            "repetition_penalty": 1.0,  # a checkpoint may have its own, and ours ignores it too
            "eos_token_id": sorted(eos) or None,
            "pad_token_id": padding,
        }
        if plan.temperature > 0:
            arguments |= {"temperature": plan.temperature, "top_k": 0, "top_p": 1.0}
        torch.manual_seed(plan.seed)
        wait(device)
        began = perf_counter()
        out = self._model.generate(ids, attention_mask=attention_mask, streamer=clock, **arguments, **self.arguments())
        wait(device)
        ended = perf_counter()
        # All rows run to the end of the longest text, so they share the clock equally.
        seconds = {"wall": ended - began, "prefill": [*clock.times, ended][1] - began}
        shares = {phase: spent / len(prompts) for phase, spent in seconds.items()}
        times = [time - began for time in clock.times[1:]]
        outputs = []
        for row in out[:, width:].tolist():
            ends = next((place for place, token in enumerate(row, 1) if token in eos), len(row))
            counts = _fit(clock.counts[1:], ends)
            reason = "eos" if ends and row[ends - 1] in eos else "length"
            outputs.append(Output(row[:ends], counts, [], dict(shares), reason, times=times[: len(counts)]))
        return outputs


def _fit(counts: Sequence[int], total: int) -> list[int]:
    """Step sizes that add up to ``total``, as a streamed block can exceed the end of the returned text."""
    fitted: list[int] = []
    for count in counts:
        if sum(fitted) < total:
            fitted.append(min(count, total - sum(fitted)))
    return fitted


class _Clock(BaseStreamer):
    """A streamer that records the time and number of tokens of each step; the prompt comes first."""

    def __init__(self, texts: int) -> None:
        self._texts = texts
        self.counts: list[int] = []
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.counts.append(value.numel() // self._texts)
        self.times.append(perf_counter())

    def end(self) -> None:
        pass


class TransformersBatches(TransformersSystem):
    """Transformers' ``generate`` on whole batches: the next batch begins when all texts of one have ended."""

    def answer_batch(self, prompts: Sequence[list[int]], budget: int, batch: int) -> list[Output | Exception]:
        outputs: list[Output | Exception] = []
        for start in range(0, len(prompts), batch):
            outputs += self._generate(prompts[start : start + batch], budget)
        return outputs


class TransformersLookup(TransformersSystem):
    """Transformers' prompt lookup decoding."""

    Options: ClassVar[dict[str, Any]] = {"prompt_lookup_num_tokens": 10}


class TransformersEarlyExit(TransformersSystem):
    """Transformers' self-speculation: the first layers draft, through the model's own head (LayerSkip)."""

    Options: ClassVar[dict[str, Any]] = {"assistant_early_exit": 4}


class TransformersAssisted(TransformersSystem):
    """Transformers' assisted generation: ``assistant`` is a smaller model with the same tokenizer."""

    Options: ClassVar[dict[str, Any]] = {"assistant": None}

    def __init__(self, label: str, engine: Engine, plan: Plan, options: Mapping[str, Any]) -> None:
        super().__init__(label, engine, plan, options)
        path = self.options["assistant"]
        if not isinstance(path, str):
            raise ConfigError(f"{label} needs a draft model; give --set {label}.assistant=PATH")
        try:
            assistant: Any = load_model(
                path, dtype=self._model.dtype, device=self.target.device, device_map=None, trust_remote_code=False
            )
        except CheckpointError as error:
            raise CheckpointError(f"cannot load the assistant {path!r} of {label}: {error}") from error
        sizes = [m.config.get_text_config().vocab_size for m in (assistant, self._model)]
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"the assistant {path!r} of {label} has {sizes[0]} tokens, and the model {sizes[1]}; "
                "give one with the same tokenizer"
            )
        self._assistant = assistant.eval()

    def arguments(self) -> dict[str, Any]:
        return {"assistant_model": self._assistant}
