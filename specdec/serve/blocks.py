"""Blocks: an answer's message as a list of thinking, texts and calls, for protocols whose answers are such lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from specdec.serve.calls import Delta

__all__ = ["Block", "Blocks", "Change"]

Kind = Literal["thinking", "text", "call"]


@dataclass(slots=True)
class Block:
    """A part of a message.

    Attributes:
        kind: what it is.
        index: its place in the message.
        name, call_id: of a call.
        text: the text, or a call's arguments.
    """

    kind: Kind
    index: int
    name: str = ""
    call_id: str = ""
    text: str = ""


Change = tuple[Literal["begin", "text", "end"], Block, str]
"""What becomes of a block, and the text that it gets."""


class Blocks:
    """The blocks that the pieces of a message add up to."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    def add(self, deltas: Sequence[Delta]) -> Iterator[Change]:
        """What the pieces change."""
        for delta in deltas:
            for kind, key in (("thinking", "reasoning_content"), ("text", "content")):
                if delta.get(key):
                    yield from self._text(kind, delta[key])  # type: ignore[arg-type]
            for call in delta.get("tool_calls", ()):
                function = call["function"]
                if "id" in call:
                    yield from self._begin(Block("call", len(self.all), function["name"], call["id"]))
                yield from self._text("call", function["arguments"])

    def end(self) -> Iterator[Change]:
        """What the message's end changes."""
        if self._open is not None:
            yield "end", self._open, ""
            self._open = None

    def _begin(self, block: Block) -> Iterator[Change]:
        yield from self.end()
        self.all.append(block)
        self._open = block
        yield "begin", block, ""

    def _text(self, kind: Kind, text: str) -> Iterator[Change]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(Block(kind, len(self.all)))
        block = self._open
        assert block is not None
        block.text += text
        if text:
            yield "text", block, text
