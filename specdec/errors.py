"""Everything that specdec raises on purpose.

::

    SpecdecError
    |-- ConfigError       an option, key or combination that cannot be (also a ValueError)
    |-- PromptError       a prompt that cannot be decoded from (also a ValueError)
    |-- TargetError       a model that specdec cannot drive exactly
    |-- CheckpointError   weights on disk that are missing, broken or of another model
    |-- CacheError        no memory is left for a text's keys and values
    |-- DraftError        a drafter proposed a tree that breaks the rules
    |-- ParallelError     processes that decode together disagree, or one of them is gone
    |-- ForkError         a process was forked from one that computes with several threads (also a RuntimeError)
    `-- NumericalError    the target returned logits that are no distribution

Problems that do not stop specdec are warnings: SpecdecWarning (a UserWarning).

Each message has the problem, the values, and the remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CacheError",
    "CheckpointError",
    "ConfigError",
    "DraftError",
    "ForkError",
    "NumericalError",
    "ParallelError",
    "PromptError",
    "SpecdecError",
    "SpecdecWarning",
    "TargetError",
    "check_choice",
    "first_line",
    "pip_line",
    "shown",
    "told",
    "unknown",
]


class SpecdecError(Exception):
    """Base of all errors of this package."""


class ConfigError(SpecdecError, ValueError):
    """An option has a value, or a combination of values, that cannot be."""


class PromptError(SpecdecError, ValueError):
    """A prompt is empty, too long, or holds tokens outside the vocabulary."""


class TargetError(SpecdecError):
    """A model whose layers cannot be walked exactly."""


class CheckpointError(SpecdecError):
    """Weights that are missing, broken, or belong to another model."""


class CacheError(SpecdecError):
    """No memory is left for a text's keys and values."""


class DraftError(SpecdecError):
    """A draft tree that breaks the rules, or does not fit."""


class NumericalError(SpecdecError):
    """Logits that are no distribution: NaN, or nothing left after the logits processors."""


class ParallelError(SpecdecError):
    """Processes that decode together disagree, or one of them is gone."""


class ForkError(SpecdecError, RuntimeError):
    """A process that was forked from one that computes with several threads, which it does not have."""


class SpecdecWarning(UserWarning):
    """Something was ignored or left unchanged; the message says what, and what specdec does instead."""


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Message for a name that is not among the known ones: the nearest one first, then all of them."""
    options = sorted(known)
    near = difflib.get_close_matches(name[:80], options, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    return f"unknown {what} {shown(name)}{hint} known: {', '.join(options) or 'none'}"


def check_choice(what: str, choice: str, known: Iterable[str]) -> str:
    """The choice; ConfigError, with ``unknown``'s message, where it is not among the known ones."""
    if choice not in known:
        raise ConfigError(unknown(what, choice, known))
    return choice


def pip_line(extra: str) -> str:
    """The command that installs an extra, from a checkout: the package is on no index yet."""
    return f"pip install '.[{extra}]' in a checkout of specdec"


def first_line(error: BaseException) -> str:
    """The first line of another library's error message; its class if the message is empty."""
    first, *rest = str(error).strip().splitlines() or [type(error).__name__]
    return f"{first} {rest[0].strip()}" if rest and first.endswith(":") else first


def shown(value: object, limit: int = 80) -> str:
    """A value as a message shows it: on one line, and not too long."""
    try:
        text = repr(value)
    except Exception:  # code of others; and Python writes no integer of more than 4,300 digits
        return f"<{type(value).__name__}>"
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def told(error: BaseException) -> str:
    """Another library's error message, with its class where the message alone is no sentence, as for KeyError."""
    plain = isinstance(error, OSError | ValueError) and not isinstance(error, UnicodeError)
    return first_line(error) if plain or not str(error).strip() else f"{type(error).__name__}: {first_line(error)}"
