"""The page in a real browser: it sends, streams, stops, races, and says what went wrong.

Needs playwright and Debian's chromium (``apt-get install chromium``, ``pip install playwright``), and the server's
packages; else all of it is skipped.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")
pytest.importorskip("uvicorn", reason="specdec[serve] is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None:
    pytest.skip("there is no chromium; apt-get install chromium", allow_module_level=True)

import uvicorn
from playwright.sync_api import Browser, Page, expect, sync_playwright
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from specdec import Engine

pytestmark = pytest.mark.slow  # a browser takes seconds to start

FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
WORDS = [
    "Once",
    " upon",
    " a",
    " time",
    ",",
    " there",
    " was",
    " a",
    " queue",
    ".\n",
    "It",
    " was",
    " 日本",
    " fair",
    ".",
]
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


CONTRASTS = """() => {
  const canvas = Object.assign(document.createElement("canvas"), {width: 1, height: 1});
  const paint = canvas.getContext("2d", {willReadFrequently: true});
  const over = (colour, under) => {
    for (const one of [under, colour]) { paint.fillStyle = one; paint.fillRect(0, 0, 1, 1); }
    return [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const linear = (value) => value / 255 <= 0.03928 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const ground = (one) => {
    const under = one.parentElement ? ground(one.parentElement) : "white";
    return `rgb(${over(getComputedStyle(one).backgroundColor, under).join(",")})`;
  };
  const texts = "#model, .text, .note, .token, [role=tab], .figures span, .figures b, #send, label > span";
  return [...document.querySelectorAll(texts)].filter((one) => one.offsetParent && !one.closest("[hidden]"))
    .map((one) => {
      const under = ground(one);
      const pair = [light(over(getComputedStyle(one).color, under)), light(over(under, "white"))];
      const [less, more] = pair.sort((one, two) => one - two);
      return [(more + 0.05) / (less + 0.05), one.className || one.id];
    });
}"""
"""The contrast of every text with what it stands on."""


class FakeServer:
    """Answers with the same words whatever it is asked, as ``specdec serve`` does; by what is asked, in other ways."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.left = threading.Event()  # a client went away in the middle of an answer
        self.key: str | None = None
        routes = [
            Route("/", self.page),
            Route("/v1/models", self.models),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]
        config = uvicorn.Config(Starlette(routes=routes), port=0, log_level="error", timeout_graceful_shutdown=0)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            self.thread.join(0.01)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}/"

    def stop(self) -> None:
        self.server.should_exit = self.server.force_exit = True
        self.thread.join()

    async def page(self, request: Request) -> Response:
        html = (files("specdec.serve") / "page.html").read_text("utf-8")
        return HTMLResponse(html, headers={"Content-Security-Policy": POLICY})

    async def models(self, request: Request) -> Response:
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return error(401, "give the server's key as a bearer token")
        extension = {"drafters": ["none", "auto", "prompt_lookup"], "default_drafter": "auto", "max_rows": 16}
        return JSONResponse({"object": "list", "data": [{"id": "fake", "object": "model", "specdec": extension}]})

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body)
        said = body["messages"][-1]["content"]
        if said == "refuse":
            return error(400, "the prompt has 9 tokens, and the model's context holds 8; shorten the prompt")
        return StreamingResponse(self.stream(body, said), media_type="text/event-stream")

    async def stream(self, body: dict[str, Any], said: str) -> AsyncIterator[str]:
        drafter = body["speculation"].get("drafter", "auto")
        words, size = WORDS * (500 if said == "go on" else 1), 1 if drafter == "none" else 3
        if said == "differ" and drafter != "none":
            words = [*words[:7], " the", *words[8:]]
        try:
            for number, first in enumerate(range(0, len(words), size)):
                yield data(piece(words[first : first + size], number, drafter))
                await asyncio.sleep(0.05 if said in ("go on", "break off") else 0)
                if said == "break off" and number == 2:
                    yield data({"error": {"message": "the model failed", "type": "server_error"}})
                    return
            yield data({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            yield data({"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 5}}})
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.left.set()
            raise


def error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status)


def data(value: Any) -> str:
    return f"data: {json.dumps(value)}\n\n"


def piece(words: list[str], number: int, drafter: str) -> dict[str, Any]:
    """A chunk of one step, whose tree has a rejected row beside each accepted one."""
    ids = [WORDS.index(word) if word in WORDS else 99 for word in words]
    sources = ["prompt_lookup"] * (len(ids) - 1) + ["target"]
    rows = [(1 + 2 * place, ids[place], words[place]) for place in range(len(ids) - 1)]
    parents = [-1] + [parent for row, _, _ in rows for parent in (max(0, row - 2), max(0, row - 2))]
    tree = {
        "token_ids": [0, *(token for _, own, _ in rows for token in (own, 7))],
        "texts": ["root", *(text for _, _, own in rows for text in (own, " no"))],
        "parents": parents,
        "sources": ["target", *(name for _ in rows for name in ("prompt_lookup", "token_recycling"))],
        "path": [0, *(row for row, _, _ in rows)],
    }
    step = {"index": number, "ms": 10.0 * (number + 1), "rows": len(parents), "drafter": drafter}
    return {
        "choices": [{"index": 0, "delta": {"content": "".join(words)}, "finish_reason": None}],
        "specdec": {**step, "token_ids": ids, "texts": words, "sources": sources, "tree": tree},
    }


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.stop()


@pytest.fixture
def page(browser: Browser, server: FakeServer) -> Iterator[Page]:
    """The page, open; an error in its script, or anything that it would load from elsewhere, fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(10_000)
    page, faults = context.new_page(), list[str]()
    page.on("pageerror", lambda fault: faults.append(str(fault)))
    page.on("request", lambda request: request.url.startswith((server.url, "data:")) or faults.append(request.url))
    page.goto(server.url)
    expect(page.locator("#model")).to_have_text("fake")
    yield page
    context.close()
    assert faults == []


def ask(page: Page, text: str) -> None:
    page.get_by_role("textbox", name="Message").fill(text)
    page.keyboard.press("Enter")


def test_an_answer_is_streamed_and_coloured(page: Page, server: FakeServer) -> None:
    page.get_by_label("Most tokens").fill("40")
    page.get_by_label("Seed").fill("7")
    ask(page, "Tell a story")
    answer = page.locator(".message.assistant")
    expect(answer.locator(".text")).to_have_text("".join(WORDS))
    expect(answer.locator(".note")).to_have_text("15 tokens in 5 steps · 5 of 9 prompt tokens were there already")
    assert answer.locator(".token").all_text_contents() == WORDS
    assert answer.locator(".token.drafted").count() == 10
    expect(page.locator("#per-step")).to_have_text("3.00")
    expect(page.locator("#per-second")).to_have_text("300")
    expect(page.locator("#accepted")).to_have_text("50%")
    expect(page.locator("#legend")).to_contain_text("prompt lookup 10")
    expect(page.locator("#legend")).to_contain_text("the model's own 5")
    sent = server.asked[0]
    assert sent["messages"] == [{"role": "user", "content": "Tell a story"}]
    assert (sent["max_tokens"], sent["seed"], sent["temperature"], sent["model"]) == (40, 7, 0, "fake")
    assert sent["speculation"] == {"drafter": "auto", "trace": True}
    ask(page, "And then?")
    expect(page.locator(".message.assistant")).to_have_count(2)
    expect(page.locator(".message.assistant").last.locator(".note")).to_contain_text("15 tokens")
    assert [one["role"] for one in server.asked[1]["messages"]] == ["user", "assistant", "user"]
    assert server.asked[1]["messages"][1]["content"] == "".join(WORDS)


def test_an_answer_is_copied_and_asked_for_again(page: Page, server: FakeServer) -> None:
    for text in ("Tell a story", "And then?"):
        ask(page, text)
        expect(page.locator(".message.assistant").last.locator(".note")).to_contain_text("15 tokens")
    expect(page.get_by_role("button", name="Copy")).to_have_count(2)
    expect(page.get_by_role("button", name="Retry")).to_have_count(1)
    page.get_by_role("button", name="Retry").click()
    expect(page.locator(".message.assistant")).to_have_count(2)
    expect(page.locator(".message.assistant").last.locator(".note")).to_contain_text("15 tokens")
    assert server.asked[2]["messages"] == server.asked[1]["messages"]
    page.get_by_role("button", name="Copy").last.click()
    expect(page.get_by_role("button", name="Copied")).to_have_count(1)


def test_an_answer_is_stopped(page: Page, server: FakeServer) -> None:
    """By the button, and by Escape; the server sees that its client went, and what came stays."""
    stops = (lambda: page.get_by_role("button", name="Stop").click(), lambda: page.keyboard.press("Escape"))
    for number, stop in enumerate(stops, 1):
        server.left.clear()
        ask(page, "go on")
        answer = page.locator(".message.assistant").last
        expect(page.locator(".message.assistant")).to_have_count(number)
        expect(answer).to_contain_text("Once upon a time, there was")
        stop()
        expect(answer.locator(".note")).to_contain_text("stopped")
        assert server.left.wait(5)
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
        expect(page.get_by_role("alert")).to_be_hidden()


def test_a_server_that_is_gone(page: Page, server: FakeServer) -> None:
    server.stop()
    ask(page, "Are you there?")
    expect(page.get_by_role("alert")).to_contain_text("The server does not answer")
    expect(page.get_by_role("textbox", name="Message")).to_have_value("Are you there?")  # not lost
    expect(page.locator(".message")).to_have_count(0)
    page.get_by_role("button", name="Dismiss").click()
    expect(page.get_by_role("alert")).to_be_hidden()


def test_a_server_that_goes_in_the_middle(page: Page, server: FakeServer) -> None:
    ask(page, "go on")
    answer = page.locator(".message.assistant")
    expect(answer).to_contain_text("Once upon")
    server.stop()
    expect(page.get_by_role("alert")).to_contain_text("The server went away in the middle of the answer")
    expect(answer.locator(".note")).to_contain_text("broken off")
    expect(answer).to_contain_text("Once upon")


@pytest.mark.parametrize(
    ("said", "message"),
    [("refuse", "the prompt has 9 tokens, and the model's context holds 8"), ("break off", "the model failed")],
)
def test_what_the_server_says_is_wrong_is_shown(page: Page, said: str, message: str) -> None:
    ask(page, said)
    expect(page.get_by_role("alert")).to_contain_text(message)
    ask(page, "Tell a story")
    expect(page.locator(".message.assistant").last).to_contain_text("fair.")
    expect(page.get_by_role("alert")).to_be_hidden()


def test_a_server_that_wants_a_key(page: Page, server: FakeServer) -> None:
    server.key = "secret"
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text("give the server's key")
    page.get_by_label("API key").fill("secret")
    page.keyboard.press("Tab")
    expect(page.locator("#model")).to_have_text("fake")
    expect(page.get_by_role("alert")).to_be_hidden()


def test_a_step_s_tree_is_shown(page: Page) -> None:
    ask(page, "Tell a story")
    tokens = page.locator(".message.assistant .token")
    expect(tokens).to_have_count(len(WORDS))
    tokens.nth(4).hover()
    expect(page.locator("#step-line")).to_have_text("Step 2 of 5: 5 rows verified, 3 tokens came, at 20 ms.")
    expect(page.locator("#tree g.accepted")).to_have_count(4)  # the root, two drafted ones, the bonus token
    expect(page.locator("#tree g.rejected")).to_have_count(2)
    assert page.locator(".token.seen").all_text_contents() == WORDS[3:6]
    page.locator("#log").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#step-line")).to_contain_text("Step 3 of 5")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#step-line")).to_contain_text("Step 1 of 5")


def test_a_race_says_whether_the_texts_are_identical(page: Page, server: FakeServer) -> None:
    """Compared, and not assumed."""
    page.get_by_role("tab", name="Race").click()
    prompt = page.get_by_role("textbox", name="Prompt of the race")
    for said in ("Tell a story", "differ"):
        prompt.fill(said)
        page.get_by_role("button", name="Start").click()
        expect(page.locator(".lane")).to_have_count(3)
        verdict = page.get_by_role("status")
        if said == "differ":
            expect(verdict).to_have_text("auto differs from plain decoding at token 8.")
            continue
        expect(verdict).to_have_text("✓ The texts are identical: all 3 have the same 15 tokens, compared one by one.")
        expect(page.locator(".lane").first).to_contain_text("plain decoding15 tokens · 15 steps · 1.00 a step")
        expect(page.locator(".lane").nth(1)).to_contain_text("15 tokens · 5 steps · 3.00 a step")
        expect(page.locator(".lane").nth(1).locator(".speed")).to_have_text("3.00× (3.00 to 3.00)")
        names = ["none", "auto", "prompt_lookup"]
        assert [one["speculation"]["drafter"] for one in server.asked] == [*names, *names[::-1], *names]
        assert len({one["seed"] for one in server.asked}) == 1
        page.locator(".lane svg").nth(1).hover(position={"x": 5, "y": 40})
        expect(page.locator("#step-line")).to_contain_text("Step 1 of 5")
        page.locator(".lane").nth(1).focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator("#step-line")).to_contain_text("Step 2 of 5")


def test_by_keyboard_alone(page: Page) -> None:
    """From the first stop on, every control is reached, and has a name."""
    page.keyboard.press("Tab")
    expect(page.get_by_role("tab", name="Chat")).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Race")).to_have_attribute("aria-selected", "true")
    expect(page.locator("#race")).to_be_visible()
    page.keyboard.press("ArrowLeft")
    reached = set()
    for _ in range(25):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
    assert {"drafter", "temperature", "seed", "max-tokens", "input", "send", "clear", "tree", "log"} <= reached
    unnamed = page.evaluate(
        """[...document.querySelectorAll('input, select, textarea, button')].filter((one) =>
           !(one.labels?.length || one.ariaLabel || one.textContent.trim())).map((one) => one.outerHTML)"""
    )
    assert unnamed == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_every_width_and_scheme(browser: Browser, server: FakeServer, scheme: Any, width: int, tmp_path: Path) -> None:
    """Nothing is wider than the screen, and text stands out from its ground (WCAG: 4.5 to 1)."""
    page = browser.new_page(viewport={"width": width, "height": 740}, color_scheme=scheme)
    page.set_default_timeout(10_000)
    page.goto(server.url)
    ask(page, "Tell a story")
    expect(page.locator(".message.assistant .note")).to_contain_text("15 tokens")
    for tab in ("Chat", "Race"):
        page.get_by_role("tab", name=tab).click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.get_by_role("tab", name="Chat").click()
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 20
    assert [one for one in contrasts if one[0] < 4.5] == []
    page.close()


def test_the_page_of_a_server(browser: Browser, tiny_engine: Engine) -> None:
    """With a model: an answer whose tokens are coloured, one from a prediction, and a race that is compared."""
    from tests.serving import serving

    with serving(tiny_engine.with_drafter("prompt_lookup", policy="off"), drafters=["suffix_automaton"]) as running:
        page, faults = browser.new_page(viewport={"width": 1280, "height": 800}), list[str]()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda fault: faults.append(str(fault)))
        page.on("console", lambda line: line.type == "error" and faults.append(line.text))
        page.goto(f"{running.url}/")
        expect(page.locator("#model")).to_have_text("tiny")
        page.get_by_label("Most tokens").fill("40")
        ask(page, "def add(a, b):\n    return a + b\n\ndef add(a, b):")
        answer = page.locator(".message.assistant")
        expect(answer.locator(".note")).to_contain_text("40 tokens in", timeout=60_000)
        said = answer.locator(".text").text_content() or ""
        assert "".join(answer.locator(".token").all_text_contents()) == said
        assert answer.locator(".token.drafted").count() > 0
        page.get_by_role("button", name="New").click()
        page.locator("#predicted summary").click()
        page.get_by_role("textbox", name="Predicted answer").fill(said)
        ask(page, "def add(a, b):\n    return a + b\n\ndef add(a, b):")
        expect(answer.locator(".note")).to_contain_text("predicted tokens came", timeout=60_000)
        expect(answer.locator(".text")).to_have_text(said)
        expect(page.locator("#legend")).to_contain_text("prediction")
        page.get_by_role("tab", name="Race").click()
        assert page.locator("#racers label").all_text_contents() == ["suffix_automaton", "prompt_lookup"]
        page.get_by_role("button", name="Start").click()
        verdict = page.get_by_role("status")
        expect(verdict).to_contain_text("the same 40 tokens, compared one by one", timeout=60_000)
        expect(page.locator(".lane .speed").last).to_contain_text("×")
        page.close()
        assert faults == []
