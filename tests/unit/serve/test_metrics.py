"""Figures of a finished request add up."""

from __future__ import annotations

import re

from specdec.results import Seconds, Statistics
from specdec.serve.metrics import Metrics


def test_the_parts_of_a_request_s_time_add_up() -> None:
    metrics = Metrics("tiny", 4)
    stats = Statistics(prompt_tokens=7, seconds=Seconds(prefill=0.25))
    stats.acceptance_lengths += [2, 1]
    metrics.finished(stats, 1.0, 3.0)
    found = dict(re.findall(r'vllm:(\w+)_sum\{model_name="tiny"\} (\S+)', metrics.text().decode()))
    assert float(found["request_queue_time_seconds"]) == 0.75
    assert float(found["request_prefill_time_seconds"]) == 0.25
    assert float(found["request_decode_time_seconds"]) == 2.0
    assert float(found["request_inference_time_seconds"]) == 2.25
    assert float(found["e2e_request_latency_seconds"]) == 3.0
    assert float(found["time_to_first_token_seconds"]) == 1.0
    assert float(found["request_prompt_tokens"]) == 7
    assert float(found["request_generation_tokens"]) == stats.new_tokens == 3
