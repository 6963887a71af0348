"""Copies: what holds memory outside of Python says so where it is copied or pickled, and what to do instead."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn, Self

from specdec.errors import ConfigError

__all__ = ["NotCopied"]


class NotCopied:
    """Base class of objects that are shared and neither copied nor pickled, as their memory is not Python's.

    Attributes:
        instead: the remedy, for the message.
    """

    instead: ClassVar[str]

    def _sharing(self) -> Self:
        """Another object that shares all that this one holds: the shallow copy of a class that allows one."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def __deepcopy__(self, memo: Any) -> Self:
        self._refuse_copy()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse_copy()

    def _refuse_copy(self) -> NoReturn:
        raise ConfigError(
            f"{type(self).__name__} can neither be copied nor pickled, as it holds memory of its own (weights for "
            f"native code, keys and values); {self.instead}"
        )
