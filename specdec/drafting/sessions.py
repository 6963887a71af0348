"""Sessions: the engine's calls of a drafter, to start a session and to get a draft, with checks of the results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral

import torch

from specdec.drafter import BatchedSession, Context, Drafter, DraftSession
from specdec.errors import DraftError, shown
from specdec.step.forward_passes import Passes
from specdec.step.step_io import Entering
from specdec.step.tree import NO_HINTS, Draft, Hints
from specdec.target import Target

__all__ = ["check_rows", "propose_at_once", "proposing", "session_of", "top_k_of"]

_INT = {int}


def top_k_of(drafter: Drafter) -> int:
    """How many of each scored row's likeliest tokens the drafter's sessions read; 0 if they do not observe steps."""
    return drafter.top_k if drafter.needs_observe else 0


def session_of(drafter: Drafter, context: Context) -> DraftSession:
    """A drafter's session for a new sequence.

    Raises:
        DraftError: the drafter returned something else.
    """
    session = drafter.start(context)
    if not all(callable(getattr(session, method, None)) for method in ("propose", "observe")):
        raise DraftError(
            f"drafter {drafter.name!r} started {shown(session)}, of type {type(session).__name__}; it must be a "
            "session with propose and observe"
        )
    return session


def proposing(session: DraftSession, row_budget: int, name: str, target: Target) -> Passes[Draft]:
    """The checked draft of a session, as a generator of the passes that it waits for; ``name``: the drafter's.

    Raises:
        DraftError: the session returned something else, or a draft with wrong types; the message names the drafter.
    """
    if not isinstance(session, BatchedSession):
        return propose_at_once(session, row_budget, name, target)
    try:
        draft = yield from session.passes(row_budget)
    except DraftError as error:
        raise DraftError(f"drafter {name!r}: {error}") from error
    _check(draft, name, target)
    return draft


def propose_at_once(session: DraftSession, row_budget: int, name: str, target: Target) -> Draft:
    """As :func:`proposing`, for a session without passes."""
    try:
        draft = session.propose(row_budget)
    except DraftError as error:
        raise DraftError(f"drafter {name!r}: {error}") from error
    _check(draft, name, target)
    return draft


def check_rows(draft: Draft, row_budget: int, root: int, name: str, target: Target) -> None:
    """Raises DraftError where a draft breaks a rule that exactness depends on; ``root``: the last emitted token."""
    if len(draft) > row_budget:
        raise DraftError(
            f"draft has {len(draft)} rows but {row_budget} slots are free; propose at most `row_budget` rows "
            f"(drafter {name!r}), lower its sizes, or raise the engine's max_rows"
        )
    if draft.on_device is not None:
        return  # a model drew them from the vocabulary, and to check them here would wait for the device
    tokens = draft.tokens
    if tokens[0] != root:
        raise DraftError(
            f"the draft's root is token {tokens[0]}, the last emitted token is {root}; "
            f"row 0 must be context.root (drafter {name!r})"
        )
    if not 0 <= min(tokens) <= max(tokens) < target.vocab_size:
        raise DraftError(f"drafter {name!r} proposed a token outside the vocabulary [0, {target.vocab_size})")


def _check(draft: Draft, name: str, target: Target) -> None:
    """Raises DraftError if ``draft`` is no draft or holds wrong types."""
    if (wrong := _misfit(draft, target)) is not None:
        raise DraftError(f"drafter {name!r} proposed {wrong}")


def _misfit(draft: Draft, target: Target) -> str | None:
    """The wrong type in a draft and the right one, as text for an error; None if there is none."""
    if not isinstance(draft, Draft):
        return f"{_typed(draft)}; it must propose a Draft"
    for what, rows in ("token", draft.tokens), ("parent", draft.parents):
        if type(rows) is not range and not _INT.issuperset(map(type, rows)):  # numpy's integers are some, too
            odd = [row for row in rows if not isinstance(row, Integral) or isinstance(row, bool)]
            if odd:
                return f"{what} {_typed(odd[0])}; {what}s are integers"
    if draft.hints is not NO_HINTS and (wrong := _wrong_hints(draft.hints, len(draft))) is not None:
        return f"a draft {wrong}"
    if type(draft.q) is dict and not draft.q and draft.entry is None:
        return None
    if type(draft.q) is not dict and not isinstance(draft.q, Mapping):
        return f"a draft whose q is {_typed(draft.q)}; it must be a mapping from rows to distributions"
    for row, q in draft.q.items():
        if not isinstance(q, torch.Tensor) or not q.is_floating_point() or q.shape != (target.vocab_size,):
            return f"a draft whose q of row {row} is {_kind(q)}; it must be floats of shape [{target.vocab_size}]"
    entry = draft.entry
    if entry is None:
        return None
    if not isinstance(entry, Entering):
        return f"a draft whose entry is {_typed(entry)}; it must be an Entering"
    if not isinstance(entry.layer, int) or not 0 < entry.layer <= target.num_layers:
        return f"a draft whose entry.layer is {shown(entry.layer)}; it must be a layer from 1 to {target.num_layers}"
    hidden, shape = entry.hidden, [len(draft), target.hidden_size]
    if not isinstance(hidden, torch.Tensor) or hidden.dtype != target.dtype or list(hidden.shape) != shape:
        return (
            f"a draft whose entry.hidden is {_kind(hidden)}; it must be {str(target.dtype).removeprefix('torch.')} of "
            f"shape {shape}: one row per draft row, in the same order"
        )
    return None


def _wrong_hints(hints: Hints, rows: int) -> str | None:
    """The fault in the hints of a draft with ``rows`` rows, or None."""
    if not isinstance(hints, Hints):
        return f"whose hints are {_typed(hints)}; they must be Hints, such as Hints(match_length=3)"
    match, chances, cost = hints.match_length, hints.chances, hints.cost
    if type(match) is not int or match < 0:
        return f"whose hints.match_length is {_typed(match)}; it must be an integer >= 0"
    if type(chances) not in (tuple, list) or len(chances) not in (0, rows):
        return (
            f"whose hints.chances are {_typed(chances)}; they must be a list of {rows} numbers, one per row, or empty"
        )
    if not isinstance(cost, float | int) or not 0 <= cost < math.inf:
        return f"whose hints.cost is {_typed(cost)}; it must be a number >= 0"
    return None


def _typed(value: object) -> str:
    return f"{shown(value)}, of type {type(value).__name__}"


def _kind(value: object) -> str:
    """Text for an error: dtype and shape of a tensor, value and type of anything else."""
    if not isinstance(value, torch.Tensor):
        return _typed(value)
    return f"{str(value.dtype).removeprefix('torch.')} of shape {list(value.shape)}"
