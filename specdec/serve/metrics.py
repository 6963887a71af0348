"""Prometheus figures: vLLM's names where vLLM has the figure, our own for rows, drafters and plain steps.

The engine's thread keeps counts as plain numbers, and a scrape reads them. Histograms observe each request and the time
between a sequence's steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specdec.engine.scheduler import Event, Scheduler
from specdec.results import Statistics

__all__ = ["Metrics"]

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("Time from arrival to the first token.", _SECONDS),
    "e2e_request_latency_seconds": ("Time from arrival to the last token.", _SECONDS),
    "request_queue_time_seconds": ("Time to the first token, less the time of the prompt's own rows.", _SECONDS),
    "request_prefill_time_seconds": ("Time of the prompt's own rows.", _SECONDS),
    "request_decode_time_seconds": ("Time from the first to the last token.", _SECONDS),
    "request_inference_time_seconds": ("Time of the prompt's own rows, and to the last token.", _SECONDS),
    "request_time_per_output_token_seconds": ("A request's mean time between tokens.", _TOKEN_SECONDS),
    "time_per_output_token_seconds": ("The same, vLLM's older name.", _TOKEN_SECONDS),
    "inter_token_latency_seconds": ("Time between steps of a text.", _TOKEN_SECONDS),
    "request_prompt_tokens": ("Tokens of a request's prompt.", _TOKENS),
    "request_generation_tokens": ("New tokens of a request.", _TOKENS),
}


class Metrics(Collector):
    """The figures of a server.

    Args:
        model: the model's name, a label of every figure.
        batch: most sequences that run at once.
        cache_bytes: limit of the caches in bytes, or None.
    """

    def __init__(self, model: str, batch: int, cache_bytes: int | None = None) -> None:
        self._model, self._batch, self._cache_bytes = model, batch, cache_bytes
        self.running = self.waiting = self.cached_bytes = self.prefix_bytes = 0
        self.seconds_each = 0.0
        self._counts: Counter[str] = Counter()
        self._per_position: Counter[int] = Counter()
        self._steps: Counter[str] = Counter()
        self._ends: Counter[str] = Counter()
        self._registry = own = CollectorRegistry()
        self._histograms = {
            name: Histogram(f"vllm:{name}", about, ["model_name"], registry=own, buckets=buckets).labels(model)
            for name, (about, buckets) in _HISTOGRAMS.items()
        }
        self._registry.register(self)

    def stepped(self, events: list[Event], scheduler: Scheduler) -> None:
        """Count the events of a scheduler's step. Called in the engine's thread."""
        counts = self._counts
        for event in events:
            step = event.step
            if step is None:
                continue
            counts["tokens"] += len(step.tokens)
            counts["rows"] += step.rows
            self._steps[step.drafter] += 1
            if step.rows > 1:
                counts["drafts"] += 1
                counts["drafted"] += step.rows - 1
                counts["accepted"] += step.accepted
                self._per_position.update(range(step.accepted))
            elif step.drafter != "none":
                counts["resting"] += 1
        self.cached_bytes = scheduler.cache_bytes

    def between(self, seconds: float) -> None:
        """Observe the seconds between two steps of an answer."""
        self._histograms["inter_token_latency_seconds"].observe(seconds)

    def ended(self, reason: str) -> None:
        """Count an answer by its end: OpenAI's finish reason, ``abort`` or ``error``."""
        self._ends[reason] += 1

    def finished(self, stats: Statistics, first: float, whole: float) -> None:
        """Observe a finished answer: the seconds from its arrival to its first and to its last token."""
        self._counts["prompt"] += stats.prompt_tokens
        self._counts["reused"] += stats.reused_tokens
        self.seconds_each += (whole - self.seconds_each) / 8  # a running mean over about the eight latest
        prefill = min(first, stats.seconds.prefill)
        seen = {
            "time_to_first_token_seconds": first,
            "e2e_request_latency_seconds": whole,
            "request_queue_time_seconds": first - prefill,
            "request_prefill_time_seconds": prefill,
            "request_decode_time_seconds": whole - first,
            "request_inference_time_seconds": whole - first + prefill,
            "request_prompt_tokens": stats.prompt_tokens,
            "request_generation_tokens": stats.new_tokens,
        }
        if stats.new_tokens > 1:
            each = (whole - first) / (stats.new_tokens - 1)
            seen |= {"request_time_per_output_token_seconds": each, "time_per_output_token_seconds": each}
        for name, value in seen.items():
            self._histograms[name].observe(value)

    def collect(self) -> Iterable[Metric]:
        """The current figures, for a scrape."""
        counts = self._counts
        yield self._gauge("vllm:num_requests_running", "Sequences that are decoded.", self.running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences that wait in the queue.", self.waiting)
        if self._cache_bytes is not None:
            share = self.cached_bytes / self._cache_bytes
            yield self._gauge("vllm:kv_cache_usage_perc", "Share of cache bytes in use; 1 is all.", share)
        yield self._gauge("specdec:cache_bytes", "Bytes of the running sequences' caches.", self.cached_bytes)
        yield self._gauge("specdec:prefix_bytes", "Bytes of the prefix cache.", self.prefix_bytes)
        for name, key, about in (
            ("vllm:prompt_tokens", "prompt", "Tokens of prompts."),
            ("vllm:generation_tokens", "tokens", "New tokens."),
            ("vllm:prefix_cache_queries", "prompt", "Tokens of prompts that were looked up."),
            ("vllm:prefix_cache_hits", "reused", "Tokens of prompts that the prefix cache had."),
            ("vllm:spec_decode_num_drafts", "drafts", "Steps with a draft."),
            ("vllm:spec_decode_num_draft_tokens", "drafted", "Tokens of drafts."),
            ("vllm:spec_decode_num_accepted_tokens", "accepted", "Tokens of drafts that were accepted."),
            ("specdec:rows", "rows", "Rows of steps."),
            ("specdec:resting_steps", "resting", "Steps in which a drafter proposed nothing."),
        ):
            yield self._counter(name, about, counts[key])
        places = {str(place): self._per_position[place] for place in range(len(self._per_position))}
        about = "Accepted tokens, by position in the draft."
        yield self._counter("vllm:spec_decode_num_accepted_tokens_per_pos", about, places, "position")
        yield self._counter("vllm:request_success", "Answers by finish reason.", dict(self._ends), "finished_reason")
        yield self._counter("specdec:steps", "Steps of sequences, by drafter.", dict(self._steps), "drafter")
        steps = sum(self._steps.values())
        share = counts["resting"] / steps if steps else 0.0
        yield self._gauge("specdec:resting_share", "Share of steps in which a drafter proposed nothing.", share)

    def _gauge(self, name: str, about: str, value: float) -> Metric:
        found = GaugeMetricFamily(name, about, labels=["model_name"])
        found.add_metric([self._model], value)
        return found

    def _counter(self, name: str, about: str, values: float | dict[str, int], label: str | None = None) -> Metric:
        found = CounterMetricFamily(name, about, labels=["model_name", *([label] if label else [])])
        if isinstance(values, dict):
            for key, value in values.items():
                found.add_metric([self._model, key], value)
        else:
            found.add_metric([self._model], values)
        return found

    def text(self) -> bytes:
        """All figures in Prometheus' text format."""
        return generate_latest(self._registry)
