"""Regular expressions of JSON Schema in the form that llguidance takes.

JSON Schema has ECMAScript's expressions, clients check answers by Python's, and llguidance reads Rust's. Where these
differ in what they match, the translation matches what the first two both do: spaces, line ends behind a dot, letters
and digits beyond ASCII, and brackets and operators in classes.
"""

from __future__ import annotations

import re

__all__ = ["bounded", "translated"]

_MAX_LENGTH = 2048  # characters
_MAX_DEPTH = 64  # parentheses in parentheses

# Code points that are spaces to ECMAScript and Python, and to either.
_BOTH = [(0x9, 0xD), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)]
_BOTH += [(0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)]
_EITHER = [(0x9, 0xD), (0x1C, 0x20), (0x85, 0x85), *_BOTH[2:], (0xFEFF, 0xFEFF)]
_PIECE = re.compile(r"\\(?:u\{[0-9A-Fa-f]+\}|[pP]\{[^}]*\}|.)|\[|\]|.", re.DOTALL)
_LETTERS = {"\\D": "[^\\p{Nd}]", "\\W": "[^\\p{L}\\p{N}_]", ".": "[^\\n\\r\\x{2028}\\x{2029}]"}

# Patterns with lookaheads that clients' libraries write, and the same without: zod's e-mail, pydantic's decimals.
_SAME = {
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^([A-Za-z0-9_'+-]+\.)*[A-Za-z0-9_'+-]*[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9-]*\.)+[A-Za-z]{2,}$"
    ),
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)$",
}


def bounded(pattern: str) -> list[str]:
    """The pieces of a pattern: characters, escapes and brackets.

    Raises:
        ValueError: it is too long, or too deep.
    """
    if len(pattern) > _MAX_LENGTH:
        raise ValueError(f"the pattern has {len(pattern)} characters, and the most is {_MAX_LENGTH}")
    pieces: list[str] = _PIECE.findall(pattern)
    depth = 0
    for piece in pieces:
        depth += {"(": 1, ")": -1}.get(piece, 0)
        if depth > _MAX_DEPTH:
            raise ValueError(f"the parentheses of the pattern are more than {_MAX_DEPTH} deep")
    return pieces


def translated(pattern: str) -> str:
    """The pattern in Rust's form.

    Raises:
        ValueError: it exceeds a bound, or holds what matches otherwise there; the message says what.
    """
    found: list[str] = []
    pieces = bounded(_SAME.get(pattern, pattern))
    place = 0
    while place < len(pieces):
        piece = pieces[place]
        place += 1
        if piece == "[":
            text, place = _class(pieces, place)
            found.append(text)
            continue
        if piece == "\\s":
            piece = f"[{_ranges(_BOTH)}]"
        elif piece == "\\S":
            piece = f"[{_ranges(_others(_EITHER))}]"
        found.append(_LETTERS.get(piece, piece))
    return "".join(found)


def _class(pieces: list[str], place: int) -> tuple[str, int]:
    """The class whose bracket is at ``place - 1``, and the place behind it."""
    negated = place < len(pieces) and pieces[place] == "^"
    place += negated
    found = ["[^" if negated else "["]
    begin = place
    while place < len(pieces):
        piece = pieces[place]
        place += 1
        if piece == "]":
            if place - 1 == begin:
                raise ValueError("a class of the pattern begins with ], which ECMAScript and Python read differently")
            return "".join([*found, "]"]), place
        if piece == "-" and place < len(pieces) and pieces[place] == "-":
            raise ValueError("a class of the pattern holds --, which is an operator elsewhere; write \\- for a hyphen")
        if piece == "\\s":
            piece = _ranges(_EITHER if negated else _BOTH)
        elif piece == "\\S":
            piece = _ranges(_others(_BOTH if negated else _EITHER))
        elif piece == "\\D":
            piece = "[^0-9]" if negated else "\\P{Nd}"
        elif piece == "\\W":
            piece = "[^0-9A-Za-z_]" if negated else "[^\\p{L}\\p{N}_]"
        elif piece in "[&~":
            piece = f"\\{piece}"
        found.append(piece)
    raise ValueError("a class of the pattern has no end")


def _ranges(points: list[tuple[int, int]]) -> str:
    return "".join(f"\\x{{{first:x}}}-\\x{{{last:x}}}" for first, last in points)


def _others(points: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The code points that are in none of the ranges, without surrogates."""
    found, begin = [], 0
    for first, last in sorted([*points, (0xD800, 0xDFFF)]):
        if first > begin:
            found.append((begin, first - 1))
        begin = max(begin, last + 1)
    return [*found, (begin, 0x10FFFF)]
