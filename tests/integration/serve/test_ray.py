"""Two replicas under Ray Serve answer as the engine does. Needs the extra ``ray``."""

from __future__ import annotations

import os
import socket
from typing import Any

import openai
import pytest

from specdec import Engine
from specdec.errors import ConfigError
from specdec.serve.config import ServeConfig

ray = pytest.importorskip("ray", reason="specdec[ray] is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_two_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray import serve

    from specdec.serve import ray_serve

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = ServeConfig(model="tiny", drafter="prompt_lookup", replicas=2, port=port, threads=1)
    ray.init(num_cpus=4, log_to_driver=False, logging_level="error", include_dashboard=False)
    try:
        serve.start(http_options={"host": config.host, "port": config.port})
        serve.run(ray_serve.deployment(config), name=ray_serve.NAME)
        states = serve.status().applications[ray_serve.NAME].deployments[ray_serve.NAME].replica_states
        assert {str(getattr(state, "value", state)): count for state, count in states.items()} == {"RUNNING": 2}
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120)
        engine = Engine.from_pretrained("tiny", "none")
        for place in range(12):
            prompt = f"def f{place}(x):\n"
            wanted = engine.generate(prompt, 12).text
            options: Any = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0}
            chunks = list(client.completions.create(**options, stream=True))
            assert "".join(chunk.choices[0].text for chunk in chunks) == wanted
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="tiny", prompt="x", temperature=9)
        for place in range(8):  # by load alone, half of them would come to the replica that knows nothing of them
            prompt, known = f"conversation {place}: " + "x = 1\n" * 9, list[int]()
            for _ in range(2):
                answer = client.completions.create(
                    model="tiny",
                    prompt=prompt,
                    max_tokens=2,
                    temperature=0,
                    extra_headers={"x-session-id": f"conversation {place}"},
                )
                assert answer.usage is not None
                assert answer.usage.prompt_tokens_details is not None
                known.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
            assert known[1] == answer.usage.prompt_tokens - 1
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.mark.parametrize("options", ["[1]", "{", "{no_such_option: 1}", "{autoscaling_config: {max_replicas: x}}"])
def test_options_that_ray_does_not_take(options: str) -> None:
    from specdec.serve import ray_serve

    with pytest.raises(ConfigError, match=r"ray_options|--ray-options"):
        ray_serve.deployment(ServeConfig(ray_options=options))
