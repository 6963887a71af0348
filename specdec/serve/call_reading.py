"""Reading of calls that a model writes as JSON: a call's arguments are given out while they come.

What is given out adds up to JSON of an object, whatever the model writes: line feeds in texts and backslashes that
escape nothing are escaped, and arguments that break off are closed behind what was given out.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Any, Literal, TypeVar

__all__ = ["Arguments", "Broken", "Part", "Reading", "Steps", "loaded"]

Part = tuple[Literal["begin", "text", "end"], str]
"""What becomes of a call, and its name at its beginning, or further text of its arguments."""

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Reads a part of a text, yields where more of the text is needed, and returns what it has read."""

_DEPTH = 200  # most lists and objects in one another, as in pydantic's parser
_NUMBER = 5000  # most characters of a number
_BLANK = re.compile(r"[ \t\r\n]*")
_RUN = re.compile(r'[^"\\]*')
_HIGH, _LOW = "u[dD][89abAB][0-9A-Fa-f]{2}", "u[dD][c-fC-F][0-9A-Fa-f]{2}"  # halves of a character, which come in pairs
_ESCAPE = re.compile(rf'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9A-Fa-f]{{4}}|{_HIGH}\\{_LOW})')
_ESCAPE_PART = re.compile(rf"\\(?:u[0-9A-Fa-f]{{0,3}}|{_HIGH}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9A-Fa-f]?)?)?)?)?)?\Z")
_CONTROL = re.compile(r"[\x00-\x1f]")
_SCALAR = re.compile(r'[^\s,:\[\]{}"]*')


class Broken(Exception):
    """The text is no call from here on."""


class _Cut(Exception):
    """The text ends within a call."""


class Reading(ABC):
    """Reads the calls of one marked text, which comes in pieces, and looks at each of its characters once.

    Args:
        mark: what the text may begin with.

    Attributes:
        done: whether the calls have ended.
        begun: whether there was a call.
        broken: whether one ended before its arguments did, which were closed.
        said: once it is done, the text that is of no call.
    """

    def __init__(self, mark: str = "") -> None:
        self.done = self.begun = self.broken = False
        self.said = ""
        self._mark, self._text, self._at, self._last = mark, "", 0, False
        self._kept = 0  # where the text begins that no call has taken
        self._parts: list[Part] = []
        self._name: str | None = None  # of the call whose arguments are given out as they come
        self._pending, self._closers = "", ""  # what is not given out yet, and what would close that which is
        self._steps = self._calls()

    @abstractmethod
    def _calls(self) -> Steps[None]:
        """Read the calls."""

    @property
    def rest(self) -> str:
        """What stands behind the calls."""
        return self._text[self._at :]

    def read(self, text: str, last: bool) -> list[Part]:
        """What a further piece of the text completes; with ``last``, no text follows it."""
        self._text, self._last = self._text[self._kept :] + text, last
        self._at, self._kept = self._at - self._kept, 0
        try:
            next(self._steps)
        except StopIteration:
            self.done = True
        except (Broken, _Cut) as error:
            self._fail(cut=isinstance(error, _Cut))
        if self._closers:
            self._kept = self._at
        parts, self._parts = self._parts, []
        return parts

    def _fail(self, *, cut: bool) -> None:
        """End at what is no call, or where the text ends within one."""
        self.done = True
        if self._closers:
            self._pending, self.broken = self._closers, True
            self._give("")
            self._end()
        elif cut and not self.begun and self._mark and self._text.startswith(self._mark):
            self._at = len(self._mark)  # behind a mark that begins no call there may be one that does
        elif cut:
            self._at = len(self._text)
        self.said = self._text[self._kept : self._at]

    def _wait(self) -> Steps[None]:
        if self._last:
            raise _Cut
        yield

    def _take(self, end: int) -> None:
        """Take the text up to ``end`` into a value."""
        self._pending += self._text[self._at : end]
        self._at = end

    def _next(self) -> Steps[str]:
        """Take white space, and return the next character."""
        while True:
            found = _BLANK.match(self._text, self._at)
            assert found is not None
            self._take(found.end())
            if self._at < len(self._text):
                return self._text[self._at]
            yield from self._wait()

    def _begin(self) -> None:
        self._parts.append(("begin", self._name or ""))
        self.begun = True

    def _give(self, closers: str) -> None:
        """Give out what is pending, where arguments are given out as they come, and note what would close them."""
        if self._name is None:
            return
        if not self._closers:
            self._begin()
        self._parts.append(("text", self._pending))
        self._pending, self._closers = "", closers

    def _end(self) -> None:
        """End a call."""
        self._parts.append(("end", ""))
        self._name, self._closers, self._kept = None, "", self._at

    def _arguments(self, name: str) -> Steps[None]:
        """Read the arguments of a call, an object, and give them out as they come."""
        self._name, self._pending = name, ""
        yield from self._value()
        self._end()

    def _value(self) -> Steps[str]:
        """Read a value, and return its characters that were not returned before."""
        ends = ""  # of the lists and objects around
        while True:
            first = yield from self._next()
            if first in "[{":
                ends = ("]" if first == "[" else "}") + ends
                if len(ends) > _DEPTH:
                    raise Broken
                self._take(self._at + 1)
                if (yield from self._next()) != ends[0]:
                    if first == "{":
                        yield from self._key()
                    continue
            elif first == '"':
                yield from self._string(ends)
            else:
                yield from self._scalar(ends)
            while ends:
                behind = yield from self._next()
                if behind not in (ends[0], ","):
                    raise Broken
                self._take(self._at + 1)
                if behind == ",":
                    if ends[0] == "}":
                        yield from self._key()
                    break
                ends = ends[1:]
                self._give(ends)
            else:
                return self._pending

    def _key(self) -> Steps[None]:
        """Read a member's name and the colon behind it."""
        if (yield from self._next()) != '"':
            raise Broken
        yield from self._string(None)
        if (yield from self._next()) != ":":
            raise Broken
        self._take(self._at + 1)

    def _string(self, ends: str | None) -> Steps[None]:
        """Read a text; it is given out as it comes, unless ``ends`` is None."""
        self._take(self._at + 1)
        escape = None
        while True:
            run = _RUN.match(self._text, self._at)
            assert run is not None
            self._at = run.end()
            self._pending += _CONTROL.sub(lambda found: json.dumps(found[0])[1:-1], run[0])
            if ends is not None and (run[0] or escape):
                self._give(f'"{ends}')
            if self._text.startswith('"', self._at):
                self._take(self._at + 1)
                if ends is not None:
                    self._give(ends)
                return
            if escape := _ESCAPE.match(self._text, self._at):
                self._take(escape.end())
            elif self._at == len(self._text) or _ESCAPE_PART.match(self._text, self._at):
                yield from self._wait()
            else:
                self._pending += "\\"  # it escapes nothing, and so is itself
                self._take(self._at + 1)

    def _scalar(self, ends: str) -> Steps[None]:
        while True:
            found = _SCALAR.match(self._text, self._at)
            assert found is not None
            if len(found[0]) > _NUMBER:
                raise Broken
            if found.end() < len(self._text):
                break
            yield from self._wait()
        loaded(found[0])
        self._take(found.end())
        self._give(ends)


def loaded(text: str) -> Any:
    """The value of JSON; raises Broken where it is none, or a number that JSON has not."""
    try:
        value = json.loads(text, strict=False)  # a text in a text may hold line feeds as they are
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        raise Broken from None
    return value


class Arguments(Reading):
    """Reads a text that is the arguments of one call.

    Args:
        name: the function's name.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._called = name

    def _calls(self) -> Steps[None]:
        self._name, self._pending = self._called, ""
        self._begin()
        self._closers = "{}"
        yield from self._value()
        self._end()
