"""A race: a conversation that several drafters go through, seen side by side, and a table of what each brought.

Each drafter decodes its own answer, a step at a time, and the one whose clock stands lowest goes next: so they are seen
at their true speeds against each other, though in fact one works at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import cycle, zip_longest
from time import monotonic
from types import TracebackType

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from specdec.cli.output import COLOURS, PICTURES
from specdec.engine.engine import Engine
from specdec.engine.prefix_cache import PrefixCache
from specdec.engine.prompt import Prompt, is_chat
from specdec.engine.questions import Question, find_questions, read_questions
from specdec.engine.text_stream import as_content
from specdec.errors import CheckpointError
from specdec.models.catalog import named_models
from specdec.results import Chunk, Generation
from specdec.settings.sampling_params import SamplingParams

__all__ = ["Lane", "Panes", "Race", "model_at_hand", "question_for"]

_REFRESH = 0.08  # seconds
_NARROWEST = 36  # columns of a pane


def model_at_hand() -> tuple[str, str | None]:
    """The model that the demo talks with, and why it is not the one that was meant."""
    try:
        named_models()["smollm2"].found()
    except CheckpointError as error:
        return "tiny", str(error)
    return "smollm2", None


def question_for(model: str) -> Question:
    """The default prompts; the embedded model knows only Python code and continues some."""
    file, number = ("tiny", 15) if model == "tiny" else ("six_kinds", 1)
    return next(question for question in read_questions(find_questions(file)) if question.id == number)


class Lane:
    """One drafter: its engine, and its answers."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self.engine, self.kept = name, engine, PrefixCache()
        self.generations: list[Generation] = []

    @property
    def tokens(self) -> int:
        return sum(one.stats.new_tokens for one in self.generations)

    @property
    def steps(self) -> int:
        return sum(one.stats.steps for one in self.generations)

    @property
    def tokens_per_second(self) -> float:
        """The prefill not counted."""
        return self.tokens / max(sum(one.stats.seconds.decode for one in self.generations), 1e-9)

    def first_difference(self, other: Lane) -> int | None:
        """Number of the first token in which the texts differ, from 1; None if they are identical."""
        mine, theirs = ([token for one in lane.generations for token in one.token_ids] for lane in (self, other))
        pairs = enumerate(zip_longest(mine, theirs), 1)
        return next((place for place, (own, their) in pairs if own != their), None)


class Race:
    """Drafters on one target; plain decoding is the first lane and the reference.

    Raises:
        ConfigError: an unknown drafter.
    """

    def __init__(
        self, engine: Engine, drafters: Iterable[str], *, max_new_tokens: int, sampling: SamplingParams
    ) -> None:
        names = dict.fromkeys(["none", *drafters])
        self.lanes = [Lane(name, engine.with_drafter(name)) for name in names]
        self.max_new_tokens = max_new_tokens
        self.sampling = sampling

    def warm_up(self) -> None:
        """A few uncounted tokens of each, so that none pays for what all need."""
        for lane in self.lanes:
            lane.engine.generate([0, 0, 0], 8)

    def turn(self, prompt: Prompt, on_chunk: Callable[[str, Chunk, float], None] = lambda *_: None) -> str:
        """All decode an answer, and every step is handed on with its drafter's name and tokens per second.

        Returns plain decoding's answer.
        """
        states = [
            lane.engine.start(prompt, self.max_new_tokens, self.sampling, prefix_cache=lane.kept, stream=True)
            for lane in self.lanes
        ]
        under_way = {lane.name: (state, state.chunks()) for lane, state in zip(self.lanes, states, strict=True)}
        while under_way:
            name, (state, chunks) = min(under_way.items(), key=lambda one: one[1][0].stats.seconds.decode)
            chunk = next(chunks, None)
            if chunk is None:
                del under_way[name]
            else:
                on_chunk(name, chunk, state.stats.tokens_per_second)
        for lane, state in zip(self.lanes, states, strict=True):
            lane.generations.append(state.result())
        plain, tokenizer = self.lanes[0].generations[-1], self.lanes[0].engine.tokenizer
        return as_content(plain.text, tokenizer, plain.token_ids) if is_chat(prompt) else plain.text

    def table(self, note: str) -> Table:
        """What each lane brought; their texts are compared with the first one's."""
        table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False, caption=note, caption_justify="left")
        table.add_column("\ndrafter", no_wrap=True)
        for title in ("new\ntokens", "target\nsteps", "tokens\nper step", "\ntokens/s", "\nspeedup"):
            table.add_column(title, justify="right", no_wrap=True)
        table.add_column("\ntext", no_wrap=True)
        plain = self.lanes[0]
        for lane in self.lanes:
            differs = lane.first_difference(plain)
            same = "[green]identical[/]" if differs is None else f"[red]differs at token {differs}[/]"
            table.add_row(
                escape(lane.name),
                str(lane.tokens),
                str(lane.steps),
                f"{lane.tokens / max(lane.steps, 1):.2f}",
                f"{lane.tokens_per_second:.0f}",
                f"{lane.tokens_per_second / plain.tokens_per_second:.2f}x",
                "reference" if lane is plain else same,
            )
        return table


class Panes:
    """A pane for each name; to be called with a name, a chunk of its stream and its tokens per second.

    It draws between steps only, so that no step is timed while a terminal is written to. Where a text is longer than
    its pane, its end is seen.
    """

    def __init__(self, console: Console, names: Sequence[str]) -> None:
        self._console = console
        self._texts = {name: Text() for name in names}
        self._colours = {name: cycle(COLOURS) for name in names}
        self._speeds = dict.fromkeys(names, "")
        self._live = Live(self.drawn(), console=console, auto_refresh=False, vertical_overflow="crop")
        self._drawn = monotonic()

    def __enter__(self) -> Panes:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.update(self.drawn(), refresh=True)
        self._live.__exit__(kind, error, trace)

    def __call__(self, name: str, chunk: Chunk, speed: float) -> None:
        speculated = chunk.step is not None and len(chunk.step.tokens) > 1
        self._texts[name].append(chunk.text.translate(PICTURES), next(self._colours[name]) if speculated else None)
        self._speeds[name] = f"  {speed:.0f} tokens/s" + (", done" if chunk.finish_reason else "")
        if monotonic() - self._drawn > _REFRESH:
            self._live.update(self.drawn(), refresh=True)
            self._drawn = monotonic()

    def drawn(self) -> Table:
        """All panes as they are now, as many beside each other as are readable."""
        width, height = self._console.size
        across = max(1, min(len(self._texts), width // _NARROWEST))
        if across < len(self._texts):  # no row with a hole where it can be helped
            across = max(n for n in range(1, across + 1) if len(self._texts) % n == 0)
        down = -(-len(self._texts) // across)
        lines = max(3, (height - 2) // down - 2)
        grid = Table.grid(expand=True)
        for _ in range(across):
            grid.add_column(ratio=1)
        panes = [self._pane(name, width // across - 4, lines) for name in self._texts]
        for first in range(0, len(panes), across):
            grid.add_row(*panes[first : first + across])
        return grid

    def _pane(self, name: str, width: int, lines: int) -> Panel:
        wrapped = self._texts[name].wrap(self._console, width)
        seen = Text("\n").join(wrapped[-lines:])
        title = Text.assemble((name, "bold"), (self._speeds[name], "dim"))
        return Panel(seen, title=title, title_align="left", height=lines + 2)
